"""Triton kernels as objects in torch's side table, from which its operator for Triton kernels launches them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

from fxwrap.caching import shared_cache
from fxwrap.devices.kernel_names import find_function_name
from fxwrap.errors import FxwrapError
from fxwrap.runtime.cpp_kernels import KernelOptions
from fxwrap.runtime.kernels import load_kernel
from fxwrap.runtime.triton.compile import split_launch_options, triton_jit_function


class InterpretedTritonKernel:
    """A Triton kernel on the CPU, run by Triton's interpreter and launched like a `@triton.jit` function."""

    fxwrap_hash: str

    def __init__(self, source: str, signature: tuple[str, ...], options: KernelOptions) -> None:
        constants = dict(options)
        self.__name__ = find_function_name(source)  # torch's errors name kernels
        self.arg_names = [name for name in triton_parameters(source) if name not in constants]
        self._launch = load_kernel("triton", source, signature, options)

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., object]:
        return lambda *arguments, **_constants: self._launch(tuple(grid), *arguments)


def triton_parameters(source: str) -> list[str]:
    """Returns the parameter names of a Triton kernel, constants included. Raises FxwrapError without a function."""
    name = find_function_name(source)
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.FunctionDef) and statement.name == name:
            return [argument.arg for argument in statement.args.args]
    raise FxwrapError(f"the source of a Triton kernel does not define the function '{name}'")


@shared_cache(256)
def triton_side_table_kernel(
    source: str, signature: tuple[str, ...], options: KernelOptions, kernel_hash: str, on_cpu: bool
) -> Any:
    """Returns the object that launches a kernel; its `fxwrap_hash` identifies the kernel of the program."""
    create = InterpretedTritonKernel if on_cpu else triton_jit_function
    kernel = create(source, signature, options)
    kernel.fxwrap_hash = kernel_hash
    return kernel


def triton_constants(options: KernelOptions) -> KernelOptions:
    """Returns the constant arguments of a launch, in the launcher's order, by which Triton distinguishes compiles."""
    constants, compile_options = split_launch_options(options)
    return (*constants.items(), *compile_options.items())
