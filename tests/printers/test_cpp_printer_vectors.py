"""What keeps loops in C++ vectorised, and exact: gathered halves, bools that choose, sums in parts."""

from __future__ import annotations

import pytest
import torch

from fxwrap.loop_ir import Axis, Buffer, Index, KernelBuilder, Scalar, as_index
from fxwrap.printers.cpp import print_cpp_kernel
from fxwrap.runtime.kernels import load_kernel
from tests.printers.cpp_kernels import BF16, F32, check, matrix, pointwise, reduction


@pytest.mark.parametrize("dtype", [BF16, torch.float16, F32], ids=str)
@pytest.mark.parametrize("first", [0, 1])
def test_scalar_gathers_in_vector_loops(dtype: torch.dtype, first: int) -> None:
    def formula(body: KernelBuilder, row: Axis, column: Axis) -> None:
        at = body.load("index", matrix(row, column), torch.int64)
        chosen = body.load("table", body.indirect_index(at, 101), dtype)
        even = at.to(F32) >= 50.0
        masked = body.where(even, lambda: body.load("table", body.indirect_index(at, 101), dtype).to(F32), -1.0)
        body.store("out", matrix(row, column), chosen.to(F32) * 2.0 + masked)

    generator = torch.Generator().manual_seed(5)
    table = torch.randn(101 + first, generator=generator).to(dtype)[first:]  # one that begins within a word, too
    index = torch.randint(0, 101, (5 * 75,), generator=generator)
    source = check(
        pointwise(formula, 5, 75, Buffer("index", torch.int64, 375), Buffer("table", dtype, 101)),
        arguments={"table": table, "index": index},
    )
    assert ("gather(" in source) == (dtype is not F32)


def test_bool_selects() -> None:
    def formula(body: KernelBuilder, row: Axis, column: Axis) -> None:
        hidden = body.load("hidden", matrix(row, column), torch.bool)
        value = body.load("x", matrix(row, column), F32)
        body.store("out", matrix(row, column), hidden.where(-float("inf"), value / 3.0))

    source = check(pointwise(formula, 5, 75, Buffer("hidden", torch.bool, 375), Buffer("x", F32, 375)))
    assert "op::where(load_bool(hidden[75 * row + column])" in source, "what compilers vectorise"


@pytest.mark.parametrize("sizes", [(1024, 96), (40000, 3)])
def test_float32_column_sums_are_accurate(sizes: tuple[int, int]) -> None:
    x = torch.rand(sizes, generator=torch.Generator().manual_seed(3))
    printed = print_cpp_kernel(reduction("sum", F32, sizes, (0,)))
    out = torch.empty(sizes[1])
    load_kernel("cpp", printed.source, printed.signature, printed.options)((1, 1, 1), x, out)
    wanted = x.double().sum(0)
    assert float((out - wanted).norm() / wanted.norm()) < 1.2e-7


def test_masks_are_removed_from_the_interior_of_a_strided_window() -> None:
    """A pool with padding: the parts of both axes that need no mask have a loop of their own."""

    def formula(body: KernelBuilder, row: Axis, column: Axis) -> None:
        total = body.constant(0.0, F32)
        for down in range(3):
            for right in range(3):
                high, wide = as_index(row) * 2 + (down - 1), as_index(column) * 2 + (right - 1)
                inside = (body.index(high) >= 0) & (body.index(wide) >= 0) & (body.index(wide) < 39)

                def load(high: Index = high, wide: Index = wide) -> Scalar:
                    return body.load("x", high * 39 + wide, F32)

                total = total + body.where(inside, load, 0.5)
        body.store("out", matrix(row, column), total)

    source = check(pointwise(formula, 12, 20, Buffer("x", F32, 25 * 39)))
    inner = source.split("if (1 <= row && row < 12) {")[1].split("else {")[0]
    loops = inner.split("for (int64_t column = ")[1:]
    assert [loop.split(";")[0] for loop in loops] == ["0", "1", "19"]
    assert "?" not in inner and "?" in source
