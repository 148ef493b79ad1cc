"""Sizes and positions of the tiles of streaming reductions as C++, and the assertions of these."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fxwrap.loop_ir import Axis, Kernel, KernelError, StreamingReduction
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


def asserts_by_scope(
    kernel: Kernel, parts: StreamingReduction, outer_axes: Iterable[Axis], asserts: Iterable[int]
) -> dict[str, list[int]]:
    """Returns the assertions that are checked once for each tile of rows, row, step, key, and score.

    `outer_axes` are those of the loops around rows. Raises KernelError for an assertion that depends on columns.
    """
    outer, row, streamed = set(outer_axes), {parts.row}, set(parts.axes)
    scopes = {
        "tile": outer, "row": outer | row, "step": outer | {*parts.axes[:-1]}, "key": outer | streamed,
        "score": outer | streamed | row,
    }  # fmt: skip
    result: dict[str, list[int]] = {scope: [] for scope in scopes}
    for position in asserts:
        axes = kernel.value_axes[position]
        scope = next((scope for scope, allowed in scopes.items() if axes <= allowed), None)
        if scope is None:
            raise KernelError("an assertion depends on the width of a head")
        result[scope].append(position)
    return result
