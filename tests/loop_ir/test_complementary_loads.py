"""Loads of one element under complementary masks are one load without a mask."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fxwrap.loop_ir import (
    Axis,
    Buffer,
    Kernel,
    KernelBuilder,
    Load,
    as_index,
    evaluate_kernel,
    merge_complementary_loads,
)
from fxwrap.printers.triton.candidates import configurations
from tests.lowering.planned_programs import STRICT, check


def loads_of(kernel: Kernel) -> list[Load]:
    return [item for item in kernel.operations if isinstance(item, Load)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("diagonal", [1, 2])
def test_triangles(dtype: torch.dtype, diagonal: int) -> None:
    """Both triangles are read once, unless a diagonal is missing between them."""

    def triangles(x: Tensor) -> Tensor:
        return torch.tril(x) + torch.triu(x, diagonal) * 2

    (kernel,) = check(triangles, torch.arange(2 * 6 * 63).view(2, 6, 63).to(dtype), options=STRICT).kernels.values()
    masks = [item.mask is not None for item in loads_of(kernel)]
    assert masks == ([False] if diagonal == 1 else [True, True])
    is_flat = configurations(kernel)[0].x == kernel.axes
    assert is_flat == (diagonal == 1), "rows of 63 elements are no vectors, all rows together are"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_outside_the_masks(dtype: torch.dtype) -> None:
    """Each load keeps its number outside of its mask, which another operation may read."""
    axis = Axis("i", 6)
    body = KernelBuilder()
    is_first = body.index(as_index(axis)) < 2
    with body.masked(is_first):
        first = body.load("in0", as_index(axis), dtype, 3).to(torch.float32)
    with body.masked(body.index(as_index(axis)) >= 2):
        second = body.load("in0", as_index(axis), dtype, 5).to(torch.float32)
    body.store("out0", as_index(axis), first * 8 + second)
    kernel = body.finish((axis,), (), [Buffer("in0", dtype, 6)], [Buffer("out0", torch.float32, 6)])
    merged = merge_complementary_loads(kernel)
    assert [item.mask for item in loads_of(merged)] == [None]
    results = [torch.empty(6), torch.empty(6)]
    for item, result in zip((kernel, merged), results, strict=True):
        evaluate_kernel(item, {"in0": torch.arange(6).to(dtype), "out0": result})
    assert results[0].tolist() == results[1].tolist() == [5, 13, 26, 27, 28, 29]
