"""Interleaved accesses: several accesses that together are contiguous, as those of the two elements of a pair."""

from __future__ import annotations

from dataclasses import dataclass

from fxwrap.caching import bounded_cache
from fxwrap.loop_ir.atoms import Axis
from fxwrap.loop_ir.body_operations import Load, Store
from fxwrap.loop_ir.index import Index
from fxwrap.loop_ir.kernel import Kernel

MAX_INTERLEAVED = 8
"""The most accesses that count as one contiguous access."""


@dataclass(frozen=True)
class InterleavedAccess:
    """Loads or stores of one buffer of adjacent elements, whose stride along an axis is their number.

    `positions` are the operations in the order of their elements. None has a mask.
    """

    axis: Axis
    positions: tuple[int, ...]

    @property
    def count(self) -> int:
        """The number of accesses."""
        return len(self.positions)

    @property
    def halves(self) -> bool:
        """Whether a block of all elements splits into those of each access in halves: the number is a power of two."""
        return self.count & (self.count - 1) == 0


@bounded_cache(1024)
def interleaved_accesses(kernel: Kernel) -> tuple[InterleavedAccess, ...]:
    """Returns the interleaved accesses of a kernel; each operation is part of at most one."""
    groups: dict[tuple[type, str, Index], dict[int, int]] = {}
    for position, item in enumerate(kernel.operations):
        if isinstance(item, Load | Store) and item.mask is None and getattr(item, "mode", "set") == "set":
            offset = _constant_term(item.index)
            offsets = groups.setdefault((type(item), item.buffer, item.index - offset), {})
            offsets.setdefault(offset, position)
    result: list[InterleavedAccess] = []
    for (_, _, index), offsets in groups.items():
        axis = _interleaved_axis(index) if len(offsets) > 1 else None
        if axis is not None:
            result += _consecutive(axis[0], axis[1], offsets)
    return tuple(result)


def _interleaved_axis(index: Index) -> tuple[Axis, int] | None:
    """Returns the axis with the smallest stride of an index, and the stride, if that many accesses are combined."""
    strides = [(index.stride(axis), axis) for axis in index.axes() if axis.size != 1]
    constant = sorted([
        (abs(number), axis.name, number, axis)
        for stride, axis in strides if stride is not None and (number := stride.constant)
    ])  # fmt: skip
    if not constant or not 1 < constant[0][2] <= MAX_INTERLEAVED:
        return None
    return constant[0][3], constant[0][2]


def _consecutive(axis: Axis, count: int, offsets: dict[int, int]) -> list[InterleavedAccess]:
    result, remaining = [], sorted(offsets)
    while remaining:
        run = range(remaining[0], remaining[0] + count)
        complete = {*remaining} >= {*run}
        if complete:
            result.append(InterleavedAccess(axis, tuple([offsets[offset] for offset in run])))
        remaining = remaining[count if complete else 1 :]
    return result


def _constant_term(index: Index) -> int:
    return next((coefficient for monomial, coefficient in index.terms if not monomial), 0)
