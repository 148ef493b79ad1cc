"""C++ loops over rows whose index begins anew in a place, as that of a roll: they are split there."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from fxwrap.loop_ir import Axis, Buffer, Kernel, KernelBuilder, Segment, as_index, specialise, split_loop, unwrapped
from tests.printers.cpp_kernels import BF16, F32, check, compiled_together

ROWS = 9


def rolled(length: int, shift: int, dtype: torch.dtype, first: int = 0) -> Kernel:
    """Rolled rows from an element on, where the middle is doubled, and the number of rolls."""
    body, row, column = KernelBuilder(), Axis("row", ROWS), Axis("column", length)
    place = as_index(column) + shift
    x = body.load("x", as_index(row) * length + place % length + first, dtype)
    value = x.to(F32) if dtype in (BF16, torch.float16) else x
    is_middle = (body.index(as_index(column)) >= length // 3) & (body.index(as_index(column)) < length // 2)
    number = body.index(place // length)
    at = as_index(row) * length + column
    body.store("out", at, body.where(is_middle, lambda: value + value, value).to(dtype))
    body.store("rolls", at, number)
    count = ROWS * length
    outputs = [Buffer("out", dtype, count), Buffer("rolls", torch.int64, count)]
    return body.finish([row, column], [], [Buffer("x", dtype, count + first)], outputs)


def moved(length: int, shift: int, dtype: torch.dtype) -> Kernel:
    """Rolled rows of one buffer."""
    body, row, column = KernelBuilder(), Axis("row", ROWS), Axis("column", length)
    x = body.load("x", as_index(row) * length + (as_index(column) + shift) % length, dtype)
    body.store("out", as_index(row) * length + column, x)
    count = ROWS * length
    return body.finish([row, column], [], [Buffer("x", dtype, count)], [Buffer("out", dtype, count)])


LENGTHS = (2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 70)
DTYPES = (F32, BF16, torch.float16, torch.float64, torch.int64, torch.uint8)
CASES = [(length, shift % length, dtype) for length, shift, dtype in product(LENGTHS, (1, 11, -3), DTYPES)]
compiled_rolls = compiled_together(rolled)
compiled_moves = compiled_together(moved)


@pytest.mark.sampled(8)
@pytest.mark.usefixtures("compiled_rolls")
@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize(("length", "shift", "dtype"), CASES, ids=str)
def test_rolled_rows(length: int, shift: int, dtype: torch.dtype, first: int) -> None:
    check(rolled(length, shift, dtype, first))


@pytest.mark.sampled(8)
@pytest.mark.usefixtures("compiled_moves")
@pytest.mark.parametrize(("length", "shift", "dtype"), CASES, ids=str)
def test_moved_rows_are_loops_without_remainders(length: int, shift: int, dtype: torch.dtype) -> None:
    source = check(moved(length, shift, dtype))
    assert "%" not in source
    if shift and dtype is not torch.bool:
        assert source.count(f"for (int64_t column = {length - shift}; column < {length}; ++column)") == 1


def test_loops_are_split_where_few_quotients_change() -> None:
    kernel = moved(33, 30, F32)
    axis = kernel.axes[1]
    assert split_loop(kernel, axis) == [], "no condition changes"
    assert split_loop(kernel, axis, wraps=True) == [Segment(0, 3), Segment(3, 33)]
    loads = [specialise(kernel, axis, segment).operations[0] for segment in (Segment(0, 3), Segment(3, 33))]
    assert [str(load.index) for load in loads] == ["column + 33*row + 30", "column + 33*row - 3"]  # type: ignore[union-attr]
    assert specialise(kernel, axis, Segment(0, 33)) == kernel, "the quotient changes within the segment"


def test_periodic_rows_are_not_split() -> None:
    body, column = KernelBuilder(), Axis("column", 40)
    periodic = as_index(column) % 10
    body.store("out", as_index(column), body.load("x", periodic, F32))
    kernel = body.finish([column], [], [Buffer("x", F32, 10)], [Buffer("out", F32, 40)])
    assert split_loop(kernel, column, wraps=True) == []
    assert unwrapped(periodic, column) == periodic
    assert "%" in check(kernel)
    assert str(unwrapped((as_index(column) + 3) % 40, column)) == "column + 3"
