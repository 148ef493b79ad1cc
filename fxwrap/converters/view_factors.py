"""Index ranges of a base divided into mixed-radix factors, one for each dimension of a view that steps through it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

from fxwrap.caching import bounded_cache
from fxwrap.converters.view_operators import StridedLayout
from fxwrap.symbolic import (
    Size,
    SymbolInfo,
    difference,
    divide_exactly,
    evaluate,
    is_at_most,
    is_equal,
    product,
    size_symbols,
    split_multiple,
    total,
)

_SAMPLE = 1009
"""The value of every symbol where strides are ordered."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a dimension of the view: `size` positions, `stride` elements apart."""

    size: Size
    stride: Size
    dim: int

    @property
    def end(self) -> Size:
        return product((self.size, self.stride))


Pieces: TypeAlias = tuple[Piece, ...]
"""Pieces that are adjacent in memory, the outermost first: together one dimension."""


def element_count(pieces: Pieces) -> Size:
    """Returns the number of positions of pieces together, 1 for none."""
    return product([piece.size for piece in pieces])


@dataclass(frozen=True, slots=True)
class Factor:
    """A mixed-radix factor of an index range: `size` positions of `stride` elements.

    The view has `pieces` of it from the position `start` on; without pieces, only that position.
    """

    size: Size
    stride: Size
    start: Size
    pieces: Pieces


@dataclass(frozen=True, slots=True)
class Range:
    """Dimensions of the base that are adjacent in memory: `size` elements, `stride` apart.

    `boundaries` are the strides of the outer ones of its dimensions, the smallest first.
    """

    size: Size
    stride: Size
    boundaries: tuple[Size, ...]


@dataclass(frozen=True, slots=True)
class FactorDivision:
    """Divides bases into factors for one view. `infos` are the ranges of symbols."""

    view: StridedLayout
    infos: Mapping[str, SymbolInfo]

    def divide(self, base: StridedLayout, coalesce: bool) -> list[Factor] | str:
        """Returns the factors of the base's index ranges, or the reason why the view has no such form."""
        ranges = _ranges(base)
        pieces_by_range = self._assign_pieces(ranges, coalesce)
        offset = difference(self.view.offset, base.offset)
        starts: dict[int, Size] = {}
        for index in sorted(range(len(ranges)), key=lambda index: -magnitude(ranges[index].stride)):
            quotient, offset = (
                (0, offset) if ranges[index].stride == 0 else split_multiple(offset, ranges[index].stride)
            )
            starts[index] = product((quotient, ranges[index].stride))
        if isinstance(pieces_by_range, str):
            return pieces_by_range
        if offset != 0:
            return f"the offset {offset} is not that of an element by the strides of its base"
        factors: list[Factor] = []
        for index, item in enumerate(ranges):
            parts = self._divide_range(item, pieces_by_range[index], starts[index], is_whole_base=len(ranges) == 1)
            if isinstance(parts, str):
                return parts
            factors += parts
        starts_at = [factor.start for factor in factors if factor.start != 0]
        if len(starts_at) == 1:  # a view begins in its base, so the only start is not negative
            return factors
        unknown = [start for start in starts_at if not is_at_most(0, start, self.infos)]
        return f"{unknown[0]}, where a slice would start, may be negative" if unknown else factors

    def _assign_pieces(self, ranges: Sequence[Range], coalesce: bool) -> list[list[Pieces]] | str:
        """Returns, for each range, the dimensions of the view that step through it, the outermost first.

        With `coalesce`, dimensions that are adjacent in memory are one group. A dimension belongs to the range with the
        largest stride that divides its stride; of several, as windows have, to one of the same size without other
        dimensions. Repeated elements are those of a repeated dimension.
        """
        assigned: list[list[Piece]] = [[] for _ in ranges]
        for dim, (size, stride) in enumerate(self.view.dimensions):
            if size == 1:
                continue
            possible = [index for index, item in enumerate(ranges) if _divides(item.stride, stride)]
            if stride == 0:
                possible = [index for index in possible if is_equal(ranges[index].size, size) and not assigned[index]]
            elif not possible:
                return f"no stride of its base divides the stride {stride} of dimension {dim}"
            if possible:
                best = max(
                    possible,
                    key=lambda index: (
                        magnitude(ranges[index].stride), not assigned[index], is_equal(ranges[index].size, size)
                    ),
                )  # fmt: skip
                assigned[best].append(Piece(size, stride, dim))
        return [_groups(pieces, coalesce) for pieces in assigned]

    def _divide_range(
        self, item: Range, groups: list[Pieces], start: Size, *, is_whole_base: bool
    ) -> list[Factor] | str:
        """Returns a range's factors, the outermost first: at most one group of pieces is in each.

        A view does not leave its base, nor a range that is all of its base, unless the symbols say that it does.
        """
        dims = sorted({piece.dim for group in groups for piece in group})
        where = f"dimensions {dims}, which step through {item.size} elements of its base from {start} on"
        if item.stride == 0:
            return [Factor(item.size, 0, 0, groups[0] if groups else ())]
        end = product((item.size, item.stride))
        if not self._has_no_carry(end, item.stride, groups, start):
            leaves = is_at_most(total((end, 1)), total((self._last(end, groups, start), item.stride)), self.infos)
            if leaves or not is_whole_base:
                return f"{where}, may leave them"
        boundaries = [item.stride]
        for boundary in item.boundaries:
            divided = _split_groups(groups, boundary)
            if self._has_no_carry(boundary, item.stride, divided, start):
                groups = divided
                boundaries.append(boundary)
        boundaries.append(end)
        for index, group in reversed(list(enumerate(groups))):
            lower = max([boundary for boundary in boundaries if _divides(boundary, group[-1].stride)], key=magnitude)
            has_inner = index + 1 < len(groups) and _divides(lower, groups[index + 1][-1].stride)
            if not has_inner and isinstance(divide_exactly(group[-1].stride, lower), int):
                continue
            boundary = self._boundary_between(boundaries, item.stride, groups, group, start)
            if boundary is None:
                return f"{where}, are not those of a mixed-radix division: stride {group[-1].stride} has no factor"
            boundaries = sorted([*boundaries, boundary], key=magnitude)
        return _factors_between(boundaries, groups, start) or f"{where}, overlap or have unknown distances"

    def _boundary_between(
        self, boundaries: Sequence[Size], unit: Size, groups: Sequence[Pieces], outer: Pieces, start: Size
    ) -> Size | None:
        """Returns a stride at which a factor for `outer` can begin."""
        stride = outer[-1].stride
        candidates = [stride]
        for boundary in boundaries:
            if isinstance(stride, int) and isinstance(boundary, int):
                candidates.append(math.gcd(stride, boundary))
        for candidate in dict.fromkeys(candidates):
            below = [boundary for boundary in boundaries if magnitude(boundary) < magnitude(candidate)]
            above = [boundary for boundary in boundaries if magnitude(boundary) > magnitude(candidate)]
            if not below or not above or not _divides(below[-1], candidate) or not _divides(candidate, above[0]):
                continue
            if self._has_no_carry(candidate, unit, groups, start):
                return candidate
        return None

    def _has_no_carry(self, boundary: Size, unit: Size, groups: Sequence[Pieces], start: Size) -> bool:
        """Whether each group is a multiple of a stride, or stays below it, whatever the others' positions are."""
        return is_at_most(total((self._last(boundary, groups, start), unit)), boundary, self.infos)

    def _last(self, boundary: Size, groups: Sequence[Pieces], start: Size) -> Size:
        """Returns the last position of the groups below a stride, relative to a multiple of it."""
        _, last = split_multiple(start, boundary)
        for group in groups:
            if not _divides(boundary, group[-1].stride):
                last = total((last, *[difference(piece.end, piece.stride) for piece in group]))
        return last


def magnitude(size: Size) -> Any:
    """Returns a number by which sizes are compared: that of a symbolic size for sampled symbols."""
    return size if isinstance(size, int) else _sampled(size)


@bounded_cache(16384)
def _sampled(size: Size) -> Any:
    return evaluate(size, dict.fromkeys(size_symbols(size), _SAMPLE))


def _divides(divisor: Size, size: Size) -> bool:
    if divisor == 0 or size == 0:
        return divisor == size
    return divide_exactly(size, divisor) is not None


def _ranges(base: StridedLayout) -> list[Range]:
    ranges: list[Range] = []
    for size, stride in base.dimensions:
        if size == 1:
            continue
        last = ranges[-1] if ranges else None
        if last is not None and stride != 0 and is_equal(last.stride, product((size, stride))):
            ranges[-1] = Range(product((last.size, size)), stride, (last.stride, *last.boundaries))
        else:
            ranges.append(Range(size, stride, ()))
    return ranges


def _groups(pieces: Sequence[Piece], coalesce: bool) -> list[Pieces]:
    groups: list[Pieces] = []
    for piece in sorted(pieces, key=lambda piece: -magnitude(piece.stride)):
        if coalesce and groups and is_equal(groups[-1][-1].stride, piece.end):
            groups[-1] = (*groups[-1], piece)
        else:
            groups.append((piece,))
    return groups


def _split_groups(groups: Sequence[Pieces], boundary: Size) -> list[Pieces]:
    """Returns the groups, those that cross a stride in two."""
    divided: list[Pieces] = []
    for group in groups:
        divided += _split_group(group, boundary)
    return divided


def _split_group(group: Pieces, boundary: Size) -> list[Pieces]:
    for index, piece in enumerate(group):
        if is_equal(piece.stride, boundary):
            return [group[: index + 1], group[index + 1 :]] if group[index + 1 :] else [group]
        inner = divide_exactly(boundary, piece.stride) if piece.stride != 0 else None
        outer = None if inner is None else divide_exactly(piece.size, inner)
        if inner is None or outer is None or inner == 1 or outer == 1:
            continue
        upper, lower = Piece(outer, boundary, piece.dim), Piece(inner, piece.stride, piece.dim)
        return [(*group[:index], upper), (lower, *group[index + 1 :])]
    return [group]


def _factors_between(boundaries: Sequence[Size], groups: Sequence[Pieces], start: Size) -> list[Factor] | None:
    factors: list[Factor] = []
    remaining = list(groups)
    for lower, upper in reversed(list(pairwise(boundaries))):
        size = divide_exactly(upper, lower)
        position, start = split_multiple(start, lower)
        inside = [group for group in remaining if _divides(lower, group[-1].stride)]
        if size is None or len(inside) > 1:
            return None
        remaining = [group for group in remaining if group not in inside]
        factors.append(Factor(size, lower, position, inside[0] if inside else ()))
    return factors if start == 0 and not remaining else None
