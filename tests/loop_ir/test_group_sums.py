"""Coefficients of groups of quantised weights, applied to the sums of groups: equal results, and what declines."""

from __future__ import annotations

import pytest
import torch

from fxwrap.loop_ir import (
    Kernel,
    Reduce,
    evaluate_kernel,
    find_contraction,
    find_grouped_sums,
    parse_kernel,
    split_sums,
    sum_groups,
)
from tests.printers.test_triton_shared_elements import INT4
from tests.printers.triton_kernels import random

INT8 = """kernel(x: {row}[{rows}*256], w: i8[32*256], s: f32[32*4]) -> (out: f32[{rows}*32]) \
for [i: {rows}, j: 32] reduce [g: 4, h: 64] {{
  %0 = {row} load x[256*i + 64*g + h]
  %1 = f32 cast %0
  %2 = i8 load w[256*j + 64*g + h]
  %3 = f32 cast %2
  %4 = f32 load s[4*j + g]
  %5 = f32 {step}
  %6 = f32 mul %1 %5
  %7 = f32 reduce sum %6
  store out[32*i + j] %7
}}
"""

SCALED_WORDS = """kernel(x: f16[3*256], w: i32[32*32], s: f32[32*8]) -> (out: f32[3*32]) \
for [i: 3, j: 32] reduce [k: 8, l: 4, q: 8] {
  %0 = f16 load x[256*i + 32*k + 8*l + q]
  %1 = f32 cast %0
  %2 = i32 load w[32*j + 4*k + l]
  %3 = i64 index 4*q
  %4 = i32 cast %3
  %5 = i32 bitwise_right_shift %2 %4
  %6 = i32 15
  %7 = i32 bitwise_and %5 %6
  %8 = f32 cast %7
  %9 = f32 load s[8*j + k]
  %10 = f32 mul %8 %9
  %11 = f32 mul %1 %10
  %12 = f32 reduce sum %11
  store out[32*i + j] %12
}
"""


def int8(step: str, rows: int = 3, row: str = "bf16") -> Kernel:
    """Weights of int8 and one step with a scale, or another coefficient, of their group."""
    return parse_kernel(INT8.format(step=step, rows=rows, row=row))


def grouped(kernel: Kernel) -> Kernel | None:
    contraction = find_contraction(kernel)
    assert contraction is not None
    return sum_groups(contraction)


def split(kernel: Kernel, size: int) -> Kernel | None:
    contraction = find_contraction(kernel)
    assert contraction is not None
    return split_sums(contraction, size)


def check(kernel: Kernel) -> Kernel:
    """Compares the sums of groups with the contraction, as the evaluator computes both."""
    return compare(kernel, grouped(kernel))


def compare(kernel: Kernel, result: Kernel | None) -> Kernel:
    """Evaluates a contraction and the kernel that replaces it."""
    generator = torch.Generator().manual_seed(3)
    assert result is not None and parse_kernel(str(result)) == result
    inputs = {item.name: random(item.dtype, int(item.extent), generator) for item in kernel.inputs}
    inputs = {
        name: torch.randint(0, 256, item.shape, generator=generator, dtype=item.dtype)
        if item.dtype is torch.uint8 else item for name, item in inputs.items()
    }  # fmt: skip
    expected, actual = [torch.zeros(int(kernel.outputs[0].extent)) for _ in range(2)]
    evaluate_kernel(kernel, {**inputs, "out": expected})
    evaluate_kernel(result, {**inputs, "out": actual})
    assert (expected - actual).norm() <= 3e-6 * expected.norm()
    return result


@pytest.mark.parametrize("rows", [1, 3])
def test_halves_of_bytes_are_two_products_of_biased_numbers(rows: int) -> None:
    result = check(parse_kernel(INT4.format(rows=rows)))
    assert [axis.name for axis in result.reduced] == ["g", "h"]
    text = str(result)
    assert "where" not in text and " if " not in text and "f32 128.0" in text
    contraction = find_contraction(parse_kernel(INT4.format(rows=rows)))
    assert contraction is not None
    form = find_grouped_sums(result, contraction)
    products, units = form.sums
    assert [len(products.terms), len(units.terms)] == [2, 2]
    assert [row for row, _ in products.terms] == [row for row, column in units.terms if column is None]
    assert [axis.name for axis in (*form.groups, *form.contraction.summed)] == ["g", "h"]


def test_numbers_without_bias_are_multiplied_as_they_are() -> None:
    kernel = parse_kernel(INT4.format(rows=3))
    contraction = find_contraction(kernel)
    assert contraction is not None
    result = compare(kernel, sum_groups(contraction, biased=False))
    assert "128.0" not in str(result) and "f32 cast" in str(result)


@pytest.mark.parametrize("step", ["mul %3 %4", "sub %3 %4", "sub %4 %3", "add %3 %4", "add %4 %3"])
def test_a_step_is_applied_to_the_sums(step: str) -> None:
    result = check(int8(step))
    sums = [item for item in result.operations if isinstance(item, Reduce) and item.axes != result.reduced[:1]]
    assert len(sums) == (1 if "mul" in step else 2), "a scale needs no sum of the rows"


def test_digits_of_words_are_unrolled() -> None:
    text = str(check(parse_kernel(SCALED_WORDS)))
    assert [f"{4 * digit}\n" in text for digit in range(8)] == [True] * 8
    assert text.count("load w") == 1 and "i64 index" not in text


PLAIN = """kernel(x: {row}[3*256], w: i8[32*256], s: f32[32]) -> (out: f32[3*32]) for [i: 3, j: 32] reduce [k: 256] {{
  %0 = {row} load x[256*i + k]
  %1 = f32 cast %0
  %2 = i8 load w[256*j + k]
  %3 = f32 cast %2
  %4 = f32 mul %1 %3
  %5 = f32 reduce sum %4
  %6 = f32 load s[j]
  %7 = f32 mul %5 %6
  store out[32*i + j] %7
}}
"""
"""Weights of int8 with a scale for each column, which follows the sum."""


@pytest.mark.parametrize("size", [64, 256])
def test_sums_are_those_of_parts(size: int) -> None:
    kernel = parse_kernel(PLAIN.format(row="bf16"))
    result = compare(kernel, split(kernel, size))
    assert [axis.size for axis in result.reduced] == [256 // size, size]


def test_parts_are_equal_and_exact() -> None:
    assert split(parse_kernel(PLAIN.format(row="bf16")), 96) is None
    assert split(parse_kernel(PLAIN.format(row="f32")), 64) is None
    assert split(int8("mul %3 %4"), 64) is None, "the scale of a group is no part of a number"


@pytest.mark.parametrize(
    "kernel",
    [
        int8("mul %3 %4", row="f32"),
        int8("maximum %3 %4"),
        parse_kernel(INT8.format(step="mul %3 %4", rows=3, row="bf16").replace("i8", "f16")),
        parse_kernel(INT8.format(step="mul %3 %4", rows=3, row="bf16").replace("4*j + g", "j")),
    ],
    ids=["rows_of_float32", "not_affine", "numbers_of_another_dtype", "no_groups"],
)
def test_other_contractions_are_left(kernel: Kernel) -> None:
    assert grouped(kernel) is None
