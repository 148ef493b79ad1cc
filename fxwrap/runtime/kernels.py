"""Kernels by language, ready to launch.

A kernel is a source text in which the function is called `kernel` (in fxwrap's own as `fxwrap/kernel_names.py` says), a
signature with one entry a parameter ("*f32" for a tensor, "i64" or "f64" for a number), and options. Its parameters are
tensors first, then numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import torch

from fxwrap.device_registry import KernelRuntime, Language, Launcher, find_language, language_named
from fxwrap.device_spec import CPP, CUDA
from fxwrap.errors import FxwrapError, NativeBuildError
from fxwrap.runtime.cpp_kernels import KernelOptions, KernelText, cpp_kernel_units, cpp_launchers
from fxwrap.runtime.native import compile_cpp, compiled_kernels, load_program, provided_kernel, record_kernels
from fxwrap.runtime.triton_compile import KernelUse, compile_triton_kernels, start_workers
from fxwrap.runtime.triton_compile import triton as triton_package
from fxwrap.runtime.triton_kernels import load_triton_kernel
from fxwrap.runtime.user_triton import load_user_kernel

_ONCE = (1, 1, 1)


def load_kernel(language: str, source: str, signature: tuple[str, ...], options: KernelOptions) -> Launcher:
    """Returns `launcher(grid, *tensors, *outs, *numbers)` of a kernel, compiled or found in the cache.

    "cpp" is compiled by the C++ compiler and called once a launch, so its grid is all ones; "triton" runs on its
    tensors' GPU, and through Triton's interpreter where the tensors are on the CPU; "user_triton" is a kernel of the
    user's, which runs as "triton" does; other languages are those of registered devices. Raises FxwrapError for a
    language that nobody has registered, or a signature or option that the language does not have, NativeBuildError
    where C++ does not compile.
    """
    return _launcher(language_named(language), source, signature, options)


@cache
def _launcher(language: Language, source: str, signature: tuple[str, ...], options: KernelOptions) -> Launcher:
    loaded = _loaded(language, source, signature, options)
    return _called_once(language.facts.name, loaded) if language.facts.called_once else loaded


@cache
def _loaded(language: Language, source: str, signature: tuple[str, ...], options: KernelOptions) -> Launcher:
    return language.kernels.load(source, signature, options)


def _called_once(language: str, function: Launcher) -> Launcher:
    def launch(grid: Sequence[int], *arguments: torch.Tensor | float) -> None:
        if grid != _ONCE and any(size != 1 for size in grid):
            raise FxwrapError(f"a kernel in '{language}' is called once, so its grid is (1, 1, 1), not {tuple(grid)}")
        function(*arguments)

    return launch


def load_function(language: str, source: str, signature: tuple[str, ...], options: KernelOptions) -> Launcher:
    """Returns `function(*tensors, *outs, *numbers)` of a kernel in a language whose kernels are called once.

    Raises as `load_kernel` does.
    """
    return _loaded(language_named(language), source, signature, options)


def load_cpp_kernel(source: str, signature: tuple[str, ...], options: KernelOptions) -> Callable[..., object]:
    """Returns the function of a C++ kernel: `function(*tensors, *outs, *numbers)`. Raises as `load_kernel` does."""
    return load_function(CPP.name, source, signature, options)


@cache
def prepare_kernels(kernels: tuple[KernelText, ...]) -> None:
    """Compiles those of these kernels together that are not compiled yet, for `load_kernel` to find.

    One that does not compile raises NativeBuildError when it is loaded.
    """
    for language, positions in _by_language(kernels):
        if language.kernels.prepare is not None:
            language.kernels.prepare([kernels[position] for position in positions])


def compile_kernels(uses: Sequence[KernelUse]) -> list[FxwrapError | None]:
    """Compiles kernels ahead of their first launch; returns for each what went wrong, or None.

    C++ kernels are compiled for this machine, Triton kernels for their GPU where this machine has one, others as their
    language says. Kernels in languages that nobody has registered are left alone.
    """
    found: list[FxwrapError | None] = [None] * len(uses)
    for language, positions in _by_language([use.kernel for use in uses]):
        if language.kernels.compile is not None:
            errors = language.kernels.compile([uses[position] for position in positions])
            for position, error in zip(positions, errors, strict=True):
                found[position] = error
    return found


def _by_language(kernels: Sequence[KernelText]) -> list[tuple[Language, list[int]]]:
    """Returns the languages of kernels that are registered, each with the positions of its kernels."""
    positions: dict[str, list[int]] = {}
    for position, kernel in enumerate(kernels):
        positions.setdefault(kernel.language, []).append(position)
    found = [(find_language(name), place) for name, place in positions.items()]
    return [(language, place) for language, place in found if language is not None]


# --- C++ ------------------------------------------------------------------------------------------------------------


def _load_cpp(source: str, signature: tuple[str, ...], options: KernelOptions) -> Launcher:
    kernel = KernelText(CPP.name, source, signature, options)
    prepare_kernels((kernel,))
    return load_program(compiled_kernels((kernel.symbol,))[kernel.symbol], symbol=f"program_{kernel.symbol}")


def _prepare_cpp(kernels: Sequence[KernelText]) -> None:
    wanted = {kernel.symbol: kernel for kernel in kernels}
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


def _compile_cpp(uses: Sequence[KernelUse]) -> list[FxwrapError | None]:
    """Compiles C++ kernels together, and where that fails one by one."""
    kernels = [use.kernel for use in uses]
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


CPP_KERNELS = KernelRuntime(_load_cpp, _prepare_cpp, _compile_cpp)
"""How C++ kernels are run on this machine."""

# --- Triton ---------------------------------------------------------------------------------------------------------


def _compile_triton(uses: Sequence[KernelUse]) -> list[FxwrapError | None]:
    """Compiles Triton kernels for GPUs that are there; the others run in the interpreter, which needs only Triton."""
    on_gpu = [use.device.type == CUDA.device_type and torch.cuda.is_available() for use in uses]
    compiled = iter(compile_triton_kernels([use for use, there in zip(uses, on_gpu, strict=True) if there]))
    return [next(compiled) if there else _failure(triton_package) for there in on_gpu]


TRITON_KERNELS = KernelRuntime(load_triton_kernel, compile=_compile_triton, begin=start_workers)
"""How Triton kernels are run: on the GPU that their tensors are on, else in Triton's interpreter."""

USER_TRITON_KERNELS = KernelRuntime(load_user_kernel)
"""How Triton kernels of the user's are run; they are compiled at their first launch, as Triton does."""

# --- launches from emitted C++ --------------------------------------------------------------------------------------

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
    """Launches a kernel that emitted C++ cannot call by itself; its source is part of the emitted text."""
    pairs = tuple([(name, option) for name, option in json.loads(options)])
    load_kernel(language, source, tuple(signature), pairs)(tuple(grid), *tensors, *outs, *numbers)
