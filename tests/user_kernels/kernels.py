"""Triton kernels as a model's author writes them: plain, tuned, with heuristics, helpers, constants and closures."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra import libdevice

from tests.user_kernels import helpers
from tests.user_kernels.helpers import scaled

SHIFT = tl.constexpr(0.5)


@triton.jit
def add(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    value = tl.load(x_ptr + offsets, mask=mask)
    if y_ptr is not None:
        value = value + scaled(tl.load(y_ptr + offsets, mask=mask))
    tl.store(out_ptr + offsets, value + SHIFT, mask=mask)


@triton.jit
def double_in_place(x_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(x_ptr + offsets, tl.load(x_ptr + offsets, mask=mask) * 2, mask=mask)


@triton.jit
def strided_rows(x_ptr, out_ptr, rows, columns, row_stride, column_stride, factor, BLOCK: tl.constexpr):
    """Writes each row's sum times a factor; strides and sizes may be 1."""
    row = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    values = tl.load(x_ptr + row * row_stride + offsets * column_stride, mask=offsets < columns, other=0.0)
    tl.store(out_ptr + row, tl.sum(values, 0) * factor)


@triton.jit
def scaled_where(x_ptr, out_ptr, n, factor, negative, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x_ptr + offsets, mask=offsets < n) * factor
    if negative:
        value = -value
    tl.store(out_ptr + offsets, value, mask=offsets < n)


@triton.jit
def minimum_and_maximum(x_ptr, low_ptr, high_ptr, columns, BLOCK: tl.constexpr, DTYPE: tl.constexpr = tl.float32):
    row = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    values = tl.load(x_ptr + row * columns + offsets, mask=offsets < columns, other=0.0).to(DTYPE)
    tl.store(low_ptr + row, tl.min(values, 0))
    tl.store(high_ptr + row, tl.max(values, 0))


@triton.jit
def through_module(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    value = helpers.scaled(tl.load(x_ptr + offsets, mask=mask)) + helpers.OFFSET
    tl.store(out_ptr + offsets, libdevice.tanh(value), mask=mask)


@triton.jit
def gaps(x_ptr, n, BLOCK: tl.constexpr):
    """Adds each element at an odd place to the one before it, whoever shows only even places."""
    offsets = tl.arange(0, BLOCK)
    mask = offsets < n
    odd = tl.load(x_ptr + 2 * offsets + 1, mask=mask)
    tl.store(x_ptr + 2 * offsets, tl.load(x_ptr + 2 * offsets, mask=mask) + odd, mask=mask)


@triton.jit
def sine(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.sin(tl.load(x_ptr + offsets, mask=offsets < n)), mask=offsets < n)


@triton.jit
def sine_backward(x_ptr, grad_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    value = tl.cos(tl.load(x_ptr + offsets, mask=mask)) * tl.load(grad_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, value, mask=mask)


@triton.autotune(
    configs=[triton.Config({"BLOCK": 64}, num_warps=2), triton.Config({"BLOCK": 128}, num_warps=4, num_stages=2)],
    key=["n"],
)
@triton.jit
def tuned(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=offsets < n) + 1, mask=offsets < n)


@triton.autotune(configs=[triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 64})], key=[], restore_value=["x_ptr"])
@triton.jit
def tuned_in_place(x_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + offsets, tl.load(x_ptr + offsets, mask=offsets < n) + 1, mask=offsets < n)


tuned_unrestored = triton.autotune(configs=tuned_in_place.configs, key=[])(tuned_in_place.fn)


@triton.heuristics({"BLOCK": lambda arguments: triton.next_power_of_2(arguments["n"])})
@triton.jit
def with_heuristics(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=offsets < n) * 3, mask=offsets < n)


@triton.autotune(configs=[triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})], key=["n"])
@triton.heuristics({"EVEN": lambda arguments: arguments["n"] % arguments["BLOCK"] == 0})
@triton.jit
def tuned_with_heuristics(x_ptr, out_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if EVEN:
        tl.store(out_ptr + offsets, tl.load(x_ptr + offsets) + 1)
    else:
        tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=offsets < n) + 1, mask=offsets < n)


def kernel_over(width: Any) -> Any:
    """A kernel that takes a constant from the function around it."""

    @triton.jit
    def shifted(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
        offsets = tl.arange(0, BLOCK)
        tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=offsets < n) + width, mask=offsets < n)

    return shifted


@triton.jit(launch_metadata=lambda grid, kernel, arguments: {"name": "profiled"})
def profiled(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=offsets < n) + 5, mask=offsets < n)
