"""Triton kernels of the tests, and what Triton compiles them to for a chip that is not here."""

from __future__ import annotations

from typing import Any

from fxwrap.runtime.cpp_kernels import KernelText
from fxwrap.runtime.triton.compile import split_launch_options, triton_jit_function


def fill(number: int) -> KernelText:
    """Multiplies, or copies: a kernel with every kind of parameter that fxwrap's own kernels have.

    Kernels of different numbers are different to fxwrap and to Triton: a process keeps what it has compiled.
    """
    return KernelText("triton", _FILL.replace("NUMBER", str(number)), _SIGNATURE, _OPTIONS)


_SIGNATURE = ("*f32", "*f32", "i64", "f64", "i1")
_OPTIONS = (("BLOCK", 64), ("num_warps", 2))
_FILL = """import triton
import triton.language as tl


@triton.jit
def kernel(x_ptr, out_ptr, n, factor: "fp64", flag, BLOCK: tl.constexpr):
    'Kernel NUMBER.'
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place, mask=place < n)
    tl.store(out_ptr + place, tl.where(flag, x * factor.to(tl.float32), x), mask=place < n)
"""


def compiled(kernel: KernelText, *arguments: Any) -> Any:
    """The binary that Triton compiles for arguments, specialised as at a launch."""
    constants, compile_options = split_launch_options(kernel.options)
    function = triton_jit_function(kernel.source, kernel.signature, kernel.options)
    return function.warmup(*arguments, grid=(1,), **constants, **compile_options)
