"""Sizes and positions of the tiles of streaming reductions as C++."""

from __future__ import annotations

from collections.abc import Sequence

from fxwrap.loop_ir import Axis, KernelError
from fxwrap.symbolic import Size

GROUP = 4
"""Sums that `contract` computes together, as in `kernel.h`."""


def element_count(axes: Sequence[Axis]) -> int:
    """Returns the number of elements of axes. Raises KernelError if it is symbolic: it is the size of a tile."""
    count = 1
    for axis in axes:
        if not isinstance(axis.size, int):
            raise KernelError(f"the size {axis.size} of a tile of its streaming reduction is symbolic")
        count *= axis.size
    return count


def at_most(limit: int, size: Size) -> int:
    """Returns the elements of an axis in a tile: its size, or a limit."""
    return max(1, min(limit, size)) if isinstance(size, int) else limit


def round_up(number: int, multiple: int = GROUP) -> int:
    """Returns the least multiple that is not below a number."""
    return -(-number // multiple) * multiple


def position_of(axes: Sequence[Axis], stride: int = 1) -> str:
    """Returns the row-major position of an element of axes, times a stride."""
    text = "0"
    for axis in axes:
        text = axis.name if text == "0" else f"({text} * {axis.size} + {axis.name})"
    return text if stride == 1 or text == "0" else f"{text} * {stride}"
