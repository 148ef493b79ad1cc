"""Triton kernels as objects for torch's table, from which its operator for Triton kernels launches them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from fxwrap.errors import FxwrapError
from fxwrap.kernel_names import function_in
from fxwrap.runtime.cpp_kernels import KernelOptions
from fxwrap.runtime.kernels import load_kernel
from fxwrap.runtime.triton_compile import gpu_function, launch_keywords


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
    name = function_in(source)
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.FunctionDef) and statement.name == name:
            return [argument.arg for argument in statement.args.args]
    raise FxwrapError(f"the source of a Triton kernel defines no function '{name}'")


@cache
def triton_function(
    source: str, signature: tuple[str, ...], options: KernelOptions, kernel_hash: str, on_cpu: bool
) -> Any:
    """Returns the object that launches a kernel; its `fxwrap_hash` says which kernel of a program it is."""
    made = CpuTritonKernel(source, signature, options) if on_cpu else gpu_function(source, signature, options)
    made.fxwrap_hash = kernel_hash
    return made


def triton_constants(options: KernelOptions) -> KernelOptions:
    """Returns the constant arguments of a launch, in the order of a launcher's: Triton tells them apart by it."""
    constants, choices = launch_keywords(options)
    return (*constants.items(), *choices.items())
