"""Kernels of the user's that no text can stand for: the objects themselves, kept for this process by a content hash."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fxwrap.errors import FxwrapError


@dataclass(frozen=True, eq=False)
class LiveKernel:
    """A kernel of Triton's, the arguments that every launch has by name, and the block shapes of descriptors."""

    kernel: Any
    constants: Mapping[str, Any] = field(default_factory=dict)
    descriptors: Mapping[str, Any] = field(default_factory=dict)


_KERNELS: dict[str, LiveKernel] = {}


def keep_kernel(key: str, kernel: LiveKernel) -> None:
    """Keeps a kernel under its content hash for as long as the process lives; an equal one stays as it is."""
    _KERNELS.setdefault(key, kernel)


def live_kernel(key: str, reason: str) -> LiveKernel:
    """Returns a kernel by its content hash; `reason` says why there is no text of it.

    Raises FxwrapError in a process that has not compiled it.
    """
    found = _KERNELS.get(key)
    if found is None:
        raise FxwrapError(
            f"this program launches a Triton kernel that only the process that compiled it has: {reason}. "
            "Compile the model in this process, or change the kernel so that its text is all that it is"
        )
    return found
