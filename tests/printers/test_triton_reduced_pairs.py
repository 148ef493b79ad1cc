"""Accesses to pairs in reductions, and loads of an element for each row: what they mean for layouts of blocks."""

from __future__ import annotations

import re
from typing import Literal

import pytest
import torch

from fxwrap.loop_ir import Axis, Kernel, KernelBuilder, as_index
from fxwrap.printers.triton import TileConfiguration
from fxwrap.symbolic import Size, make_symbol, product
from tests.printers.test_triton_printer_compile import instructions
from tests.printers.triton_kernels import BF16, F32, build, check

SYMBOL = make_symbol("s0")


def pairs(rows: Size, columns: Size, reduced: Literal["rows", "columns"], dtype: torch.dtype = F32) -> Kernel:
    """Swaps the elements of each pair, with a factor of a row, and sums the products of both."""
    i, j = Axis("i", rows), Axis("j", columns)

    def write(body: KernelBuilder) -> None:
        at = as_index(i) * product((columns, 2)) + as_index(j) * 2
        left, right = [body.load("x", at + number, dtype).to(F32) for number in range(2)]
        factor = body.load("factor", as_index(i), dtype).to(F32)
        total = body.reduce("sum", left * right * factor)[0]
        body.store("total", as_index(j if reduced == "rows" else i), total)
        body.store("out", at, (right * factor).to(dtype))
        body.store("out", at + 1, (left * factor).to(dtype))

    size = product((rows, columns, 2))
    outputs = {"total": (F32, columns if reduced == "rows" else rows), "out": (dtype, size)}
    axes = ([j], [i]) if reduced == "rows" else ([i], [j])
    return build(*axes, {"x": (dtype, size), "factor": (dtype, rows)}, outputs, write)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    ("rows", "columns", "reduced", "tile"),
    [
        (48, 20, "rows", TileConfiguration(x_block=16, r_block=64)),
        (48, 20, "rows", TileConfiguration(x_block=16, r_block=16, looped=True)),
        (SYMBOL, 32, "rows", TileConfiguration(x_block=32, r_block=8, looped=True)),
        (20, 48, "columns", TileConfiguration(y_block=4, r_block=64)),
        (20, 48, "columns", TileConfiguration(r_block=16, looped=True)),
        (5, SYMBOL, "columns", TileConfiguration(r_block=32, looped=True)),
    ],
)
def test_pairs_of_a_reduction_are_one_access(
    rows: Size, columns: Size, reduced: Literal["rows", "columns"], tile: TileConfiguration, dtype: torch.dtype
) -> None:
    kernel = pairs(rows, columns, reduced, dtype)
    axes = {"x" if tile.x_block > 1 else "y": kernel.axes}
    text = check(kernel, TileConfiguration(**{**vars(tile), **axes}), numbers={"s0": 21})
    assert text.count("tl.load(") == 2 and text.count("tl.store(") == 2


def centred_pairs(rows: int, columns: int) -> Kernel:
    """Sums of squares of what is stored: the second elements of pairs plus the centred first ones."""
    i, j = Axis("i", rows), Axis("j", columns)

    def write(body: KernelBuilder) -> None:
        at = as_index(i) * 2 * columns + as_index(j) * 2
        left, right = [body.load("x", at + number, F32) for number in range(2)]
        body.store("out", at, left + right)  # of the first stage
        mean = body.reduce("sum", left)[0] / float(columns)
        deviation = left - mean + right
        body.store("total", as_index(i), body.reduce("sum", deviation * deviation)[0])
        body.store("out", at + 1, deviation)  # of the second stage

    inputs, outputs = {"x": (F32, 2 * rows * columns)}, {"out": (F32, 2 * rows * columns), "total": (F32, rows)}
    return build([i], [j], inputs, outputs, write)


@pytest.mark.parametrize("looped", [False, True])
def test_pairs_that_several_stages_read_are_loaded_in_each(looped: bool) -> None:
    kernel = centred_pairs(6, 48)
    text = check(kernel, TileConfiguration(y=kernel.axes, r_block=16 if looped else 64, looped=looped))
    assert text.count("tl.load(") == 1 + looped
    assert text.count("tl.store(") == 3, "stores of different stages are one"


def test_pairs_of_columns_are_vectors() -> None:
    kernel = pairs(4096, 16, "rows")
    text = instructions(kernel, TileConfiguration(x=kernel.axes, x_block=16, r_block=128, looped=True))
    accesses = re.findall(r"(?:ld|st)\.global\S*\.b32", text)
    assert sum(".v4" in item for item in accesses) >= 16, "pairs are accessed one by one"


@pytest.mark.parametrize("columns", [16, 12])
def test_elements_of_rows_do_not_decide_the_layout_of_blocks(columns: int) -> None:
    """A load of an element for each thread would give the columns that it is multiplied with to threads of rows."""
    i, j = Axis("i", 128), Axis("j", columns)

    def write(body: KernelBuilder) -> None:
        x = body.load("x", as_index(i) * columns + as_index(j), F32)
        factor = body.load("factor", as_index(i), BF16).to(F32)
        body.store("total", as_index(j), body.reduce("sum", factor * x)[0])

    kernel = build([j], [i], {"x": (F32, 128 * columns), "factor": (BF16, 128)}, {"total": (F32, columns)}, write)
    tile = TileConfiguration(x=(j,), x_block=16, r_block=128)
    check(kernel, tile)
    text = instructions(kernel, tile)
    assert text.count("shfl.sync") <= 32, "each column is summed by all threads, which takes 80 exchanges"


def test_masked_vectors_of_rows_are_interpreted() -> None:
    i, j, k = Axis("i", 3), Axis("j", 100), Axis("k", 12)

    def write(body: KernelBuilder) -> None:
        at = as_index(i) * 100 + as_index(j)
        factor = body.load("factor", at, BF16).to(F32)
        body.store("out", at * 12 + as_index(k), factor + body.load("x", at * 12 + as_index(k), F32))

    kernel = build([i, j, k], [], {"factor": (BF16, 300), "x": (F32, 3600)}, {"out": (F32, 3600)}, write)
    text = check(kernel, TileConfiguration(x=(k,), y=(i, j), x_block=16, y_block=128))
    assert re.search(r"tl\.load\(factor_ptr [^\n]*mask=\w+\)?[^\n]*\[:, None\]", text)
