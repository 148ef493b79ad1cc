"""Rows at indirect indices of transposed matrices in C++: they are gathered in blocks of elements."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from fxwrap.errors import FxwrapError
from fxwrap.loop_ir import Axis, Buffer, Kernel, KernelBuilder, as_index, linearize_index
from tests.printers.cpp_kernels import BF16, F32, check, compiled_together

SOURCE = 37


def gathered(dtype: torch.dtype, rows: int, length: int, form: str) -> Kernel:
    """Rows of a transposed matrix at indices, plus a number for each row, times one for all.

    Forms: "plain"; "images", a matrix for each; "narrow", rows of few elements that share a line of the cache.
    """
    body, image, row, column = KernelBuilder(), Axis("b", 2), Axis("i", rows), Axis("j", length)
    at = body.load("at", as_index(row), torch.int64)
    distance = 3 if form == "narrow" else SOURCE
    body.device_assert(at < distance, "an index is out of bounds")
    chosen = body.indirect_index((at < distance).where(at, 0), distance)
    outer = as_index(image if form == "images" else 0) * (length * distance)
    x = body.load("x", outer + as_index(column) * distance + chosen, dtype)
    scale, number = body.load("scale", as_index(row), F32), body.load("number", as_index(0), F32)
    axes = [image, row, column] if form == "images" else [row, column]
    sizes = [int(axis.size) for axis in axes]
    body.store("out", linearize_index(axes, sizes), (x.to(F32) * scale + number).to(dtype))
    count = 2 if form == "images" else 1
    inputs = [Buffer("at", torch.int64, rows), Buffer("x", dtype, count * length * distance)]
    inputs += [Buffer("scale", F32, rows), Buffer("number", F32, 1)]
    return body.finish(axes, [], inputs, [Buffer("out", dtype, count * rows * length)])


CASES = list(
    product((F32, BF16, torch.float16, torch.int64), (15, 16, 64, 201), (16, 45, 300), ("plain", "images", "narrow"))
)
compiled_gathers = compiled_together(gathered)


@pytest.mark.sampled(6)
@pytest.mark.usefixtures("compiled_gathers")
@pytest.mark.parametrize(("dtype", "rows", "length", "form"), CASES, ids=str)
def test_rows_across_memory_are_gathered_in_blocks(dtype: torch.dtype, rows: int, length: int, form: str) -> None:
    indices = torch.randint(0, 3 if form == "narrow" else SOURCE, (rows,), generator=torch.Generator().manual_seed(0))
    source = check(gathered(dtype, rows, length, form), arguments={"at": indices})
    assert ("_block = 0;" in source) == (rows >= 16 and length > 32 and form != "narrow")


def test_an_index_out_of_bounds_is_reported() -> None:
    indices = torch.zeros(70, dtype=torch.int64)
    indices[66] = SOURCE
    with pytest.raises((FxwrapError, IndexError), match="out of bounds"):
        check(gathered(F32, 70, 45, "plain"), arguments={"at": indices})
