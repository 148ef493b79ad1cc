"""C++ kernels as translation units: generated kernels share units, whose header is then parsed once."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

from fxwrap.devices.kernel_names import find_function_name
from fxwrap.errors import FxwrapError
from fxwrap.runtime.checks import raise_error
from fxwrap.runtime.native import KERNEL_FLAGS, NativeSource

KernelOptions: TypeAlias = tuple[tuple[str, str | int | float | bool], ...]

GENERATED_PREAMBLE: Final = '#include "kernel.h"\n'
"""The first line of generated kernels. They define only their function, so several can share a translation unit."""

_MIN_UNIT_CHARS: Final = 4000
"""Characters of source that justify another compiler process."""

_MAX_UNIT_CHARS: Final = 20000

_SCALAR_TYPES = {
    "i1": "bool", "bool": "bool", "i8": "int8_t", "i16": "int16_t", "i32": "int32_t", "i64": "int64_t", "u8": "uint8_t",
    "u16": "uint16_t", "u32": "uint32_t", "u64": "uint64_t", "f32": "float", "f64": "double",
}  # fmt: skip

_C_TYPES = {
    name: getattr(ctypes, f"c_{kind.removesuffix('_t')}") for name, kind in _SCALAR_TYPES.items()
}  # c_bool, c_int8, ..., c_double


class _Kernel(Protocol):
    @property
    def language(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def signature(self) -> tuple[str, ...]: ...
    @property
    def options(self) -> KernelOptions: ...


@dataclass(frozen=True, slots=True)
class KernelText:
    """A kernel: the arguments of `load_kernel`."""

    language: str
    source: str
    signature: tuple[str, ...]
    options: KernelOptions = ()

    @classmethod
    def of(cls, kernel: _Kernel) -> KernelText:
        """Returns the text of a kernel of a program or of a printer."""
        return cls(kernel.language, kernel.source, kernel.signature, kernel.options)

    @property
    def symbol(self) -> str:
        """The linker symbol of a C++ kernel: equal kernels have equal symbols."""
        return cpp_symbol(self.source, self.signature, self.options)


def cpp_symbol(source: str, signature: tuple[str, ...], options: KernelOptions) -> str:
    """Returns the linker symbol of a C++ kernel: equal kernels have equal symbols."""
    digest = hashlib.sha256(repr((signature, options, source)).encode()).hexdigest()
    return f"{find_function_name(source)}_{digest[:24]}"


def emit_cpp_declaration(symbol: str, signature: Sequence[str]) -> str:
    """Returns the declaration of a C++ kernel. Raises FxwrapError for an entry without a C++ type."""
    for entry in signature:
        if not entry.startswith("*") and entry not in _SCALAR_TYPES:
            raise FxwrapError(
                f"C++ has no type for a kernel's parameter '{entry}', only for {', '.join(_SCALAR_TYPES)}"
            )
    return f'extern "C" void {symbol}({", ".join(_parameter_types(signature))});'


def _parameter_types(signature: Sequence[str]) -> list[str]:
    return ["void*" if entry.startswith("*") else _SCALAR_TYPES[entry] for entry in signature]


def make_translation_units(kernels: Sequence[KernelText]) -> list[NativeSource]:
    """Returns translation units that define C++ kernels under their symbols.

    Generated kernels share units, as many as compile in parallel; others have one each. The option `flags` replaces a
    kernel's compiler flags. Raises FxwrapError for another option.
    """
    shared, units = [], []
    for kernel in {kernel.symbol: kernel for kernel in kernels}.values():
        flags = _flags(kernel.options)
        if flags is None and kernel.source.startswith(GENERATED_PREAMBLE):
            shared.append(kernel)
        else:
            own_flags = KERNEL_FLAGS if flags is None else tuple(shlex.split(flags))
            rename = f"-D{find_function_name(kernel.source)}={kernel.symbol}"
            units.append(NativeSource(kernel.source, (*own_flags, rename), kernels=1))
    return [*[NativeSource(_unit(group), kernels=len(group)) for group in _groups(shared)], *units]


def emit_cpp_entry_points(kernels: Sequence[KernelText]) -> str:
    """Returns a unit with an exported function per kernel, `call_<symbol>`, which calls it and returns its error.

    The error is null, or texts of its kind and its message. The functions use no bridge.
    """
    parts = []
    for kernel in kernels:
        types = _parameter_types(kernel.signature)
        parameters = ", ".join([f"{kind} a{index}" for index, kind in enumerate(types)])
        arguments = ", ".join([f"a{index}" for index in range(len(types))])
        parts.append(
            f"{emit_cpp_declaration(kernel.symbol, kernel.signature)}\n"
            f'extern "C" __attribute__((visibility("default"))) const char** call_{kernel.symbol}({parameters}) '
            f"{{ return error_of([&] {{ {kernel.symbol}({arguments}); }}); }}\n"
        )
    return _ENTRY_POINTS_PREAMBLE + "".join(parts)


_ENTRY_POINTS_PREAMBLE: Final = """\
#include <cstdint>
#include "kernel_failure.h"
template <class Call> static const char** error_of(const Call& call) {
  static thread_local const char* texts[2];
  try {
    call();
    return nullptr;
  } catch (const fxwrap::KernelFailure& failure) {
    texts[0] = failure.kind, texts[1] = failure.message;
    return texts;
  }
}
"""


def load_cpp_entry_point(library: Path, kernel: KernelText) -> Callable[..., None]:
    """Returns `function(*tensors, *outs, *scalars)` of a kernel in a library with `emit_cpp_entry_points`."""
    function = ctypes.CDLL(str(library))[f"call_{kernel.symbol}"]
    is_pointer = [entry.startswith("*") for entry in kernel.signature]
    function.argtypes = [ctypes.c_void_p if entry.startswith("*") else _C_TYPES[entry] for entry in kernel.signature]
    function.restype = ctypes.POINTER(ctypes.c_char_p)

    def launch(*arguments: Any) -> None:
        passed = [item.data_ptr() if tensor else item for tensor, item in zip(is_pointer, arguments, strict=True)]
        error = function(*passed)
        if error:
            raise_error(error[0].decode(), error[1].decode())

    return launch


def emit_cpp_launchers(kernels: Sequence[KernelText]) -> str:
    """Returns a library with a program per kernel that only calls it: `program_<symbol>`."""
    parts = [_launcher(kernel.symbol, kernel.signature) for kernel in kernels]
    return '#include "bridge.h"\n' + "\n".join(parts)


def _flags(options: KernelOptions) -> str | None:
    remaining = dict(options)
    flags = remaining.pop("flags", None)
    if remaining:
        raise FxwrapError(f"a C++ kernel has the option 'flags' and no option '{next(iter(remaining))}'")
    return None if flags is None else str(flags)


def _groups(kernels: Sequence[KernelText]) -> list[list[KernelText]]:
    """Splits kernels, in order, into groups of about equal length."""
    total = sum(len(kernel.source) for kernel in kernels)
    count = max(min(os.cpu_count() or 1, -(-total // _MIN_UNIT_CHARS)), -(-total // _MAX_UNIT_CHARS))
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
        name, text = find_function_name(kernel.source), kernel.source.removeprefix(GENERATED_PREAMBLE).strip()
        parts.append(f"#define {name} {kernel.symbol}\n{text}\n#undef {name}\n")
    return "\n".join([GENERATED_PREAMBLE, *parts])


def _launcher(symbol: str, signature: Sequence[str]) -> str:
    slots, ints, floats, inputs, arguments = 0, 0, 0, [], []
    for entry in signature:
        if entry.startswith("*"):
            inputs.append(f"Slot{{{slots}}}")
            arguments.append(f"data_ptr(f, Slot{{{slots}}})")
            slots += 1
        elif entry in ("f32", "f64"):
            inputs.append(f"FloatSymbol{{{floats}}}")
            arguments.append(f"f.floats[{floats}]")
            floats += 1
        else:
            kind = "BoolSymbol" if entry in ("i1", "bool") else "IntSymbol"
            inputs.append(f"{kind}{{{ints}}}")
            arguments.append(f"f.ints[{ints}]")
            ints += 1
    table = ", ".join([f'{{"argument {index}", {text}}}' for index, text in enumerate(inputs)])
    declared = f"static constexpr Input inputs[] = {{{table}}};\n" if inputs else ""
    field = f".inputs = {symbol}_program::inputs, " if inputs else ""
    return (
        f"{emit_cpp_declaration(symbol, signature)}\n"
        f"namespace {symbol}_program {{\nusing namespace fxwrap;\n"
        f"static void run(Frame& f) {{ {symbol}({', '.join(arguments)}); }}\n{declared}}}\n"
        f'FXWRAP_EXPORT const fxwrap::Program program_{symbol} = {{.name = "kernel", .slots = {slots}, .ints = {ints}, '
        f".floats = {floats}, {field}.run = {symbol}_program::run}};\n"
    )
