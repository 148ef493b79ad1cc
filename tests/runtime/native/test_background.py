"""Kernels that are launched while the bridge is compiled, and afterwards by the bridge."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import Options
from fxwrap.errors import NativeBuildError
from fxwrap.runtime import kernels, native
from fxwrap.runtime.kernels import load_cpp_kernel, prepare_kernels
from fxwrap.runtime.native import BridgeBuild, InterimLauncher, background, build_bridge
from fxwrap.runtime.native.prebuilt import empty_prebuilt_tables

SCALE = """extern "C" void kernel(const float* x, float* y, long n, double factor, bool negate, float shift) {
  for (long i = 0; i < n; ++i) y[i] = float(factor) * (negate ? -x[i] : x[i]) + shift;
}
"""
SIGNATURE = ("*f32", "*f32", "i64", "f64", "i1", "f32")


class Machine:
    """A machine without a bridge, whose compiler waits until `finish` and then has one, or fails."""

    def __init__(self, cache: Path, bridge: Path) -> None:
        self.cache, self.bridge = cache, bridge
        self.compiled, self.builds, self.error = threading.Event(), 0, ""

    def build(self, in_background: bool = False) -> BridgeBuild:
        assert in_background, "a program waits for the bridge"
        self.builds += 1
        assert self.compiled.wait(600)
        if self.error:
            raise NativeBuildError(self.error)
        (self.cache / self.bridge.name).symlink_to(self.bridge)
        return BridgeBuild(self.cache / self.bridge.name, 1.0)

    def finish(self, error: str = "") -> None:
        self.error = error
        self.compiled.set()
        background.join_background()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    fresh = Machine(tmp_path, build_bridge().folder)
    monkeypatch.setenv("FXWRAP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(background, "build_bridge", fresh.build)
    fxwrap.caching.clear_caches()
    with empty_prebuilt_tables():
        yield fresh
        fresh.finish()
    fxwrap.caching.clear_caches()


def scaled(launch: object) -> torch.Tensor:
    y = torch.empty(3)
    launch(torch.tensor([1.0, 2.0, 3.0]), y, 3, 0.5, True, 10.0)  # type: ignore[operator]
    return y


def test_a_kernel_is_launched_without_the_bridge_until_it_is_compiled(machine: Machine) -> None:
    launch = load_cpp_kernel(SCALE, SIGNATURE, ())
    assert isinstance(launch, InterimLauncher) and native.find_bridge() is None
    expected = torch.tensor([9.5, 9.0, 8.5])
    assert torch.equal(scaled(launch), expected)
    machine.finish()
    assert native.find_bridge() is not None and type(launch._launch).__module__ != kernels.__name__
    assert launch._launch.name == "kernel" and torch.equal(scaled(launch), expected)
    by_bridge = type(launch._launch)
    del launch  # equal kernels share a launcher while it is in use
    fxwrap.caching.clear_caches()
    assert type(load_cpp_kernel(SCALE, SIGNATURE, ())) is by_bridge and machine.builds == 1


def test_a_kernel_that_is_launched_without_the_bridge_raises_its_error(machine: Machine) -> None:
    source = 'extern "C" void kernel(long n) {\n  if (n > 3) fxwrap_index_error("n is out of bounds");\n}\n'
    launch = load_cpp_kernel('#include "kernel.h"\n' + source, ("i64",), ())
    assert isinstance(launch, InterimLauncher)
    launch(3)
    for _ in range(2):
        with pytest.raises(IndexError, match=r"^n is out of bounds$"):
            launch(4)
        machine.finish()


@pytest.mark.parametrize("emitter", ["python", "fx"])
def test_programs_run_while_the_bridge_is_compiled(machine: Machine, emitter: str) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x.sin() + y).sum(1), torch.softmax(x * y, 0)

    inputs = [torch.randn(6, 5), torch.randn(6, 5)]
    compiled = fxwrap.compile_graph(make_fx(function)(*inputs), inputs, options=Options(emitter=emitter))
    assert compiled.program.kernels
    for _ in range(2):
        for result, expected in zip(compiled(*inputs), function(*inputs), strict=True):
            torch.testing.assert_close(result, expected)
        machine.finish()
    assert machine.builds == 1


def test_a_bridge_that_does_not_compile_leaves_the_launches_as_they_are(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fxwrap.native")
    launch = load_cpp_kernel(SCALE, SIGNATURE, ())
    machine.finish("no headers")
    assert torch.equal(scaled(launch), torch.tensor([9.5, 9.0, 8.5]))
    (message,) = [record.getMessage() for record in caplog.records if "bridge" in record.getMessage()]
    assert message == "the C++ bridge does not compile, and programs run without it: no headers"


def test_a_kernel_that_does_not_compile_raises_at_once(machine: Machine) -> None:
    with pytest.raises(NativeBuildError, match="this is no C"):
        load_cpp_kernel('extern "C" void kernel(float* y) { this is no C++; }', ("*f32",), ())


def test_kernels_that_are_prepared_together_are_linked_with_the_bridge_together(machine: Machine) -> None:
    texts = [kernels.KernelText("cpp", f"{SCALE}// {index}\n", SIGNATURE) for index in range(3)]
    prepare_kernels(tuple(texts))
    machine.finish()
    libraries = native.compiled_kernels(tuple([text.symbol for text in texts]))
    assert len(libraries) == 3 and len(set(libraries.values())) == 1
