"""Short rows in C++, whose lanes are rows: they are transposed in blocks, before and after the loops over them."""

from __future__ import annotations

import re
from itertools import product

import pytest
import torch

from fxwrap.loop_ir import ZERO, Axis, Buffer, Index, Kernel, KernelBuilder, Scalar, as_index, linearize_index
from fxwrap.printers.cpp import print_cpp_kernel
from fxwrap.symbolic import make_symbol
from tests.printers.cpp_kernels import BF16, F32, check, compiled_together

ROWS, GAP = 75, 3
DTYPES = (F32, BF16, torch.float16, torch.float64, torch.int32, torch.uint8)


def rows_of(length: int, dtype: torch.dtype, gap: int = 0) -> Kernel:
    """Rows with elements between them, their sums and maxima, and elements that depend on these."""
    body, row, column = KernelBuilder(), Axis("i", ROWS), Axis("j", length)
    at = as_index(row) * (length + gap) + column
    x = body.load("x", at, dtype)
    value = x.to(F32) if dtype.is_floating_point and dtype is not torch.float64 else x
    total, largest = body.reduce("sum", value)[0], body.reduce("max", value)[0]
    body.store("sum", as_index(row), total)
    body.store("out", at, (value + largest).to(dtype))
    count = ROWS * (length + gap) - gap
    return body.finish(
        [row], [column], [Buffer("x", dtype, count)], [Buffer("sum", total.dtype, ROWS), Buffer("out", dtype, count)]
    )


def scans_of(kind: str, length: int, dtype: torch.dtype) -> Kernel:
    """Scans of rows, and of a number of rows that is not known."""
    number = make_symbol("s0")
    body, row, column = KernelBuilder(), Axis("i", number), Axis("j", length)
    at = as_index(row) * length + column
    x = body.load("x", at, dtype)
    results = body.scan(kind, x.to(F32) if dtype is BF16 else x)
    outputs = []
    for position, result in enumerate(results):
        result = result.to(dtype) if position == 0 else result
        body.store(f"out{position}", at, result)
        outputs.append(Buffer(f"out{position}", result.dtype, number * length))
    return body.finish([row], [column], [Buffer("x", dtype, number * length)], outputs)


def uneven_rows(length: int, dtype: torch.dtype, in_place: bool) -> Kernel:
    """Rows with elements between them times those of one row, written in place or elsewhere."""
    body, row, column = KernelBuilder(), Axis("i", 9), Axis("j", length)
    at = as_index(row) * (length + GAP) + column
    result = "x" if in_place else "out"
    value, weight = body.load("x", at, dtype), body.load("w", as_index(column), dtype)
    is_half = dtype in (BF16, torch.float16)
    product = (value.to(F32) * weight.to(F32)).to(dtype) if is_half else value * weight
    body.store(result, at, product)
    count = 9 * (length + GAP) - GAP
    inputs = [*([] if in_place else [Buffer("x", dtype, count)]), Buffer("w", dtype, length)]
    return body.finish([row, column], [], inputs, [Buffer(result, dtype, count)])


def biased_rows(length: int, dtype: torch.dtype, rows: int, in_place: bool) -> Kernel:
    """Rows times a row, plus the exponential of another, and a number; a store of a row in each row."""
    body, row, column = KernelBuilder(), Axis("i", rows), Axis("j", length)
    at, result = as_index(row) * length + column, "x" if in_place else "out"

    def load(name: str, index: Index) -> Scalar:
        value = body.load(name, index, dtype)
        return value.to(F32) if dtype in (BF16, torch.float16) else value

    scale, number = load("w", as_index(column)), load("n", ZERO)
    bias = load("b", as_index(column) + 1)
    bias = bias.exp() if dtype.is_floating_point else bias
    body.store(result, at, (load("x", at) * scale + bias + number).to(dtype))
    body.store("rows", at, body.load("w", as_index(column), dtype))
    count = rows * length
    inputs = [*([] if in_place else [Buffer("x", dtype, count)]), Buffer("w", dtype, length)]
    inputs += [Buffer("b", dtype, length + 1), Buffer("n", dtype, 1)]
    return body.finish([row, column], [], inputs, [Buffer(result, dtype, count), Buffer("rows", dtype, count)])


ROW_CASES = list(product((2, 3, 4, 5, 7, 8, 11, 15, 16, 21), DTYPES, (0, GAP)))
SCAN_CASES = list(product(("cumsum", "cumprod", "cummax", "logcumsumexp"), (3, 7, 20), (F32, BF16, torch.int64)))
SCAN_CASES = [case for case in SCAN_CASES if case[0] != "logcumsumexp" or case[2] is not torch.int64]

UNEVEN_CASES = list(product((5, 7, 15, 16, 31, 37, 63, 65), DTYPES, (False, True)))


def rows_with_gaps(length: int, dtype: torch.dtype, rows: int, form: str) -> Kernel:
    """Rows with gaps times others, stored in rows without gaps.

    Forms: "images" of rows; "gaps" between the rows of results, too; "in place", where these are also the operands;
    "windows", which overlap; "bias", a number for each column; "scale", a number for each row.
    """
    body, image, row, column = KernelBuilder(), Axis("b", 3), Axis("i", rows), Axis("j", length)
    outer, count = (as_index(image), 3 * rows) if form == "images" else (ZERO, rows)
    at, extent = as_index(outer) * rows * length + as_index(row) * length + column, count * length
    step = max(length - 2, 1) if form == "windows" else length + GAP
    gapped, far = as_index(outer) * (rows * step) + as_index(row) * step + column, count * step + length

    def load(name: str, index: Index) -> Scalar:
        value = body.load(name, index, dtype)
        return value.to(F32) if dtype in (BF16, torch.float16) else value

    inputs, outputs = [Buffer("x", dtype, far)], [Buffer("out", dtype, extent)]
    value = load("out" if form == "in place" else "x", gapped)
    if form in ("bias", "scale"):
        value = value + load("w", as_index(column if form == "bias" else row))
        inputs.append(Buffer("w", dtype, length if form == "bias" else rows))
    elif form != "in place":
        value = value * load("y", at)
        inputs.append(Buffer("y", dtype, extent))
    if form in ("gaps", "in place"):
        outputs = [Buffer("out", dtype, far)]
    body.store("out", gapped if form in ("gaps", "in place") else at, (value + value).to(dtype))
    axes = [image, row, column] if form == "images" else [row, column]
    return body.finish(axes, [], [] if form == "in place" else inputs, outputs)


GAP_FORMS = ("images", "gaps", "in place", "windows", "bias", "scale")
GAP_CASES = list(product((2, 3, 4, 5, 10, 15, 17), DTYPES, (2, 37, 1100), GAP_FORMS))


def few_channels(length: int, dtype: torch.dtype, rows: int, to_rows: bool) -> Kernel:
    """Images of few channels in another layout, scaled in float32, plus an image in the new layout, in place."""
    body, image, row, column = KernelBuilder(), Axis("b", 2), Axis("p", rows), Axis("c", length)
    along = linearize_index((image, row, column), (2, rows, length))
    across = linearize_index((image, column, row), (2, length, rows))
    source, target = (across, along) if to_rows else (along, across)
    x, scale = body.load("x", source + 1, dtype), body.load("w", as_index(column), F32)
    body.store("out", target, x)
    value = x.to(F32) * scale + body.load("total", target, F32)
    body.store("total", target, value)
    count = 2 * rows * length
    inputs = [Buffer("x", dtype, count + 1), Buffer("w", F32, length)]
    return body.finish([image, row, column], [], inputs, [Buffer("out", dtype, count), Buffer("total", F32, count)])


CHANNEL_CASES = list(product((3, 4, 5, 8, 12, 15), DTYPES, (32, 37, 70, 128), (False, True)))
BIAS_CASES = list(product((2, 3, 5, 10, 15, 17, 20, 31, 63), DTYPES, (1111, 2000), (False, True)))

compiled_rows_with_gaps = compiled_together(rows_with_gaps)
compiled_few_channels = compiled_together(few_channels)
compiled_biased_rows = compiled_together(biased_rows)
compiled_uneven_rows = compiled_together(uneven_rows)
compiled_rows = compiled_together(rows_of)
compiled_scans = compiled_together(lambda kind, length, dtype, rows: scans_of(kind, length, dtype))


@pytest.mark.sampled(12)
@pytest.mark.usefixtures("compiled_rows_with_gaps")
@pytest.mark.parametrize(("length", "dtype", "rows", "form"), GAP_CASES, ids=str)
def test_short_rows_with_gaps_are_moved_to_blocks(length: int, dtype: torch.dtype, rows: int, form: str) -> None:
    source = check(rows_with_gaps(length, dtype, rows, form))
    are_moved = length < 5 or (length < 16 and dtype in (BF16, torch.float16))
    if form != "scale" and (form != "bias" or rows == 1100):
        assert ("load_rows<" in source) == are_moved
        assert ("store_rows<" in source) == (are_moved and form in ("gaps", "in place"))


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("compiled_rows")
@pytest.mark.parametrize(("length", "dtype", "gap"), ROW_CASES, ids=str)
def test_short_rows_are_transposed(length: int, dtype: torch.dtype, gap: int) -> None:
    source = check(rows_of(length, dtype, gap))
    assert f"load_columns<{length}>(x + " in source and f"store_columns<{length}>(&out_tile" in source
    assert "for_lane_block<32>(75 - i__0, [&](auto lanes)" in source, "whole blocks have a constant number of lanes"


def test_loads_of_a_tile_of_float64_follow_the_stores_of_its_rows() -> None:
    """GCC may move them if it takes vectors of integers for other memory than the tile."""
    check(rows_of(8, torch.float64))


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("compiled_scans")
@pytest.mark.parametrize(("kind", "length", "dtype"), SCAN_CASES, ids=str)
@pytest.mark.parametrize("rows", [0, 70])
def test_scans_of_short_rows(kind: str, length: int, dtype: torch.dtype, rows: int) -> None:
    source = check(scans_of(kind, length, dtype), {"s0": rows})
    assert f"load_columns<{length}>(x + " in source and "_running" in source
    assert ("IndexedLanes<" in source) == (kind == "cummax"), "elements and positions are in arrays of their own"


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("compiled_uneven_rows")
@pytest.mark.parametrize(("length", "dtype", "in_place"), UNEVEN_CASES, ids=str)
def test_rows_of_uneven_length_end_with_a_block_that_overlaps(length: int, dtype: torch.dtype, in_place: bool) -> None:
    source = check(uneven_rows(length, dtype, in_place))
    is_short_half = dtype in (BF16, torch.float16) and length < 16
    overlaps = not in_place and length not in (16, 65) and not is_short_half
    if dtype is torch.float16 and length >= 16:
        assert "widen(" in source, "blocks are converted instead"
    else:
        assert ("const int64_t start = fxwrap::min<int64_t>(" in source) == overlaps


@pytest.mark.sampled(6)
@pytest.mark.usefixtures("compiled_biased_rows")
@pytest.mark.parametrize(("length", "dtype", "rows", "in_place"), BIAS_CASES, ids=str)
def test_rows_that_repeat_values_are_one_long_row(length: int, dtype: torch.dtype, rows: int, in_place: bool) -> None:
    source = check(biased_rows(length, dtype, rows, in_place))
    assert source.count("_table[start + j_] = ") == (3 if dtype in (BF16, torch.float16) else 2)
    (blocks,) = re.findall(r"for \(int64_t i_ = 0; i_ < (\d+)", source)
    assert int(blocks) * 256 <= rows * length + 4096, "each iteration computes a block of rows"


@pytest.mark.parametrize("hindrance", ["few rows", "whole vectors", "long rows", "values of rows", "gaps"])
def test_other_rows_have_loops_of_their_own(hindrance: str) -> None:
    length = {"whole vectors": 32, "long rows": 100}.get(hindrance, 10)
    body, row, column = KernelBuilder(), Axis("i", 3 if hindrance == "few rows" else 3000), Axis("j", length)
    at = as_index(row) * (length + (hindrance == "gaps")) + column
    value = body.load("x", at, F32) * body.load("w", as_index(column), F32)
    value = value + body.load("r", as_index(row), F32) if hindrance == "values of rows" else value
    body.store("out", at, value)
    count = 3000 * (length + 1)
    inputs = [Buffer(name, F32, size) for name, size in (("x", count), ("w", length), ("r", 3000))]
    used = inputs if hindrance == "values of rows" else inputs[:2]
    kernel = body.finish([row, column], [], used, [Buffer("out", F32, count)])
    assert "_table" not in print_cpp_kernel(kernel).source


@pytest.mark.sampled(8)
@pytest.mark.usefixtures("compiled_few_channels")
@pytest.mark.parametrize(("length", "dtype", "rows", "to_rows"), CHANNEL_CASES, ids=str)
def test_images_of_few_channels_are_transposed_in_blocks(
    length: int, dtype: torch.dtype, rows: int, to_rows: bool
) -> None:
    source = check(few_channels(length, dtype, rows, to_rows))
    assert source.count(f"store_columns<{length}>(") == (2 if to_rows else 0)
    assert source.count(f"load_columns<{length}>(") == 1


@pytest.mark.parametrize("hindrance", ["one layout", "few rows", "long rows", "a mask"])
def test_other_images_are_not_transposed_in_blocks(hindrance: str) -> None:
    length, rows = 40 if hindrance == "long rows" else 5, 20 if hindrance == "few rows" else 64
    body, row, column = KernelBuilder(), Axis("p", rows), Axis("c", length)
    along, across = as_index(row) * length + column, as_index(column) * rows + row
    inside = body.index(as_index(row)) < 60
    index = along if hindrance == "one layout" else across

    def load() -> Scalar:
        return body.load("x", index, F32)

    body.store("out", along, body.where(inside, load, 0.5) if hindrance == "a mask" else load())
    count = rows * length
    kernel = body.finish([row, column], [], [Buffer("x", F32, count)], [Buffer("out", F32, count)])
    assert "_columns<" not in print_cpp_kernel(kernel).source
