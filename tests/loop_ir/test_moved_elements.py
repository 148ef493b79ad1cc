"""Half-precision elements that are only moved are not converted; those that are computed with are."""

from __future__ import annotations

import pytest
import torch

from fxwrap.loop_ir import Compute, Kernel, evaluate_kernel, parse_kernel, select_unconverted_elements

COUNT = 12


def kernel_of(dtype: str, number: str, stored: str, value: str = "%7") -> Kernel:
    """Selects elements of two tensors and a number, and stores them."""
    inputs = f"x: {dtype}[{COUNT}], y: {dtype}[{COUNT}]"
    return parse_kernel(f"""kernel({inputs}) -> (out: {stored}[{COUNT}]) for [p: {COUNT}] {{
  %0 = i64 index p
  %1 = i64 4
  %2 = bool lt %0 %1
  %3 = {dtype} load x[p]
  %4 = f32 cast %3
  %5 = {dtype} load y[p]
  %6 = f32 cast %5
  %7 = f32 where %2 %4 %6
  %8 = i64 9
  %9 = bool lt %0 %8
  %10 = f32 {number}
  %11 = f32 where %9 {value} %10
  %12 = {stored} cast %11
  store out[p] %12
}}
""")


def result(kernel: Kernel, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x, y = [torch.randn(COUNT, generator=generator).to(dtype) for _ in range(2)]
    x[1] = torch.tensor([0x7FC1], dtype=torch.int16).view(dtype) if dtype is torch.bfloat16 else x[1]  # a NaN with bits
    output = torch.zeros(COUNT, dtype=kernel.outputs[0].dtype)
    evaluate_kernel(kernel, {"x": x, "y": y, "out": output}, {})
    return output


@pytest.mark.parametrize("number", ["0.0", "-inf"])
@pytest.mark.parametrize(("text", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_selections_of_elements_in_memory_have_no_casts(text: str, dtype: torch.dtype, number: str) -> None:
    kernel = kernel_of(text, number, text)
    moved = select_unconverted_elements(kernel)
    assert [item.name for item in moved.operations if isinstance(item, Compute)] == ["lt", "lt", "where", "where"]
    torch.testing.assert_close(result(moved, dtype), result(kernel, dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("number", "stored", "value"),
    [("0.1", "bf16", "%7"), ("0.0", "f16", "%7"), ("0.0", "f32", "%7"), ("%7", "bf16", "%7")],
    ids=["an inexact number", "another dtype", "a wide result", "a selection with two users"],
)
def test_other_elements_are_converted(number: str, stored: str, value: str) -> None:
    if number == "%7":
        number = "neg %7"
    kernel = kernel_of("bf16", number, stored, value)
    assert select_unconverted_elements(kernel) is kernel
