"""Quantised matmuls that sum groups, in Triton's interpreter and compiled for an H100 or H200."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import triton

from fxwrap.loop_ir import Kernel, find_contraction, parse_kernel
from fxwrap.printers.triton import (
    BatchedDotConfiguration,
    FragmentConfiguration,
    GroupSumConfiguration,
    RowGroupSumConfiguration,
    configurations,
    pipelined_bytes,
    print_triton,
)
from fxwrap.printers.triton.contraction_queries import can_use_dot
from tests.loop_ir.test_group_sums import PLAIN, SCALED_WORDS, int8
from tests.printers.test_triton_printer_compile import SPILLED, compiled
from tests.printers.test_triton_shared_elements import INT4
from tests.printers.triton_kernels import check

ROW = {"i: 1, ": "", "256*i + ": "", "32*i + ": ""}
"""What the kernel of one row does not have."""


def replaced(text: str, old_new: dict[str, str]) -> str:
    for old, new in old_new.items():
        text = text.replace(old, new)
    return text


def int4(rows: int) -> Kernel:
    """Two weights in a byte, with a scale and a zero for each group of 64; without an axis of rows if there is one."""
    text = INT4.format(rows=max(rows, 1))
    return parse_kernel(text if rows else replaced(text, ROW))


def large(rows: int) -> Kernel:
    """The same, of 4096 columns and products."""
    sizes = {
        "32*128": "4096*2048", "32*4": "4096*64", "j: 32": "j: 4096", "g: 4": "g: 64", "*256]": "*4096]", "4*j + g":
        "64*j + g", "256*i": "4096*i", "128*j": "2048*j", "32*i + j": "4096*i + j", f"[{rows}*32]": f"[{rows}*4096]",
    }  # fmt: skip
    return parse_kernel(replaced(INT4.format(rows=rows), sizes))


def steps(kernel: Kernel, columns: int, groups: int) -> BatchedDotConfiguration:
    """Some groups of some columns in a step."""
    form = find_contraction(kernel)
    assert form is not None
    rows = 32 if form.rows and form.rows[0].size == 17 else 8
    return BatchedDotConfiguration(
        x=form.rows, y=form.columns, p=kernel.reduced[:1], x_block=rows, y_block=columns, p_block=groups,
        r_block=int(kernel.reduced[1].size), num_stages=2,
    )  # fmt: skip


@pytest.mark.parametrize(("rows", "columns", "groups"), [(0, 16, 4), (1, 32, 1), (3, 16, 2), (17, 16, 4)])
def test_sums_of_groups_are_those_of_products(rows: int, columns: int, groups: int) -> None:
    kernel = int4(rows)
    source = check(kernel, steps(kernel, columns, groups), tolerance=2e-4)
    assert source.count("tl.dot(") == 4 and "biased_bytes(" in source
    assert source.count("tl.load(x_ptr") == 1, "pairs of elements are loaded together"
    assert "= tl.fma(" in source and ", s, total)" in source, "no product and no negation by itself"


@pytest.mark.parametrize("rows", [0, 3])
def test_the_last_step_has_fewer_groups(rows: int) -> None:
    """Rows and coefficients of groups that are not there are zeros; their weights are any bytes."""
    source = check(int4(rows), steps(int4(rows), 16, 8), tolerance=2e-4)
    loads = {name: line for line in source.splitlines() for name in "xwsz" if f"tl.load({name}_ptr" in line}
    assert all(re.search(r"mask=\(?g_mask", line) for line in loads.values())
    assert [name for name, line in loads.items() if "other=0.0" in line] == ["x", "z", "s"]


@pytest.mark.parametrize("step", ["mul %3 %4", "sub %4 %3"])
def test_numbers_that_are_no_bytes_are_converted(step: str) -> None:
    kernel = int8(step)
    source = check(kernel, steps(kernel, 16, 2), tolerance=2e-3)
    assert "biased_bytes" not in source and ("tl.full((P_BLOCK, Y_BLOCK, R_BLOCK), 1.0" in source) == ("sub" in step)


def test_digits_of_words() -> None:
    kernel = parse_kernel(SCALED_WORDS)
    source = check(kernel, steps(kernel, 16, 2), tolerance=2e-3)
    assert source.count("tl.dot(") == 8


def test_warps_share_out_the_products_of_columns() -> None:
    """Parts of int8 sums are a batch of the dot, which adds to the totals."""
    kernel = parse_kernel(PLAIN.format(row="bf16"))
    known = [item for item in configurations(kernel) if isinstance(item, GroupSumConfiguration)]
    assert known, "few columns"
    for item in known:
        source = check(kernel, item, tolerance=2e-3)
        assert source.count("total = tl.dot(") == 1 and "total = tl.sum(total, 0, keep_dims=True)" in source


def test_rows_of_float16() -> None:
    kernel = parse_kernel(str(int4(3)).replace("x: bf16", "x: f16").replace("bf16 load x", "f16 load x"))
    source = check(kernel, steps(kernel, 16, 4), tolerance=2e-3)  # eager mode rounds weights to 11 bits
    assert "sub = -1024.0 - z" in source and "0x64646464" in source


def test_every_configuration_is_correct() -> None:
    for rows in (0, 3):
        kernel = int4(rows)
        known = configurations(kernel)
        assert not isinstance(known[-1], GroupSumConfiguration)
        assert all(isinstance(item, GroupSumConfiguration) and item.p == kernel.reduced[:1] for item in known[:-1])
        for item in known:
            check(kernel, item, tolerance=0.5)


@pytest.mark.parametrize("rows", [0, 8])
def test_the_first_tile_occupies_a_large_gpu(rows: int) -> None:
    """Few columns have small tiles, whose warps share out the products of a column."""
    int8_text = replaced(PLAIN.format(row="bf16"), {"256": "4096"})
    without_rows = {"i: 3, ": "", "4096*i + ": "", "32*i + ": ""}
    int8_kernel = parse_kernel(int8_text if rows else replaced(int8_text, without_rows))
    firsts = [
        next(item for item in configurations(kernel, lambda size, columns=columns: {32: columns}.get(size, size))
             if not isinstance(item, FragmentConfiguration))
        for kernel in (int4(rows), int8_kernel) for columns in (4096, 16384)
    ]  # fmt: skip
    tiles = [(item.y_block, item.num_warps, isinstance(item, GroupSumConfiguration)) for item in firsts]
    int4_tiles = [(16, 4, True), (32, 4, True)] if rows else [(4, 4, True), (4, 1, True)]
    assert tiles == [*int4_tiles, (16, 2, True), (64, 4, False) if rows else (16, 4, True)]


@pytest.mark.parametrize(
    ("rows", "few", "many"), [(8, (16, 16), (32, 4)), (16, (32, 8), (32, 8)), (32, (16, 16), (64, 4))]
)
def test_tiles_of_several_rows_follow_rows_and_columns(rows: int, few: tuple[int, int], many: tuple[int, int]) -> None:
    kernel = large(rows)
    for columns, wanted in ((4096, few), (16384, many)):
        known = configurations(kernel, lambda size, columns=columns: columns if size == 4096 else size)
        first = next(item for item in known if not isinstance(item, FragmentConfiguration))
        assert (first.y_block, first.p_block) == wanted, columns


def test_all_stages_of_many_rows_fit_shared_memory() -> None:
    kernel = large(64)
    known = [item for item in configurations(kernel) if isinstance(item, GroupSumConfiguration)]
    assert known[0].p_block < 16 and compiled(print_triton(kernel, known[0])).metadata.shared <= 227 << 10
    assert all(item.p_block * item.num_stages < 48 for item in known)


def test_one_row_without_dots_loads_first_unless_it_is_long() -> None:
    one = replaced(str(large(1)), {"i: 1, ": "", "4096*i + ": ""})
    firsts = [row_sums(parse_kernel(one.replace("g: 64", f"g: {groups}"))) for groups in (64, 224)]
    assert [(item.loads_first, item.num_stages) for item in firsts] == [(True, 1), (False, 3)]


@pytest.mark.parametrize("rows", [1, 8])
def test_a_gpu_unpacks_whole_registers(rows: int) -> None:
    """No conversion of integers, no byte or half word of operands by itself, no register in local memory."""
    kernel = large(rows)
    first = next(
        item
        for item in configurations(kernel)
        if isinstance(item, GroupSumConfiguration) and not isinstance(item, FragmentConfiguration)
    )
    binary = compiled(print_triton(kernel, first))
    ptx = binary.asm["ptx"]
    assert not SPILLED.search(ptx) and not re.search(r"cvt\.rn\.\w+\.[us]\d", ptx)
    assert not re.search(r"ld\.global\S*\.b8", ptx) and "prmt.b32" in ptx and "mma.sync" in ptx
    assert len(re.findall(r"cp\.async\.\w+\.shared", ptx)) > 2, "weights and rows are read ahead"


STORED_OPERANDS = pytest.mark.xfail(
    triton.__version__.startswith("3.8."),
    reason="Triton 3.8 stores the operands that two dots of a step read, rows and ones, to shared memory",
    raises=AssertionError,
    strict=True,
)


@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(large(8), marks=STORED_OPERANDS, id="int4"),
        pytest.param(parse_kernel(PLAIN.format(row="bf16").replace("256", "4096")), id="int8"),
    ],
)
def test_the_text_tells_the_shared_memory_of_its_loops(kernel: Kernel) -> None:
    """As much as Triton allocates for the loads of all stages but one."""
    dots = [item for item in configurations(kernel) if isinstance(item, BatchedDotConfiguration)]
    for printed in [print_triton(kernel, item) for item in dots[:2]]:
        size = pipelined_bytes(printed.source, printed.signature, printed.options)
        assert size > 0 and size == compiled(printed).metadata.shared


@pytest.mark.parametrize(("rows", "fuses"), [(3, False), (80, True)])
def test_few_rows_sum_groups_instead_of_row_reductions(rows: int, fuses: bool) -> None:
    text = (
        str(int4(rows))
        .replace("(out: f32", f"(first: f32[{rows}], out: f32")
        .replace("j: 32] reduce [", "] reduce [j: 32, ")
    )
    text = text.replace(", ] reduce", "] reduce").replace(
        "%20 = f32 reduce sum %19", "%20 = f32 reduce sum %19 over g h p"
    )
    kernel = parse_kernel(text.replace("\n}", "\n  %22 = f32 reduce max %20 over j\n  store first[i] %22\n}"))
    form = find_contraction(kernel)
    assert form is not None and form.row_reductions and can_use_dot(form) == fuses


COMPUTED_ROW = """kernel(x: bf16[256], w: u8[2048], s: bf16[64], c: f32[16]) -> (out: f32[16]) \
for [i: 4, j: 4] reduce [g: 4, h: 32, p: 2] {
  %0 = bf16 load x[64*g + 2*h + p]
  %1 = f32 cast %0
  %2 = f32 mul %1 %1
  %3 = f32 1.0
  %4 = f32 add %2 %3
  %5 = u8 load w[512*i + 128*j + 32*g + h]
  %6 = i64 index p
  %7 = i64 1
  %8 = bool lt %6 %7
  %9 = u8 4
  %10 = u8 bitwise_right_shift %5 %9
  %11 = u8 15
  %12 = u8 bitwise_and %5 %11
  %13 = u8 where %8 %12 %10
  %14 = f32 cast %13
  %15 = bf16 load s[16*i + 4*j + g]
  %16 = f32 cast %15
  %17 = f32 load c[4*i + j]
  %18 = f32 mul %14 %16
  %19 = f32 mul %18 %17
  %20 = f32 mul %4 %19
  %21 = f32 reduce sum %20 of bf16
  %22 = f32 add %21 %17
  store out[4*i + j] %22
}
"""
"""A computed row; columns along two axes, with a coefficient that the epilogue uses too."""


def row_sums(kernel: Kernel) -> RowGroupSumConfiguration:
    """The first configuration of a row without dots."""
    return next(item for item in configurations(kernel) if isinstance(item, RowGroupSumConfiguration))


@pytest.mark.parametrize(("columns", "groups"), [(4, 1), (8, 4)])
@pytest.mark.parametrize("loads_first", [False, True])
@pytest.mark.parametrize("text", ["", COMPUTED_ROW], ids=["plain", "computed"])
def test_one_row_needs_no_dot(columns: int, groups: int, loads_first: bool, text: str) -> None:
    """The row is loaded once for the columns of a program; a step has one column after another, or all loads first."""
    kernel = parse_kernel(text) if text else int4(0)
    item = replace(row_sums(kernel), y_block=columns, p_block=groups, loads_first=loads_first)
    source = check(kernel, item, tolerance=2e-3)
    assert "tl.dot" not in source and source.count("biased_floats(bitwise") == 2 * columns
    loop = source[source.index("for start") : source.index("= tl.sum(total, 0")]
    before, _, steps = loop.partition("tl.split(")
    assert before.count("tl.load(x_ptr") == 1 and "tl.load(x_ptr" not in steps
    first, then = [part.count("tl.load(w_ptr") for part in (before, steps)]
    assert (first, then) == ((columns, 0) if loads_first else (0, columns))
    assert not loads_first or "tl.load" not in steps


def test_a_gpu_reads_weights_of_one_row_straight_into_registers() -> None:
    kernel = large(1)
    text = str(kernel)
    assert not any(isinstance(item, RowGroupSumConfiguration) for item in configurations(kernel)), (
        "an axis of one row has dots"
    )
    one = parse_kernel(replaced(text, {"i: 1, ": "", "4096*i + ": ""}))
    without_stages = replace(row_sums(one), loads_first=False)
    binary = compiled(print_triton(one, without_stages))
    ptx = binary.asm["ptx"]
    assert not SPILLED.search(ptx) and "mma.sync" not in ptx and len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)) >= 8
    assert binary.asm["ttgir"].count("ttg.convert_layout") <= 4, "the row is converted, not the weights"
    ptx = compiled(print_triton(one, replace(without_stages, loads_first=True))).asm["ptx"]
    loads, barrier = [item.start() for item in re.finditer(r"ld\.global", ptx)], ptx.index("bar.sync")
    assert len(loads) >= 16 and max(loads) < barrier, "a step waits for memory once"
