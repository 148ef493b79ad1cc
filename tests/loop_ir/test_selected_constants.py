"""What is computed from one of a few selected integers is selected, too; the meaning of a kernel stays."""

from __future__ import annotations

import pytest
import torch

from fxwrap.loop_ir import Compute, Kernel, evaluate_kernel, fold_selected_constants, parse_kernel

COUNT = 64


def kernel_of(last: str, result: str = "%16", dtype: str = "u8") -> Kernel:
    """Selects one of three offsets for each element and computes an integer from it, the element's index and others."""
    return parse_kernel(f"""kernel(x: f32[{COUNT}]) -> (out: {dtype}[{COUNT}]) for [p: {COUNT}] {{
  %0 = f32 load x[p]
  %1 = f32 0.0
  %2 = f32 0.5
  %3 = bool gt %0 %1
  %4 = bool gt %0 %2
  %5 = i64 -7
  %6 = i64 12
  %7 = i64 25
  %8 = i64 where %4 %6 %7
  %9 = i64 where %3 %8 %5
  %10 = i64 index 3*p + 5
  %11 = i64 add %10 %9
  %12 = i64 index p
  %13 = i64 3
  {last}
  store out[p] {result}
}}
""")


def result(kernel: Kernel, dtype: torch.dtype) -> torch.Tensor:
    x, output = torch.randn(COUNT, generator=torch.Generator().manual_seed(0)), torch.zeros(COUNT, dtype=dtype)
    evaluate_kernel(kernel, {"x": x, "out": output}, {})
    return output


def integer_operations(kernel: Kernel) -> set[str]:
    computed = [item for item in kernel.operations if isinstance(item, Compute)]
    return {item.name for item in computed if not item.dtype.is_floating_point and item.dtype is not torch.bool}


FOLDED = {
    "quotient and remainder": """%14 = i64 floor_divide %9 %13
  %15 = i64 integer_remainder %9 %13
  %16 = i64 mul %14 %15
  %17 = u8 cast %16""",
    "indices that cancel out": """%14 = i64 mul %12 %13
  %15 = i64 sub %11 %14
  %16 = i64 floor_divide %15 %13
  %17 = u8 cast %16""",
    "wrapped": """%14 = i64 mul %9 %6
  %15 = i64 mul %14 %6
  %16 = u8 cast %15
  %17 = u8 add %16 %16""",
}
STAYING = {
    "an index": """%14 = i64 add %11 %12
  %15 = i64 mul %14 %13
  %16 = i64 add %15 %12
  %17 = u8 cast %16""",
    "a selection read twice": """%14 = i64 floor_divide %9 %13
  %15 = i64 mul %9 %12
  %16 = i64 add %14 %15
  %17 = u8 cast %16""",
}


@pytest.mark.parametrize("name", FOLDED)
def test_results_are_selected(name: str) -> None:
    kernel = kernel_of(FOLDED[name], "%17")
    folded = fold_selected_constants(kernel)
    assert integer_operations(folded) == {"where"} and integer_operations(kernel) != {"where"}
    assert torch.equal(result(folded, torch.uint8), result(kernel, torch.uint8))


@pytest.mark.parametrize("name", STAYING)
def test_other_operations_stay(name: str) -> None:
    kernel = kernel_of(STAYING[name], "%17")
    assert fold_selected_constants(kernel) is kernel
