"""Offsets within a capacity by depth-first search, for the problems that greedy placement cannot pack.

After MiniMalloc (Moffitt, ASPLOS 2023): a buffer is placed as low as those placed before it allow, a section of time in
which what is left cannot fit ends the branch, and parts that no longer share a section are solved apart. The branching
is that of active schedules in job shops (Giffler and Thompson, 1960): of the buffer that could end lowest and those
that would be in its way, one is placed now; when that fails it waits, which is to say that it lies on top of
a buffer that is not placed yet. Several orders take turns, with growing limits on the number of steps.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

Buffer = tuple[int, int, int]  # first, last (exclusive), size

_PLACED = 1 << 62  # in the place of an offset: a buffer that needs none any more
_FIRST_LIMIT = 1000  # steps that each strategy has in the first round, or fewer where all have few


class Outcome(enum.Enum):
    """How a search ended: with offsets, with the proof that there are none, or at its limit of steps or time."""

    SOLVED = "solved"
    IMPOSSIBLE = "impossible"
    GAVE_UP = "gave up"


@dataclass(frozen=True)
class SearchResult:
    """What a search found. `offsets` are in the order of the buffers, empty unless solved; `steps` is what it took."""

    outcome: Outcome
    offsets: tuple[int, ...]
    steps: int


@dataclass(frozen=True)
class Limits:
    """When to give up: after so many steps of all strategies, or at this value of `time.monotonic()`."""

    steps: int
    deadline: float


@dataclass(frozen=True)
class _Part:
    """Buffers that depend on each other. A section is a longest stretch of time of which all buffers live together."""

    first: list[int]
    last: list[int]
    size: list[int]
    neighbours: list[list[int]]  # which buffers share a section with this one
    members: list[list[int]]  # which buffers live in a section
    capacity: int


@dataclass(frozen=True)
class _Strategy:
    """Which conflict is settled first, which of its buffers goes first, and the order that decides between equals."""

    tightest_conflict: bool
    value: str  # "rank", "offset" or "slack"
    rank: list[int]


@dataclass(slots=True)
class _State:
    """A partial placement. Lists by buffer and by section; a placed buffer has _PLACED for its offset and its end."""

    lowest: list[int]  # by buffer: the top of what is placed beneath it
    bound: list[int]  # the same, but for waiting buffers the lowest top of what they may come to lie on
    end: list[int]  # bound + size
    waiting: set[int]  # buffers that do not lie at `lowest`
    height: list[int]  # by section: the top of what is placed
    remaining: list[int]  # the sizes of what is not placed yet
    soonest: list[int]  # the lowest end of what is not placed yet
    members: list[list[int]]  # what is not placed yet

    def copy(self) -> _State:
        """A state to place one more buffer in."""
        return _State(
            self.lowest[:], self.bound[:], self.end[:], set(self.waiting),
            self.height[:], self.remaining[:], self.soonest[:], self.members[:],
        )  # fmt: skip


@dataclass(slots=True)
class _Frame:
    """Where the search can come back to: a state, the buffers to place in it, and the frame to blame if none fits."""

    state: _State
    alive: list[int]
    origin: int
    rest: _Agenda
    pick: int = -1


@dataclass(frozen=True, slots=True)
class _Agenda:
    """Parts still to be solved, each with its state and the frame that must be reconsidered when it has no solution."""

    items: tuple[tuple[list[int], _State, int], ...] = field(default=())


def search(buffers: Sequence[Buffer], capacity: int, limits: Limits) -> SearchResult:
    """Look for offsets such that no buffers that live together overlap and all end at or below `capacity`.

    `buffers` are (first, last_exclusive, size) with sizes above zero. The result is the same on every run, unless
    the deadline cuts it. Buffers that never live at the same time as others cost nothing.
    """
    unit = math.gcd(*(size for _, _, size in buffers)) if buffers else 1
    offsets = [0] * len(buffers)
    steps = 0
    for indices in _independent(buffers):
        chosen = [(first, last, size // unit) for first, last, size in (buffers[index] for index in indices)]
        result = _search_part(chosen, capacity // unit, Limits(limits.steps - steps, limits.deadline))
        steps += result.steps
        if result.outcome is not Outcome.SOLVED:
            return SearchResult(result.outcome, (), steps)
        for index, offset in zip(indices, result.offsets):
            offsets[index] = offset * unit
    return SearchResult(Outcome.SOLVED, tuple(offsets), steps)


def _independent(buffers: Sequence[Buffer]) -> list[list[int]]:
    """Groups of buffers between which no time is shared, in the order of time, each in that order too."""
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


def _search_part(buffers: list[Buffer], capacity: int, limits: Limits) -> SearchResult:
    part = _make_part(buffers, capacity)
    state = _start(part)
    if state is None:
        return SearchResult(Outcome.IMPOSSIBLE, (), 0)
    if len(buffers) == 1:
        return SearchResult(Outcome.SOLVED, (0,), 0)
    steps = 0
    # A strategy needs a step for each buffer to get anywhere.
    limit = min(_FIRST_LIMIT, max(limits.steps // 8, 2 * len(buffers)))
    while True:
        for strategy in _strategies(buffers):
            left = limits.steps - steps
            if left <= 0 or time.monotonic() > limits.deadline:
                return SearchResult(Outcome.GAVE_UP, (), steps)
            result = _explore(part, state, strategy, Limits(min(limit, left), limits.deadline))
            steps += result.steps
            if result.outcome is not Outcome.GAVE_UP:
                return SearchResult(result.outcome, result.offsets, steps)
        limit *= 2


def _make_part(buffers: list[Buffer], capacity: int) -> _Part:
    """Number the sections: a new one starts where a buffer starts after another has ended."""
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
    return _Part(first, last, [size for _, _, size in buffers], neighbours, members, capacity)


def _strategies(buffers: list[Buffer]) -> Iterator[_Strategy]:
    """Ways to search, those first that solved more of MiniMalloc's problems quickly."""
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
        most, length, area = crowded_long(index)
        return (most, area, length)

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


def _start(part: _Part) -> _State | None:
    """Nothing placed; None where even that is too much for the capacity."""
    remaining = [sum(part.size[index] for index in members) for members in part.members]
    if max(remaining) > part.capacity:
        return None
    count = len(part.size)
    soonest = [min(part.size[index] for index in members) for members in part.members]
    return _State([0] * count, [0] * count, part.size[:], set(), [0] * len(remaining), remaining, soonest, part.members)


def _explore(part: _Part, start: _State, strategy: _Strategy, limits: Limits) -> SearchResult:
    """One depth-first search, with a stack of its own since problems may be deeper than Python's."""
    offsets = [0] * len(part.size)
    everything = sorted(range(len(part.size)), key=lambda index: part.first[index])
    stack = [_Frame(start, everything, -1, _Agenda())]
    for step in range(limits.steps):
        if step % 64 == 0 and time.monotonic() > limits.deadline:
            return SearchResult(Outcome.GAVE_UP, (), step)
        frame = stack[-1]
        pick = frame.pick = _choose(part, frame.state, frame.alive, strategy)
        child = _place(part, frame.state, pick)
        if child is None:
            if not _back_up(part, stack, len(stack) - 1):
                return SearchResult(Outcome.IMPOSSIBLE, (), step + 1)
            continue
        offsets[pick] = frame.state.lowest[pick]
        items = frame.rest.items
        for alive in _split(part, [index for index in frame.alive if index != pick]):
            if len(alive) == 1:
                offsets[alive[0]] = child.lowest[alive[0]]
            else:
                items = ((alive, child, len(stack) - 1), *items)
        if not items:
            return SearchResult(Outcome.SOLVED, tuple(offsets), step + 1)
        alive, state, origin = items[0]
        stack.append(_Frame(state, alive, origin, _Agenda(items[1:])))
    return SearchResult(Outcome.GAVE_UP, (), limits.steps)


def _back_up(part: _Part, stack: list[_Frame], blamed: int) -> bool:
    """Let the pick of the blamed frame wait, or blame the frame before it; False when there is none left."""
    while blamed >= 0:
        del stack[blamed + 1 :]
        frame = stack[blamed]
        state = _postpone(part, frame.state, frame.pick)
        if state is not None:
            frame.state = state
            return True
        blamed = frame.origin
    return False


def _split(part: _Part, alive: list[int]) -> list[list[int]]:
    """Groups that share no section with each other, the largest first; `alive` is ordered by first section."""
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


def _place(part: _Part, state: _State, pick: int) -> _State | None:
    """Put a buffer at its lowest offset; None where the rest then cannot fit."""
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
    if not _raise_waiting(part, new, changed) or not _refresh(part, new, sections, changed):
        return None
    return new


def _postpone(part: _Part, state: _State, pick: int) -> _State | None:
    """Let a buffer wait: it lies on top of one that is not placed yet. None where nothing fits then."""
    new = state.copy()
    new.waiting.add(pick)
    changed: list[int] = []
    if not _raise_waiting(part, new, changed) or not _refresh(part, new, range(0), changed):
        return None
    return new


def _raise_waiting(part: _Part, state: _State, changed: list[int]) -> bool:
    """Bound the offsets of waiting buffers by the lowest end among the neighbours not placed; False beyond capacity."""
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


def _refresh(part: _Part, state: _State, sections: range, changed: list[int]) -> bool:
    """Update the sections of changed buffers; False where what is left of one does not fit above its lowest bound."""
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


def _choose(part: _Part, state: _State, alive: list[int], strategy: _Strategy) -> int:
    """The buffer to place next: of the conflict that the strategy takes first, the one that it places first."""
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


def _conflict(part: _Part, state: _State, index: int) -> list[int]:
    """A buffer and those that may lie below its end and in its way; empty where one of these could be raised before.

    If nothing that meets any of them ends below this buffer, one of them lies at its lowest offset: were the lowest of
    them higher, it would lie on something, which would end below this buffer's end.
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


def _slack(part: _Part, state: _State, index: int) -> int:
    """How much the tightest section of a buffer can lose at most."""
    sections = slice(part.first[index], part.last[index])
    return part.capacity - max(map(int.__add__, state.height[sections], state.remaining[sections]))
