"""Reductions of columns in C++: a few elements are combined before an accumulator, and costly values are kept."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from fxwrap.loop_ir import Axis, Buffer, Kernel, KernelBuilder, as_index
from fxwrap.printers.cpp import print_cpp_kernel
from tests.printers.cpp_kernels import BF16, F32, check, compiled_together, matrix, reduction

HALF = (BF16, torch.float16)


def columns_of(kind: str, dtype: torch.dtype, rows: int, columns: int) -> Kernel:
    """Results of the columns of a matrix."""
    return reduction(kind, F32 if dtype in HALF else dtype, (rows, columns), (0,), dtype)


def truths_of(kind: str, dtype: torch.dtype, rows: int, columns: int, reduced: int) -> Kernel:
    """Whether comparisons hold anywhere, or everywhere, in the columns or the rows of a matrix."""
    body, row, column = KernelBuilder(), Axis("i", rows), Axis("j", columns)
    x = body.load("x", matrix(row, column), dtype)
    value = x.to(F32) if dtype in HALF else x
    is_large = value if dtype is torch.bool else value > (2 if dtype is torch.int64 else 0.5)
    axes, others = ([row], [column]) if reduced == 0 else ([column], [row])
    result = body.reduce(kind, is_large if kind == "any" else ~is_large)[0]
    body.store("out", as_index(others[0]), result)
    body.store("negated", as_index(others[0]), (~result).to(F32))
    size = int(others[0].size)
    outputs = [Buffer("out", torch.bool, size), Buffer("negated", F32, size)]
    return body.finish(others, axes, [Buffer("x", dtype, rows * columns)], outputs)


def softmax_of(dtype: torch.dtype, rows: int, columns: int) -> Kernel:
    """The softmax of the columns of a matrix."""
    body, row, column = KernelBuilder(), Axis("i", rows), Axis("j", columns)
    x = body.load("x", matrix(row, column), dtype)
    value = x.to(F32) if dtype in HALF else x
    power = (value - body.reduce("max", value)[0]).exp()
    body.store("out", matrix(row, column), (power / body.reduce("sum", power)[0]).to(dtype))
    count = rows * columns
    return body.finish([column], [row], [Buffer("x", dtype, count)], [Buffer("out", dtype, count)])


SIZES = [(1, 1), (3, 7), (6, 64), (9, 130), (64, 33), (70, 5), (131, 17), (200, 16)]
COLUMN_CASES = list(product(("max", "min", "prod", "sum"), (F32, BF16, torch.float16, torch.float64), SIZES))
COLUMN_CASES += list(product(("max", "sum", "argmax"), (torch.int64, torch.uint8), SIZES))
TRUTH_CASES = list(product(("any", "all"), (torch.bool, torch.int64, F32, BF16, torch.float64), SIZES, (0, 1)))
SOFTMAX_CASES = list(product((F32, BF16, torch.float16, torch.float64), [*SIZES, (600, 40), (5000, 20)]))

compiled_columns = compiled_together(lambda kind, dtype, sizes: columns_of(kind, dtype, *sizes))
compiled_truths = compiled_together(lambda kind, dtype, sizes, reduced: truths_of(kind, dtype, *sizes, reduced))
compiled_softmaxes = compiled_together(lambda dtype, sizes: softmax_of(dtype, *sizes))


@pytest.mark.sampled(6)
@pytest.mark.usefixtures("compiled_columns")
@pytest.mark.parametrize(("kind", "dtype", "sizes"), COLUMN_CASES, ids=str)
def test_columns(kind: str, dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    source = check(columns_of(kind, dtype, *sizes))
    is_rounded = kind == "sum" and dtype.is_floating_point
    assert is_rounded or "_parts" not in source, "only sums of floats are split for their accuracy"


@pytest.mark.sampled(8)
@pytest.mark.usefixtures("compiled_truths")
@pytest.mark.parametrize(("kind", "dtype", "sizes", "reduced"), TRUTH_CASES, ids=str)
def test_truth_values(kind: str, dtype: torch.dtype, sizes: tuple[int, int], reduced: int) -> None:
    source = check(truths_of(kind, dtype, *sizes, reduced))
    bits = {torch.bool: 8, torch.int64: 64, torch.float64: 64}.get(dtype, 32)
    assert f"Lanes<uint{bits}_t, " in source, "as wide as what is compared"


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("compiled_softmaxes")
@pytest.mark.parametrize(("dtype", "sizes"), SOFTMAX_CASES, ids=str)
def test_exponentials_of_columns_are_computed_once(dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    source = check(softmax_of(dtype, *sizes))
    width = max(dtype.itemsize, 4)
    fits = sizes[0] * width * min(sizes[1], 16) <= 65536
    assert ("_column[" in source) == (fits and sizes != (1, 1)), "unless they do not fit in the cache"


@pytest.mark.parametrize("reduced", [0, 1])
@pytest.mark.parametrize("dtype", [*HALF, F32], ids=str)
def test_products_are_of_float64_unless_they_are_rounded(dtype: torch.dtype, reduced: int) -> None:
    body, row, column = KernelBuilder(), Axis("i", 37), Axis("j", 37)
    result = body.reduce("prod", body.load("x", matrix(row, column), dtype).to(F32))[0]
    axes = ([column], [row]) if reduced == 0 else ([row], [column])
    body.store("out", as_index(axes[0][0]), result.to(dtype))
    kernel = body.finish(*axes, [Buffer("x", dtype, 37 * 37)], [Buffer("out", dtype, 37)])
    x = 1 + 0.1 * torch.randn(37 * 37, generator=torch.Generator().manual_seed(0))
    assert ("Lanes<double" in check(kernel, arguments={"x": x.to(dtype)})) == (dtype is F32)


@pytest.mark.parametrize("kind", ["max", "min", "prod", "sum", "any", "all"])
def test_columns_with_nan_and_infinities(kind: str) -> None:
    sizes = (70, 37)
    special = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 0.0])
    x = torch.randn(sizes)
    x[torch.arange(5) * 13, torch.arange(5) * 7] = special
    x[3] = special.repeat(8)[:37]
    kernel = truths_of(kind, F32, *sizes, 0) if kind in ("any", "all") else columns_of(kind, F32, *sizes)
    check(kernel, arguments={"x": x.flatten()})


def test_elements_of_columns_are_combined_before_an_accumulator() -> None:
    source = print_cpp_kernel(columns_of("max", F32, 64, 100)).source
    pairs = "combine::max(combine::max(max_1_0, max_1_1), combine::max(max_1_2, max_1_3))"
    assert f"max_1_lanes[lane] = combine::max(max_1_lanes[lane], {pairs});" in source
