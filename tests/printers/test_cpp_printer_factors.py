"""Contractions of numbers that half precision represents in C++, against the loop IR's evaluator."""

from __future__ import annotations

import pytest
import torch

from fxwrap.loop_ir import Kernel, parse_kernel
from fxwrap.symbolic import evaluate
from tests.loop_ir.test_group_sums import SCALED_WORDS, int8
from tests.printers.cpp_kernels import check, compiled_together
from tests.printers.test_triton_shared_elements import INT4

EXACT = """kernel(x: bf16[{rows}*{terms}], w: {dtype}[{columns}*{terms}], s: f32[{columns}]) \
-> (out: f32[{rows}*{columns}]) for [i: {rows}, j: {columns}] reduce [k: {terms}] {{
  %0 = bf16 load x[{terms}*i + k]
  %1 = f32 cast %0
  %2 = {dtype} load w[{terms}*j + k]
  %3 = f32 cast %2
  %4 = f32 mul %1 %3
  %5 = f32 reduce sum %4
  %6 = f32 load s[j]
  %7 = f32 mul %5 %6
  store out[{columns}*i + j] %7
}}
"""

GATED = """kernel(x: bf16[5*256], w: i8[32*256], v: i8[32*256], s: f32[32*4], t: f32[32*4]) -> (out: bf16[5*32]) \
for [i: 5, j: 32] reduce [g: 4, h: 64] {
  %0 = bf16 load x[256*i + 64*g + h]
  %1 = f32 cast %0
  %2 = f32 neg %1
  %3 = i8 load w[256*j + 64*g + h]
  %4 = f32 cast %3
  %5 = f32 load s[4*j + g]
  %6 = f32 mul %4 %5
  %7 = f32 mul %2 %6
  %8 = f32 reduce sum %7 of bf16
  %9 = i8 load v[256*j + 64*g + h]
  %10 = f32 cast %9
  %11 = f32 load t[4*j + g]
  %12 = f32 sub %10 %11
  %13 = f32 mul %2 %12
  %14 = f32 reduce sum %13 of bf16
  %15 = f32 abs %8
  %16 = f32 add %15 %14
  %17 = bf16 cast %16
  store out[32*i + j] %17
}
"""
"""Two sums of a computed row operand, which eager mode has in bfloat16, and an epilogue of both."""


def exact(rows: int | str, columns: int, terms: int | str, dtype: str = "i8") -> Kernel:
    """Rows of bfloat16 times weights of another dtype, with scales of columns."""
    return parse_kernel(EXACT.format(rows=rows, columns=columns, terms=terms, dtype=dtype))


def kernels() -> list[Kernel]:
    """Rows that are and are not multiples of tiles, and groups of whole and of partial vectors."""
    steps = ["mul %3 %4", "sub %3 %4", "sub %4 %3", "add %3 %4"]
    return [
        *[parse_kernel(INT4.format(rows=rows)) for rows in (1, 2, 5, 8, 9, 17, "s0")],
        *[int8(step, rows) for step, rows in zip(steps, (1, 3, 8, 12), strict=True)],
        int8("mul %3 %4", 2, "f16"), parse_kernel(SCALED_WORDS), parse_kernel(SCALED_WORDS.replace("f16", "bf16")),
        exact(8, 19, 1100), exact(3, 5, 31), exact(17, 23, 64, "u8"), exact("s0", 33, 70), exact(2, 40, "s1"),
        parse_kernel(GATED),
    ]  # fmt: skip


compiled_kernels = compiled_together(lambda position: kernels()[position])


def run(kernel: Kernel, preamble: str = "") -> str:
    """Compares a kernel with the evaluator, with all values of bytes and words; returns its source."""
    numbers = {symbol.name: {"s0": 11, "s1": 1030}[symbol.name] for symbol in kernel.symbols}
    arguments = {}
    for buffer in kernel.inputs:
        if not buffer.dtype.is_floating_point:
            size = buffer.extent if isinstance(buffer.extent, int) else int(evaluate(buffer.extent, numbers))
            info = torch.iinfo(buffer.dtype)
            arguments[buffer.name] = torch.randint(info.min, info.max, (size,), dtype=buffer.dtype)
    return check(kernel, numbers, arguments, rtol=3e-4, preamble=preamble)


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("compiled_kernels")
@pytest.mark.parametrize("position", range(len(kernels())))
def test_products_of_factors(position: int) -> None:
    assert "FactorTile" in run(kernels()[position])


def test_processors_without_pairs_multiply_floats() -> None:
    for position in (0, 3, 8, 13, 19):
        run(kernels()[position], "#undef __AVX512BF16__\n")


def test_one_row_of_bytes_and_rows_of_float32_are_no_factors() -> None:
    """One row of bytes is as fast as floats, and float32 rows are not exact."""
    for kernel in (exact(1, 40, 1100), parse_kernel(str(exact(8, 40, 1100)).replace("bf16", "f32"))):
        assert "FactorTile" not in run(kernel)
