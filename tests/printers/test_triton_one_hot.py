"""Sums of rows times one-hot vectors as Triton kernels: one element is selected; non-finite rows are summed."""

from __future__ import annotations

import pytest
import torch

from fxwrap.loop_ir import Axis, Kernel, KernelBuilder, as_index, linearize_index
from fxwrap.printers.triton import TileConfiguration, configurations, print_triton
from tests.printers.triton_kernels import BF16, F32, I64, build, check

PICKS = "    if total - total == 0.0:"

# NumPy, which the interpreter computes with, warns of what these tests are about: infinities and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def loss_kernel(rows: int, size: int, flag: str = "eq") -> Kernel:
    """The sum over each row of its log-softmax where the position is the row's label."""
    p, r = Axis("p0", rows), Axis("r0", size)

    def write(body: KernelBuilder) -> None:
        x = body.load("x", linearize_index([p, r], [rows, size]), BF16).to(F32)
        largest, total = body.reduce("softmax", x)
        label = body.load("label", as_index(p), I64)
        one_hot = body.compute(flag, body.index(as_index(r)), label).to(F32)
        body.store("out", as_index(p), body.reduce("sum", one_hot * (x - largest - total.log()))[0])

    inputs = {"x": (BF16, rows * size), "label": (I64, rows)}
    return build([p], [r], inputs, {"out": (F32, rows)}, write)


ROW = TileConfiguration(y=(Axis("p0", 9),), r_block=32, num_warps=1)


@pytest.mark.parametrize("size", [32, 27])
def test_a_one_hot_sum_becomes_a_gather(size: int) -> None:
    kernel = loss_kernel(9, size)
    labels = torch.tensor([0, 3, size - 1, size, -1, 2**40, -(2**33), 5, 6])
    assert PICKS in check(kernel, ROW, inputs={"label": labels})


@pytest.mark.parametrize("size", [32, 27])
@pytest.mark.parametrize("value", [float("-inf"), float("inf"), float("nan"), 3e38, -3e38])
def test_non_finite_elements_propagate(value: float, size: int) -> None:
    x = torch.randn(9, size, generator=torch.Generator().manual_seed(3)).to(BF16)
    x[1, 4] = x[2, 5] = x[3, :] = x[4, 0] = value
    x[4, 1] = -value
    labels = torch.tensor([4, 4, 4, 4, 4, size, 0, 1, 2])
    assert PICKS in check(loss_kernel(9, size), ROW, inputs={"x": x.flatten(), "label": labels})


def test_only_an_exclusive_full_row_is_gathered_from() -> None:
    kernel = loss_kernel(9, 32)
    (axis,) = kernel.axes
    labels = torch.arange(9)
    for cut in (
        TileConfiguration(y=(axis,), y_block=4, r_block=32, num_warps=1),
        TileConfiguration(y=(axis,), r_block=8, looped=True, num_warps=1),
    ):
        assert PICKS not in check(kernel, cut, inputs={"label": labels})


def test_only_a_comparison_with_one_label_becomes_a_gather() -> None:
    assert PICKS in print_triton(loss_kernel(8192, 4096)).source
    assert PICKS not in check(loss_kernel(9, 32, "ne"), ROW, inputs={"label": torch.arange(9)})
    p, r = Axis("p0", 9), Axis("r0", 32)

    def write(body: KernelBuilder) -> None:
        x = body.load("x", linearize_index([p, r], [9, 32]), F32)
        label = body.load("label", linearize_index([p, r], [9, 32]), I64)  # another for each element
        product = body.index(as_index(r)).equals(label).to(F32) * x
        body.store("out", as_index(p), body.reduce("sum", product)[0])

    kernel = build([p], [r], {"x": (F32, 288), "label": (I64, 288)}, {"out": (F32, 9)}, write)
    for cut in (ROW, *configurations(kernel)):
        assert PICKS not in check(kernel, cut)


def test_an_overwritten_row_is_not_reloaded() -> None:
    p, r = Axis("p0", 9), Axis("r0", 32)
    position = linearize_index([p, r], [9, 32])

    def write(body: KernelBuilder) -> None:
        x = body.load("x", position, F32)
        body.store("x", position, x * 2.0)
        one_hot = body.index(as_index(r)).equals(body.load("label", as_index(p), I64)).to(F32)
        body.store("out", as_index(p), body.reduce("sum", one_hot * x)[0])

    kernel = build([p], [r], {"label": (I64, 9)}, {"x": (F32, 288), "out": (F32, 9)}, write)
    start = {"x": torch.randn(288, generator=torch.Generator().manual_seed(1))}
    assert PICKS not in check(kernel, ROW, inputs={"label": torch.arange(9)}, in_place=start)


def test_the_gathered_element_uses_its_index() -> None:
    """Loads of weights, of flipped rows and of gathered ones are computed at the label too."""
    p, r = Axis("p0", 9), Axis("r0", 32)

    def write(body: KernelBuilder) -> None:
        place = body.indirect_index(body.load("order", as_index(r), I64), 32)
        x = body.load("x", as_index(p) * 32 + 31 - r, F32) * body.load("weight", as_index(r), F32)
        row = x + body.load("x", as_index(p) * 32 + place, F32)
        one_hot = body.index(as_index(r)).equals(body.load("label", as_index(p), I64)).to(F32)
        body.store("out", as_index(p), body.reduce("sum", row * one_hot)[0])

    inputs = {"x": (F32, 288), "weight": (F32, 32), "order": (I64, 32), "label": (I64, 9)}
    kernel = build([p], [r], inputs, {"out": (F32, 9)}, write)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(5))
    assert PICKS in check(kernel, ROW, inputs={"order": order, "label": torch.arange(9) * 3})
