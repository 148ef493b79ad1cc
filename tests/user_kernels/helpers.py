"""Functions that kernels of other modules call."""

from __future__ import annotations

import triton
import triton.language as tl

FACTOR = tl.constexpr(3.0)
OFFSET = tl.constexpr(0.25)


@triton.jit
def _times(x, factor):
    return x * factor


@triton.jit
def scaled(x):
    return _times(x, FACTOR)
