"""Comparisons of what is computed from one byte are comparisons of the byte; the meaning of a kernel stays."""

from __future__ import annotations

import pytest
import torch

from fxwrap.loop_ir import Compute, Kernel, compare_small_integers, evaluate_kernel, parse_kernel


def kernel_of(value: str, own: str, comparison: str = "eq", dtype: str = "i8") -> Kernel:
    """Selects elements of 16 rows of 16 by a comparison of what is computed from a masked byte with an index."""
    return parse_kernel(f"""kernel(bytes: {dtype}[256], x: f32[256]) -> (out: f32[256]) for [p: 16, q: 16] {{
  %0 = i64 index p
  %1 = i64 index q
  %2 = i64 15
  %3 = bool lt %0 %2
  %4 = {dtype} load bytes[16*p + q] if %3 else 0
  %5 = i64 cast %4
  %6 = i64 5
  %7 = i64 8
  %8 = i64 floor_divide %5 %6
  %9 = i64 mul %8 %7
  %10 = i64 integer_remainder %5 %6
  %11 = i64 add %9 %10
  %12 = i64 mul %0 %7
  %13 = i64 sub %1 %12
  {value}
  %15 = i64 index {own}
  %16 = bool {comparison} %14 %15
  %17 = f32 load x[16*p + q]
  %18 = f32 0.0
  %19 = f32 where %16 %17 %18
  store out[16*p + q] %19
}}
""")


def results(kernel: Kernel, dtype: torch.dtype = torch.int8) -> torch.Tensor:
    """Returns what a kernel selects for each value of a byte."""
    data, x = torch.arange(256).to(dtype), torch.randn(256, generator=torch.Generator().manual_seed(0))
    output = torch.zeros(256)
    evaluate_kernel(kernel, {"bytes": data, "x": x, "out": output}, {})
    return output


def comparisons(kernel: Kernel) -> list[torch.dtype]:
    """Returns the dtypes of the operands of equality."""
    compared = [item for item in kernel.operations if isinstance(item, Compute) and item.name in ("eq", "ne")]
    return [kernel.operations[item.operands[0]].dtype for item in compared]  # type: ignore[union-attr]


@pytest.mark.parametrize("comparison", ["eq", "ne"])
@pytest.mark.parametrize("dtype", ["i8", "u8"])
@pytest.mark.parametrize(
    ("value", "own", "count"),
    [
        ("%14 = i64 add %13 %11", "-8*p + q + 19", 1),  # 8 * 2 + 3
        ("%14 = i64 sub %11 %13", "8*p - q + 1", 1),
        ("%14 = i64 add %13 %11", "-8*p + q + 7", 0),  # no remainder by 5 is 7
    ],
)
def test_a_byte_itself_is_compared(comparison: str, dtype: str, value: str, own: str, count: int) -> None:
    kernel, data = kernel_of(value, own, comparison, dtype), {"i8": torch.int8, "u8": torch.uint8}[dtype]
    solved = compare_small_integers(kernel)
    assert comparisons(kernel) == [torch.int64] and comparisons(solved) == [data] * count
    assert torch.equal(results(solved, data), results(kernel, data))


@pytest.mark.parametrize("comparison", ["eq", "ne"])
@pytest.mark.parametrize(
    "own", ["-8*p + q + (q)%(2) + 8*(p)%(3) + 9", "-8*p + q + 2*(q)%(2) + 1"], ids=["two remainders", "one"]
)
def test_a_byte_is_compared_with_an_index_of_few_values(comparison: str, own: str) -> None:
    """As by the backward of a pooling with a stride, whose offsets depend on remainders by it."""
    kernel = kernel_of("%14 = i64 add %13 %11", own, comparison)
    solved = compare_small_integers(kernel)
    assert comparisons(solved) == [torch.int32] and len(solved.operations) < len(kernel.operations)
    assert torch.equal(results(solved), results(kernel))


@pytest.mark.parametrize(
    ("value", "own"),
    [
        ("%14 = i64 add %1 %11", "-8*p"),  # the indices do not cancel out
        ("%14 = i64 add %13 %10", "-8*p + q + 3"),  # several bytes have this remainder
        ("%14 = i64 add %13 %2", "-8*p + q"),  # nothing depends on a byte
        ("%14 = i64 add %13 %11", "-8*p + q + 3*(q)%(3)"),  # 0, 3 and none: the bytes are no index
    ],
    ids=["other indices", "several solutions", "no byte", "no index"],
)
def test_other_comparisons_stay(value: str, own: str) -> None:
    kernel = kernel_of(value, own)
    assert compare_small_integers(kernel) is kernel
