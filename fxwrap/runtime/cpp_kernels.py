"""C++ kernels as translation units: several in one where they are generated, so that their header is read once."""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from fxwrap.errors import FxwrapError
from fxwrap.kernel_names import function_in
from fxwrap.runtime.native import NativeSource

KernelOptions: TypeAlias = tuple[tuple[str, str | int | float | bool], ...]

GENERATED: Final = '#include "kernel.h"\n'
"""How generated kernels begin. They define nothing but their function, so several share a translation unit."""

_UNIT_LENGTH: Final = 4000
"""Characters of source from which on it is worth starting the compiler once more, beside the first."""

_LONGEST_UNIT: Final = 20000

_NUMBERS = {
    "i1": "bool", "bool": "bool", "i8": "int8_t", "i16": "int16_t", "i32": "int32_t", "i64": "int64_t", "u8": "uint8_t",
    "u16": "uint16_t", "u32": "uint32_t", "u64": "uint64_t", "f32": "float", "f64": "double",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class KernelText:
    """A kernel as `load_kernel` takes it."""

    language: str
    source: str
    signature: tuple[str, ...]
    options: KernelOptions = ()

    @property
    def symbol(self) -> str:
        """The symbol that a C++ kernel is linked under: equal kernels have equal symbols."""
        return cpp_symbol(self.source, self.signature, self.options)


def cpp_symbol(source: str, signature: tuple[str, ...], options: KernelOptions) -> str:
    """Returns the symbol that a C++ kernel is linked under: equal kernels have equal symbols."""
    return f"{function_in(source)}_{hashlib.sha256(repr((signature, options, source)).encode()).hexdigest()[:24]}"


def cpp_declaration(symbol: str, signature: Sequence[str]) -> str:
    """Returns the declaration of a C++ kernel. Raises FxwrapError for an entry that C++ has no type for."""
    for entry in signature:
        if not entry.startswith("*") and entry not in _NUMBERS:
            raise FxwrapError(f"C++ has no type for a kernel's parameter '{entry}', only for {', '.join(_NUMBERS)}")
    parameters = ["void*" if entry.startswith("*") else _NUMBERS[entry] for entry in signature]
    return f'extern "C" void {symbol}({", ".join(parameters)});'


def cpp_kernel_units(kernels: Sequence[KernelText]) -> list[NativeSource]:
    """Returns C++ kernels as translation units in which each is called by its symbol.

    Generated kernels share as few units as compile fast on this machine's processors; others have one each. The option
    `flags` replaces a kernel's compiler flags. Raises FxwrapError for another option.
    """
    shared, units = [], []
    for kernel in {kernel.symbol: kernel for kernel in kernels}.values():
        flags = _flags(kernel.options)
        if flags is None and kernel.source.startswith(GENERATED):
            shared.append(kernel)
        else:
            chosen = NativeSource(kernel.source).flags if flags is None else tuple(shlex.split(flags))
            units.append(NativeSource(kernel.source, (*chosen, f"-D{function_in(kernel.source)}={kernel.symbol}")))
    return [*[NativeSource(_unit(group)) for group in _groups(shared)], *units]


def cpp_launchers(kernels: Sequence[KernelText]) -> str:
    """Returns a library of the bridge with a program for each kernel that only calls it: `program_<its symbol>`."""
    parts = [_launcher(kernel.symbol, kernel.signature) for kernel in kernels]
    return '#include "bridge.h"\n' + "\n".join(parts)


def _flags(options: KernelOptions) -> str | None:
    given = dict(options)
    flags = given.pop("flags", None)
    if given:
        raise FxwrapError(f"a C++ kernel has the option 'flags' and no option '{next(iter(given))}'")
    return None if flags is None else str(flags)


def _groups(kernels: Sequence[KernelText]) -> list[list[KernelText]]:
    """Returns the kernels in groups of about equal length, each in the order given."""
    total = sum(len(kernel.source) for kernel in kernels)
    count = max(min(os.cpu_count() or 1, -(-total // _UNIT_LENGTH)), -(-total // _LONGEST_UNIT))
    groups: list[list[KernelText]] = []
    length = 0
    for kernel in kernels:
        if not groups or length * count >= total * len(groups):
            groups.append([])
        groups[-1].append(kernel)
        length += len(kernel.source)
    return groups


def _unit(kernels: Sequence[KernelText]) -> str:
    parts = []
    for kernel in kernels:
        name, text = function_in(kernel.source), kernel.source.removeprefix(GENERATED).strip()
        parts.append(f"#define {name} {kernel.symbol}\n{text}\n#undef {name}\n")
    return "\n".join([GENERATED, *parts])


def _launcher(symbol: str, signature: Sequence[str]) -> str:
    """Returns a program of the bridge that only calls a kernel."""
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
    field = f".inputs = {symbol}_program::inputs, " if inputs else ""
    return (
        f"{cpp_declaration(symbol, signature)}\n"
        f"namespace {symbol}_program {{\nusing namespace fxwrap;\n"
        f"static void run(Frame& f) {{ {symbol}({', '.join(passed)}); }}\n{declared}}}\n"
        f'FXWRAP_EXPORT const fxwrap::Program program_{symbol} = {{.name = "kernel", .slots = {slots}, .ints = {ints}, '
        f".floats = {floats}, {field}.run = {symbol}_program::run}};\n"
    )
