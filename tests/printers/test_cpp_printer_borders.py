"""C++ loops over rows whose index turns or stops at borders, as those of pads: they are split there."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from fxwrap.loop_ir import Axis, Buffer, Kernel, KernelBuilder, as_index, specialise, split_loop
from tests.printers.cpp_kernels import BF16, F32, check, compiled_together

ROWS = 3
F16 = torch.float16


def padded(length: int, before: int, after: int, dtype: torch.dtype, form: str) -> Kernel:
    """Rows with borders, scaled: "reflected" at the first and last element, "clamped", or "mirrored" about both."""
    body, row, column = KernelBuilder(), Axis("row", ROWS), Axis("column", before + length + after)
    place, last = body.index(as_index(column) - before), body.index(as_index(length - 1))
    if form == "clamped":
        source = place.apply("maximum", 0).apply("minimum", last)
    elif form == "reflected":
        source = last - abs(last - abs(place))
    else:
        source = abs(place).apply("minimum", last + last - abs(place))
    chosen = body.indirect_index(source, length)
    x = body.load("x", as_index(row) * length + chosen, dtype)
    value = (x.to(F32) * 3.0).to(dtype) if dtype in (BF16, F16) else x + x
    body.store("out", as_index(row) * column.size + column, value)
    outputs = [Buffer("out", dtype, ROWS * int(column.size))]
    return body.finish([row, column], [], [Buffer("x", dtype, ROWS * length)], outputs)


CASES = list(product((5, 14, 40, 224), (0, 1, 4), (0, 2, 4), (F32, BF16, F16, torch.float64, torch.uint8)))
compiled_pads = compiled_together(padded)


@pytest.mark.sampled(6)
@pytest.mark.usefixtures("compiled_pads")
@pytest.mark.parametrize("form", ["reflected", "clamped", "mirrored"])
@pytest.mark.parametrize(("length", "before", "after", "dtype"), CASES, ids=str)
def test_borders_are_loops_of_their_own(length: int, before: int, after: int, dtype: torch.dtype, form: str) -> None:
    source = check(padded(length, before, after, dtype, form))
    if before or after:
        assert "op::abs" not in source and "op::maximum" not in source and "op::minimum" not in source
        assert "gather(" not in source, "elements of a segment are adjacent"


def test_segments_between_borders_are_linear() -> None:
    kernel = padded(14, 1, 2, F32, "reflected")
    *_, column = kernel.axes
    segments = split_loop(kernel, column, wraps=True)
    assert [(segment.start, segment.end) for segment in segments] == [(0, 1), (1, 15), (15, 17)]
    loads = [specialise(kernel, column, segment).operations for segment in segments]
    strides = [
        next(item for item in operations if hasattr(item, "buffer")).index.stride(column) for operations in loads
    ]  # type: ignore[union-attr]
    assert [stride.constant for stride in strides if stride is not None] == [-1, 1, -1]


def test_a_border_of_unknown_width_is_computed() -> None:
    """An index that depends on another value than the axis is not split."""
    body, row, column = KernelBuilder(), Axis("row", 20), Axis("column", 20)
    source = abs(body.index(as_index(column) - as_index(row)))
    x = body.load("x", as_index(row) * 20 + body.indirect_index(source, 20), F32)
    body.store("out", as_index(row) * 20 + column, x)
    kernel = body.finish([row, column], [], [Buffer("x", F32, 400)], [Buffer("out", F32, 400)])
    assert "op::abs" in check(kernel)
