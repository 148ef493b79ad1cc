"""Convolutions in emitted C++: the library is asked once, and reads what lies in any of torch's orders."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fxwrap
from fxwrap.converters.cpp import to_cpp
from fxwrap.runtime.native import Program as NativeProgram
from fxwrap.runtime.native import compile_cpp, load_program
from tests.launch.fake_driver import FakeDriver
from tests.launch.test_products import by_operator, no_gpu

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True)
class Convolution:
    """What is convolved, and how; the tensors lie in the order of one format, but for a weight that differs."""

    given: tuple[int, ...] = (2, 3, 6, 5)
    weight: tuple[int, ...] = (4, 3, 3, 2)
    stride: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] = (0, 0)
    dilation: tuple[int, ...] = (1, 1)
    channels_last: bool = False
    weight_differs: bool = False
    groups: int = 1
    dtype: torch.dtype = torch.bfloat16

    def eager(self, given: Tensor, weight: Tensor) -> Tensor:
        flat = [0] * len(self.stride)
        return torch.ops.aten.convolution(
            given, weight, None, self.stride, self.padding, self.dilation, False, flat, self.groups
        )

    def shapes(self) -> list[tuple[int, ...]]:
        """Of input, weight and result."""
        result = self.eager(torch.empty(self.given, device="meta"), torch.empty(self.weight, device="meta"))
        return [self.given, self.weight, tuple(result.shape)]

    def strides(self) -> list[tuple[int, ...]]:
        """Of input, weight and result."""
        found = []
        for place, shape in enumerate(self.shapes()):
            like = torch.empty(shape, device="meta")
            if self.channels_last != (place == 1 and self.weight_differs):
                like = like.contiguous(memory_format=_FORMATS[like.dim()])
            found.append(like.stride())
        return found

    def program(self, name: str = "convolution") -> NativeProgram:
        """A program that writes it, of flat tensors; one of a new name knows of none yet."""
        code = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}[self.dtype]
        taken, views = [], []
        for item, shape, strides in zip(("given", "weight", "out"), self.shapes(), self.strides(), strict=True):
            kind = "mutable" if item == "out" else "borrowed"
            taken.append(f"%{item}_memory: {kind} {code}[{math.prod(shape)}]@cuda:0")
            layout = f"{', '.join(map(str, shape))} | {', '.join(map(str, strides))}"
            views.append(f"  %{item} = memory.view(%{item}_memory) : {code}[{layout}]@cuda:0")
        numbers = [f"[{', '.join(map(str, item))}]" for item in (self.stride, self.padding, self.dilation)]
        flat = f"[{', '.join('0' for _ in self.stride)}]"
        call = f"@aten.convolution.out(%given, %weight, none, {', '.join(numbers)}, false, {flat}, {self.groups})"
        text = "\n".join([f"program @{name}({', '.join(taken)}) {{", *views, f"  extern.call {call} outs=(%out)",
                          "  control.return()", "}\n"])  # fmt: skip
        return load_program(compile_cpp(to_cpp(fxwrap.parse(text)).source, name="convolution"))


class Memory:
    """Tensors on the fake device, and what they hold."""

    def __init__(self, driver: FakeDriver, how: Convolution, *, skipped: int = 0, device: int = 0) -> None:
        generator = torch.Generator().manual_seed(0)
        self.given: list[Tensor] = []
        self.seen: list[Tensor] = []
        for shape, strides in zip(how.shapes(), how.strides(), strict=True):
            count = math.prod(shape)
            self.given.append(driver.tensor(count, how.dtype, skipped=skipped, device=device))
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
def test_as_eager(name: str, channels_last: bool, driver: FakeDriver) -> None:
    how = replace(_SHAPES[name], channels_last=channels_last)
    memory = Memory(driver, how)
    given, weight, result = memory.seen
    expected = how.eager(given.float(), weight.float()).to(how.dtype)
    how.program()(*memory.given)
    torch.testing.assert_close(result, expected, check_stride=False)
    assert "convolve on 100 context 100" in driver.log()


def test_half_precision(driver: FakeDriver) -> None:
    how = Convolution(dtype=torch.float16)
    memory = Memory(driver, how)
    how.program()(*memory.given)
    expected = how.eager(memory.seen[0].float(), memory.seen[1].float()).half()
    torch.testing.assert_close(memory.seen[2], expected)


def test_the_library_is_asked_once_for_each_alignment(driver: FakeDriver) -> None:
    how = Convolution()
    run = how.program("asks_once")
    driver.enter(0)
    memory, moved = Memory(driver, how), Memory(driver, how, skipped=3)
    for given in (memory, memory, moved, memory):
        given.seen[2].zero_()
        run(*given.given)
        assert given.seen[2].any()
    log = [line.replace("128", "64").replace("256", "64") for line in driver.log()]
    once = "convolve on 100 context 100"
    assert log[0] == "library for context 100 mode 2"
    assert log[1:] == ["ask about 64 64 64", "plan 0", "stream 7 for 100", once, once,
                       "ask about 2 2 2", "plan 0", once, once]  # fmt: skip


def test_the_stream_is_torchs_current_one(driver: FakeDriver) -> None:
    how = Convolution()
    run, memory = how.program(), Memory(driver, how)
    run(*memory.given)
    driver.log()
    driver.set("stream", 9)
    try:
        run(*memory.given)
        run(*memory.given)
    finally:
        driver.set("stream", 7)
    assert [line for line in driver.log() if "stream" in line] == ["stream 9 for 100"]


def test_another_device_is_made_current(driver: FakeDriver) -> None:
    how = Convolution()
    run = how.program()
    driver.enter(0)
    run(*Memory(driver, how, device=1).given)
    log = driver.log()
    assert log[-2:] == ["stream 8 for 101", "convolve on 101 context 101"] and driver.context() == 0


def test_the_first_plan_that_can_be_made_is_taken(driver: FakeDriver) -> None:
    how = Convolution()
    run, memory = how.program("refused"), Memory(driver, how)
    driver.set("refused plans", 2)
    try:
        run(*memory.given)
    finally:
        driver.set("refused plans", 0)
    assert [line for line in driver.log() if "plan" in line] == ["plan 0", "plan 1", "plan 2"]
    assert memory.seen[2].any()


def test_descriptors_of_earlier_addresses_are_given_back(driver: FakeDriver) -> None:
    how = Convolution()
    run = how.program("moves")
    counts = []
    for _ in range(20):
        run(*Memory(driver, how, skipped=1).given)
        counts.append(driver.descriptors())
    assert len(set(counts)) == 1


@no_gpu
@pytest.mark.parametrize("failing", ["cudnnCreate", "heuristics", "refused plans", "cudnnSetStream",
                                     "cudnnBackendExecute"])  # fmt: skip
def test_what_the_library_refuses_is_left_to_the_operator(failing: str, driver: FakeDriver) -> None:
    how = Convolution()
    run = how.program("without_" + failing.replace(" ", "_"))
    driver.set(failing, 3000)
    try:
        for _ in range(2):
            with by_operator():
                run(*Memory(driver, how).given)
    finally:
        driver.set(failing, 0)


_OTHERS: dict[str, dict[str, bool]] = {
    "deterministic": {"deterministic": True},
    "timed": {"benchmark": True},
    "without cuDNN": {"enabled": False},
    "exact": {"allow_tf32": False},
}


@no_gpu
@pytest.mark.parametrize("name", _OTHERS)
def test_what_torch_is_told_to_do_otherwise_is_left_to_it(name: str, driver: FakeDriver) -> None:
    how = Convolution()
    run = how.program()
    flags: Any = torch.backends.cudnn.flags
    with flags(**{"enabled": True, **_OTHERS[name]}), by_operator():
        run(*Memory(driver, how).given)
    assert not driver.log()


@no_gpu
def test_deterministic_algorithms_are_left_to_the_operator(driver: FakeDriver, deterministic_algorithms: None) -> None:
    how = Convolution()
    with by_operator():
        how.program()(*Memory(driver, how).given)
    assert not driver.log()


@no_gpu
@pytest.mark.parametrize("other", [{"groups": 2, "given": (2, 6, 6, 5)}, {"dtype": torch.float32}], ids=str)
def test_other_convolutions_are_left_to_the_operator(other: dict[str, Any], driver: FakeDriver) -> None:
    how = Convolution(**{**other, "weight": (4, 3, 3, 2)})
    with by_operator():
        how.program()(*Memory(driver, how).given)
    assert not driver.log()


@no_gpu
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_weight_of_another_order_is_left_to_the_operator(channels_last: bool, driver: FakeDriver) -> None:
    """torch copies one of the tensors to the other's order."""
    how = Convolution(channels_last=channels_last, weight_differs=True)
    with by_operator():
        how.program()(*Memory(driver, how).given)
    assert not driver.log()


def test_call_sites_with_one_problem_have_one_plan(driver: FakeDriver) -> None:
    how = Convolution()
    memory = Memory(driver, how)
    for name in ("first", "second"):
        how.program(name)(*memory.given)
    assert sum(line.startswith("plan") for line in driver.log()) == 1
