"""Kernels by language, ready to launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from fxwrap.errors import FxwrapError

Launcher = Callable[..., None]
"""`launcher(grid, *tensors, *outs, *numbers)`."""


@cache
def load_kernel(
    language: str, source: str, signature: tuple[str, ...], options: tuple[tuple[str, Any], ...]
) -> Launcher:
    """Returns the launcher of a kernel. Raises FxwrapError for a language without one."""
    raise FxwrapError(f"there is no launcher for kernels in '{language}'")
