"""A beam search in the order of time, for problems in which few bytes are free.

There, buffers that start take over the memory of buffers that end: both divide into exchanges of the same size, each
consecutive in memory. A state of the search is a set of orders of the buffers at a time, a PQ-tree (`orders.py`),
rather than offsets. It branches on the exchanges (`exchanges.py`), and keeps the states with the most orders, which
represent the most partial packings, and the fewest coincidences.

Where bytes are free, sizes are equal if they differ little, and some exchanges leave a gap, which a later one may use.
A flow of bytes (`byte_flow.py`) shows whether the capacity suffices for all exchanges of a state. A sweep proves
nothing.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise

from fxwrap.memory_planning.byte_flow import ByteFlow, Takeover
from fxwrap.memory_planning.exchanges import Exchange, ExchangeQuery, find_exchanges, margin
from fxwrap.memory_planning.explore import SearchLimits, SearchResult, SearchStatus
from fxwrap.memory_planning.greedy import Buffer, peak_of
from fxwrap.memory_planning.orders import Tree, digest, freedom, gather, leaves, mix, node_of

_MAX_WHOLE = 12
"""Largest number of buffers that end, or start, for which `_is_one_exchange` looks for smaller exchanges."""

_MAX_SURPLUS, _SURPLUS_LEFT = 8, 2
"""How many times the width is collected before the best states are chosen, and how many times remains."""

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class SweepOptions:
    """How a sweep runs.

    `width` is the number of states that remain of those with an equal number of buffers. Sizes are equal if they differ
    by at most `tolerance` of `TOLERANCE_UNIT`.
    """

    width: int
    tolerance: int = 0


@dataclass(frozen=True)
class _History:
    """The exchanges of a state, the last one first.

    The order of the ended leaves is reversed unless the leaf `anchor` lies on the side `is_anchor_left` of them; -1 for
    either order.
    """

    earlier: _History | None
    takeover: Takeover
    anchor: int
    is_anchor_left: bool


@dataclass(frozen=True)
class _State:
    """Orders of the leaves at a section, with `free` ones that the `pending` ones may replace which start there.

    Leaves from the number of buffers on are gaps, with their bytes. `flow` is the one before the last exchange.
    """

    section: int
    tree: Tree
    free: tuple[int, ...]
    pending: tuple[int, ...]
    gaps: tuple[int, ...]
    cost: int
    score: int
    key: int
    history: _History | None
    flow: ByteFlow


@dataclass
class _Level:
    """States with an equal number of buffers; those whose scores are not below `worst` are not added."""

    states: list[_State] = field(default_factory=list)
    worst: int | None = None


def sweep(buffers: Sequence[Buffer], capacity: int, options: SweepOptions, limits: SearchLimits) -> SearchResult:
    """Runs one sweep over buffers whose times are numbers of sections. C++ takes the same steps.

    A step tries an exchange.
    """
    return _Sweep(buffers, capacity, options, limits).run()


class _Sweep:
    """One sweep over the sections of a problem.

    Fields:
        _started, _ended: the buffers that start and end at each section, the largest first.
        _live: the live bytes in each section.
        _is_full: whether the live buffers fill the capacity in all sections.
        _whole: the groups of buffers that end together in one exchange, by the section where the last of each starts.
        _levels: the states, by the number of buffers in them.
    """

    def __init__(self, buffers: Sequence[Buffer], capacity: int, options: SweepOptions, limits: SearchLimits) -> None:
        self._buffers = buffers
        self._count = len(buffers)
        self._sizes = [size for _, _, size in buffers]
        self._capacity = capacity
        self._options = options
        self._limits = limits
        self._sections = max([last for _, last, _ in buffers])
        self._started: list[list[int]] = [[] for _ in range(self._sections + 1)]
        self._ended: list[list[int]] = [[] for _ in range(self._sections + 1)]
        self._live = [0] * self._sections
        by_size = sorted(range(len(buffers)), key=lambda index: (-buffers[index][2], index))
        for index in by_size:
            first, last, size = buffers[index]
            self._started[first].append(index)
            self._ended[last].append(index)
            for section in range(first, last):
                self._live[section] += size
        self._is_full = all(live == capacity for live in self._live)
        self._whole: list[list[list[int]]] = [[] for _ in range(self._sections)]
        for section in range(1, self._sections):
            if self._is_one_exchange(section):
                latest = max([buffers[index][0] for index in self._ended[section]])
                self._whole[latest].append(self._ended[section])
        self._levels = [_Level() for _ in range(len(buffers) + 1)]
        self._steps = 0

    def run(self) -> SearchResult:
        self._start()
        for count in range(self._count):
            choices: dict[object, list[Exchange]] = {}
            for state in self._best(self._levels[count].states, self._options.width, is_final=True):
                if self._steps >= self._limits.steps or time.monotonic() > self._limits.deadline:
                    return SearchResult(SearchStatus.LIMIT_REACHED, (), self._steps)
                self._expand(state, count, choices)
            self._levels[count] = _Level()
        for state in self._best(self._levels[-1].states, self._options.width, is_final=True):
            offsets = self._offsets(state)
            if peak_of(self._buffers, offsets) <= self._capacity:
                return SearchResult(SearchStatus.SOLVED, tuple(offsets), self._steps)
        return SearchResult(SearchStatus.LIMIT_REACHED, (), self._steps)

    def _start(self) -> None:
        initial: list[int] = [*self._started[0]]
        gap = self._capacity - self._live[0]
        if gap:
            initial.append(self._count)
        tree = self._foresee(node_of([*initial]), 0)
        if tree is not None:
            free, gaps = ((self._count,), (gap,)) if gap else ((), ())
            flow = ByteFlow(self._sizes, initial, gap)
            state = _State(0, tree, free, (), gaps, 0, 0, 0, None, flow)
            self._levels[len(self._started[0])].states.append(state)

    def _expand(self, state: _State, count: int, choices: dict[object, list[Exchange]]) -> None:
        """Adds the states after each exchange in a state."""
        if not state.pending:
            advanced = self._advanced(state)
            if advanced is None:
                return
            state = advanced
        free = tuple([self._free_size(state, leaf) for leaf in state.free])
        pending = tuple([self._sizes[index] for index in state.pending])
        if (free, pending) not in choices:
            spare = -1 if self._is_full else self._capacity - self._live[state.section]
            choices[free, pending] = find_exchanges(ExchangeQuery(free, pending, self._options.tolerance, spare))
        for exchange in choices[free, pending]:
            self._steps += 1
            self._try(state, exchange, self._levels[count + len(exchange.started)])

    def _free_size(self, state: _State, leaf: int) -> int:
        """Returns the size of a free leaf, below zero if it was free before the section."""
        if leaf >= self._count:
            return -state.gaps[leaf - self._count]
        _, last, size = self._buffers[leaf]
        return -size if last < state.section else size

    def _best(self, states: Sequence[_State], limit: int, *, is_final: bool) -> list[_State]:
        """Returns the states with the lowest scores, of those with equal orders only one; finally those that fit."""
        best: list[_State] = []
        keys: set[int] = set()
        for state in sorted(states, key=lambda state: state.score):
            if len(best) == limit:
                break
            if state.key in keys:
                continue
            keys.add(state.key)
            chosen = self._with_flow(state) if is_final and not self._is_full else state
            if chosen is not None:
                best.append(chosen)
        return best

    def _with_flow(self, state: _State) -> _State | None:
        if state.history is None:
            return state
        flow = state.flow.with_takeover(state.history.takeover)
        return None if flow is None else replace(state, flow=flow)

    def _advanced(self, state: _State) -> _State | None:
        """Returns the state at the next section in which buffers start; None if free leaves do not fit before it."""
        section, free = state.section, state.free
        while True:
            section += 1
            if section >= self._sections:
                return None
            free = (*free, *self._ended[section])
            if self._started[section]:
                return replace(state, section=section, free=free, pending=tuple(self._started[section]))
            if not self._fits(section, free):
                return None

    def _fits(self, section: int, free: Sequence[int]) -> bool:
        """Whether the buffers whose memory is not in use again fit beside the live ones."""
        size = sum([self._sizes[leaf] for leaf in free if leaf < self._count])
        return size <= self._capacity - self._live[section]

    def _try(self, state: _State, exchange: Exchange, level: _Level) -> None:
        """Adds the state after an exchange, if there is one."""
        ended = [state.free[position] for position in exchange.ended]
        started = [state.pending[position] for position in exchange.started]
        pending = tuple([index for index in state.pending if index not in started])
        free = tuple([leaf for leaf in state.free if leaf not in ended])
        gaps = state.gaps
        if exchange.left >= 0:
            if len(gaps) > self._count:
                return
            started.append(self._count + len(gaps))
            free = (*free, started[-1])
            gaps = (*gaps, exchange.left)
        if not pending and not self._fits(state.section, free):
            return
        before = gather(state.tree, frozenset(ended), node_of([*started]))
        if before is None:
            return
        tree = before.tree if pending else self._foresee(before.tree, state.section)
        if tree is None:
            return
        cost = state.cost + exchange.cost
        score = cost - freedom(tree) // (1 if self._is_full else 2)
        if level.worst is not None and score >= level.worst:
            return
        key = digest(tree, self._digest) + sum([mix(self._digest(index)) for index in pending]) & _MASK
        takeover = Takeover(before.order, tuple(started))
        history = _History(state.history, takeover, before.anchor, before.is_anchor_left)
        level.states.append(_State(state.section, tree, free, pending, gaps, cost, score, key, history, state.flow))
        if len(level.states) > _MAX_SURPLUS * self._options.width:
            limit = _SURPLUS_LEFT * self._options.width
            level.states = self._best(level.states, limit, is_final=False)
            if len(level.states) == limit:
                level.worst = level.states[-1].score

    def _digest(self, leaf: int) -> int:
        """Buffers with equal ends and sizes are equal from now on."""
        if leaf >= self._count:
            return mix(~(leaf - self._count) & _MASK)
        _, last, size = self._buffers[leaf]
        return mix(mix(last) ^ size)

    def _foresee(self, tree: Tree, section: int) -> Tree | None:
        """Makes the buffers that one exchange will end consecutive, now that the last of them has started.

        Buffers between them must end there, too.
        """
        for ended in self._whole[section]:
            gathered = gather(tree, frozenset(ended), None)
            if gathered is None:
                return None
            tree = gathered.tree
        return tree

    def _is_one_exchange(self, section: int) -> bool:
        """Whether no buffers that end at a section have the size of some that start there, except all of them."""
        ended, started = self._ended[section], self._started[section]
        if not 2 <= len(ended) <= _MAX_WHOLE or not 1 <= len(started) <= _MAX_WHOLE:
            return False
        tolerance = self._options.tolerance
        size = self._total(started)
        if abs(self._total(ended) - size) > margin(size, tolerance):
            return False
        sums = sorted([self._total(chosen) for chosen in _proper_sets(ended)])
        for chosen in _proper_sets(started):
            size = self._total(chosen)
            nearest = bisect_left(sums, size - margin(size, tolerance))
            if nearest < len(sums) and sums[nearest] <= size + margin(size, tolerance):
                return False
        return True

    def _total(self, indices: Sequence[int]) -> int:
        return sum([self._sizes[index] for index in indices])

    def _offsets(self, state: _State) -> list[int]:
        """Returns the lowest offsets of one of a state's orders, found by undoing its exchanges."""
        order = leaves(state.tree)
        above: list[set[int]] = [set() for _ in self._buffers]
        history = state.history
        while True:
            for lower, upper in pairwise([leaf for leaf in order if leaf < self._count]):
                above[lower].add(upper)
            if history is None:
                break
            ended, started = history.takeover.ended, history.takeover.started
            begin = min(order.index(leaf) for leaf in started)
            if history.anchor >= 0 and (order.index(history.anchor) < begin) != history.is_anchor_left:
                ended = ended[::-1]
            order[begin : begin + len(started)] = ended
            history = history.earlier
        return _stacked(self._buffers, above, self._sections)


def _stacked(buffers: Sequence[Buffer], above: Sequence[set[int]], sections: int) -> list[int]:
    """Returns the offsets of buffers that lie on those which they are above of."""
    waiting = [0] * len(buffers)
    for indices in above:
        for index in indices:
            waiting[index] += 1
    ready = [index for index, count in enumerate(waiting) if not count]
    offsets, heights = [0] * len(buffers), [0] * sections
    while ready:
        index = ready.pop()
        first, last, size = buffers[index]
        offsets[index] = max(heights[first:last])
        heights[first:last] = [offsets[index] + size] * (last - first)
        for upper in above[index]:
            waiting[upper] -= 1
            if not waiting[upper]:
                ready.append(upper)
    return offsets


def _proper_sets(indices: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yields the sets that are neither empty nor whole."""
    for count in range(1, len(indices)):
        yield from combinations(indices, count)
