"""Kernels whose loads and stores are contiguous along different axes: tiles along both, of several axes each."""

from __future__ import annotations

import re

import pytest
import torch

from fxwrap.loop_ir import Axis, Kernel, KernelBuilder, as_index, linearize_index, parse_kernel
from fxwrap.printers.triton import RowPartConfiguration, TileConfiguration, configurations
from fxwrap.printers.triton.accesses import is_unaligned
from fxwrap.symbolic import Size, make_symbol, product
from tests.printers.test_triton_printer_compile import instructions
from tests.printers.triton_kernels import BF16, F32, build, check

SYMBOL = make_symbol("s0")


def transposed(rows: Size, columns: int, others: int, kind: str, dtype: torch.dtype, batch: int = 2) -> Kernel:
    """Scans the rows of a matrix of rows, others and columns, or divides them by their sum, and swaps the last axes."""
    b, i, j, r = Axis("b", batch), Axis("i", columns), Axis("j", others), Axis("r", rows)

    def write(body: KernelBuilder) -> None:
        x = body.load("x", linearize_index([b, r, j, i], [batch, rows, others, columns]), dtype).to(F32)
        result = body.scan("cumsum", x)[0] if kind == "cumsum" else x / body.reduce("sum", x)[0]
        at = linearize_index([b, r, i, j], [batch, rows, columns, others])
        body.store("out", at, result.to(dtype))

    size = product((batch, rows, columns, others))
    return build([b, i, j], [r], {"x": (dtype, size)}, {"out": (dtype, size)}, write)


@pytest.mark.parametrize("kind", ["cumsum", "sum"])
@pytest.mark.parametrize(
    ("rows", "columns", "others", "dtype"),
    [
        (20, 40, 24, BF16),
        (20, 48, 4, F32),  # others that columns continue
        (150, 16, 20, F32),  # in a loop
        (SYMBOL, 16, 20, BF16),
    ],
)
def test_columns_along_two_axes(rows: Size, columns: int, others: int, kind: str, dtype: torch.dtype) -> None:
    kernel = transposed(rows, columns, others, kind, dtype)
    tile = configurations(kernel)[0]
    assert isinstance(tile, TileConfiguration)
    assert tile.x == (kernel.axes[1],) and tile.y == (kernel.axes[2],) and tile.x_block > 1 < tile.y_block
    count = 2 * (21 if rows == SYMBOL else rows) * columns * others
    check(kernel, tile, {"x": torch.rand(count).to(dtype)}, {"s0": 21})  # sums of both signs may be near zero


@pytest.mark.parametrize("others", [8, 128])
def test_loads_and_stores_are_vectors(others: int) -> None:
    kernel = transposed(128, 160, others, "cumsum", BF16, batch=8)
    text = instructions(kernel, configurations(kernel)[0])
    accesses = re.findall(r"(?:ld|st)\.global[.\w:]*", text)
    assert accesses and all(".v4.b32" in item for item in accesses)


def test_short_axes_that_nothing_continues_have_no_tile() -> None:
    b, i, j, r = Axis("b", 2), Axis("i", 40), Axis("j", 4), Axis("r", 20)

    def write(body: KernelBuilder) -> None:
        x = body.load("x", linearize_index([b, r, j, i], [2, 20, 4, 40]), F32)
        body.store("out", linearize_index([b, i, r, j], [2, 40, 20, 4]), body.scan("cumsum", x)[0])

    kernel = build([b, i, j], [r], {"x": (F32, 6400)}, {"out": (F32, 6400)}, write)
    assert all(not tile.y for tile in configurations(kernel) if isinstance(tile, TileConfiguration))


def windowed(height: int, channels: int, parts: int, dtype: torch.dtype = BF16) -> Kernel:
    """Moves windows of 4 x 4 elements of channels, and their parts, to images of one more column and row of zeros."""
    i, j, k, h, w = [
        Axis(name, size)
        for name, size in zip("ijkhw", (2, parts, channels // parts, height + 1, height + 1), strict=True)
    ]

    def write(body: KernelBuilder) -> None:
        inside = (body.index(as_index(h)) < height) & (body.index(as_index(w)) < height)
        rows, columns = height * channels * 4, 16 * channels
        at = as_index(i) * height * height * channels + (as_index(h) // 4) * rows + (as_index(w) // 4) * columns
        at = at + (as_index(h) % 4) * 4 * channels + (as_index(w) % 4) * channels + as_index(k) * parts + as_index(j)
        with body.masked(inside):
            x = body.load("x", at, dtype)
        body.store("out", linearize_index([i, j, k, h, w], [2, parts, channels // parts, height + 1, height + 1]), x)

    size = 2 * channels * (height + 1) ** 2
    return build([i, j, k, h, w], [], {"x": (dtype, 2 * channels * height**2)}, {"out": (dtype, size)}, write)


def test_sides_of_a_tile_have_the_axes_that_continue_accesses() -> None:
    kernel = windowed(32, 128, 4)
    _, j, k, h, w = kernel.axes
    tile = configurations(kernel)[0]
    assert isinstance(tile, TileConfiguration) and (tile.y, tile.x) == ((k, j), (h, w))
    loads = re.findall(r"ld\.global[.\w:]*", instructions(kernel, tile))
    assert loads and all(item.endswith(".v4.b32") for item in loads), "elements are loaded one by one"


@pytest.mark.parametrize(("height", "parts"), [(32, 8), (16, 4), (32, 2)])
def test_tiles_of_several_axes_on_each_side(height: int, parts: int) -> None:
    kernel = windowed(height, 32, parts, F32)
    tile = configurations(kernel)[0]
    assert isinstance(tile, TileConfiguration) and len(tile.x) == 2 and len(tile.y) == 2
    check(kernel, tile)


def test_columns_of_few_rows_are_along_one_axis() -> None:
    kernel = transposed(8, 64, 32, "sum", F32)
    assert all(not tile.y for tile in configurations(kernel) if isinstance(tile, TileConfiguration))


@pytest.mark.parametrize(("step", "is_odd"), [(64, False), (68, True)])
def test_rows_at_quotients_and_remainders_are_aligned(step: int, is_odd: bool) -> None:
    """A vector of eight elements fits where all numbers that such an index multiplies are multiples of eight."""
    i, j = Axis("i", 64), Axis("j", 64)

    def write(body: KernelBuilder) -> None:
        at = (as_index(i) % 8) * 8 * step + (as_index(i) // 8) * step + as_index(j)
        body.store("out", as_index(i) * 64 + as_index(j), body.load("x", at, BF16))

    kernel = build([i, j], [], {"x": (BF16, 64 * step)}, {"out": (BF16, 4096)}, write)
    assert is_unaligned(kernel, j) == is_odd


@pytest.mark.parametrize(
    ("row", "stages"), [("512*i + j + 4096*p", 3), ("512*(i)%(4) + 2048*(i)//(4) + j + 4096*p", 1)]
)
def test_rows_at_quotients_and_remainders_are_first_without_a_pipeline(row: str, stages: int) -> None:
    kernel = parse_kernel(f"""kernel(x: f32[65536]) -> (out: f32[128], total: f32[8192]) \
for [p: 16] reduce [i: 8, j: 512] {{
  %0 = f32 load x[{row}]
  %1 = f32 reduce sum %0 over j
  store out[i + 8*p] %1
  %3 = f32 mul %0 %1
  %4 = f32 reduce sum %3 over i
  store total[512*p + j] %4
}}
""")
    tile = configurations(kernel)[0]
    assert isinstance(tile, RowPartConfiguration) and tile.num_stages == stages and not tile.chunk
    check(kernel, tile)
