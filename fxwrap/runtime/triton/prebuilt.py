"""Triton binaries of saved programs, by kernel; launchers load them instead of compiling."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from fxwrap.runtime.triton.variants import TritonVariant

_MAX_KERNELS = 4096
"""Kernels whose binaries stay in memory; Triton compiles those that were evicted again."""


@dataclass(frozen=True)
class TritonBinary:
    """A compiled kernel: Triton's cache key and files by name.

    `variant` is the form for fxwrap's own launches; None where only Triton can launch it.
    """

    key: str
    files: Mapping[str, bytes]
    variant: TritonVariant | None


_LOCK = threading.Lock()
_PREBUILT: OrderedDict[str, dict[str, TritonBinary]] = OrderedDict()


def register_prebuilt_triton(symbol: str, binary: TritonBinary) -> None:
    """Registers a binary of the kernel with this symbol."""
    with _LOCK:
        _PREBUILT.setdefault(symbol, {}).setdefault(binary.key, binary)
        if len(_PREBUILT) > _MAX_KERNELS:
            _PREBUILT.popitem(last=False)


def find_prebuilt_triton(symbol: str) -> list[TritonBinary]:
    """Returns the registered binaries of a kernel."""
    with _LOCK:
        return list(_PREBUILT.get(symbol, {}).values())


def has_prebuilt_variant(symbol: str, capability: int) -> bool:
    """Whether a registered variant was compiled for this compute capability (90 for 9.0) and needs no Triton."""
    variants = [item.variant for item in find_prebuilt_triton(symbol)]
    return any(variant is not None and variant.capability == capability for variant in variants)
