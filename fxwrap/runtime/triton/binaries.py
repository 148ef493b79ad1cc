"""Triton binaries of kernels: in saved programs, and as a translation unit for emitted C++.

Triton's cache key covers source, arguments, options, target and its version: an imported binary is found by exactly the
same compilation.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from fxwrap.runtime.cpp_kernels import KernelText
from fxwrap.runtime.native import PROGRAM_FLAGS, NativeSource
from fxwrap.runtime.triton.compile import find_jit_function, import_triton, split_launch_options
from fxwrap.runtime.triton.prebuilt import TritonBinary, find_prebuilt_triton, triton_binary
from fxwrap.runtime.triton.variants import TritonVariant, variant_of


def collect_triton_binaries(kernel: KernelText) -> list[TritonBinary]:
    """Returns all binaries of a kernel in this process, compiled by Triton or registered from files."""
    constants, _ = split_launch_options(kernel.options)
    compiled = [triton_binary(item, constants) for item in triton_compiled_kernels(kernel)]
    known = {item.key for item in compiled}
    return [*compiled, *[item for item in find_prebuilt_triton(kernel.symbol) if item.key not in known]]


def triton_compiled_kernels(kernel: KernelText) -> list[Any]:
    """Returns Triton's compiled kernel objects of a kernel in this process."""
    function = find_jit_function(kernel)
    caches = getattr(function, "device_caches", {})
    return [item for cache in list(caches.values()) for item in list(cache[0].values()) if hasattr(item, "hash")]


def install_triton_binary(binary: TritonBinary) -> None:
    """Imports a binary into Triton's cache."""
    import_triton()
    manager = importlib.import_module("triton.runtime.cache").get_cache_manager(binary.key)
    metadata = next(name for name in binary.files if name.endswith(".json"))
    if manager.get_group(metadata):
        return
    manager.put_group(metadata, {name: manager.put(content, name) for name, content in binary.files.items()})


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
    numbers = (variant.capability, "false" if variant.ptx else "true", variant.threads, variant.shared, variant.scratch)
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
