"""The form of kernels that are contractions."""

from __future__ import annotations

import pytest

from fxwrap.loop_ir import find_contraction, parse_kernel

MATMUL = """kernel(in0: f32[24], in1: f32[40]) -> (out0: f32[15]) for [p0: 3, p1: 5] reduce [r0: 8] {
  %0 = f32 load in0[8*p0 + r0]
  %1 = f32 load in1[8*p1 + r0]
  %2 = f32 mul %0 %1
  %3 = f32 reduce sum %2
  store out0[5*p0 + p1] %3
}
"""


def test_a_matmul_has_rows_and_columns() -> None:
    form = find_contraction(parse_kernel(MATMUL))
    assert form is not None
    assert [[axis.name for axis in axes] for axes in (form.batch, form.rows, form.columns)] == [[], ["p0"], ["p1"]]
    assert [(item.reduction, item.row_operand, item.column_operand) for item in form.sums] == [(3, 0, 1)]


def test_the_operand_with_more_points_has_the_columns() -> None:
    form = find_contraction(parse_kernel(MATMUL.replace("mul %0 %1", "mul %1 %0").replace("p0: 3", "p0: 30")))
    assert form is not None
    assert ([axis.name for axis in form.rows], [axis.name for axis in form.columns]) == (["p1"], ["p0"])
    assert [(item.row_operand, item.column_operand) for item in form.sums] == [(1, 0)]


def test_axes_of_both_operands_are_a_batch() -> None:
    text = MATMUL.replace("p0: 3", "b: 2, p0: 3").replace("in0[8*p0", "in0[24*b + 8*p0").replace("in1[", "in1[40*b + ")
    form = find_contraction(parse_kernel(text.replace("out0[5*p0", "out0[15*b + 5*p0")))
    assert form is not None
    assert [[axis.name for axis in axes] for axes in (form.batch, form.rows, form.columns)] == [["b"], ["p0"], ["p1"]]


ROWS = MATMUL.replace("p1: 5] reduce [r0: 8]", "] reduce [p1: 5, r0: 8]").replace("p0: 3, ]", "p0: 3]").replace(
    "sum %2", "sum %2 over r0\n  %4 = f32 reduce max %3 over p1\n  store out1[p0] %4"
).replace("f32[15]) for", "f32[15], out1: f32[3]) for").replace("store out0", "store out0")  # fmt: skip


def test_row_reductions_reduce_columns_of_the_results() -> None:
    kernel = parse_kernel(ROWS)
    assert str(parse_kernel(str(kernel))) == str(kernel)
    form = find_contraction(kernel)
    assert form is not None and form.row_reductions == (4,)
    names = [[axis.name for axis in axes] for axes in (form.rows, form.columns, form.reduced_columns, form.summed)]
    assert names == [["p0"], ["p1"], ["p1"], ["r0"]]
    assert [(item.row_operand, item.column_operand) for item in form.sums] == [(0, 1)]


def test_reduced_columns_are_columns_however_few_they_are() -> None:
    form = find_contraction(parse_kernel(ROWS.replace("p0: 3", "p0: 30")))
    assert form is not None and [axis.name for axis in form.columns] == ["p1"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("in0[8*p0 + r0]", "in0[8*p1 + r0]"),
        ("max %3 over p1", "max %3 over p1, r0"),
        ("store out1[p0] %4", "store out1[p0] %4\n  store out0[r0] %0"),
        ("max %3 over p1", "max %1 over r0"),
    ],
    ids=["columns_on_both_sides", "all_axes", "stores_per_summed_element", "a_maximum_of_an_operand"],
)
def test_other_reductions_in_steps_are_no_contractions(old: str, new: str) -> None:
    new = new.replace("p1, r0", "p1 r0")
    assert find_contraction(parse_kernel(ROWS.replace(old, new))) is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("mul %0 %1", "add %0 %1"),
        ("reduce sum", "reduce max"),
        ("mul %0 %1", "mul %0 %0"),
        ("in1[8*p1 + r0]", "in1[8*p0 + r0]"),
        ("in1[8*p1 + r0]", "in1[8*p1]"),
        ("store out0[5*p0 + p1] %3", "store out0[5*p0 + p1] %3\n  store out0[r0] %0"),
        ("store out0", "store add out0"),
    ],
    ids=["a_sum", "a_maximum", "a_square", "no_columns", "a_factor", "stores_per_reduced_element", "atomic_stores"],
)
def test_other_kernels_are_none(old: str, new: str) -> None:
    assert find_contraction(parse_kernel(MATMUL.replace(old, new))) is None
