"""The fake driver, built once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver as triton_driver

from fxwrap.runtime import kernels
from tests.conftest import HAS_CUDA
from tests.runtime.launch.fake_driver import FakeDriver, build

Calls = list[tuple[tuple[int, ...], tuple[Any, ...]]]
"""Grids and arguments of launches."""


@pytest.fixture
def driver() -> FakeDriver:
    """The driver, in use, with an empty log and no current context.

    torch calls the true driver where there is one, with addresses of the host.
    """
    if torch.cuda.is_available():
        pytest.skip(HAS_CUDA)
    fake_driver = FakeDriver(build())
    fake_driver.log()
    return fake_driver


@pytest.fixture
def deterministic_algorithms() -> Iterator[None]:
    """torch is to use deterministic algorithms only."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class _UnavailableGpu:
    """The part of Triton's driver that it queries before it compiles."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # Triton caches its compilations by device

    def get_current_stream(self, _device: int) -> int:
        return 0


@pytest.fixture
def chip() -> Iterator[_UnavailableGpu]:
    """Triton compiles for compute capability 9.0, or for another one by `capability`."""
    gpu = _UnavailableGpu(90)
    triton_driver.set_active(gpu)
    yield gpu
    triton_driver.set_active(None)  # Triton selects its own at the next use


@pytest.fixture
def python_launches(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Launches that the runtime's operator was called for."""
    calls: Calls = []

    def load(_language: str, _source: str, _signature: tuple[str, ...], _options: Any) -> Callable[..., None]:
        return lambda grid, *arguments: calls.append((grid, arguments))

    monkeypatch.setattr(kernels, "load_kernel", load)
    return calls
