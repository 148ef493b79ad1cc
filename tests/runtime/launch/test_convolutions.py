"""Convolutions in emitted C++: one plan query, and every memory format of torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fxwrap
from fxwrap.converters.cpp import to_cpp
from fxwrap.runtime.native import NativeProgram, compile_cpp, load_program
from tests.runtime.launch.fake_driver import FakeDriver
from tests.runtime.launch.test_matmuls import expect_operator_fallback

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True)
class Convolution:
    """The problem of a convolution; all tensors have one memory format unless the weight differs."""

    input: tuple[int, ...] = (2, 3, 6, 5)
    weight: tuple[int, ...] = (4, 3, 3, 2)
    stride: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] = (0, 0)
    dilation: tuple[int, ...] = (1, 1)
    channels_last: bool = False
    weight_differs: bool = False
    groups: int = 1
    dtype: torch.dtype = torch.bfloat16

    def eager(self, x: Tensor, weight: Tensor) -> Tensor:
        flat = [0] * len(self.stride)
        return torch.ops.aten.convolution(
            x, weight, None, self.stride, self.padding, self.dilation, False, flat, self.groups
        )

    def shapes(self) -> list[tuple[int, ...]]:
        """Of input, weight and result."""
        result = self.eager(torch.empty(self.input, device="meta"), torch.empty(self.weight, device="meta"))
        return [self.input, self.weight, tuple(result.shape)]

    def strides(self) -> list[tuple[int, ...]]:
        """Of input, weight and result."""
        strides = []
        for place, shape in enumerate(self.shapes()):
            like = torch.empty(shape, device="meta")
            if self.channels_last != (place == 1 and self.weight_differs):
                like = like.contiguous(memory_format=_FORMATS[like.dim()])
            strides.append(like.stride())
        return strides

    def program(self, name: str = "convolution") -> NativeProgram:
        """A program that computes it on flat tensors; a new name starts without cached plans."""
        code = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}[self.dtype]
        parameters, views = [], []
        for item, shape, strides in zip(("input", "weight", "out"), self.shapes(), self.strides(), strict=True):
            kind = "mutable" if item == "out" else "borrowed"
            parameters.append(f"%{item}_memory: {kind} {code}[{math.prod(shape)}]@cuda:0")
            layout = f"{', '.join(map(str, shape))} | {', '.join(map(str, strides))}"
            views.append(f"  %{item} = memory.view(%{item}_memory) : {code}[{layout}]@cuda:0")
        numbers = [f"[{', '.join(map(str, item))}]" for item in (self.stride, self.padding, self.dilation)]
        flat = f"[{', '.join('0' for _ in self.stride)}]"
        call = f"@aten.convolution.out(%input, %weight, none, {', '.join(numbers)}, false, {flat}, {self.groups})"
        text = "\n".join([f"program @{name}({', '.join(parameters)}) {{", *views, f"  extern.call {call} outs=(%out)",
                          "  control.return()", "}\n"])  # fmt: skip
        return load_program(compile_cpp(to_cpp(fxwrap.parse(text)).source, name="convolution"))


class Memory:
    """Tensors on the fake device, and views of their memory on the host."""

    def __init__(self, driver: FakeDriver, how: Convolution, *, skipped: int = 0, device: int = 0) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tensors: list[Tensor] = []
        self.seen: list[Tensor] = []
        for shape, strides in zip(how.shapes(), how.strides(), strict=True):
            count = math.prod(shape)
            self.tensors.append(driver.tensor(count, how.dtype, skipped=skipped, device=device))
            memory = driver.memory()[skipped:]
            memory.copy_(torch.randn(count, generator=generator))
            self.seen.append(memory.as_strided(shape, strides))


_SHAPES: dict[str, Convolution] = {
    "plain": Convolution(),
    "strides and padding": Convolution(stride=(2, 1), padding=(1, 2)),
    "dilated": Convolution(dilation=(2, 3), padding=(2, 1)),
    "one pixel": Convolution(weight=(4, 3, 1, 1)),
    "volumes": Convolution((2, 2, 4, 5, 3), (3, 2, 2, 3, 2), (1, 2, 1), (0, 1, 1), (1, 1, 1)),
}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", _SHAPES)
def test_matches_eager(name: str, channels_last: bool, driver: FakeDriver) -> None:
    how = replace(_SHAPES[name], channels_last=channels_last)
    memory = Memory(driver, how)
    x, weight, result = memory.seen
    expected = how.eager(x.float(), weight.float()).to(how.dtype)
    how.program()(*memory.tensors)
    torch.testing.assert_close(result, expected, check_stride=False)
    assert "convolve on 100 context 100" in driver.log()


def test_half_precision(driver: FakeDriver) -> None:
    how = Convolution(dtype=torch.float16)
    memory = Memory(driver, how)
    how.program()(*memory.tensors)
    expected = how.eager(memory.seen[0].float(), memory.seen[1].float()).half()
    torch.testing.assert_close(memory.seen[2], expected)


def test_one_plan_per_alignment(driver: FakeDriver) -> None:
    how = Convolution()
    run = how.program("asks_once")
    driver.enter(0)
    memory, moved = Memory(driver, how), Memory(driver, how, skipped=3)
    for operands in (memory, memory, moved, memory):
        operands.seen[2].zero_()
        run(*operands.tensors)
        assert operands.seen[2].any()
    log = [line.replace("128", "64").replace("256", "64") for line in driver.log()]
    once = "convolve on 100 context 100"
    assert log[0] == "library for context 100 mode 2"
    assert log[1:] == ["ask about 64 64 64", "plan 0", "stream 7 for 100", once, once,
                       "ask about 2 2 2", "plan 0", once, once]  # fmt: skip


def test_the_current_stream_is_used(driver: FakeDriver) -> None:
    how = Convolution()
    run, memory = how.program(), Memory(driver, how)
    run(*memory.tensors)
    driver.log()
    driver.set("stream", 9)
    try:
        run(*memory.tensors)
        run(*memory.tensors)
    finally:
        driver.set("stream", 7)
    assert [line for line in driver.log() if "stream" in line] == ["stream 9 for 100"]


def test_the_device_becomes_current(driver: FakeDriver) -> None:
    how = Convolution()
    run = how.program()
    driver.enter(0)
    run(*Memory(driver, how, device=1).tensors)
    log = driver.log()
    assert log[-2:] == ["stream 8 for 101", "convolve on 101 context 101"] and driver.context() == 0


def test_the_first_supported_plan_is_used(driver: FakeDriver) -> None:
    how = Convolution()
    run, memory = how.program("refused"), Memory(driver, how)
    driver.set("refused plans", 2)
    try:
        run(*memory.tensors)
    finally:
        driver.set("refused plans", 0)
    assert [line for line in driver.log() if "plan" in line] == ["plan 0", "plan 1", "plan 2"]
    assert memory.seen[2].any()


def test_stale_descriptors_are_destroyed(driver: FakeDriver) -> None:
    how = Convolution()
    run = how.program("moves")
    counts = []
    for _ in range(20):
        run(*Memory(driver, how, skipped=1).tensors)
        counts.append(driver.descriptors())
    assert len(set(counts)) == 1


@pytest.mark.parametrize("failing", ["cudnnCreate", "heuristics", "refused plans", "cudnnSetStream",
                                     "cudnnBackendExecute"])  # fmt: skip
def test_problems_the_library_rejects_call_the_operator(failing: str, driver: FakeDriver) -> None:
    how = Convolution()
    run = how.program("without_" + failing.replace(" ", "_"))
    driver.set(failing, 3000)
    try:
        for _ in range(2):
            with expect_operator_fallback():
                run(*Memory(driver, how).tensors)
    finally:
        driver.set(failing, 0)


_OTHERS: dict[str, dict[str, bool]] = {
    "deterministic": {"deterministic": True},
    "timed": {"benchmark": True},
    "without cuDNN": {"enabled": False},
    "exact": {"allow_tf32": False},
}


@pytest.mark.parametrize("name", _OTHERS)
def test_torch_backend_settings_call_the_operator(name: str, driver: FakeDriver) -> None:
    how = Convolution()
    run = how.program()
    flags: Any = torch.backends.cudnn.flags
    with flags(**{"enabled": True, **_OTHERS[name]}), expect_operator_fallback():
        run(*Memory(driver, how).tensors)
    assert not driver.log()


def test_deterministic_mode_calls_the_operator(driver: FakeDriver, deterministic_algorithms: None) -> None:
    how = Convolution()
    with expect_operator_fallback():
        how.program()(*Memory(driver, how).tensors)
    assert not driver.log()


@pytest.mark.parametrize("other", [{"groups": 2, "input": (2, 6, 6, 5)}, {"dtype": torch.float32}], ids=str)
def test_unsupported_convolutions_call_the_operator(other: dict[str, Any], driver: FakeDriver) -> None:
    how = Convolution(**{**other, "weight": (4, 3, 3, 2)})
    with expect_operator_fallback():
        how.program()(*Memory(driver, how).tensors)
    assert not driver.log()


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_weight_of_another_memory_format_calls_the_operator(channels_last: bool, driver: FakeDriver) -> None:
    """torch copies one of the tensors to the other's memory format."""
    how = Convolution(channels_last=channels_last, weight_differs=True)
    with expect_operator_fallback():
        how.program()(*Memory(driver, how).tensors)
    assert not driver.log()


def test_equal_problems_share_one_plan(driver: FakeDriver) -> None:
    how = Convolution()
    memory = Memory(driver, how)
    for name in ("first", "second"):
        how.program(name)(*memory.tensors)
    assert sum(line.startswith("plan") for line in driver.log()) == 1
