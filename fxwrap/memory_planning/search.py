"""Offset assignment within a capacity by depth-first search, for problems that greedy placement cannot pack.

After MiniMalloc (Moffitt, ASPLOS 2023): only canonical solutions are explored, in which each buffer is placed as low as
those below it allow; the floor of a section of time is the lowest offset of its pending buffers, and a branch ends when
the rest does not fit above it; dominated placements, which leave a gap that another buffer fits, are left out; parts
that share no section are solved separately; buffers are ordered dynamically. Branching follows active schedules in job
shops (Giffler and Thompson, 1960): a buffer is placed at its floor, or it waits, that is, it lies on one that is not
placed yet. The section to fill next has the fewest candidates by weighted failures (Boussemart et al., 2004), and
restarts take turns with several orders.

Before that, buffers are merged into blocks (`blocks.py`), which often leaves little to search.
"""

from __future__ import annotations

import enum
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fxwrap.memory_planning.blocks import Grouping, MergedBuffers, merge_blocks
from fxwrap.memory_planning.greedy import Buffer, max_live_bytes
from fxwrap.memory_planning.placement import Placement, Subproblem

_FIRST_STEPS = 1000
"""Steps of a search in the first round."""

_GROWTH = 1.3
"""Growth of this number from round to round."""

_BLOCK_STEPS = 500
"""Steps of the search for the inside of a block."""

_PERTURBATION = 0.15
"""Largest relative change of the keys of an order, after the first turn of each."""


class SearchStatus(enum.Enum):
    """The outcome of a search: offsets, a proof that there are none, or a limit."""

    SOLVED = "solved"
    INFEASIBLE = "impossible"
    LIMIT_REACHED = "gave up"


@dataclass(frozen=True)
class SearchResult:
    """The result of a search. `offsets` are in the order of the buffers, empty unless solved."""

    outcome: SearchStatus
    offsets: tuple[int, ...]
    steps: int


@dataclass(frozen=True)
class SearchLimits:
    """Limits of a search: the number of steps, and a value of `time.monotonic()`."""

    steps: int
    deadline: float


@dataclass(frozen=True)
class _Order:
    """The order in which the candidates of a section are placed: the lowest first, or by rank only."""

    lowest_first: bool
    key: Callable[[int, int], int]
    """From the number of sections and the size to a key; large ones come first."""


_ORDERS = (
    _Order(True, lambda length, size: (length << 64) + size),
    _Order(False, lambda length, size: length * size),
    _Order(True, lambda length, size: length * length * size),
    _Order(False, lambda length, size: (length << 64) + size),
)


@dataclass(frozen=True)
class _Decision:
    """A backtracking point: a buffer that was placed, or that waits, and the sections of the part it belongs to."""

    index: int
    sections: range
    trail: int
    waits: bool


def search(buffers: Sequence[Buffer], capacity: int, limits: SearchLimits) -> SearchResult:
    """Searches for offsets with which live buffers never overlap and all end at or below `capacity`.

    `buffers` are (first, last_exclusive, size) with sizes above zero. The result is deterministic unless the deadline
    stops the search.
    """
    unit = math.gcd(*(size for _, _, size in buffers)) if buffers else 1
    offsets = [0] * len(buffers)
    steps = 0
    for indices in _independent(buffers):
        chosen = [(first, last, size // unit) for first, last, size in (buffers[index] for index in indices)]
        result = _search_dependent(chosen, capacity // unit, SearchLimits(limits.steps - steps, limits.deadline))
        steps += result.steps
        if result.outcome is not SearchStatus.SOLVED:
            return SearchResult(result.outcome, (), steps)
        for index, offset in zip(indices, result.offsets):
            offsets[index] = offset * unit
    return SearchResult(SearchStatus.SOLVED, tuple(offsets), steps)


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


def _search_dependent(buffers: list[Buffer], capacity: int, limits: SearchLimits) -> SearchResult:
    """Searches in rounds: with each way to merge blocks, and at last without, as long as the limits allow."""
    if max_live_bytes(buffers) > capacity:
        return SearchResult(SearchStatus.INFEASIBLE, (), 0)
    if len(buffers) == 1:
        return SearchResult(SearchStatus.SOLVED, (0,), 0)
    searches = [_RestartedSearch(buffers, capacity, grouping) for grouping in (*Grouping, None)]
    steps, allowed = 0, float(_FIRST_STEPS)
    while True:
        for item in searches:
            result = item.run(SearchLimits(min(limits.steps - steps, int(allowed)), limits.deadline))
            steps += result.steps
            is_proof = result.outcome is SearchStatus.INFEASIBLE and item.grouping is None
            if result.outcome is SearchStatus.SOLVED or is_proof:
                return SearchResult(result.outcome, result.offsets, steps)
            if steps >= limits.steps or time.monotonic() > limits.deadline:
                return SearchResult(SearchStatus.LIMIT_REACHED, (), steps)
        searches = [item for item in searches if not item.is_infeasible]
        allowed *= _GROWTH


class _RestartedSearch:
    """Depth-first searches of one problem, each with the next order; failures weigh sections in all of them."""

    def __init__(self, buffers: list[Buffer], capacity: int, grouping: Grouping | None) -> None:
        self.buffers = buffers
        self.capacity = capacity
        self.grouping = grouping
        self.is_infeasible = False
        self.turn = 0
        self._prepared: tuple[MergedBuffers, Subproblem, list[int]] | None = None

    def run(self, limits: SearchLimits) -> SearchResult:
        """Runs the next search."""
        if self._prepared is None:
            merged = merge_blocks(self.buffers, self.grouping, _pack_block)
            part = Subproblem.of(merged.buffers, self.capacity)
            self._prepared = merged, part, [1] * len(part.members)
        merged, part, weights = self._prepared
        order = _ORDERS[self.turn % len(_ORDERS)]
        ranks = _ranks(part, order, self.turn // len(_ORDERS))
        self.turn += 1
        result = _explore(part, order, ranks, weights, limits)
        self.is_infeasible = result.outcome is SearchStatus.INFEASIBLE
        offsets = merged.expand(result.offsets) if result.offsets else ()
        return SearchResult(result.outcome, tuple(offsets), result.steps)


def _pack_block(buffers: Sequence[Buffer], capacity: int) -> Sequence[int]:
    """Returns offsets of the buffers of a block; () for none."""
    part = Subproblem.of(buffers, capacity)
    ranks = _ranks(part, _ORDERS[0], 0)
    limits = SearchLimits(_BLOCK_STEPS, math.inf)
    return _explore(part, _ORDERS[0], ranks, [1] * len(part.members), limits).offsets


def _ranks(part: Subproblem, order: _Order, perturbed: int) -> list[int]:
    """Returns the rank of each buffer in an order, perturbed by a seed unless it is 0."""
    generator = random.Random(perturbed)
    keys: list[float] = []
    for first, last, size in zip(part.first, part.last, part.size):
        key: float = order.key(last - first, size)
        keys.append(-key * generator.uniform(1 - _PERTURBATION, 1 + _PERTURBATION) if perturbed else -key)
    ranks = [0] * len(keys)
    for position, index in enumerate(sorted(range(len(keys)), key=lambda index: (keys[index], part.twin_rank[index]))):
        ranks[index] = position
    return ranks


def _explore(
    part: Subproblem, order: _Order, ranks: list[int], weights: list[int], limits: SearchLimits
) -> SearchResult:
    """Runs one depth-first search. `weights` counts the failures of each section."""
    state = Placement(part)
    if not state.start():
        return SearchResult(SearchStatus.INFEASIBLE, (), 0)
    decisions: list[_Decision] = []
    steps = 0
    while sections := _pending_sections(state, decisions):
        if steps >= limits.steps or (steps % 64 == 0 and time.monotonic() > limits.deadline):
            return SearchResult(SearchStatus.LIMIT_REACHED, (), steps)
        steps += 1
        index = _choose(state, sections, order, ranks, weights)
        if index is None:
            fits = state.raise_lowest_end(sections)
        else:
            decisions.append(_Decision(index, state.part_around(part.first[index]), len(state.trail), False))
            fits = state.place(index)
        while not fits:
            weights[state.failed] += 1
            if not _backtrack(state, decisions):
                return SearchResult(SearchStatus.INFEASIBLE, (), steps)
            steps += 1
            fits = state.postpone(decisions[-1].index)
    return SearchResult(SearchStatus.SOLVED, tuple(state.lowest), steps)


def _pending_sections(state: Placement, decisions: list[_Decision]) -> range:
    """Returns the sections of the latest decision's part that has buffers to place; empty if all are placed."""
    members = state.members
    for decision in reversed(decisions):
        if any(members[section] for section in decision.sections):
            return decision.sections
    return range(len(members)) if not decisions else range(0) if not any(members) else range(len(members))


def _choose(state: Placement, sections: range, order: _Order, ranks: list[int], weights: list[int]) -> int | None:
    """Returns the buffer to place next: the first candidate of the section with the fewest; None for no candidate."""
    count, height, members = state.candidate_count, state.height, state.members
    keys = sorted([(count[section] / weights[section], height[section], section)
                   for section in sections if members[section]])  # fmt: skip
    for _, _, section in keys:
        ready = [index for index in members[section] if state.is_ready(index)]
        if ready and order.lowest_first:
            return min(ready, key=lambda index: (state.lowest[index], ranks[index]))
        if ready:
            return min(ready, key=ranks.__getitem__)
    return None


def _backtrack(state: Placement, decisions: list[_Decision]) -> bool:
    """Undoes decisions up to the last placement that the failure depends on, whose buffer waits now.

    A failure depends on the part around its section only. Returns False if no placement is left.
    """
    part = state.part
    blamed = state.part_around(state.failed)
    while decisions:
        decision = decisions.pop()
        state.undo(decision.trail)
        if part.last[decision.index] <= blamed.start or part.first[decision.index] >= blamed.stop:
            continue
        if not decision.waits:
            decisions.append(_Decision(decision.index, decision.sections, decision.trail, True))
            return True
        blamed = range(min(blamed.start, decision.sections.start), max(blamed.stop, decision.sections.stop))
    return False
