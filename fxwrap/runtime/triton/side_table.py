"""Triton kernels as objects in torch's side table, from which its operator for Triton kernels launches them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

from fxwrap.caching import shared_cache
from fxwrap.devices import language_traits
from fxwrap.devices.kernel_names import find_function_name
from fxwrap.errors import FxwrapError
from fxwrap.runtime.cpp_kernels import KernelOptions
from fxwrap.runtime.kernels import load_kernel
from fxwrap.runtime.triton.compile import split_launch_options, triton_jit_function
from fxwrap.runtime.triton.user_kernels import load_user_kernel


class InterpretedTritonKernel:
    """A Triton kernel on the CPU, run by Triton's interpreter and launched like a `@triton.jit` function."""

    fxwrap_hash: str

    def __init__(self, source: str, signature: tuple[str, ...], options: KernelOptions) -> None:
        self.__name__ = find_function_name(source)  # torch's errors name kernels
        self.arg_names = triton_argument_names(source, options)
        self._launch = load_kernel("triton", source, signature, options)

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., object]:
        return lambda *arguments, **_constants: self._launch(tuple(grid), *arguments)


def triton_argument_names(source: str, options: KernelOptions) -> list[str]:
    """Returns the names of a generated kernel's parameters without constants. Raises FxwrapError without a function."""
    name, constants = find_function_name(source), dict(options)
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.FunctionDef) and statement.name == name:
            return [argument.arg for argument in statement.args.args if argument.arg not in constants]
    raise FxwrapError(f"the source of a Triton kernel does not define the function '{name}'")


def argument_names(language: str, source: str, signature: tuple[str, ...], options: KernelOptions) -> list[str]:
    """Returns the names of the arguments of a Triton kernel, generated or the user's, in the order of its launcher."""
    if language_traits(language).user_defined:
        return load_user_kernel(source, signature, options).names
    return triton_argument_names(source, options)


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
