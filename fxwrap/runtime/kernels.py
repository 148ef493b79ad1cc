"""Kernels by language, ready to launch.

A kernel has a source text that defines its function (`fxwrap/devices/kernel_names.py` determines its name), a signature
with one entry per parameter ("*f32" for a tensor, "i64" or "f64" for a scalar), and options. Tensors come first in the
signature, then scalars.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from fxwrap.caching import bounded_cache, shared_cache
from fxwrap.devices import CPP, CUDA, KernelRuntime, Launcher, RegisteredLanguage, find_language, get_language
from fxwrap.errors import FxwrapError, NativeBuildError
from fxwrap.runtime import native
from fxwrap.runtime.cpp_kernels import (
    KernelOptions,
    KernelText,
    emit_cpp_entry_points,
    emit_cpp_launchers,
    load_cpp_entry_point,
    make_translation_units,
)
from fxwrap.runtime.triton.compile import KernelUse, compile_ahead, compile_triton_kernels, start_workers
from fxwrap.runtime.triton.compile import import_triton as triton_package
from fxwrap.runtime.triton.kernels import load_triton_kernel
from fxwrap.runtime.triton.user_kernels import load_user_kernel

_UNIT_GRID = (1, 1, 1)


def load_kernel(language: str, source: str, signature: tuple[str, ...], options: KernelOptions) -> Launcher:
    """Returns `launcher(grid, *tensors, *outs, *scalars)` of a kernel, which is compiled or loaded from the cache.

    Equal kernels share a launcher while it is in use. Kernels in gridless languages ("cpp") take the grid (1, 1, 1).
    "triton" and "user_triton" kernels run on the GPU of their tensors, and in Triton's interpreter for CPU tensors.
    Raises FxwrapError for an unregistered language or an invalid signature or option, NativeBuildError where C++ does
    not compile.
    """
    return _launcher(get_language(language), source, signature, options)


@shared_cache(1024)
def _launcher(
    language: RegisteredLanguage, source: str, signature: tuple[str, ...], options: KernelOptions
) -> Launcher:
    launcher = _load(language, source, signature, options)
    return _require_unit_grid(language.traits.name, launcher) if language.traits.gridless else launcher


@shared_cache(1024)
def _load(language: RegisteredLanguage, source: str, signature: tuple[str, ...], options: KernelOptions) -> Launcher:
    return language.kernels.load(source, signature, options)


def _require_unit_grid(language: str, function: Launcher) -> Launcher:
    def launch(grid: Sequence[int], *arguments: torch.Tensor | float) -> None:
        if grid != _UNIT_GRID and any(size != 1 for size in grid):
            raise FxwrapError(f"kernels in '{language}' are called once: the grid must be (1, 1, 1), not {tuple(grid)}")
        function(*arguments)

    return launch


def load_gridless_kernel(language: str, source: str, signature: tuple[str, ...], options: KernelOptions) -> Launcher:
    """Returns `function(*tensors, *outs, *scalars)` of a kernel in a gridless language. Raises as `load_kernel`."""
    return _load(get_language(language), source, signature, options)


def load_cpp_kernel(source: str, signature: tuple[str, ...], options: KernelOptions) -> Launcher:
    """Returns `function(*tensors, *outs, *scalars)` of a C++ kernel. Raises as `load_kernel`."""
    return load_gridless_kernel(CPP.name, source, signature, options)


@bounded_cache(64)
def prepare_kernels(kernels: tuple[KernelText, ...]) -> None:
    """Compiles kernels together, except those that are compiled already; `load_kernel` then finds them.

    A kernel that does not compile raises NativeBuildError when it is loaded.
    """
    for language, positions in _group_by_language(kernels):
        if language.kernels.precompile is not None:
            language.kernels.precompile([kernels[position] for position in positions])


def compile_kernels(uses: Sequence[KernelUse]) -> list[FxwrapError | None]:
    """Compiles kernels ahead of their first launch; returns the error or None of each.

    C++ kernels are compiled for this machine, Triton kernels for the GPU where this machine has one, others by their
    language's `compile`. Kernels in unregistered languages are skipped.
    """
    results: list[FxwrapError | None] = [None] * len(uses)
    for language, positions in _group_by_language([use.kernel for use in uses]):
        if language.kernels.compile is not None:
            errors = language.kernels.compile([uses[position] for position in positions])
            for position, error in zip(positions, errors, strict=True):
                results[position] = error
    return results


def _group_by_language(kernels: Sequence[KernelText]) -> list[tuple[RegisteredLanguage, list[int]]]:
    """Returns the registered languages of kernels, each with the positions of its kernels."""
    positions: dict[str, list[int]] = {}
    for position, kernel in enumerate(kernels):
        positions.setdefault(kernel.language, []).append(position)
    languages = [(find_language(name), members) for name, members in positions.items()]
    return [(language, members) for language, members in languages if language is not None]


# --- C++ ------------------------------------------------------------------------------------------------------------


def _load_cpp(source: str, signature: tuple[str, ...], options: KernelOptions) -> Launcher:
    kernel = KernelText(CPP.name, source, signature, options)
    if native.find_bridge() is not None:
        return _load_by_bridge(kernel)
    prepare_kernels((kernel,))
    library = native.find_interim_kernel(kernel.symbol) or _compile_interim_library([kernel])
    launch = load_cpp_entry_point(library, kernel)
    return native.InterimLauncher(launch, partial(_load_by_bridge, kernel))


def _load_by_bridge(kernel: KernelText) -> Launcher:
    prepare_kernels((kernel,))
    # The cache folder may have been deleted since: prepare_kernels remembers what it has prepared.
    library = native.compiled_kernels((kernel.symbol,)).get(kernel.symbol) or _compile_library([kernel])
    return native.load_program(library, symbol=f"program_{kernel.symbol}")


def _prepare_cpp(kernels: Sequence[KernelText]) -> None:
    by_symbol = {kernel.symbol: kernel for kernel in kernels}
    compiled = _compiled_symbols(tuple(by_symbol))
    missing = [kernel for symbol, kernel in by_symbol.items() if symbol not in compiled]
    if missing:
        compile_missing = _index_library if native.find_bridge() is not None else _index_interim_library
        try:
            compile_missing(missing)
        except NativeBuildError:
            if len(missing) == 1:
                raise


def _compiled_symbols(symbols: tuple[str, ...]) -> set[str]:
    """Returns the symbols of the kernels that can be launched as the bridge is now: compiled, or not yet."""
    compiled = set(native.compiled_kernels(symbols))
    if native.find_bridge() is None:
        compiled |= {symbol for symbol in symbols if native.find_interim_kernel(symbol) is not None}
    return compiled


def _index_library(kernels: Sequence[KernelText]) -> None:
    native.index_kernel_library([kernel.symbol for kernel in kernels], _compile_library(kernels))


def _index_interim_library(kernels: Sequence[KernelText]) -> None:
    """Compiles kernels for launches without the bridge. When it is there, the same kernels are linked with it."""
    native.register_interim_kernels([kernel.symbol for kernel in kernels], _compile_interim_library(kernels))
    native.after_bridge(partial(_index_library, kernels))


def _compile_interim_library(kernels: Sequence[KernelText]) -> Path:
    units = make_translation_units(kernels)
    return native.compile_cpp(emit_cpp_entry_points(kernels), name="interim", extra_sources=units)


def _compile_library(kernels: Sequence[KernelText]) -> Path:
    return native.compile_cpp(
        emit_cpp_launchers(kernels), name="kernels", extra_sources=make_translation_units(kernels)
    )


def compile_kernel_library(kernels: Sequence[KernelText]) -> Path:
    """Returns a library with a program per C++ kernel, compiled or from the cache.

    Raises NativeBuildError where a kernel does not compile.
    """
    unique = list({kernel.symbol: kernel for kernel in kernels}.values())
    prebuilt = {native.find_prebuilt_kernel(kernel.symbol) for kernel in unique}
    return (prebuilt.pop() if len(prebuilt) == 1 else None) or _compile_library(unique)


def _compile_cpp(uses: Sequence[KernelUse]) -> list[FxwrapError | None]:
    """Compiles C++ kernels together, or one by one if that fails."""
    kernels = [use.kernel for use in uses]
    error = _catch_error(lambda: prepare_kernels(tuple(kernels)))
    if error is not None and len(kernels) == 1:
        return [error]
    try:
        compiled = _compiled_symbols(tuple([kernel.symbol for kernel in kernels]))
    except NativeBuildError as no_compiler:
        return [no_compiler] * len(kernels)
    return [
        None if kernel.symbol in compiled else _catch_error(partial(prepare_kernels, (kernel,))) for kernel in kernels
    ]


def _catch_error(function: Callable[[], object]) -> FxwrapError | None:
    try:
        function()
    except FxwrapError as error:
        return error
    return None


CPP_KERNELS = KernelRuntime(_load_cpp, _prepare_cpp, _compile_cpp)
"""C++ kernels on this machine."""

# --- Triton ---------------------------------------------------------------------------------------------------------


def _compile_triton(uses: Sequence[KernelUse]) -> list[FxwrapError | None]:
    """Compiles Triton kernels for the GPUs of this machine; others run in the interpreter, which needs only Triton."""
    on_gpu = [use.device.type == CUDA.device_type and torch.cuda.is_available() for use in uses]
    errors = iter(compile_triton_kernels([use for use, is_on_gpu in zip(uses, on_gpu, strict=True) if is_on_gpu]))
    return [next(errors) if is_on_gpu else _catch_error(triton_package) for is_on_gpu in on_gpu]


TRITON_KERNELS = KernelRuntime(
    load_triton_kernel, compile=_compile_triton, warm_up=start_workers, compile_ahead=compile_ahead
)
"""Triton kernels: on the GPU of their tensors, else in Triton's interpreter."""

USER_TRITON_KERNELS = KernelRuntime(load_user_kernel)
"""User-defined Triton kernels; Triton compiles them at their first launch."""

# --- launches from emitted C++ --------------------------------------------------------------------------------------

_LAUNCH = (
    "launch(str language, str source, str[] signature, str options, int[] grid, Tensor[] tensors, Tensor(a!)[] outs, "
    "Scalar[] numbers) -> ()"
)
_library = torch.library.Library("fxwrap_runtime", "DEF")  # type: ignore[no-untyped-call]
_library.define(_LAUNCH)  # type: ignore[no-untyped-call]


def serialize_options(options: KernelOptions) -> str:
    """Returns a kernel's options in the form that the operator `fxwrap_runtime::launch` takes."""
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
    """Launches a kernel that emitted C++ cannot call itself; its source is part of the emitted text."""
    pairs = tuple([(name, option) for name, option in json.loads(options)])
    load_kernel(language, source, tuple(signature), pairs)(tuple(grid), *tensors, *outs, *numbers)
