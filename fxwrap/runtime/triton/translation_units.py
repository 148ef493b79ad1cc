"""Triton binaries as a translation unit for emitted C++."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from fxwrap.runtime.cpp_kernels import KernelText
from fxwrap.runtime.native import PROGRAM_FLAGS, NativeSource
from fxwrap.runtime.triton.binaries import triton_compiled_kernels
from fxwrap.runtime.triton.compile import split_launch_options
from fxwrap.runtime.triton.prebuilt import find_prebuilt_triton
from fxwrap.runtime.triton.variants import TritonVariant, variant_of


def variants_symbol(symbol: str) -> str:
    """Returns the linker symbol of a kernel's variants."""
    return f"variants_of_{symbol}"


def compiled_variants(kernel: KernelText) -> list[TritonVariant]:
    """Returns the variants of a kernel in this process, compiled or from files, that launch without Triton."""
    constants, _ = split_launch_options(kernel.options)
    variants = [item.variant for item in find_prebuilt_triton(kernel.symbol)]
    variants += [variant_of(compiled, constants) for compiled in triton_compiled_kernels(kernel)]
    by_use = {(item.capability, item.classes): item for item in variants if item is not None}
    return [by_use[use] for use in sorted(by_use)]


def variants_unit(kernels: Mapping[str, Sequence[TritonVariant]]) -> list[NativeSource]:
    """Returns a translation unit with the variants of kernels by symbol, or an empty list.

    It includes files with the machine code.
    """
    files: dict[str, bytes] = {}
    tables = []
    for symbol, variants in sorted(kernels.items()):
        if variants:
            rows = ",\n".join([f"    {_row(variant, files)}" for variant in variants])
            name = variants_symbol(symbol)
            table = f"static const fxwrap::Variant {name}_rows[] = {{\n{rows}\n}};\n"
            tables.append(f'{table}extern "C" const fxwrap::Variants {name} = {{{name}_rows, {len(variants)}}};\n')
    if not tables:
        return []
    text = "\n".join(['#include "bridge.h"\n', *[_data(name) for name in files], *tables])
    return [NativeSource(text, PROGRAM_FLAGS, tuple(files.items()))]


def _row(variant: TritonVariant, files: dict[str, bytes]) -> str:
    ptx = _file(variant.ptx.encode() + b"\0", "ptx", files) if variant.ptx else "nullptr"
    numbers = (variant.capability, "false" if variant.ptx else "true", variant.threads, variant.shared)
    rest = ", ".join([*map(str, numbers), _bytes(variant.classes), _bytes(variant.parameter_passing)])
    return f'{{"{variant.name}", {_file(variant.cubin, "cubin", files)}, {ptx}, {rest}}}'


def _bytes(content: bytes) -> str:
    text = "".join([f"\\{item:03o}" for item in content])
    return f'reinterpret_cast<const uint8_t*>("{text}")'


def _file(content: bytes, ending: str, files: dict[str, bytes]) -> str:
    """Adds a file; returns its name, which is also its symbol."""
    name = f"{ending}_{hashlib.sha256(content).hexdigest()[:24]}"
    files[name] = content
    return name


def _data(name: str) -> str:
    """Returns the definition of a file's symbol. `.incbin` avoids parsing the content as C++."""
    lines = (".section .rodata", ".balign 16", f".local {name}", f"{name}:", f'.incbin "{name}"', ".previous")
    text = "".join(["    " + _quoted(f"{line}\n") + "\n" for line in lines])
    return f'asm(\n{text});\nextern "C" const char {name}[];\n'


def _quoted(line: str) -> str:
    escaped = line.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
