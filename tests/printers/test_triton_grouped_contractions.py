"""Grouped contractions in Triton: interpreted beside the evaluator, with tiles of rows that have several groups."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fxwrap.loop_ir import (
    Kernel,
    KernelError,
    evaluate_kernel,
    find_contraction,
    find_grouped_contraction,
    has_ascending_groups,
    parse_kernel,
)
from fxwrap.printers.triton import DotConfiguration, GroupBlockConfiguration, configurations, print_triton
from tests.printers.test_triton_printer_compile import instructions
from tests.printers.triton_kernels import check

GROUPED = """kernel(a: f16[37*40], w: f16[4*24*40], group: i64[37], bias: f32[4*24]) -> (out: f32[37*24]) \
for [i: 37, j: 24] reduce [k: 40] {
  %0 = i64 load group[i]
  %1 = f16 load a[40*i + k]
  %2 = f32 cast %1
  %3 = f16 load w[960*%0<4> + 40*j + k]
  %4 = f32 cast %3
  %5 = f32 mul %2 %4
  %6 = f32 reduce sum %5
  %7 = f32 load bias[24*%0<4> + j]
  %8 = f32 add %6 %7
  store out[24*i + j] %8
}
"""
QUANTISED = """kernel(a: f32[37*40], w: i8[4*24*40], scale: f32[4*24], group: i64[37]) -> (out: f32[37*24]) \
for [i: 37, j: 24] reduce [k: 40] {
  %0 = i64 load group[i]
  %1 = f32 load a[40*i + k]
  %2 = f32 exp %1
  %3 = i8 load w[960*%0<4> + 40*j + k]
  %4 = f32 cast %3
  %5 = f32 load scale[24*%0<4> + j]
  %6 = f32 mul %4 %5
  %7 = f32 mul %2 %6
  %8 = f32 reduce sum %7
  store out[24*i + j] %8
}
"""
SEVERAL = """kernel(a: f16[19*40], w: f16[4*24*40], group: i64[38]) -> (out: f32[38*24]) \
for [i: 19, s: 2, j: 24] reduce [k: 40] {
  %0 = i64 load group[2*i + s]
  %1 = f16 load a[40*i + k]
  %2 = f32 cast %1
  %3 = f16 load w[960*%0<4> + 40*j + k]
  %4 = f32 cast %3
  %5 = f32 mul %2 %4
  %6 = f32 reduce sum %5
  store out[48*i + 24*s + j] %6
}
"""
"""A token's elements are multiplied by the matrices of its two experts."""

GROUPS = torch.tensor([0] * 5 + [2] * 20 + [3] * 12)


def tile(kernel: Kernel, rows_first: bool) -> DotConfiguration:
    """Tiles of 16 rows, as the left or as the right operand of the dot."""
    y, x = kernel.axes if rows_first else kernel.axes[::-1]
    return DotConfiguration(x=(x,), y=(y,), x_block=16, y_block=16, r_block=32, num_stages=2)


@pytest.mark.parametrize("rows_first", [True, False])
@pytest.mark.parametrize("text", [GROUPED, QUANTISED], ids=["bias", "dequantised"])
@pytest.mark.parametrize("groups", [GROUPS, GROUPS.flip(0)], ids=["sorted", "in_another_order"])
def test_tiles_whose_rows_have_several_groups(text: str, rows_first: bool, groups: torch.Tensor) -> None:
    kernel = parse_kernel(text)
    source = check(kernel, tile(kernel, rows_first), {"group": groups}, tolerance=1e-3)
    assert source.count("tl.dot") == 1 and "in tl.range(first, last + 1)" in source


@pytest.mark.parametrize("rows_first", [True, False])
def test_programs_go_through_bands_of_rows(rows_first: bool) -> None:
    kernel = parse_kernel(GROUPED)
    for band in (1, 2, 3):  # of three blocks of rows, for each of two of columns
        banded = replace(tile(kernel, rows_first), band=band)
        source = check(kernel, banded, {"group": GROUPS}, tolerance=1e-3)
        assert f"tl.minimum(3 - band, {band})" in source


def blocks_of_groups(kernel: Kernel, rows_first: bool, block: int) -> GroupBlockConfiguration:
    """Blocks of rows of one group each, of four groups."""
    *rows, column = kernel.axes
    y, x = ((*rows,), (column,)) if rows_first else ((column,), (*rows,))
    y_block, x_block = (block, 16) if rows_first else (16, block)
    return GroupBlockConfiguration(
        x=x, y=y, x_block=x_block, y_block=y_block, r_block=32, num_stages=2, rows=tuple(rows), groups=4
    )


def ascending(text: str) -> str:
    """Returns a kernel whose groups ascend."""
    return text.replace("group: i64[37]", "group: i64[37] ascending").replace("i64[38]", "i64[38] ascending")


@pytest.mark.parametrize("rows_first", [True, False])
@pytest.mark.parametrize("text", [GROUPED, QUANTISED, SEVERAL], ids=["bias", "dequantised", "several"])
def test_blocks_have_rows_of_one_group(text: str, rows_first: bool) -> None:
    """Groups are empty, of one row, shorter and longer than a block, begin with a window, or have all rows."""
    kernel = parse_kernel(ascending(text))
    count = math.prod(int(axis.size) for axis in kernel.axes[:-1])
    for sizes in ([5, 20, 0, count - 25], [0, 1, 16, count - 17], [0, 0, 0, count], [count, 0, 0, 0]):
        groups = torch.arange(4).repeat_interleave(torch.tensor(sizes))
        for block in (8, 32):
            source = check(kernel, blocks_of_groups(kernel, rows_first, block), {"group": groups}, tolerance=1e-3)
            assert source.count("tl.dot") == 1


@pytest.mark.parametrize("rows", [0, 1, 9, 40])
def test_blocks_of_one_group_of_any_number_of_rows(rows: int) -> None:
    text = ascending(GROUPED).replace("i: 37", "i: s0").replace("i64[37]", "i64[s0]").replace("37*", "s0*")
    kernel = parse_kernel(text)
    groups = torch.arange(rows) * 4 // max(rows, 1)
    check(kernel, blocks_of_groups(kernel, True, 8), {"group": groups}, {"s0": rows}, tolerance=1e-3)


def test_windows_of_rows_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxwrap.printers.triton.group_blocks._MAX_WINDOWS", 2)
    kernel = parse_kernel(ascending(GROUPED))
    source = check(kernel, blocks_of_groups(kernel, True, 8), {"group": GROUPS}, tolerance=1e-3)
    assert "in tl.range(0, 5, 2)" in source


@pytest.mark.parametrize("rows_first", [True, False])
@pytest.mark.parametrize("text", [GROUPED, QUANTISED, SEVERAL], ids=["bias", "dequantised", "several"])
def test_last_rows_of_a_group_are_smaller_blocks(text: str, rows_first: bool) -> None:
    """Groups end with a block, a half and a quarter of one, with a row less and more of each."""
    kernel = parse_kernel(ascending(text))
    count = math.prod(int(axis.size) for axis in kernel.axes[:-1])
    blocks = replace(blocks_of_groups(kernel, rows_first, 16), tails=(8, 4))
    for sizes in ([4, 3, 5, count - 12], [7, 8, 9, count - 24], [15, 0, 17, count - 32], [16, 1, count - 17, 0]):
        groups = torch.arange(4).repeat_interleave(torch.tensor(sizes))
        source = check(kernel, blocks, {"group": groups}, tolerance=1e-3)
        assert source.count("tl.dot") == 3


def test_there_are_blocks_for_all_windows_and_further_groups() -> None:
    kernel = parse_kernel(ascending(GROUPED))
    printed = print_triton(kernel, blocks_of_groups(kernel, True, 8))
    assert printed.grid == ((5 + 3) * 2, 1, 1)


@pytest.mark.parametrize("is_ascending", [True, False])
def test_groups_ascend_if_the_kernel_says_so(is_ascending: bool) -> None:
    kernel = parse_kernel(ascending(GROUPED) if is_ascending else GROUPED)
    form = find_grouped_contraction(kernel)
    assert form is not None and has_ascending_groups(form) is is_ascending
    assert any(isinstance(item, GroupBlockConfiguration) for item in configurations(kernel)) is is_ascending
    assert str(parse_kernel(str(kernel))) == str(kernel)


def test_groups_of_rows_in_another_order_do_not_ascend() -> None:
    reversed_rows = parse_kernel(ascending(GROUPED).replace("load group[i]", "load group[-i + 36]"))
    form = find_grouped_contraction(reversed_rows)
    assert form is not None and not has_ascending_groups(form)


def test_the_evaluator_checks_that_buffers_ascend() -> None:
    kernel = parse_kernel(ascending(GROUPED))
    buffers = {item.name: torch.zeros(int(item.extent), dtype=item.dtype) for item in (*kernel.inputs, *kernel.outputs)}
    evaluate_kernel(kernel, buffers | {"group": GROUPS})
    with pytest.raises(KernelError, match="the elements of 'group' do not ascend"):
        evaluate_kernel(kernel, buffers | {"group": GROUPS.flip(0)})


@pytest.mark.parametrize("rows_first", [True, False])
def test_infinite_elements_of_a_group_stay_in_its_rows(rows_first: bool) -> None:
    """Products of zeros and infinite elements are NaN: rows of other groups in a tile must not have them."""
    weights = torch.randn(4, 24 * 40, generator=torch.Generator().manual_seed(1)).half()
    weights[2] = float("inf")
    for text in (GROUPED, ascending(GROUPED)):
        kernel = parse_kernel(text)
        configuration = blocks_of_groups(kernel, rows_first, 16) if "ascending" in text else tile(kernel, rows_first)
        inputs = {"group": GROUPS, "w": weights.flatten()}
        check(kernel, configuration, inputs, tolerance=1e-3)


@pytest.mark.parametrize("text", [GROUPED, ascending(GROUPED)], ids=["any_order", "ascending"])
def test_every_configuration_is_correct(text: str) -> None:
    kernel = parse_kernel(text)
    candidates = configurations(kernel)
    assert any(isinstance(item, DotConfiguration) for item in candidates)
    for item in dict.fromkeys([replace(item, num_stages=1, num_warps=4) for item in candidates]):
        check(kernel, item, {"group": GROUPS}, tolerance=1e-3)


@pytest.mark.parametrize(("rows", "text"), [(8, GROUPED), (512, GROUPED), (512, ascending(GROUPED))])
def test_a_gpu_multiplies_blocks_of_a_group_in_a_pipeline(rows: int, text: str) -> None:
    sized = text.replace("37", str(rows)).replace("24", "256").replace("960", "65536").replace("40", "256")
    kernel = parse_kernel(sized)
    dots = [item for item in configurations(kernel) if isinstance(item, DotConfiguration)]
    assert isinstance(dots[0], GroupBlockConfiguration) is ("ascending" in text)
    compiled = instructions(kernel, dots[0])
    assert "wgmma.mma_async" in compiled and "cp.async" in compiled


def test_rows_have_a_matrix_each_in_the_plain_form_and_share_those_of_groups_in_the_other() -> None:
    kernel = parse_kernel(GROUPED)
    plain, form = find_contraction(kernel), find_grouped_contraction(kernel)
    assert plain is not None and form is not None and form.group is not None
    assert ([axis.name for axis in plain.batch], [axis.name for axis in form.rows]) == (["i"], ["i"])
    assert (plain.rows, form.batch, form.group.size) == ((), (), 4)


def test_rows_that_share_elements_may_have_several_groups() -> None:
    """The results of one token are rows, although the first operand does not vary along them."""
    kernel = parse_kernel(SEVERAL)
    form = find_grouped_contraction(kernel)
    assert form is not None
    assert [[axis.name for axis in axes] for axes in (form.batch, form.rows, form.columns)] == [[], ["i", "s"], ["j"]]
    groups = torch.arange(38) * 7 % 4
    for item in dict.fromkeys([replace(item, num_stages=1, num_warps=4) for item in configurations(kernel)]):
        check(kernel, item, {"group": groups}, tolerance=1e-3)


@pytest.mark.parametrize("rows_first", [True, False])
def test_the_experts_of_one_token_multiply_its_elements_once_each(rows_first: bool) -> None:
    """Elements of the first operand are those of all rows, of which other groups must not add them."""
    text = SEVERAL.replace("[i: 19, s: 2, j: 24]", "[s: 2, j: 24]").replace("40*i + k", "k").replace("2*i + s", "s")
    kernel = parse_kernel(text.replace("48*i + 24*s", "24*s").replace("19*40", "40").replace("38", "2"))
    form = find_grouped_contraction(kernel)
    assert form is not None and [axis.name for axis in form.rows] == ["s"]
    groups = torch.tensor([1, 3])
    check(kernel, tile(kernel, rows_first), {"group": groups}, tolerance=1e-3)
    for item in dict.fromkeys([replace(item, num_stages=1, num_warps=4) for item in configurations(kernel)]):
        check(kernel, item, {"group": groups}, tolerance=1e-3)


@pytest.mark.parametrize(
    ("old", "new"),
    [("w[960*%0<4>", "w[960*i"), ("w[960*%0<4> + 40*j", "w[960*%0<4> + 40*j + i"), ("add %6 %7", "add %6 %4")],
    ids=["affine", "rows_in_the_matrix_too", "its_elements_outside_of_the_sum"],
)
def test_other_kernels_are_not_grouped(old: str, new: str) -> None:
    text = GROUPED.replace(old, new).replace("w: f16[4*24*40]", "w: f16[37*24*40]")
    if new == "add %6 %4":
        text = text.replace("store out[24*i + j] %8", "%9 = f32 reduce sum %4\n  store out[24*i + j] %9")
    assert find_grouped_contraction(parse_kernel(text)) is None
