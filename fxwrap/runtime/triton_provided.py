"""What files brought along of what Triton has compiled, by kernel: launchers take it up, and Triton is not asked."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from fxwrap.runtime.triton_variants import TritonVariant


@dataclass(frozen=True)
class TritonBinary:
    """A compiled kernel: the key that Triton has it under, and its files by name.

    `variant` is the same as fxwrap's own launches take it; None where only Triton can launch it.
    """

    key: str
    files: Mapping[str, bytes]
    variant: TritonVariant | None


_LOCK = threading.Lock()
_PROVIDED: dict[str, dict[str, TritonBinary]] = {}


def provide_triton(symbol: str, binary: TritonBinary) -> None:
    """Makes a compiled kernel known to this process, by the symbol of the kernel."""
    with _LOCK:
        _PROVIDED.setdefault(symbol, {}).setdefault(binary.key, binary)


def provided_triton(symbol: str) -> list[TritonBinary]:
    """Returns what is known of a kernel by its symbol."""
    with _LOCK:
        return list(_PROVIDED.get(symbol, {}).values())


def launches_provided(symbol: str, capability: int) -> bool:
    """Says whether something that is known of a kernel was compiled for this chip, 90 for 9.0, and needs no Triton."""
    found = [item.variant for item in provided_triton(symbol)]
    return any(variant is not None and variant.capability == capability for variant in found)
