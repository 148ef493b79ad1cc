"""Kernels by language, ready to launch.

A kernel is a source text in which the function is called `kernel`, a signature with one entry a parameter ("*f32" for a
tensor, "i64" or "f64" for a number), and options. Its parameters are tensors first, then numbers.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeAlias

import torch

from fxwrap.errors import FxwrapError
from fxwrap.runtime.native import NativeSource, compile_cpp, load_program
from fxwrap.runtime.triton_kernels import load_triton_kernel

Launcher: TypeAlias = Callable[..., None]
"""`launcher(grid, *tensors, *outs, *numbers)`."""

KernelOptions: TypeAlias = tuple[tuple[str, str | int | float | bool], ...]

_NUMBERS = {
    "i1": "bool", "bool": "bool", "i8": "int8_t", "i16": "int16_t", "i32": "int32_t", "i64": "int64_t", "u8": "uint8_t",
    "u16": "uint16_t", "u32": "uint32_t", "u64": "uint64_t", "f32": "float", "f64": "double",
}  # fmt: skip


@cache
def load_kernel(language: str, source: str, signature: tuple[str, ...], options: KernelOptions) -> Launcher:
    """Returns the launcher of a kernel, compiled or found in the cache.

    "cpp" is compiled by the C++ compiler and called once a launch, so its grid is all ones; "triton" runs on its
    tensors' GPU, and through Triton's interpreter where the tensors are on the CPU. Raises FxwrapError for another
    language or a signature or option that the language does not have, NativeBuildError where C++ does not compile.
    """
    match language:
        case "cpp":
            return _load_cpp_kernel(source, signature, options)
        case "triton":
            return load_triton_kernel(source, options)
        case _:
            raise FxwrapError(f"there is no launcher for kernels in '{language}', only for 'cpp' and 'triton'")


def cpp_symbol(source: str, signature: tuple[str, ...], options: KernelOptions) -> str:
    """Returns the symbol that a C++ kernel is linked under: equal kernels have equal symbols."""
    return f"kernel_{hashlib.sha256(repr((signature, options, source)).encode()).hexdigest()[:24]}"


def cpp_declaration(symbol: str, signature: Sequence[str]) -> str:
    """Returns the declaration of a C++ kernel. Raises FxwrapError for an entry that C++ has no type for."""
    for entry in signature:
        if not entry.startswith("*") and entry not in _NUMBERS:
            raise FxwrapError(f"C++ has no type for a kernel's parameter '{entry}', only for {', '.join(_NUMBERS)}")
    parameters = ["void*" if entry.startswith("*") else _NUMBERS[entry] for entry in signature]
    return f'extern "C" void {symbol}({", ".join(parameters)});'


def cpp_kernel_source(symbol: str, source: str, options: KernelOptions) -> NativeSource:
    """Returns a C++ kernel as a translation unit in which it is called `symbol`; the option `flags` replaces the flags.

    Raises FxwrapError for another option.
    """
    given = dict(options)
    flags = given.pop("flags", None)
    if given:
        raise FxwrapError(f"a C++ kernel has the option 'flags' and no option '{next(iter(given))}'")
    unit = NativeSource(source)
    chosen = unit.flags if flags is None else tuple(shlex.split(str(flags)))
    return NativeSource(source, (*chosen, f"-Dkernel={symbol}"))


def _load_cpp_kernel(source: str, signature: tuple[str, ...], options: KernelOptions) -> Launcher:
    symbol = cpp_symbol(source, signature, options)
    kernel = cpp_kernel_source(symbol, source, options)
    program = load_program(compile_cpp(_cpp_launcher(symbol, signature), name="kernel", extra_sources=[kernel]))

    def launch(grid: Sequence[int], *arguments: torch.Tensor | float) -> None:
        if any(size != 1 for size in grid):
            raise FxwrapError(f"a C++ kernel is called once, so its grid is (1, 1, 1), not {tuple(grid)}")
        program(*arguments)

    return launch


def _cpp_launcher(symbol: str, signature: Sequence[str]) -> str:
    """Returns a program of the bridge that only calls the kernel."""
    slots, ints, floats, inputs, passed = 0, 0, 0, [], []
    for entry in signature:
        if entry.startswith("*"):
            inputs.append(f"Slot{{{slots}}}")
            passed.append(f"data_ptr(f, Slot{{{slots}}})")
            slots += 1
        elif entry in ("f32", "f64"):
            inputs.append(f"FloatSymbol{{{floats}}}")
            passed.append(f"f.floats[{floats}]")
            floats += 1
        else:
            kind = "BoolSymbol" if entry in ("i1", "bool") else "IntSymbol"
            inputs.append(f"{kind}{{{ints}}}")
            passed.append(f"f.ints[{ints}]")
            ints += 1
    table = ", ".join([f'{{"argument {index}", {text}}}' for index, text in enumerate(inputs)])
    declared = f"static constexpr Input inputs[] = {{{table}}};\n" if inputs else ""
    field = ".inputs = program::inputs, " if inputs else ""
    return (
        '#include "bridge.h"\n'
        f"{cpp_declaration(symbol, signature)}\n"
        "namespace program {\nusing namespace fxwrap;\n"
        f"static void run(Frame& f) {{ {symbol}({', '.join(passed)}); }}\n{declared}}}\n"
        f'FXWRAP_EXPORT const fxwrap::Program fxwrap_program = {{.name = "kernel", .slots = {slots}, .ints = {ints}, '
        f".floats = {floats}, {field}.run = program::run}};\n"
    )


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
