"""Triton binaries, exported from Triton's cache into saved programs and imported again.

Triton's cache key covers source, arguments, options, target and its version: an imported binary is found by exactly the
same compilation.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from fxwrap.runtime.cpp_kernels import KernelText
from fxwrap.runtime.triton.compile import import_triton, split_launch_options, triton_jit_function
from fxwrap.runtime.triton.prebuilt import TritonBinary, find_prebuilt_triton
from fxwrap.runtime.triton.variants import variant_of

_LAUNCH_FILE_SUFFIXES = (".json", ".ptx", ".cubin", ".hsaco")
"""The files that a launch needs; the others are intermediate stages."""


def collect_triton_binaries(kernel: KernelText) -> list[TritonBinary]:
    """Returns all binaries of a kernel in this process, compiled by Triton or registered from files."""
    constants, _ = split_launch_options(kernel.options)
    compiled = [_binary(item, constants) for item in triton_compiled_kernels(kernel)]
    known = {item.key for item in compiled}
    return [*compiled, *[item for item in find_prebuilt_triton(kernel.symbol) if item.key not in known]]


def triton_compiled_kernels(kernel: KernelText) -> list[Any]:
    """Returns Triton's compiled kernel objects of a kernel in this process."""
    function = triton_jit_function(kernel.source, kernel.signature, kernel.options)
    caches = getattr(function, "device_caches", {})
    return [item for cache in list(caches.values()) for item in list(cache[0].values()) if hasattr(item, "hash")]


def _binary(compiled: Any, constants: Collection[str]) -> TritonBinary:
    files = {name: Path(path) for name, path in compiled.metadata_group.items() if name.endswith(_LAUNCH_FILE_SUFFIXES)}
    contents = {name: path.read_bytes() for name, path in sorted(files.items())}
    return TritonBinary(compiled.hash, contents, variant_of(compiled, constants))


def install_triton_binary(binary: TritonBinary) -> None:
    """Imports a binary into Triton's cache."""
    import_triton()
    manager = importlib.import_module("triton.runtime.cache").get_cache_manager(binary.key)
    metadata = next(name for name in binary.files if name.endswith(".json"))
    if manager.get_group(metadata):
        return
    manager.put_group(metadata, {name: manager.put(content, name) for name, content in binary.files.items()})
