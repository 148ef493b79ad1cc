"""Reduced axes that select bits of packed weights: unrolled, with each byte or word loaded once."""

from __future__ import annotations

import pytest
import torch

from fxwrap.loop_ir import Kernel, Load, evaluate_kernel, find_contraction, parse_kernel, unroll_packed_axes
from fxwrap.printers.triton import configurations
from tests.printers.triton_kernels import check, random

PAIRS = """\
kernel(x: bf16[{rows}*64], w: u8[24*32], s: bf16[24*4]) \
-> (out: f32[{rows}*24]) for [m: {rows}, n: 24] reduce [g: 4, b: 8, h: 2] {{
  %0 = bf16 load x[64*m + 16*g + 2*b + h]
  %1 = f32 cast %0
  %2 = i64 index h
  %3 = i64 1
  %4 = bool lt %2 %3
  %5 = bool ge %2 %3
  %6 = u8 load w[32*n + 8*g + b] if %5 else 0
  %7 = u8 4
  %8 = u8 bitwise_right_shift %6 %7
  %9 = u8 load w[32*n + 8*g + b] if %4 else 0
  %10 = u8 15
  %11 = u8 bitwise_and %9 %10
  %12 = u8 where %4 %11 %8
  %13 = f32 cast %12
  %14 = bf16 load s[4*n + g]
  %15 = f32 cast %14
  %16 = f32 mul %13 %15
  %17 = f32 mul %1 %16
  %18 = f32 reduce sum %17
  store out[24*m + n] %18
}}
"""
"""Two int4 weights in a byte, with a scale for each group of 16."""

WORDS = """\
kernel(x: bf16[{rows}*64], w: i32[24*8]) \
-> (out: f32[{rows}*24]) for [m: {rows}, n: 24] reduce [a: 2, q: 4, b: 4, h: 2] {{
  %0 = i32 load w[8*n + a + 2*b]
  %1 = i64 index 4*q + 16*h
  %2 = i32 cast %1
  %3 = i32 bitwise_right_shift %0 %2
  %4 = i32 15
  %5 = i32 bitwise_and %3 %4
  %6 = f32 cast %5
  %7 = bf16 load x[64*m + 32*a + 8*q + 2*b + h]
  %8 = f32 cast %7
  %9 = f32 mul %8 %6
  %10 = f32 reduce sum %9
  store out[24*m + n] %10
}}
"""
"""Eight int4 weights in a word."""


def one_row(text: str) -> Kernel:
    """The kernel without an axis of rows."""
    return parse_kernel(text.format(rows=1).replace("m: 1, ", "").replace("64*m + ", "").replace("24*m + ", ""))


def loads(kernel: Kernel, buffer: str) -> int:
    return len([item for item in kernel.operations if isinstance(item, Load) and item.buffer == buffer])


def assert_equal(kernel: Kernel, unrolled: Kernel) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = {item.name: random(item.dtype, int(item.extent), generator) for item in kernel.inputs}  # type: ignore[call-overload]
    inputs["w"] = torch.randint(-128, 128, inputs["w"].shape, generator=generator).to(inputs["w"].dtype)
    if inputs["w"].dtype is torch.int32:
        inputs["w"] = torch.randint(-(2**31), 2**31 - 1, inputs["w"].shape, generator=generator, dtype=torch.int32)
    results = [torch.zeros(int(kernel.outputs[0].extent)) for _ in range(2)]  # type: ignore[arg-type]
    for item, result in zip((kernel, unrolled), results, strict=True):
        evaluate_kernel(item, {**inputs, "out": result}, {})
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-4)
    check(unrolled, configurations(unrolled)[0], inputs, tolerance=5e-2)


@pytest.mark.parametrize(("text", "terms"), [(PAIRS, 2), (WORDS, 8)], ids=["bytes", "words"])
def test_one_row_adds_the_terms_of_a_packed_element(text: str, terms: int) -> None:
    kernel = one_row(text)
    unrolled = unroll_packed_axes(kernel)
    assert (loads(unrolled, "w"), loads(unrolled, "x"), len(unrolled.reductions)) == (1, terms, 1)
    assert configurations(unrolled) != configurations(kernel)
    assert_equal(kernel, unrolled)


@pytest.mark.parametrize(("text", "terms"), [(PAIRS, 2), (WORDS, 8)], ids=["bytes", "words"])
def test_several_rows_keep_sums_of_products(text: str, terms: int) -> None:
    kernel = parse_kernel(text.format(rows=5))
    unrolled = unroll_packed_axes(kernel, separate=True)
    form = find_contraction(unrolled)
    assert form is not None and len(form.sums) == terms and loads(unrolled, "w") == 1
    assert_equal(kernel, unrolled)


def test_reduced_axes_have_the_order_of_the_packed_elements() -> None:
    unrolled = unroll_packed_axes(one_row(WORDS))
    assert [axis.name for axis in unrolled.reduced] == ["b", "a"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("reduce sum", "reduce max"),  # the largest term is not the sum of terms
        ("i32 load w[8*n + a + 2*b]", "i32 load w[8*n + 2*b + h]"),  # nothing is packed along h
        ("q: 4, b: 4, h: 2", "q: 4, b: 2, h: 4"),  # too many terms
    ],
    ids=["maximum", "not packed", "many"],
)
def test_near_misses(before: str, after: str) -> None:
    text = WORDS.format(rows=5)
    assert before in text
    kernel = parse_kernel(text.replace(before, after))
    assert unroll_packed_axes(kernel) is kernel
