"""Offset assignment within a capacity by depth-first search, for problems that greedy placement cannot pack.

After MiniMalloc (Moffitt, ASPLOS 2023): only canonical solutions are explored, in which each buffer is placed as low as
those below it allow; the floor of a section of time is the lowest offset of its pending buffers, and a branch ends when
the rest does not fit above it; dominated placements, which leave a gap that another buffer fits, are left out; parts
that share no section are solved separately; buffers are ordered dynamically. Branching follows active schedules in job
shops (Giffler and Thompson, 1960): a buffer is placed at its floor, or it waits, that is, it lies on one that is not
placed yet. The section to fill next is the lowest, which packs sparse problems, or has the fewest candidates by
weighted failures (Boussemart et al., 2004), which packs dense ones; restarts take turns.

Before that, buffers are merged into blocks (`blocks.py`), which often leaves little to search. If few bytes are free,
beam searches in the order of time (`sweep.py`) take turns with these searches. The inner loops have
native counterparts (`native_search.py`).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from typing import Protocol

from fxwrap.memory_planning.blocks import APPROXIMATE, EXACT, Blocks
from fxwrap.memory_planning.exchanges import TOLERANCE_UNIT
from fxwrap.memory_planning.explore import BY_LENGTH, Order, SearchLimits, SearchResult, SearchStatus, explore, ranks_in
from fxwrap.memory_planning.greedy import Buffer, max_live_bytes
from fxwrap.memory_planning.native_search import NativeBlocks, native_search
from fxwrap.memory_planning.placement import Subproblem, in_sections
from fxwrap.memory_planning.sweep import SweepOptions, sweep

_FIRST_STEPS = 200
"""Steps of a search in the first round, beside two for each buffer or block to place."""

_MERGED_SHARE = 2 / 3
"""The part of the number of buffers above which merging leaves too many blocks."""

_OTHER_TURNS = 4
"""The number of rounds in which each other search, with too many blocks or without any, runs once."""

_GROWTH = 1.3
"""Growth of this number from round to round."""

_MERGING_SHARE = 7 / 8
"""The part of the steps of a later search that splits and merges blocks before it places them."""

_FIRST_WIDTH, _WIDTH_GROWTH = 8, 4
"""Width of the first two sweeps, and its growth after each two."""

_TOLERANCE = TOLERANCE_UNIT // 32
"""Tolerance of sweeps where bytes are free."""

_FIRST_SWEEP = 4
"""The first round with a sweep where bytes are free."""

_MAX_FREE_SHARE = 0.15
"""The part of all bytes that are free above which no sweep runs."""

_NATIVE_BUFFERS, _BUILT_BUFFERS = 32, 128
"""Numbers of buffers from which the native search is worth its load, and from which it is worth its build."""

_ORDERS = (
    Order(True, True, lambda length, size: length * size),
    BY_LENGTH,
    Order(False, False, lambda length, size: length * size),
    Order(False, True, lambda length, size: length * length * size),
    Order(False, False, lambda length, size: (length << 64) + size),
)


class SearchFunctions(Protocol):
    """The inner loops of the search. All implementations have equal results."""

    def explore(
        self, part: Subproblem, order: Order, ranks: list[int], weights: list[int], limits: SearchLimits
    ) -> SearchResult:
        """Runs one depth-first search; see `explore`."""

    def sweep(
        self, buffers: Sequence[Buffer], capacity: int, options: SweepOptions, limits: SearchLimits
    ) -> SearchResult:
        """Runs one beam search in the order of time; see `sweep`."""

    def merge(self, buffers: Sequence[Buffer], capacity: int, tolerances: Sequence[float]) -> Blocks | NativeBlocks:
        """Merges buffers, whose times are numbers of sections, into blocks; see `Blocks`."""


class PythonSearch:
    """The reference."""

    explore = staticmethod(explore)
    sweep = staticmethod(sweep)
    merge = staticmethod(Blocks)


def search(
    buffers: Sequence[Buffer], capacity: int, limits: SearchLimits, functions: SearchFunctions | None = None
) -> SearchResult:
    """Searches for offsets with which live buffers never overlap and all end at or below `capacity`.

    `buffers` are (first, last_exclusive, size) with sizes above zero. `functions` are native by default, for many
    buffers, else Python. A search until a deadline, or of very many buffers, compiles the native ones. Other searches
    use them if they are compiled: these take less time in Python than a compiler. The result does not depend on the
    functions, and is deterministic, unless the deadline stops the search.
    """
    is_large = len(buffers) >= _NATIVE_BUFFERS
    builds = limits.deadline < math.inf or len(buffers) >= _BUILT_BUFFERS
    functions = functions or (native_search(builds) if is_large else None) or PythonSearch()
    unit = math.gcd(*(size for _, _, size in buffers)) if buffers else 1
    offsets = [0] * len(buffers)
    steps = 0
    for indices in _independent(buffers):
        chosen = [(first, last, size // unit) for first, last, size in (buffers[index] for index in indices)]
        result = _search_dependent(
            chosen, capacity // unit, SearchLimits(limits.steps - steps, limits.deadline), functions
        )
        steps += result.steps
        if result.outcome is not SearchStatus.SOLVED:
            return SearchResult(result.outcome, (), steps)
        for index, offset in zip(indices, result.offsets):
            offsets[index] = offset * unit
    return SearchResult(SearchStatus.SOLVED, tuple(offsets), steps)


def compile_search(buffers: Sequence[Buffer]) -> None:
    """Compiles the native functions that a search of so many buffers uses, ahead of its deadline."""
    if len(buffers) >= _NATIVE_BUFFERS:
        native_search()


def _independent(buffers: Sequence[Buffer]) -> list[list[int]]:
    """Returns groups of buffers with disjoint ranges of time, in the order of time."""
    groups: list[list[int]] = []
    reach = None
    for index in sorted(range(len(buffers)), key=lambda index: (buffers[index][0], index)):
        first, last, _ = buffers[index]
        if reach is None or first >= reach:
            groups.append([])
            reach = last
        groups[-1].append(index)
        reach = max(reach, last)
    return groups


def _search_dependent(
    buffers: list[Buffer], capacity: int, limits: SearchLimits, functions: SearchFunctions
) -> SearchResult:
    """Searches in rounds until a limit.

    Rounds have blocks of equal sizes and of similar ones, if that leaves few of them, and no blocks.
    """
    if max_live_bytes(buffers) > capacity:
        return SearchResult(SearchStatus.INFEASIBLE, (), 0)
    if len(buffers) == 1:
        return SearchResult(SearchStatus.SOLVED, (0,), 0)
    unmerged = _RestartedSearch(buffers, capacity, None, functions)
    merged = [_RestartedSearch(buffers, capacity, tolerances, functions) for tolerances in (EXACT, APPROXIMATE)]
    promising = [item for item in merged if item.count <= _MERGED_SHARE * len(buffers)] or [unmerged]
    others = [item for item in (unmerged, *merged) if item not in promising]
    sweeps = _Sweeps(buffers, capacity, functions)
    steps = swept = 0
    for turn in itertools.count():
        searches = [*promising, *others] if turn % _OTHER_TURNS == _OTHER_TURNS - 1 else promising
        for item in (*searches, None):
            if item is None and turn < sweeps.first_turn:
                continue
            if item is None:  # sweeps have half as many steps, of their own, so that they displace no other search
                result = sweeps.run(SearchLimits(limits.steps // 2 - swept, limits.deadline))
                swept += result.steps
            else:
                own = min(limits.steps - steps, int((_FIRST_STEPS + 2 * item.count) * _GROWTH**turn))
                result = item.run(SearchLimits(own, limits.deadline))
                steps += result.steps
            is_proof = result.outcome is SearchStatus.INFEASIBLE and item is unmerged
            if result.outcome is SearchStatus.SOLVED or is_proof:
                return SearchResult(result.outcome, result.offsets, steps)
            if steps >= limits.steps or time.monotonic() > limits.deadline:
                return SearchResult(SearchStatus.LIMIT_REACHED, (), steps)
            if result.outcome is SearchStatus.INFEASIBLE and unmerged not in promising:
                promising = [*promising, unmerged]
                others = [other for other in others if other is not unmerged]
    raise AssertionError("unreachable")


class _Sweeps:
    """Sweeps of one problem in both directions of time, wider after each two."""

    def __init__(self, buffers: list[Buffer], capacity: int, functions: SearchFunctions) -> None:
        self._turn = 0
        self._capacity = capacity
        self._functions = functions
        self._buffers = in_sections(buffers)
        self._end = max([last for _, last, _ in self._buffers])
        used = sum([(last - first) * size for first, last, size in self._buffers])
        self._free_share = 1 - used / (capacity * self._end)

    @property
    def first_turn(self) -> int:
        """The round from which sweeps run: where bytes are free, other searches may soon be done."""
        return _FIRST_SWEEP if self._free_share else 0

    def run(self, limits: SearchLimits) -> SearchResult:
        """Runs the next sweep, unless many bytes are free."""
        if self._free_share > _MAX_FREE_SHARE:
            return SearchResult(SearchStatus.LIMIT_REACHED, (), 0)
        buffers = self._buffers
        if self._turn % 2:
            buffers = [(self._end - last, self._end - first, size) for first, last, size in buffers]
        width = _FIRST_WIDTH * _WIDTH_GROWTH ** (self._turn // 2)
        self._turn += 1
        options = SweepOptions(width, _TOLERANCE if self._free_share else 0)
        return self._functions.sweep(buffers, self._capacity, options, limits)


class _RestartedSearch:
    """Depth-first searches of one problem, each with the next order, and with other blocks if there are any.

    Failures weigh sections in all searches with the same blocks.
    """

    def __init__(
        self, buffers: list[Buffer], capacity: int, tolerances: Sequence[float] | None, functions: SearchFunctions
    ) -> None:
        self.turn = 0 if tolerances is None else 1
        self._buffers = buffers
        self._capacity = capacity
        self._functions = functions
        self._blocks = None if tolerances is None else functions.merge(in_sections(buffers), capacity, tolerances)
        self._part = Subproblem.of(buffers if self._blocks is None else self._blocks.buffers, capacity)
        self._weights = [1] * self._part.sections

    @property
    def count(self) -> int:
        """The number of buffers or blocks to place."""
        return len(self._part.size)

    def run(self, limits: SearchLimits) -> SearchResult:
        """Runs the next search."""
        steps = 0
        if self._blocks is not None and self.turn > 1 and self._blocks.has_blocks:
            before = self._blocks.steps
            self._blocks.improve(int(limits.steps * _MERGING_SHARE), limits.deadline)
            steps = self._blocks.steps - before
            self._part = Subproblem.of(self._blocks.buffers, self._capacity)
            self._weights = [1] * self._part.sections
        part = self._part
        order = _ORDERS[self.turn % len(_ORDERS)]
        ranks = ranks_in(part, order, self.turn // len(_ORDERS))
        self.turn += 1
        result = self._functions.explore(
            part, order, ranks, self._weights, SearchLimits(limits.steps - steps, limits.deadline)
        )
        offsets: Sequence[int] = result.offsets
        if offsets and self._blocks is not None:
            offsets = self._blocks.expand(offsets)
        return SearchResult(result.outcome, tuple(offsets), steps + result.steps)
