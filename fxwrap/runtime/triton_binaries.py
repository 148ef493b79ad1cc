"""What Triton has compiled, taken from its cache and put back there, so that a saved program brings it along.

Triton keeps what it compiled under a key that covers source, arguments, options, target and its own version, so that
what is put back is found by that very compilation and no other.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from fxwrap.runtime.cpp_kernels import KernelText
from fxwrap.runtime.triton_compile import gpu_function, launch_keywords, triton
from fxwrap.runtime.triton_provided import TritonBinary, provided_triton
from fxwrap.runtime.triton_variants import variant_of

_KEPT = (".json", ".ptx", ".cubin", ".hsaco")
"""The files of a compiled kernel that it is launched by; the others are stages on the way."""


def compiled_triton(kernel: KernelText) -> list[TritonBinary]:
    """Returns what this process has of a kernel, for all its uses: compiled by Triton here, or brought by files."""
    constants, _ = launch_keywords(kernel.options)
    here = [_binary(item, constants) for item in compiled_by_triton(kernel)]
    known = {item.key for item in here}
    return [*here, *[item for item in provided_triton(kernel.symbol) if item.key not in known]]


def compiled_by_triton(kernel: KernelText) -> list[Any]:
    """Returns Triton's own objects for what this process has compiled a kernel to."""
    function = gpu_function(kernel.source, kernel.signature, kernel.options)
    caches = getattr(function, "device_caches", {})
    return [item for cache in list(caches.values()) for item in list(cache[0].values()) if hasattr(item, "hash")]


def _binary(compiled: Any, constants: Collection[str]) -> TritonBinary:
    files = {name: Path(path) for name, path in compiled.metadata_group.items() if name.endswith(_KEPT)}
    contents = {name: path.read_bytes() for name, path in sorted(files.items())}
    return TritonBinary(compiled.hash, contents, variant_of(compiled, constants))


def put_back(binary: TritonBinary) -> None:
    """Puts a compiled kernel into Triton's cache, for Triton to find instead of compiling."""
    triton()
    manager = importlib.import_module("triton.runtime.cache").get_cache_manager(binary.key)
    head = next(name for name in binary.files if name.endswith(".json"))
    if manager.get_group(head):
        return
    manager.put_group(head, {name: manager.put(content, name) for name, content in binary.files.items()})
