"""Contractions in Triton: interpreted beside the evaluator, and compiled for a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fxwrap.loop_ir import Kernel, parse_kernel
from fxwrap.printers.triton import DotConfiguration, configurations
from tests.printers.test_cpp_printer_contractions import BATCHED, QUANTISED, ROW_REDUCTIONS, matmul, parts
from tests.printers.triton_kernels import check


def dot(kernel: Kernel, rows_first: bool, r_block: int = 32) -> DotConfiguration:
    """Small tiles of the dot, with rows or columns as the left operand."""
    rows, columns = kernel.axes[-2:-1], kernel.axes[-1:]
    y, x = (rows, columns) if rows_first else (columns, rows)
    return DotConfiguration(x=x, y=y, x_block=16, y_block=32, r_block=r_block, num_stages=2)


@pytest.mark.parametrize("rows_first", [True, False])
@pytest.mark.parametrize(
    ("rows", "columns", "reduced", "dtype"), [(5, 40, 70, "bf16"), (40, 33, 64, "f16"), (3, 17, 31, "f32")], ids=str
)
def test_dots_of_blocks(rows: int, columns: int, reduced: int, dtype: str, rows_first: bool) -> None:
    kernel = matmul(rows, columns, reduced, dtype)
    text = check(kernel, dot(kernel, rows_first))
    assert ('input_precision="ieee"' in text) == (dtype == "f32")


@pytest.mark.parametrize("rows_first", [True, False])
def test_two_products_of_a_computed_operand_over_two_axes(rows_first: bool) -> None:
    kernel = parse_kernel(BATCHED)
    assert check(kernel, dot(kernel, rows_first), tolerance=1e-4).count("tl.dot") == 2


def test_computed_operands_are_rounded_in_matmuls_of_half_precision_alone() -> None:
    """Elsewhere only products of numbers that half precision represents are computed in it."""
    wide = QUANTISED.replace(" of bf16", "")
    codes = wide.replace("f32 mul %1 %5", "f32 mul %1 %3")
    for text, operand, tolerance in (
        (QUANTISED, "mul.to(tl.bfloat16)", 0.5),
        (wide, 'input_precision="ieee"', 1e-5),
        (codes, "to(tl.bfloat16)", 1e-5),
    ):
        kernel = parse_kernel(text)
        assert operand in check(kernel, dot(kernel, rows_first=False), tolerance=tolerance)


MIXED = """kernel(a: f32[5*70], b: bf16[9*70]) -> (out: f32[45]) for [i: 5, j: 9] reduce [k: 70] {
  %0 = f32 load a[70*i + k]
  %1 = f32 abs %0
  %2 = bf16 load b[70*j + k]
  %3 = f32 cast %2
  %4 = f32 mul %1 %3
  %5 = f32 reduce sum %4
  store out[9*i + j] %5
}
"""


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_operands_of_several_dtypes_are_multiplied_in_float32(dtype: str) -> None:
    kernel = parse_kernel(MIXED.replace("a: f32", f"a: {dtype}").replace("f32 load", f"{dtype} load").replace(
        "f32 abs %0", "f32 abs %0" if dtype == "f32" else "f32 cast %0"
    ))  # fmt: skip
    assert 'input_precision="ieee"' in check(kernel, dot(kernel, rows_first=True), tolerance=1e-5)


def test_symbolic_sizes() -> None:
    kernel = matmul("s0", "s1", "s2", "f16")
    for numbers in ({"s0": 17, "s1": 35, "s2": 50}, {"s0": 1, "s1": 2, "s2": 0}):
        check(kernel, dot(kernel, rows_first=True), numbers=numbers)


@pytest.mark.parametrize("rows", [1, 2, 12, 100])
def test_every_configuration_is_correct(rows: int) -> None:
    kernel = matmul(rows, 24, 40, "f16")
    candidates = configurations(kernel)
    assert any(isinstance(item, DotConfiguration) for item in candidates)
    for item in dict.fromkeys([replace(item, num_stages=1, num_warps=4) for item in candidates]):
        check(kernel, item)


@pytest.mark.parametrize(
    ("rows", "columns", "tile"),
    [(3, 4096, (8, 16)), (8, 16384, (8, 32)), (9, 4096, (16, 16)), (16, 16384, (16, 128)), (64, 16384, (64, 64))],
)
def test_few_rows_have_tiles_by_rows_and_columns(rows: int, columns: int, tile: tuple[int, int]) -> None:
    first = configurations(matmul(rows, columns, 4096, "bf16"))[0]
    assert (first.x_block, first.y_block) == tile and isinstance(first, DotConfiguration)


def test_blocks_of_all_stages_fit_in_shared_memory() -> None:
    """Of float32, and of many sums, which have a matrix each."""
    for kernel in (matmul(64, 16384, 4096, "f32"), matmul(8, 4096, 4096, "f32"), parse_kernel(_sums(12))):
        size = max([item.dtype.itemsize for item in kernel.inputs])
        matrices = len(kernel.reductions)
        dots = [item for item in configurations(kernel) if isinstance(item, DotConfiguration)]
        assert dots
        for item in dots:
            assert (item.x_block + matrices * item.y_block) * item.r_block * size * item.num_stages <= 227 << 10


def _sums(count: int) -> str:
    """The products of 8 rows with several matrices, added."""
    matrices = ", ".join([f"b{number}: bf16[16384*4096]" for number in range(count)])
    lines = ["%0 = bf16 load a[4096*i + k]", "%1 = f32 cast %0"]
    total = 0
    for number in range(count):
        at = len(lines)
        lines += [f"%{at} = bf16 load b{number}[4096*j + k]", f"%{at + 1} = f32 cast %{at}"]
        lines += [f"%{at + 2} = f32 mul %1 %{at + 1}", f"%{at + 3} = f32 reduce sum %{at + 2}"]
        lines += [f"%{at + 4} = f32 add %{total or at + 3} %{at + 3}"]
        total = at + 4
    body = "".join([f"  {line}\n" for line in [*lines, f"store out[16384*i + j] %{total}"]])
    signature = f"kernel(a: bf16[8*4096], {matrices}) -> (out: f32[8*16384])"
    return f"{signature} for [i: 8, j: 16384] reduce [k: 4096] {{\n{body}}}\n"


@pytest.mark.parametrize("rows", [5, 100])
@pytest.mark.parametrize("kind", ["softmax", "argmax", "welford"])
def test_row_reductions_of_parts_of_columns(rows: int, kind: str) -> None:
    kernel = parts(rows, 512 if kind == "welford" else 300, kind)
    tiles = {(item.x_block, item.y_block): item for item in configurations(kernel)}
    assert all(isinstance(item, DotConfiguration) and 128 in sizes for sizes, item in tiles.items())
    for item in list(tiles.values())[:2]:
        check(kernel, replace(item, band=2), tolerance=1e-4)


@pytest.mark.parametrize("band", [0, 2, 9])
def test_programs_go_through_bands_of_rows(band: int) -> None:
    split, whole = parts(80, 300), matmul(80, 100, 24, "f16")
    for kernel, columns, rows, block in (
        (split, split.reduced[:1], split.axes[1:], 128),
        (whole, whole.axes[1:], whole.axes[:1], 32),
    ):
        dot = DotConfiguration(x=columns, y=rows, x_block=block, y_block=16, r_block=16, band=band)
        check(kernel, dot, tolerance=1e-2)


@pytest.mark.parametrize("rows", [1, 40])
def test_row_reductions_of_whole_rows(rows: int) -> None:
    kernel = parse_kernel(ROW_REDUCTIONS.replace("i: 5", f"i: {5 * rows}").replace("[2*5*70]", f"[350*{2 * rows}]"))
    sizes = {"350*n": 350, "570*n": 570, "30*n": 30, "5*n": 5}
    text = str(kernel)
    for old, size in sizes.items():
        text = text.replace(f"{old} ", f"{size * rows}*n ")
    for size in (1140, 60, 10):
        text = text.replace(f"[{size}]", f"[{size * rows}]")
    kernel = parse_kernel(text)
    assert check(kernel, configurations(kernel)[0], tolerance=1e-4).count("tl.dot") == 1


def test_sums_in_float64_have_no_dot() -> None:
    assert not any(isinstance(item, DotConfiguration) for item in configurations(matmul(8, 24, 40, "f64")))


def _one_row(reduced: int, dtype: str, sums: int) -> Kernel:
    """The products of one row with matrices, added."""
    matrices = ", ".join([f"b{number}: {dtype}[4096*{reduced}]" for number in range(sums)])
    lines = [f"%0 = {dtype} load a[k]", "%1 = f32 cast %0"]
    for number in range(sums):
        at = len(lines)
        lines += [f"%{at} = {dtype} load b{number}[{reduced}*j + k]", f"%{at + 1} = f32 cast %{at}"]
        lines += [f"%{at + 2} = f32 mul %1 %{at + 1}", f"%{at + 3} = f32 reduce sum %{at + 2}"]
    if sums == 2:
        lines.append("%10 = f32 add %5 %9")
    lines += [f"%{len(lines)} = {dtype} cast %{len(lines) - 1}", f"store out[j] %{len(lines)}"]
    body = "".join([f"  {line}\n" for line in lines])
    signature = f"kernel(a: {dtype}[{reduced}], {matrices}) -> (out: {dtype}[4096])"
    return parse_kernel(f"{signature} for [j: 4096] reduce [k: {reduced}] {{\n{body}}}\n")


@pytest.mark.parametrize(
    ("reduced", "dtype", "sums", "columns"),
    [(14336, "bf16", 1, 4), (4096, "bf16", 2, 2), (14336, "f32", 1, 1), (4096, "f32", 2, 1), (4096, "bf16", 1, 1)],
)
def test_one_row_of_half_precision_reads_several_columns(reduced: int, dtype: str, sums: int, columns: int) -> None:
    """Where rows are long, or have two sums."""
    assert configurations(_one_row(reduced, dtype, sums))[0].y_block == columns
