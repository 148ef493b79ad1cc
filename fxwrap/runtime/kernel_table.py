"""The kernels that emitted FX graphs launch, by content hash."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet, WeakValueDictionary

import torch
from torch.utils.weak import WeakIdKeyDictionary

from fxwrap.caching import bounded_cache
from fxwrap.devices import Launcher, RegisteredLanguage
from fxwrap.errors import KernelTextError
from fxwrap.runtime.cpp_kernels import KernelText
from fxwrap.runtime.kernel_texts import RegisteredKernel as RegisteredKernel
from fxwrap.runtime.kernel_texts import parse_kernels
from fxwrap.runtime.kernels import load_kernel, prepare_kernels

_KERNELS: WeakValueDictionary[str, RegisteredKernel] = WeakValueDictionary()
"""Kernels by content hash. Emitted graphs own them in their metadata. Those of graphs that only have their hashes are
owned by `own_kernel`'s cache, from the first launch or fake propagation on, and Triton kernels by torch's table."""

_UNPREPARED: WeakSet[RegisteredKernel] = WeakSet()
"""Kernels registered since the last first launch. Those of a graph are registered, and compile faster, together."""

_TABLE_LOCK = threading.RLock()
"""Held while a table is changed or iterated: threads register and launch kernels at the same time."""


@contextmanager
def empty_kernel_table() -> Iterator[None]:
    """Runs without registered kernels and restores the table afterwards: for tests."""
    before, unprepared = dict(_KERNELS), set(_UNPREPARED)
    _KERNELS.clear()
    _UNPREPARED.clear()
    try:
        yield
    finally:
        _KERNELS.clear()
        _KERNELS.update(before)
        _UNPREPARED.clear()
        _UNPREPARED.update(unprepared)


def register_kernel(kernel_hash: str, kernel: RegisteredKernel) -> RegisteredKernel:
    """Registers a kernel under its content hash and returns it, or the equal one that is registered.

    It remains available while the result is referenced.
    """
    with _TABLE_LOCK:
        registered = _KERNELS.setdefault(kernel_hash, kernel)
        if registered is kernel:
            _UNPREPARED.add(kernel)
    return registered


def find_registered_kernel(kernel_hash: object) -> RegisteredKernel | None:
    """Returns the kernel with a content hash; None for an unknown hash or an object of another type."""
    return _KERNELS.get(kernel_hash) if isinstance(kernel_hash, str) else None


def get_registered_kernel(kernel_hash: str) -> RegisteredKernel:
    """Returns the kernel with a content hash. Raises KernelTextError for an unknown one."""
    kernel = _KERNELS.get(kernel_hash)
    if kernel is None:
        reason = "no kernel with this content hash is loaded in this process"
        remedy = (
            "Emit the program with fxwrap.to_fx in this process first; in an exported program, run the node of "
            "fxwrap::register_kernels first, and export it again if the texts there lack this kernel"
        )
        raise KernelTextError(kernel_hash, reason, remedy)
    return kernel


@bounded_cache(4096)
def find_launcher(kernel_hash: str, _language: RegisteredLanguage | None) -> Launcher:
    """Returns the launcher of a kernel for the current registration of its language."""
    kernel = get_registered_kernel(kernel_hash)
    with _TABLE_LOCK:
        unprepared = list(_UNPREPARED)
        _UNPREPARED.difference_update(unprepared)
    prepare_kernels(tuple([KernelText(item.language, *item.text) for item in unprepared]))
    return load_kernel(kernel.language, *kernel.text)


@bounded_cache(4096)
def own_kernel(kernel_hash: str) -> RegisteredKernel:
    """Keeps a kernel available for graphs that were traced through the operator and only have its hash."""
    return get_registered_kernel(kernel_hash)


_KERNELS_OF_TEXTS = WeakIdKeyDictionary()
"""The kernels of each tensor of texts that was registered, which they live as long as."""


def register_kernel_texts(texts: torch.Tensor) -> None:
    """Registers the kernels of an exported program; calls after the first return at once."""
    if texts in _KERNELS_OF_TEXTS:
        return
    parsed = parse_kernels(texts)
    with _TABLE_LOCK:
        _KERNELS_OF_TEXTS[texts] = [register_kernel(kernel_hash, kernel) for kernel_hash, kernel in parsed.items()]
