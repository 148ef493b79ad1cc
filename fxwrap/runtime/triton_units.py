"""What Triton has compiled as a translation unit, which emitted C++ is linked with."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from fxwrap.runtime.cpp_kernels import KernelText
from fxwrap.runtime.native import PROGRAM_FLAGS, NativeSource
from fxwrap.runtime.triton_binaries import compiled_by_triton
from fxwrap.runtime.triton_compile import launch_keywords
from fxwrap.runtime.triton_provided import provided_triton
from fxwrap.runtime.triton_variants import TritonVariant, variant_of


def variants_symbol(symbol: str) -> str:
    """Returns the name under which the compilations of a kernel are linked, by the symbol of the kernel."""
    return f"variants_of_{symbol}"


def compiled_variants(kernel: KernelText) -> list[TritonVariant]:
    """Returns what this process has of a kernel, compiled or from a file, that can be launched without Triton."""
    constants, _ = launch_keywords(kernel.options)
    found = [item.variant for item in provided_triton(kernel.symbol)]
    found += [variant_of(compiled, constants) for compiled in compiled_by_triton(kernel)]
    by_use = {(item.capability, item.classes): item for item in found if item is not None}
    return [by_use[use] for use in sorted(by_use)]


def variants_unit(kernels: Mapping[str, Sequence[TritonVariant]]) -> list[NativeSource]:
    """Returns a translation unit with the compilations of kernels, by the kernels' symbols; none where there are none.

    It names files beside it, which hold the machine code.
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
    rest = ", ".join([*map(str, numbers), _bytes(variant.classes), _bytes(variant.passed)])
    return f'{{"{variant.name}", {_file(variant.cubin, "cubin", files)}, {ptx}, {rest}}}'


def _bytes(content: bytes) -> str:
    text = "".join([f"\\{item:03o}" for item in content])
    return f'reinterpret_cast<const uint8_t*>("{text}")'


def _file(content: bytes, ending: str, files: dict[str, bytes]) -> str:
    """Returns the symbol of a file's content, which is also the file's name."""
    name = f"{ending}_{hashlib.sha256(content).hexdigest()[:24]}"
    files[name] = content
    return name


def _data(name: str) -> str:
    """Returns the declaration of a file's content. `.incbin` is what every assembler has, and costs no parsing."""
    lines = (".section .rodata", ".balign 16", f".local {name}", f"{name}:", f'.incbin "{name}"', ".previous")
    text = "".join(["    " + _quoted(f"{line}\n") + "\n" for line in lines])
    return f'asm(\n{text});\nextern "C" const char {name}[];\n'


def _quoted(line: str) -> str:
    escaped = line.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
