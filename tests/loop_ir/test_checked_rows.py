"""Contractions of gathered rows without assertions equal those with them; indices are checked before."""

from __future__ import annotations

import pytest
import torch

from fxwrap.loop_ir import Kernel, evaluate_kernel, parse_kernel
from fxwrap.loop_ir.checked_rows import split_checked_rows
from fxwrap.symbolic import Size, evaluate

GATHERED = """kernel(x: f32[320], at: i64[130], w: f32[1536], group: i64[130]) -> (out: f32[6240]) \
for [i: 130, j: 48] reduce [k: 16] {
  %0 = i64 load at[i]
  %1 = i64 20
  %2 = i64 0
  %3 = bool ge %0 %2
  %4 = bool lt %0 %1
  %5 = bool logical_and %3 %4
  require %5 'an index is out of bounds'
  %7 = i64 where %5 %0 %2
  %8 = f32 load x[16*%7<20> + k]
  %9 = i64 load group[i]
  %10 = f32 load w[768*%9<2> + 16*j + k]
  %11 = f32 mul %8 %10
  %12 = f32 reduce sum %11
  store out[48*i + j] %12
}
"""


def hint(size: Size) -> int:
    return size if isinstance(size, int) else int(evaluate(size, {"s0": 1 << 10}))


def tensors(kernel: Kernel, rows: int = 130) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    known = {"s0": rows}
    floats = {
        item.name: torch.randn(int(evaluate(item.extent, known)), generator=generator)
        for item in kernel.inputs if item.dtype is torch.float32
    }  # fmt: skip
    whole = {"at": torch.randint(0, 20, (rows,), generator=generator), "group": torch.arange(rows) % 2}
    return {**floats, **whole, "out": torch.zeros(48 * rows)}


@pytest.mark.parametrize("rows", [130, 7])
def test_rows_are_stored_by_the_kernel_that_checks_them(rows: int) -> None:
    text = GATHERED if rows == 130 else GATHERED.replace("130", "s0").replace("6240", "48*s0")
    kernel = parse_kernel(text)
    split = split_checked_rows(kernel, hint)
    assert split is not None and split.matmul == 1
    check, matmul = split.kernels
    (row,) = split.temporaries
    assert "require" in str(check) and "require" not in str(matmul) and not check.reduced
    assert [item.name for item in matmul.inputs] == ["x", "w", "group", row.name]
    whole = tensors(kernel, rows)
    expected, parts = whole["out"].clone(), {**whole, row.name: torch.full((rows,), -1)}
    numbers = {"s0": rows} if rows == 7 else {}
    evaluate_kernel(kernel, {**whole, "out": expected}, numbers)
    for item in split.kernels:
        evaluate_kernel(item, {buffer.name: parts[buffer.name] for buffer in (*item.inputs, *item.outputs)}, numbers)
    torch.testing.assert_close(parts["out"], expected)
    parts["at"][3] = 20
    with pytest.raises(IndexError, match="an index is out of bounds"):
        evaluate_kernel(check, {buffer.name: parts[buffer.name] for buffer in (*check.inputs, *check.outputs)}, numbers)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("  require %5 'an index is out of bounds'\n", "  require %5 'an index is out of bounds' if %5\n"),
        ("  %12 = f32 reduce", "  require %5 'it is checked again'\n  %12 = f32 reduce"),
    ],
    ids=["masked", "several"],
)
def test_all_assertions_of_rows_are_checked_before(before: str, after: str) -> None:
    text = GATHERED.replace(before, after)
    if "again" in after:
        text = text.replace("store out[48*i + j] %12", "store out[48*i + j] %13")
        text = text.replace("%12 = f32 reduce", "%13 = f32 reduce")
    split = split_checked_rows(parse_kernel(text), hint)
    assert split is not None and str(split.kernels[0]).count("require") == text.count("require")
    assert "require" not in str(split.kernels[1])


@pytest.mark.parametrize("gathers_left", [True, False])
def test_gathered_operands_of_ungrouped_contractions(gathers_left: bool) -> None:
    """Either operand is that of rows or of columns; few columns are multiplied as fast as they are loaded."""
    text = GATHERED.replace("  %9 = i64 load group[i]\n", "  %9 = i64 0\n").replace("768*%9<2> + ", "")
    text = text.replace(", group: i64[130]", "").replace("1536", "2304").replace("48", "144").replace("6240", "18720")
    split = split_checked_rows(parse_kernel(text if gathers_left else text.replace("%8 %10", "%10 %8")), hint)
    assert split is not None and [str(axis.size) for axis in split.kernels[0].axes] == ["130"]
    assert "require" in str(split.kernels[0]) and "require" not in str(split.kernels[1])
    few = text.replace("144", "48").replace("2304", "768").replace("18720", "6240")
    assert split_checked_rows(parse_kernel(few), hint) is None


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("130", "90"),
        ("at[i]", "at[j]"),
        ("16*%7<20> + k", "16*i + k"),
        ("  require %5 'an index is out of bounds'\n", "  %6 = i64 0\n"),
    ],
    ids=["few_rows", "index_of_columns", "index_of_nothing", "no_assertion"],
)
def test_other_kernels_stay_whole(before: str, after: str) -> None:
    text = GATHERED.replace(before, after)
    text = text.replace("x: f32[320]", "x: f32[2080]").replace("6240", "48*90" if before == "130" else "6240")
    assert split_checked_rows(parse_kernel(text), hint) is None
