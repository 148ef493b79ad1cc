"""User-defined kernels without a text: the objects themselves, found in this process by a content hash."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from fxwrap.errors import FxwrapError


@dataclass(frozen=True, eq=False)
class InProcessKernel:
    """A Triton kernel object, the constant arguments of its launches, and the block shapes of its descriptors."""

    kernel: Any
    constants: Mapping[str, object] = field(default_factory=dict)
    descriptors: Mapping[str, Sequence[int]] = field(default_factory=dict)


class KernelKey(str):
    """A content hash that keeps its kernel alive: a kernel is available while a program has its key."""

    kernel: InProcessKernel


_KERNELS: WeakValueDictionary[str, InProcessKernel] = WeakValueDictionary()


def register_in_process_kernel(key: str, kernel: InProcessKernel) -> KernelKey:
    """Registers a kernel, or finds the equal one, and returns the key that keeps it available."""
    owner = KernelKey(key)
    owner.kernel = _KERNELS.setdefault(str(key), kernel)
    return owner


def get_in_process_kernel(key: str, reason: str) -> InProcessKernel:
    """Returns a kernel by its content hash; `reason` tells why it has no text.

    Raises FxwrapError in a process that did not compile it, or after its program was deleted.
    """
    kernel = _KERNELS.get(key)
    if kernel is None:
        raise FxwrapError(
            f"this program launches a Triton kernel that exists only in the process that compiled it: {reason}. "
            "Compile the model in this process, or change the kernel so that its text defines all of it"
        )
    return kernel
