"""The exchanges that a sweep tries in one section: free leaves, and started buffers that take over their memory.

The cost of an exchange is the logarithm of one more than the number of equally good ones that would be there by chance:
among many sets of leaves some have similar sizes, while an equal size of two large ones hardly is a coincidence.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb

from fxwrap.memory_planning.orders import FREEDOM_UNIT

TOLERANCE_UNIT = 1024
"""Unit of `tolerance`."""


@dataclass(frozen=True)
class _Limits:
    """Numbers of sets of free leaves, of sets of pending buffers, and of exchanges tried in a state."""

    free_sets: int
    pending_sets: int
    exchanges: int


_FULL_LIMITS, _SPARE_LIMITS = _Limits(1000, 600, 100), _Limits(300, 200, 30)
"""Limits where no bytes are free, and where many exchanges are of similar sizes, so that most are not tried anyway."""

_MAX_PARTLY_FILLED, _MAX_PARTLY_FILLED_LEAVES = 12, 4
"""Number of sets of free leaves that are partly filled, and of leaves in each."""

_OLD_COST = 1.0
"""Cost of an exchange of leaves that were free before."""

_GAP_COST = 1.0
"""Cost of a gap, beside the coincidence that no more bytes are left over."""


@dataclass(frozen=True)
class Exchange:
    """Positions of free leaves and of pending buffers that take over their memory.

    `left` bytes are left over as a gap; -1 for no gap.
    """

    cost: int
    ended: tuple[int, ...]
    started: tuple[int, ...]
    left: int


@dataclass(frozen=True)
class ExchangeQuery:
    """Sizes by position; those below zero are of leaves that were free before the section.

    Sizes are equal if they differ by at most `tolerance` of `TOLERANCE_UNIT`. `spare` bytes are free in the section; -1
    where none is in any section.
    """

    free: tuple[int, ...]
    pending: tuple[int, ...]
    tolerance: int
    spare: int


def margin(size: int, tolerance: int) -> int:
    """Returns the largest difference of two sizes that are taken for equal."""
    return size * tolerance // TOLERANCE_UNIT


def find_exchanges(query: ExchangeQuery) -> list[Exchange]:
    """Returns exchanges with the first pending buffer, the cheapest first.

    They are of few free or pending buffers, or of all but few.
    """
    return _Finder(query).run()


@dataclass(frozen=True)
class _Set:
    size: int
    positions: tuple[int, ...]
    has_new: bool = False
    has_old: bool = False


_EMPTY = _Set(0, ())


class _Finder:
    def __init__(self, query: ExchangeQuery) -> None:
        self._query = query
        self._limits = _FULL_LIMITS if query.spare < 0 else _SPARE_LIMITS
        self._most_free = _largest_set(len(query.free), self._limits.free_sets)
        self._most_pending = _largest_set(len(query.pending) - 1, self._limits.pending_sets)
        free = _sets_of(query.free, 0, self._most_free)
        self._free = sorted(free, key=lambda chosen: chosen.size)
        self._sizes = [chosen.size for chosen in self._free]
        self._pending = list(_sets_of(query.pending, 1, self._most_pending))
        self._ended = [position for position, size in enumerate(query.free) if size > 0]
        self._ended_size = sum([query.free[position] for position in self._ended])

    def run(self) -> list[Exchange]:
        pending = self._query.pending
        exchanges: list[Exchange] = []
        total = sum(pending)
        for named in self._pending:
            few = (0, *named.positions)
            exchanges += self._equal_sizes(named, few, pending[0] + named.size)
            if len(pending) - len(named.positions) > self._most_pending + 1:
                rest = _without(range(len(pending)), named.positions)
                exchanges += self._equal_sizes(named, rest, total - named.size)
        if self._query.spare >= 0:
            exchanges += self._partly_filled((0,), pending[0])
            if len(pending) > 1:
                exchanges += self._partly_filled(tuple(range(len(pending))), total)
        return sorted(exchanges, key=lambda exchange: exchange.cost)[: self._limits.exchanges]

    def _equal_sizes(self, named: _Set, started: tuple[int, ...], size: int) -> Iterator[Exchange]:
        """Yields the exchanges of free leaves that have the size of some pending buffers."""
        difference = margin(size, self._query.tolerance)
        for chosen in self._between(size - difference, size + difference):
            if chosen.positions:
                cost = self._cost(chosen, named, abs(chosen.size - size), size) + _old_cost(chosen)
                yield Exchange(cost, chosen.positions, started, -1)
        if len(self._ended) <= self._most_free:
            return
        left = self._ended_size - size
        for chosen in self._between(left - difference, left + difference):
            if chosen.has_old or len(self._ended) - len(chosen.positions) <= self._most_free:
                continue
            extent = min(size, sum(self._query.pending) - size + 1) if chosen.positions else size
            cost = self._cost(chosen, named, abs(chosen.size - left), extent)
            yield Exchange(cost, _without(self._ended, chosen.positions), started, -1)

    def _partly_filled(self, started: tuple[int, ...], size: int) -> Iterator[Exchange]:
        """Yields exchanges of larger sets of free leaves, of which a gap is left over."""
        spare = self._query.spare
        least = size + margin(size, self._query.tolerance) + 1
        added = 0
        for chosen in self._between(least, size + spare):
            if added == _MAX_PARTLY_FILLED:
                break
            if len(chosen.positions) <= _MAX_PARTLY_FILLED_LEAVES:
                added += 1
                yield self._with_gap(chosen, started, size)
        is_large = len(self._ended) > _MAX_PARTLY_FILLED_LEAVES
        if is_large and len(started) == len(self._query.pending) and least <= self._ended_size <= size + spare:
            yield self._with_gap(_Set(self._ended_size, tuple(self._ended), has_new=True), started, size)

    def _with_gap(self, chosen: _Set, started: tuple[int, ...], size: int) -> Exchange:
        """Returns an exchange that leaves a gap. All that ended is one set, not one of many of as many leaves."""
        left = chosen.size - size
        alternatives = _EMPTY if chosen.positions == tuple(self._ended) else chosen
        cost = self._cost(alternatives, _EMPTY, left, size) + _in_units(_GAP_COST) + _old_cost(chosen)
        return Exchange(cost, chosen.positions, started, left)

    def _between(self, least: int, largest: int) -> Iterator[_Set]:
        for position in range(bisect_left(self._sizes, least), len(self._sizes)):
            if self._sizes[position] > largest:
                return
            yield self._free[position]

    def _cost(self, chosen: _Set, named: _Set, difference: int, size: int) -> int:
        sets = _combinations(len(self._query.free), len(chosen.positions)) * _combinations(
            len(self._query.pending) - 1, len(named.positions)
        )
        return _in_units(math.log1p(sets * float(2 * difference + 1) / float(size)))


def _old_cost(chosen: _Set) -> int:
    return 0 if chosen.has_new else _in_units(_OLD_COST)


def _in_units(cost: float) -> int:
    return round(FREEDOM_UNIT * cost)


def _combinations(count: int, chosen: int) -> float:
    """Returns the number of sets, rounded as in C++."""
    result = 1.0
    for item in range(chosen):
        result = result * float(count - item) / float(item + 1)
    return result


def _sets_of(sizes: Sequence[int], first: int, largest: int) -> Iterator[_Set]:
    """Yields the sets with up to a number of positions, from `first` on; the empty one first."""
    for number in range(largest + 1):
        for positions in combinations(range(first, len(sizes)), number):
            chosen = [sizes[position] for position in positions]
            has_new, has_old = any(size > 0 for size in chosen), any(size < 0 for size in chosen)
            yield _Set(sum(map(abs, chosen)), positions, has_new, has_old)


def _largest_set(count: int, limit: int) -> int:
    """Returns the largest number of items of which there are no more sets than a limit; 1 at least."""
    largest, sets = 1, count
    while largest < count and sets + comb(count, largest + 1) <= limit:
        largest += 1
        sets += comb(count, largest)
    return min(largest, count)


def _without(positions: Sequence[int], removed: Sequence[int]) -> tuple[int, ...]:
    return tuple([position for position in positions if position not in removed])
