"""Reductions of a few columns in C++, whose lanes are the elements of several rows."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from fxwrap.loop_ir import Axis, Buffer, Kernel, KernelBuilder, as_index
from fxwrap.printers.cpp import print_cpp_kernel
from tests.printers.cpp_kernels import BF16, F32, check, compiled_together, matrix, reduction
from tests.printers.test_cpp_printer_columns import softmax_of, truths_of

HALF = (BF16, torch.float16)
SIZES = [(700, 2), (1000, 3), (4001, 5), (400, 7), (2500, 10), (1200, 15), (100, 20), (301, 31)]
KINDS = ("sum", "prod", "max", "min")
REDUCTION_CASES = list(product(KINDS, (F32, BF16, torch.float16, torch.float64), SIZES))
REDUCTION_CASES += list(product(("max", "sum"), (torch.int64, torch.uint8), SIZES))
SOFTMAX_CASES = list(product((F32, BF16, torch.float16, torch.float64), SIZES))


def reduced(kind: str, dtype: torch.dtype, rows: int, columns: int) -> Kernel:
    """Results of the columns of a matrix."""
    return reduction(kind, F32 if dtype in HALF else dtype, (rows, columns), (0,), dtype)


def scaled(dtype: torch.dtype, rows: int, columns: int, batches: int = 1) -> Kernel:
    """Columns of each of some matrices without their mean, multiplied by a factor of the column."""
    body, row, column, batch = KernelBuilder(), Axis("i", rows), Axis("j", columns), Axis("b", batches)
    at = as_index(batch) * (rows * columns) + matrix(row, column)
    x = body.load("x", at, dtype).to(F32)
    mean = body.reduce("sum", x)[0] / float(rows)
    factor = body.load("factor", as_index(column), dtype).to(F32)
    body.store("out", at, ((x - mean) * factor).to(dtype))
    body.store("mean", as_index(batch) * columns + column, mean)
    size = batches * rows * columns
    inputs = [Buffer("x", dtype, size), Buffer("factor", dtype, columns)]
    return body.finish(
        [batch, column], [row], inputs, [Buffer("out", dtype, size), Buffer("mean", F32, batches * columns)]
    )


compiled_reductions = compiled_together(lambda kind, dtype, sizes: reduced(kind, dtype, *sizes))
compiled_softmaxes = compiled_together(lambda dtype, sizes: softmax_of(dtype, *sizes))


def is_in_blocks(source: str) -> bool:
    """Whether the elements of columns are combined after passes over blocks of rows."""
    return "combine_rows<" in source


@pytest.mark.sampled(6)
@pytest.mark.usefixtures("compiled_reductions")
@pytest.mark.parametrize(("kind", "dtype", "sizes"), REDUCTION_CASES, ids=str)
def test_reductions(kind: str, dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    assert is_in_blocks(check(reduced(kind, dtype, *sizes), rtol=2e-5))


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("compiled_softmaxes")
@pytest.mark.parametrize(("dtype", "sizes"), SOFTMAX_CASES, ids=str)
def test_softmax(dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    assert is_in_blocks(check(softmax_of(dtype, *sizes)))


@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("dtype", [F32, torch.float16])
def test_factors_of_columns_and_batches(dtype: torch.dtype, batches: int) -> None:
    assert is_in_blocks(check(scaled(dtype, 203, 6, batches)))


@pytest.mark.parametrize("kind", ["any", "all"])
def test_truth_values(kind: str) -> None:
    assert is_in_blocks(check(truths_of(kind, BF16, 205, 5, 0)))


@pytest.mark.parametrize(
    "kernel",
    [reduced("argmax", F32, 1000, 5), reduced("sum", F32, 1000, 16), reduced("sum", F32, 100, 5)],
    ids=["position", "whole vectors", "few rows"],
)
def test_others_are_reduced_row_by_row(kernel: Kernel) -> None:
    assert not is_in_blocks(print_cpp_kernel(kernel).source)
