"""Offset assignment within a capacity by depth-first search, for problems that greedy placement cannot pack.

After MiniMalloc (Moffitt, ASPLOS 2023): a buffer is placed as low as earlier ones allow, a branch ends when the pending
buffers of a section of time cannot fit, and independent subproblems are solved separately. Branching follows active
schedules in job shops (Giffler and Thompson, 1960): among the buffer that could end lowest and its conflicts, one is
placed now; if that fails it waits, that is, it must be on top of a buffer that is not placed yet. Several strategies
take turns, with growing step limits.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fxwrap.memory_planning.greedy import Buffer

_PLACED = 1 << 62  # the offset of a placed buffer in a state
_FIRST_STEP_LIMIT = 1000  # of a strategy in the first round, if the total allows


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
    """Limits of a search: the steps of all strategies, and a value of `time.monotonic()`."""

    steps: int
    deadline: float


@dataclass(frozen=True)
class _Subproblem:
    """Dependent buffers, by index. A section is a maximal range of time in which all its buffers are live at once."""

    first: list[int]
    last: list[int]
    size: list[int]
    neighbours: list[list[int]]  # the buffers that share a section with each buffer
    members: list[list[int]]  # the buffers of each section
    capacity: int


@dataclass(frozen=True)
class _Strategy:
    """The choice of the conflict to resolve, of its buffer to place first, and the order between equals."""

    tightest_conflict: bool
    value: Literal["rank", "offset", "slack"]
    rank: list[int]


@dataclass(slots=True)
class _State:
    """A partial placement, by buffer and by section; placed buffers have the offset and end _PLACED."""

    lowest: list[int]  # by buffer: the top of the placed ones below it
    bound: list[int]  # the same; for waiting buffers the lowest possible offset
    end: list[int]  # bound + size
    waiting: set[int]  # buffers whose offset is above `lowest`
    height: list[int]  # by section: the top of the placed buffers
    remaining: list[int]  # by section: the total size of the other buffers
    soonest: list[int]  # by section: the lowest end of the other buffers
    members: list[list[int]]  # by section: the other buffers

    def copy(self) -> _State:
        """Returns a copy to place another buffer in."""
        return _State(
            self.lowest[:], self.bound[:], self.end[:], set(self.waiting),
            self.height[:], self.remaining[:], self.soonest[:], self.members[:],
        )  # fmt: skip


_Agenda: TypeAlias = tuple[tuple[list[int], _State, int], ...]
"""Pending subproblems, each with its state and the frame to revise if it has no solution."""


@dataclass(slots=True)
class _Frame:
    """A backtracking point: a state, the buffers to place, and the frame to revise if none fits."""

    state: _State
    alive: list[int]
    origin: int
    rest: _Agenda
    pick: int = -1


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
        result = _search_subproblem(chosen, capacity // unit, SearchLimits(limits.steps - steps, limits.deadline))
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


def _search_subproblem(buffers: list[Buffer], capacity: int, limits: SearchLimits) -> SearchResult:
    part = _build_subproblem(buffers, capacity)
    state = _start(part)
    if state is None:
        return SearchResult(SearchStatus.INFEASIBLE, (), 0)
    if len(buffers) == 1:
        return SearchResult(SearchStatus.SOLVED, (0,), 0)
    steps = 0
    limit = min(_FIRST_STEP_LIMIT, max(limits.steps // 8, 2 * len(buffers)))
    while True:
        for strategy in _strategies(buffers):
            remaining = limits.steps - steps
            if remaining <= 0 or time.monotonic() > limits.deadline:
                return SearchResult(SearchStatus.LIMIT_REACHED, (), steps)
            result = _explore(part, state, strategy, SearchLimits(min(limit, remaining), limits.deadline))
            steps += result.steps
            if result.outcome is not SearchStatus.LIMIT_REACHED:
                return SearchResult(result.outcome, result.offsets, steps)
        limit *= 2


def _build_subproblem(buffers: list[Buffer], capacity: int) -> _Subproblem:
    """Computes the sections: a new one starts with the first buffer after an end."""
    events = sorted({(last, 0, index) for index, (_, last, _) in enumerate(buffers)}
                    | {(first, 1, index) for index, (first, _, _) in enumerate(buffers)})  # fmt: skip
    first, last = [0] * len(buffers), [0] * len(buffers)
    section, ended = 0, False
    for _, starts, index in events:
        if starts:
            if ended:
                section, ended = section + 1, False
            first[index] = section
        else:
            last[index], ended = section + 1, True
    members: list[list[int]] = [[] for _ in range(section + 1)]
    for index in range(len(buffers)):
        for number in range(first[index], last[index]):
            members[number].append(index)
    neighbours = [
        sorted(set().union(*members[first[index] : last[index]]) - {index}) for index in range(len(buffers))
    ]  # fmt: skip
    return _Subproblem(first, last, [size for _, _, size in buffers], neighbours, members, capacity)


def _strategies(buffers: list[Buffer]) -> Iterator[_Strategy]:
    """Yields strategies, ordered by how many of MiniMalloc's benchmarks they solve quickly."""
    instants = sorted({instant for first, last, _ in buffers for instant in (first, last)})
    number = {instant: position for position, instant in enumerate(instants)}
    load = [0] * len(instants)
    for first, last, size in buffers:
        for position in range(number[first], number[last]):
            load[position] += size

    def crowded_long(index: int) -> tuple[int, ...]:
        first, last, size = buffers[index]
        return (-max(load[number[first] : number[last]]), first - last, (first - last) * size)

    def crowded_large(index: int) -> tuple[int, ...]:
        peak, length, area = crowded_long(index)
        return (peak, area, length)

    def broad(index: int) -> tuple[int, ...]:
        first, last, size = buffers[index]
        return ((number[first] - number[last]) * size, first - last)

    def rank(key: Callable[[int], tuple[int, ...]]) -> list[int]:
        ranks = [0] * len(buffers)
        for position, index in enumerate(sorted(range(len(buffers)), key=key)):
            ranks[index] = position
        return ranks

    long, large, area = rank(crowded_long), rank(crowded_large), rank(broad)
    yield _Strategy(False, "offset", area)
    yield _Strategy(True, "rank", long)
    yield _Strategy(True, "offset", long)
    yield _Strategy(False, "offset", large)
    yield _Strategy(False, "rank", long)
    yield _Strategy(False, "offset", long)
    yield _Strategy(True, "slack", large)
    yield _Strategy(False, "slack", area)


def _start(part: _Subproblem) -> _State | None:
    """Returns the state without placed buffers; None if a section exceeds the capacity."""
    remaining = [sum(part.size[index] for index in members) for members in part.members]
    if max(remaining) > part.capacity:
        return None
    count = len(part.size)
    soonest = [min(part.size[index] for index in members) for members in part.members]
    return _State([0] * count, [0] * count, part.size[:], set(), [0] * len(remaining), remaining, soonest, part.members)


def _explore(part: _Subproblem, start: _State, strategy: _Strategy, limits: SearchLimits) -> SearchResult:
    """Runs one depth-first search, with an explicit stack since problems may exceed Python's recursion limit."""
    offsets = [0] * len(part.size)
    everything = sorted(range(len(part.size)), key=lambda index: part.first[index])
    stack = [_Frame(start, everything, -1, ())]
    for step in range(limits.steps):
        if step % 64 == 0 and time.monotonic() > limits.deadline:
            return SearchResult(SearchStatus.LIMIT_REACHED, (), step)
        frame = stack[-1]
        pick = frame.pick = _choose(part, frame.state, frame.alive, strategy)
        child = _place(part, frame.state, pick)
        if child is None:
            if not _backtrack(part, stack, len(stack) - 1):
                return SearchResult(SearchStatus.INFEASIBLE, (), step + 1)
            continue
        offsets[pick] = frame.state.lowest[pick]
        items = frame.rest
        for alive in _split(part, [index for index in frame.alive if index != pick]):
            if len(alive) == 1:
                offsets[alive[0]] = child.lowest[alive[0]]
            else:
                items = ((alive, child, len(stack) - 1), *items)
        if not items:
            return SearchResult(SearchStatus.SOLVED, tuple(offsets), step + 1)
        alive, state, origin = items[0]
        stack.append(_Frame(state, alive, origin, items[1:]))
    return SearchResult(SearchStatus.LIMIT_REACHED, (), limits.steps)


def _backtrack(part: _Subproblem, stack: list[_Frame], blamed: int) -> bool:
    """Postpones the pick of the blamed frame, or of an earlier one; returns False if there is none."""
    while blamed >= 0:
        del stack[blamed + 1 :]
        frame = stack[blamed]
        state = _postpone(part, frame.state, frame.pick)
        if state is not None:
            frame.state = state
            return True
        blamed = frame.origin
    return False


def _split(part: _Subproblem, alive: list[int]) -> list[list[int]]:
    """Returns the groups that share no section, the largest first. `alive` is ordered by first section."""
    groups: list[list[int]] = []
    first, last = part.first, part.last
    reach = -1
    for index in alive:
        if first[index] >= reach:
            groups.append([])
        groups[-1].append(index)
        reach = max(reach, last[index])
    if len(groups) > 1:
        groups.sort(key=len, reverse=True)
    return groups


def _place(part: _Subproblem, state: _State, pick: int) -> _State | None:
    """Returns the state with a buffer at its lowest offset; None if the others cannot fit."""
    new = state.copy()
    lowest, bound, end, size = new.lowest, new.bound, new.end, part.size
    top = lowest[pick] + size[pick]
    sections = range(part.first[pick], part.last[pick])
    for section in sections:
        new.height[section] = top
        new.remaining[section] -= size[pick]
        new.members[section] = [index for index in new.members[section] if index != pick]
    lowest[pick] = bound[pick] = end[pick] = _PLACED
    changed = []
    for index in part.neighbours[pick]:
        if lowest[index] < top:
            lowest[index] = bound[index] = top
            end[index] = top + size[index]
            if end[index] > part.capacity:
                return None
            new.waiting.discard(index)
            changed.append(index)
    return new if _raise_waiting(part, new, changed) and _refresh(part, new, sections, changed) else None


def _postpone(part: _Subproblem, state: _State, pick: int) -> _State | None:
    """Returns the state in which a buffer waits, that is, must be on top of another; None if nothing fits."""
    new = state.copy()
    new.waiting.add(pick)
    changed: list[int] = []
    return new if _raise_waiting(part, new, changed) and _refresh(part, new, range(0), changed) else None


def _raise_waiting(part: _Subproblem, state: _State, changed: list[int]) -> bool:
    """Raises the offsets of waiting buffers to the lowest end of a pending neighbour; False beyond the capacity."""
    waiting, end, size = state.waiting, state.end, part.size
    if not waiting:
        return True
    open_bounds = {
        index: min([end[other] for other in part.neighbours[index] if other not in waiting], default=_PLACED)
        for index in waiting
    }
    while open_bounds:
        index = min(open_bounds, key=open_bounds.__getitem__)
        bound = open_bounds.pop(index)
        top = bound + size[index]
        if top > part.capacity:
            return False
        for other in part.neighbours[index]:
            if other in open_bounds and top < open_bounds[other]:
                open_bounds[other] = top
        if bound != state.bound[index]:
            state.bound[index], end[index] = bound, top
            changed.append(index)
    return True


def _refresh(part: _Subproblem, state: _State, sections: range, changed: list[int]) -> bool:
    """Updates the sections of changed buffers; returns False if the pending buffers of one exceed the capacity."""
    bound, end, capacity = state.bound, state.end, part.capacity
    dirty = set(sections)
    for index in changed:
        dirty.update(range(part.first[index], part.last[index]))
    for section in dirty:
        members = state.members[section]
        if not members:
            state.soonest[section] = _PLACED
            continue
        if min([bound[index] for index in members]) + state.remaining[section] > capacity:
            return False
        state.soonest[section] = min([end[index] for index in members])
    return True


def _choose(part: _Subproblem, state: _State, alive: list[int], strategy: _Strategy) -> int:
    """Returns the buffer to place next by the strategy."""
    first, last, soonest = part.first, part.last, state.soonest
    best: list[int] = []
    best_key: tuple[int, int, int] | None = None
    rank = strategy.rank
    for index in alive:
        end = state.end[index]
        if soonest[first[index]] != end or index in state.waiting or min(soonest[first[index] : last[index]]) != end:
            continue
        conflict = _conflict(part, state, index)
        if not conflict:
            continue
        if len(conflict) == 1:
            return index
        if strategy.tightest_conflict:
            key = (_slack(part, state, index), len(conflict), rank[index])
        else:
            key = (state.lowest[index], 0, rank[index])
        if best_key is None or key < best_key:
            best, best_key = conflict, key
    match strategy.value:
        case "rank":
            return min(best, key=rank.__getitem__)
        case "offset":
            return min(best, key=lambda index: (state.lowest[index], rank[index]))
        case _:
            return min(best, key=lambda index: (_slack(part, state, index), rank[index]))


def _conflict(part: _Subproblem, state: _State, index: int) -> list[int]:
    """Returns a buffer and its neighbours that may be below its end; [] if another buffer must be placed before.

    If no neighbour of these ends below this buffer's end, one of them is at its lowest offset in any solution.
    """
    end, bound, waiting = state.end[index], state.bound, state.waiting
    conflict = [index]
    for other in part.neighbours[index]:
        if bound[other] < end:
            if min(state.soonest[part.first[other] : part.last[other]]) < end:
                return []
            if other not in waiting:
                conflict.append(other)
    return conflict


def _slack(part: _Subproblem, state: _State, index: int) -> int:
    """Returns the free bytes of the tightest section of a buffer."""
    sections = slice(part.first[index], part.last[index])
    return part.capacity - max(map(int.__add__, state.height[sections], state.remaining[sections]))
