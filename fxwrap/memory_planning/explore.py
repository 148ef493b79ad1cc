"""One depth-first search for offsets within a capacity: the branching, and the reference of the native search."""

from __future__ import annotations

import enum
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fxwrap.memory_planning.greedy import Buffer
from fxwrap.memory_planning.placement import Placement, Subproblem


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
class Order:
    """The section to fill next, the lowest or the most constrained one, and the order of its candidates."""

    lowest_section: bool
    lowest_first: bool
    """Whether candidates with a low floor come first, before the key decides."""
    key: Callable[[int, int], int]
    """From the number of sections and the size to a key; large ones come first."""


BY_LENGTH = Order(False, True, lambda length, size: (length << 64) + size)

_BLOCK_STEPS = 500
"""Steps of the search for the inside of a block."""

_PERTURBATION = 0.15
"""Largest relative change of the keys of an order, after the first turn of each."""


@dataclass(frozen=True)
class _Decision:
    """A backtracking point: a buffer that was placed, or that waits, and the sections of the part it belongs to."""

    index: int
    sections: range
    trail: int
    waits: bool


def explore(part: Subproblem, order: Order, ranks: list[int], weights: list[int], limits: SearchLimits) -> SearchResult:
    """Runs one depth-first search. `weights` counts the failures of each section. C++ takes the same steps."""
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


def _choose(state: Placement, sections: range, order: Order, ranks: list[int], weights: list[int]) -> int | None:
    """Returns the buffer to place next: the first candidate of the section with the fewest; None for no candidate."""
    count, height, members = state.candidate_count, state.height, state.members
    pending = [section for section in sections if members[section]]
    if order.lowest_section:
        keys = sorted([(float(height[section]), count[section], section) for section in pending])
    else:
        keys = sorted([(count[section] / weights[section], height[section], section) for section in pending])
    for _, _, section in keys:
        if order.lowest_first:
            candidates = sorted(members[section], key=lambda index: (state.lowest[index], ranks[index]))
        else:
            candidates = sorted(members[section], key=ranks.__getitem__)
        index = next(filter(state.is_ready, candidates), None)
        if index is not None:
            return index
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


def pack_block(buffers: Sequence[Buffer], capacity: int) -> Sequence[int]:
    """Returns offsets of the buffers of a block; () for none."""
    part = Subproblem.of(buffers, capacity)
    limits = SearchLimits(_BLOCK_STEPS, math.inf)
    return explore(part, BY_LENGTH, ranks_in(part, BY_LENGTH, 0), [1] * part.sections, limits).offsets


def ranks_in(part: Subproblem, order: Order, perturbed: int) -> list[int]:
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
