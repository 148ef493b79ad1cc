"""Scans and reductions of columns whose loads and stores are contiguous along different axes: tiles along both."""

from __future__ import annotations

import re

import pytest
import torch

from fxwrap.loop_ir import Axis, Kernel, KernelBuilder, linearize_index
from fxwrap.printers.triton import TileConfiguration, configurations
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
    check(kernel, tile, {"x": torch.rand(2 * 21 * columns * others).to(dtype)} if rows == SYMBOL else None, {"s0": 21})


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
