"""Launchers that Triton before 3.7 compiles for signatures are built when Triton first launches a kernel."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import triton
from torch.torch_version import TorchVersion

from fxwrap.runtime.triton.compile import import_triton
from fxwrap.torch_compat import build_at_first_use


def launcher_class(built: list[int], fails: bool = False) -> Any:
    class Launcher:
        def __init__(self, number: int) -> None:
            time.sleep(0.01)
            built.append(number)
            if fails:
                raise OSError("no compiler")
            self.launch = lambda: 10 * number

        def __call__(self) -> int:
            return self.launch()

    build_at_first_use(Launcher)
    return Launcher


def test_a_launcher_is_built_once_at_its_first_use() -> None:
    built = list[int]()
    launchers = [launcher_class(built)(number) for number in (1, 2)]
    assert built == []
    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(lambda _: launchers[0](), range(8))] == [10] * 8
    assert built == [1] and launchers[1]() == 20 and built == [1, 2]
    with pytest.raises(AttributeError, match="stride"):
        _ = launchers[0].stride


def test_each_use_reports_why_a_launcher_cannot_be_built() -> None:
    built = list[int]()
    launcher = launcher_class(built, fails=True)(3)
    for _ in range(2):
        with pytest.raises(OSError, match="no compiler"):
            launcher()
    assert built == [3, 3]


def test_loading_a_kernel_compiles_no_launcher() -> None:
    """Triton 3.7 and later have one launcher for all signatures."""
    import_triton()
    from triton.backends.nvidia.driver import CudaLauncher

    is_late = CudaLauncher.__init__.__module__.startswith("fxwrap.")
    assert is_late == (TorchVersion(triton.__version__) < "3.7")
    if is_late:
        launcher = CudaLauncher("source", "metadata")
        with pytest.raises(AttributeError, match="signature"):  # of the source, which the constructor reads
            _ = launcher.launch
