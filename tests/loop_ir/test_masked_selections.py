"""Selections that repeat the mask of loads that they select are dropped; others, and the meaning of a kernel, stay."""

from __future__ import annotations

import pytest
import torch

from fxwrap.loop_ir import Compute, Kernel, drop_repeated_masks, evaluate_kernel, parse_kernel

COUNT = 32


def kernel_of(other: str, constant: str, selected: str) -> Kernel:
    """Loads every third element and selects by the mask of the load."""
    return parse_kernel(f"""kernel(x: bf16[{COUNT}]) -> (out: f32[{COUNT}]) for [p: {COUNT}] {{
  %0 = i64 index (p)%(3)
  %1 = i64 1
  %2 = bool lt %0 %1
  %3 = bf16 load x[p] if %2 else {other}
  %4 = f32 cast %3
  %5 = f32 {constant}
  %6 = bool gt %4 %5
  %7 = f32 where %6 %4 %5
  %8 = f32 add %4 %5
  %9 = bool ge %0 %1
  %10 = f32 where {selected}
  store out[p] %10
}}
""")


def result(kernel: Kernel) -> torch.Tensor:
    x = torch.randn(COUNT, generator=torch.Generator().manual_seed(0)).bfloat16()
    output = torch.zeros(COUNT)
    evaluate_kernel(kernel, {"x": x, "out": output}, {})
    return output


@pytest.mark.parametrize("number", ["0.0", "-inf"])
@pytest.mark.parametrize("selected", ["%2 %4 %5", "%2 %7 %5"], ids=["cast", "selection"])
def test_a_repeated_mask_is_dropped(number: str, selected: str) -> None:
    kernel = kernel_of(number, number, selected)
    dropped = drop_repeated_masks(kernel)
    left = [item for item in dropped.operations if isinstance(item, Compute) and item.name == "where"]
    assert len(left) == (selected == "%2 %7 %5")
    assert torch.equal(result(dropped), result(kernel))


@pytest.mark.parametrize(
    ("other", "constant", "selected"),
    [
        ("0.0", "-inf", "%2 %4 %5"),  # another number
        ("0.0", "-0.0", "%2 %4 %5"),  # of another sign
        ("0.1", "0.1", "%2 %4 %5"),  # which bfloat16 rounds
        ("0.0", "0.0", "%9 %4 %5"),  # by another condition
        ("0.0", "0.0", "%2 %5 %4"),  # of the masked value
        ("0.0", "0.0", "%2 %8 %5"),  # of a sum, which may be any
    ],
)
def test_other_selections_stay(other: str, constant: str, selected: str) -> None:
    kernel = kernel_of(other, constant, selected)
    assert drop_repeated_masks(kernel) is kernel
