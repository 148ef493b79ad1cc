"""Kernels that random programs launch: one of C++, one of Triton, and two that a user wrote in Triton."""

from __future__ import annotations

import dataclasses
from typing import Any

from fxwrap.user_kernels import serialize_kernel
from fxwrap.wrapper_ir import KernelDefinition
from tests.support.samples import SAMPLES
from tests.support.strategies.programs import ProgramKernel
from tests.user_kernels import kernels

_BLOCK = 64


def _user_kernel(kernel: Any, signature: tuple[str, ...], reads: int, **constants: object) -> ProgramKernel:
    source = serialize_kernel(kernel, {**constants, "BLOCK": _BLOCK}, {}, [])
    return ProgramKernel(KernelDefinition(kernel.__name__, "user_triton", source, signature), reads, _BLOCK)


def _sample_kernel(sample: str, name: str, block: int = 0) -> ProgramKernel:
    (definition,) = SAMPLES[sample].kernels
    return ProgramKernel(dataclasses.replace(definition, name=name), 1, block)


CPP = (_sample_kernel("mlp", "cpp_relu"),)
"""C++ kernels, which every emitter launches on a CPU."""

TRITON = (
    _sample_kernel("triton_kernel", "triton_relu", _BLOCK),
    _user_kernel(kernels.double_in_place, ("*f32 x_ptr", "i64 n"), 0),
    _user_kernel(kernels.add, ("*f32 x_ptr", "*f32 y_ptr", "*f32 out_ptr", "i64 n"), 2),
)
"""Triton kernels, which emitted C++ does not launch on a CPU. The user's require `triton_on_cpu`."""
