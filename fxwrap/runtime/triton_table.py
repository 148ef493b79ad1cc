"""Triton kernels as objects for torch's table, from which its operator for Triton kernels launches them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from fxwrap.errors import FxwrapError
from fxwrap.runtime.cpp_kernels import KernelOptions
from fxwrap.runtime.kernels import load_kernel
from fxwrap.runtime.modules import load_module


class CpuTritonKernel:
    """A Triton kernel on the CPU, by Triton's interpreter; it is launched as a `@triton.jit` function is."""

    fxwrap_hash: str

    def __init__(self, source: str, signature: tuple[str, ...], options: KernelOptions) -> None:
        constants = dict(options)
        self.arg_names = [name for name in triton_parameters(source) if name not in constants]
        self._launch = load_kernel("triton", source, signature, options)

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        return lambda *arguments, **_constants: self._launch(tuple(grid), *arguments)


def triton_parameters(source: str) -> list[str]:
    """Returns the names of a Triton kernel's parameters, constants included. Raises FxwrapError where there is none."""
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "kernel":
            return [argument.arg for argument in statement.args.args]
    raise FxwrapError("the source of a Triton kernel defines no function 'kernel'")


@cache
def triton_function(
    source: str, signature: tuple[str, ...], options: KernelOptions, kernel_hash: str, on_cpu: bool
) -> Any:
    """Returns the object that launches a kernel; its `fxwrap_hash` says which kernel of a program it is."""
    made = CpuTritonKernel(source, signature, options) if on_cpu else load_module(source, "triton_kernel").kernel
    made.fxwrap_hash = kernel_hash
    return made


def triton_constants(options: KernelOptions) -> KernelOptions:
    """Returns the constant arguments of a launch: the kernel's options, floating-point fusion off unless asked for."""
    return options if "enable_fp_fusion" in dict(options) else (*options, ("enable_fp_fusion", False))
