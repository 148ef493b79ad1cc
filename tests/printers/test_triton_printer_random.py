"""Random kernels, cut at random, in Triton's interpreter against the loop IR's evaluator."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fxwrap.loop_ir import Axis, Buffer, Index, Kernel, KernelBuilder, Scalar, as_index, linearize_index
from fxwrap.printers.triton import Configuration, TileConfiguration, configurations
from tests.printers.triton_kernels import BF16, F32, F64, I64, check
from tests.support.long_form import sample_size

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

UNARY = ("neg", "abs", "exp", "sigmoid", "tanh", "erf", "sqrt", "reciprocal", "floor", "sign")
STEPS = ("floor", "sign")
"""Of loaded values only: the rounding error of others, as of the mean of equal elements less one, decides the step."""
BINARY = ("add", "sub", "mul", "maximum", "minimum", "fmax")
REDUCTIONS = ("sum", "max", "min", "welford", "softmax")


@dataclass
class KernelDraw:
    """A kernel that is being drawn: values of rows and of elements, and the buffers used so far."""

    draw: st.DrawFn
    body: KernelBuilder
    axes: list[Axis]
    reduced: list[Axis]
    inputs: list[Buffer]
    outputs: list[Buffer]
    values: list[Scalar]
    loaded: list[Scalar]

    def index(self, axes: list[Axis]) -> tuple[Index, int]:
        """A position in a tensor over some of the axes, in any order, one of them perhaps walked backwards."""
        chosen = self.draw(st.permutations(axes))[: self.draw(st.integers(0, len(axes)))]
        sizes = [int(axis.size) for axis in chosen]
        places = [as_index(axis) for axis in chosen]
        if chosen and self.draw(st.booleans()):
            places[0] = as_index(sizes[0] - 1) - places[0]
        count = 1
        for size in sizes:
            count *= size
        return linearize_index(places, sizes), count

    def load(self) -> None:
        position, count = self.index([*self.axes, *self.reduced])
        dtype = self.draw(st.sampled_from((BF16, F32)))
        name = f"in{len(self.inputs)}"
        self.inputs.append(Buffer(name, dtype, count))
        self.add_loaded(self.body.load(name, position, dtype).to(F32))

    def gather(self) -> None:
        position, count = self.index(self.axes)
        index, table = f"in{len(self.inputs)}", f"in{len(self.inputs) + 1}"
        self.inputs += [Buffer(index, I64, count), Buffer(table, F32, 7)]
        chosen = self.body.load(index, position, I64)
        chosen = self.body.compute("integer_remainder", chosen, chosen.coerce(7))
        self.add_loaded(self.body.load(table, self.body.indirect_index(chosen, 7), F32))

    def add_loaded(self, value: Scalar) -> None:
        self.values.append(value)
        self.loaded.append(value)

    def compute(self) -> None:
        name = self.draw(st.sampled_from((*UNARY, *BINARY)))
        value, other = [self.draw(st.sampled_from(self.values)) for _ in range(2)]
        if name in STEPS:
            self.values.append(self.draw(st.sampled_from(self.loaded)).apply(name))
        elif name in UNARY:
            value = value.apply("abs") if name in ("sqrt", "reciprocal") else value
            # Where the exact value is zero, the reciprocal of its rounding error is any number.
            value = value.maximum(0.5) if name == "reciprocal" else value
            self.values.append(value.apply(name))
        elif self.draw(st.booleans()):
            self.values.append(value.apply(name, other))
        else:
            self.values.append(value.apply(name, self.draw(st.sampled_from((0.5, 1.0, -3.0)))))

    def reduce(self) -> None:
        kind = self.draw(st.sampled_from(REDUCTIONS))
        value = self.draw(st.sampled_from(self.values)).maximum(-30.0).minimum(30.0)
        self.values += self.body.reduce(kind, value)

    def store(self, value: Scalar) -> None:
        name = f"out{len(self.outputs)}"
        whole = [*self.axes, *self.reduced]
        kernel = Kernel(tuple(self.axes), tuple(self.reduced), (), (), tuple(self.body.operations))
        over = whole if kernel.varying[value.position] or not self.reduced else self.axes
        order = self.draw(st.permutations(over))
        sizes = [int(axis.size) for axis in order]
        count = 1
        for size in sizes:
            count *= size
        dtype = self.draw(st.sampled_from((BF16, F32, F64)))
        self.body.store(name, linearize_index(order, sizes), value.to(dtype))
        self.outputs.append(Buffer(name, dtype, count))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Kernel, Configuration]:
    """A kernel and one way to cut it."""
    sizes = st.sampled_from((1, 2, 3, 4, 7, 8, 13))
    axes = [Axis(f"p{number}", draw(sizes)) for number in range(draw(st.integers(0, 3)))]
    reduced = [Axis(f"r{number}", draw(sizes)) for number in range(draw(st.integers(0, 2)))]
    building = KernelDraw(draw, KernelBuilder(), axes, reduced, [], [], [], [])
    building.load()
    for _ in range(draw(st.integers(1, 8))):
        steps = [building.load, building.gather, building.compute, building.compute]
        draw(st.sampled_from([*steps, *([building.reduce] * 2 if reduced else [])]))()
    if reduced:
        building.reduce()
    for value in {item.position: item for item in building.values[-3:]}.values():
        building.store(value)
    kernel = building.body.finish(axes, reduced, building.inputs, building.outputs)
    return kernel, draw(draw_configuration(kernel))


@st.composite
def draw_configuration(draw: st.DrawFn, kernel: Kernel) -> Configuration:
    """One of the printer's own configurations, or any other."""
    if draw(st.booleans()):
        return draw(st.sampled_from(configurations(kernel)))
    order = draw(st.permutations(kernel.axes))
    split = draw(st.integers(0, len(order)))
    x, y = tuple(order[:split][:1]), tuple(order[split:][:2])
    blocks = st.sampled_from((1, 2, 4, 16))
    if not kernel.reduced:
        return TileConfiguration(x=x, y=y, x_block=draw(blocks), y_block=draw(blocks))
    size = int(kernel.reduced_count)
    looped = draw(st.booleans())
    whole = 1 << max(size - 1, 0).bit_length()
    r_block = draw(st.sampled_from((2, 4, 8))) if looped else whole
    blocks_of_axes = {"x_block": draw(blocks), "y_block": draw(blocks), "r_block": r_block}
    return TileConfiguration(x=x, y=y, **blocks_of_axes, looped=looped, num_stages=draw(st.integers(1, 3)))


@settings(max_examples=sample_size(25), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(cases())
def test_random_kernels(case: tuple[Kernel, Configuration]) -> None:
    kernel, configuration = case
    generator = torch.Generator().manual_seed(11)
    inputs = {}
    for buffer in kernel.inputs:
        values = torch.randn(int(buffer.extent), generator=generator)
        inputs[buffer.name] = (values * 5).to(buffer.dtype)
    check(kernel, configuration, inputs=inputs, tolerance=2e-2)
