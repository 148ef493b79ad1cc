"""Tensors of one launch that share elements, as far as their types decide it.

A kernel runs its elements in any order, so none of its tensors may share an element with one that it writes. The bytes
of a tensor are `start + sum(index * stride)` over its dimensions, a last one being the bytes of an element. Two tensors
share a byte if a bounded linear Diophantine equation, the difference of the two sums, has a solution; strides that
nest, as those of views of dense tensors do, leave one or two values to try for each dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd

from fxwrap.symbolic import Size
from fxwrap.wrapper_ir.types import TensorType, Value

_MAX_STEPS, _MAX_VALUES = 4096, 64
"""How many partial solutions of an equation, and how many values of a difference of indices, are tried."""


@dataclass(frozen=True, slots=True)
class Access:
    """The access of a launch to a tensor value: the root of its memory, and its first byte there."""

    value: Value
    root: str
    start: Size
    is_write: bool

    @property
    def type(self) -> TensorType:
        """The value's type."""
        return self.value.tensor_type


def certain_overlap(accesses: Iterable[Access]) -> tuple[Access, Access] | None:
    """Returns two accesses, one of which writes, that share an element, the one that writes first; None if none do.

    Sizes with symbols count as positive. Tensors are compared by their first byte if symbols decide their position or
    strides, and in full otherwise: what remains undecided is not returned.
    """
    by_root: dict[str, list[Access]] = {}
    for access in accesses:
        if 0 not in access.type.sizes:
            by_root.setdefault(access.root, []).append(access)
    for group in by_root.values():
        if len(group) > 1 and any(access.is_write for access in group):
            pair = _with_equal_start(group) or _static_overlap(group)
            if pair is not None:
                return pair if pair[0].is_write else pair[::-1]
    return None


def _with_equal_start(group: Sequence[Access]) -> tuple[Access, Access] | None:
    """Returns two accesses with the same first element, one of which writes."""
    first: dict[Size, Access] = {}
    for access in group:
        other = first.setdefault(access.start, access)
        if other is not access and (access.is_write or other.is_write):
            return other, access
        if access.is_write:
            first[access.start] = access
    return None


def _static_overlap(group: Sequence[Access]) -> tuple[Access, Access] | None:
    """Returns two accesses of constant position and strides that share an element, one of which writes."""
    before: list[tuple[int, Access]] = []  # those that end after the start of the next one
    static = [(access.start, access) for access in group if isinstance(access.start, int) and access.type.is_static]
    for start, access in sorted(static, key=lambda item: item[0]):
        before = [(end, other) for end, other in before if end > start]
        for _, other in before:
            if (access.is_write or other.is_write) and shares_bytes(other, access):
                return other, access
        size = access.type.storage_bytes
        assert isinstance(size, int)
        before.append((start + size, access))
    return None


def shares_bytes(first: Access, second: Access) -> bool:
    """Whether two accesses of one root, of constant positions and strides and with elements, certainly share a byte."""
    ranges: dict[int, tuple[int, int]] = {}  # by stride in bytes: the bounds of the difference of two indices
    for length, stride in _dimensions(first.type):
        low, high = ranges.get(stride, (0, 0))
        ranges[stride] = low, high + length - 1
    for length, stride in _dimensions(second.type):
        low, high = ranges.get(stride, (0, 0))
        ranges[stride] = low - (length - 1), high
    terms = [(stride, *ranges[stride]) for stride in sorted(ranges, reverse=True) if stride]
    return _has_solution(terms, int(second.start) - int(first.start))


def _dimensions(type_: TensorType) -> list[tuple[int, int]]:
    """Returns the sizes and the strides in bytes of a static type, with a dimension of the bytes of an element."""
    size = type_.dtype.itemsize
    return [*[(int(length), int(stride) * size) for length, stride in zip(type_.sizes, type_.strides)], (size, 1)]


def _has_solution(terms: Sequence[tuple[int, int, int]], total: int) -> bool:
    """Whether a sum of multiples of positive strides, each between two bounds, is certainly a total."""
    least, most, common = [0], [0], [0]  # of the terms from a position on
    for stride, low, high in reversed(terms):
        least.append(least[-1] + stride * low)
        most.append(most[-1] + stride * high)
        common.append(gcd(common[-1], stride))
    pending, seen = [(0, total)], set[tuple[int, int]]()
    while pending and len(seen) < _MAX_STEPS:
        state = position, rest = pending.pop()
        if position == len(terms):
            if rest == 0:
                return True
            continue
        after = len(terms) - position
        if state in seen or rest % common[after]:
            continue
        seen.add(state)
        stride, low, high = terms[position]
        smallest = max(low, -((most[after - 1] - rest) // stride))
        largest = min(high, (rest - least[after - 1]) // stride, smallest + _MAX_VALUES)
        pending += [(position + 1, rest - stride * count) for count in range(smallest, largest + 1)]
    return False
