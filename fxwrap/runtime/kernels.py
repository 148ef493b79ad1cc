"""Kernels by language, ready to launch.

A kernel is a source text in which the function is called `kernel`, a signature with one entry a parameter ("*f32" for a
tensor, "i64" or "f64" for a number), and options. Its parameters are tensors first, then numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TypeAlias

import torch

from fxwrap.errors import FxwrapError, NativeBuildError
from fxwrap.runtime.cpp_kernels import KernelOptions, KernelText, cpp_kernel_units, cpp_launchers
from fxwrap.runtime.native import compile_cpp, compiled_kernels, load_program, provided_kernel, record_kernels
from fxwrap.runtime.triton_compile import KernelUse, compile_triton_kernels
from fxwrap.runtime.triton_compile import triton as triton_package
from fxwrap.runtime.triton_kernels import load_triton_kernel
from fxwrap.runtime.user_triton import load_user_kernel

Launcher: TypeAlias = Callable[..., None]
"""`launcher(grid, *tensors, *outs, *numbers)`."""

_ONCE = (1, 1, 1)


@cache
def load_kernel(language: str, source: str, signature: tuple[str, ...], options: KernelOptions) -> Launcher:
    """Returns the launcher of a kernel, compiled or found in the cache.

    "cpp" is compiled by the C++ compiler and called once a launch, so its grid is all ones; "triton" runs on its
    tensors' GPU, and through Triton's interpreter where the tensors are on the CPU; "user_triton" is a kernel of the
    user's, which runs as "triton" does. Raises FxwrapError for another
    language or a signature or option that the language does not have, NativeBuildError where C++ does not compile.
    """
    match language:
        case "cpp":
            return _load_cpp_kernel(source, signature, options)
        case "triton":
            return load_triton_kernel(source, signature, options)
        case "user_triton":
            return load_user_kernel(source, signature, options)
        case _:
            known = "'cpp', 'triton' and 'user_triton'"
            raise FxwrapError(f"there is no launcher for kernels in '{language}', only for {known}")


@cache
def prepare_kernels(kernels: tuple[KernelText, ...]) -> None:
    """Compiles the C++ kernels among these that are not compiled yet, together, for `load_kernel` to find.

    One that does not compile raises NativeBuildError when it is loaded.
    """
    wanted = {kernel.symbol: kernel for kernel in kernels if kernel.language == "cpp"}
    if not wanted:
        return
    known = compiled_kernels(tuple(wanted))
    missing = [kernel for symbol, kernel in wanted.items() if symbol not in known]
    if missing:
        try:
            path = compile_cpp(cpp_launchers(missing), name="kernels", extra_sources=cpp_kernel_units(missing))
        except NativeBuildError:
            if len(missing) == 1:
                raise
            return
        record_kernels([kernel.symbol for kernel in missing], path)


def kernel_library(kernels: Sequence[KernelText]) -> Path:
    """Returns a library with a program for each of these C++ kernels, compiled or found in the cache.

    Raises NativeBuildError where one does not compile.
    """
    wanted = list({kernel.symbol: kernel for kernel in kernels}.values())
    provided = {provided_kernel(kernel.symbol) for kernel in wanted}
    together = provided.pop() if len(provided) == 1 else None
    if together is not None:
        return together
    return compile_cpp(cpp_launchers(wanted), name="kernels", extra_sources=cpp_kernel_units(wanted))


def compile_kernels(uses: Sequence[KernelUse]) -> list[FxwrapError | None]:
    """Compiles kernels ahead of their first launch; returns for each what went wrong, or None.

    C++ kernels are compiled for this machine, Triton kernels for their GPU where this machine has one. Kernels in other
    languages are left alone.
    """
    found: list[FxwrapError | None] = [None] * len(uses)
    cpp = [position for position, use in enumerate(uses) if use.kernel.language == "cpp"]
    triton = [position for position, use in enumerate(uses) if use.kernel.language == "triton"]
    on_gpu = [position for position in triton if uses[position].device.type == "cuda" and torch.cuda.is_available()]
    for position, error in zip(cpp, _compile_cpp_kernels([uses[position].kernel for position in cpp]), strict=True):
        found[position] = error
    for position, error in zip(on_gpu, compile_triton_kernels([uses[position] for position in on_gpu]), strict=True):
        found[position] = error
    for position in triton:
        if position not in on_gpu:
            found[position] = _failure(triton_package)
    return found


def _compile_cpp_kernels(kernels: Sequence[KernelText]) -> list[FxwrapError | None]:
    """Compiles C++ kernels together, and where that fails one by one."""
    if not kernels:
        return []
    together = _failure(lambda: prepare_kernels(tuple(kernels)))
    if together is not None and len(kernels) == 1:
        return [together]
    try:
        known = compiled_kernels(tuple([kernel.symbol for kernel in kernels]))
    except NativeBuildError as error:  # no compiler
        return [error] * len(kernels)
    return [None if kernel.symbol in known else _failure(partial(prepare_kernels, (kernel,))) for kernel in kernels]


def _failure(compile_them: Callable[[], object]) -> FxwrapError | None:
    try:
        compile_them()
    except FxwrapError as error:
        return error
    return None


@cache
def load_cpp_kernel(source: str, signature: tuple[str, ...], options: KernelOptions) -> Callable[..., object]:
    """Returns the function of a C++ kernel: `function(*tensors, *outs, *numbers)`. Raises as `load_kernel` does."""
    kernel = KernelText("cpp", source, signature, options)
    prepare_kernels((kernel,))
    return load_program(compiled_kernels((kernel.symbol,))[kernel.symbol], symbol=f"program_{kernel.symbol}")


def _load_cpp_kernel(source: str, signature: tuple[str, ...], options: KernelOptions) -> Launcher:
    program = load_cpp_kernel(source, signature, options)

    def launch(grid: Sequence[int], *arguments: torch.Tensor | float) -> None:
        if grid != _ONCE and any(size != 1 for size in grid):
            raise FxwrapError(f"a C++ kernel is called once, so its grid is (1, 1, 1), not {tuple(grid)}")
        program(*arguments)

    return launch


_LAUNCH = (
    "launch(str language, str source, str[] signature, str options, int[] grid, Tensor[] tensors, Tensor(a!)[] outs, "
    "Scalar[] numbers) -> ()"
)
_library = torch.library.Library("fxwrap_runtime", "DEF")  # type: ignore[no-untyped-call]
_library.define(_LAUNCH)  # type: ignore[no-untyped-call]


def options_text(options: KernelOptions) -> str:
    """Returns a kernel's options as the operator `fxwrap_runtime::launch` takes them."""
    return json.dumps(options)


@torch.library.impl(_library, "launch", "CompositeExplicitAutograd")
def _launch(
    language: str,
    source: str,
    signature: list[str],
    options: str,
    grid: list[int],
    tensors: list[torch.Tensor],
    outs: list[torch.Tensor],
    numbers: list[float],
) -> None:
    """Launches a kernel from emitted C++ that C++ cannot launch by itself; its source is part of the emitted text."""
    pairs = tuple([(name, option) for name, option in json.loads(options)])
    load_kernel(language, source, tuple(signature), pairs)(tuple(grid), *tensors, *outs, *numbers)
