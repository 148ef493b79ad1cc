"""A beam search in the order of time, for problems in which most bytes are in use.

Where all bytes are in use, buffers that start take over the memory of buffers that end: both divide into exchanges of
the same size, each consecutive in memory. A state of the search is a set of orders of the buffers at a time, a PQ-tree
(`orders.py`), rather than offsets. It branches on the exchanges, and keeps the states with the most orders, which stand
for the most partial packings. With free bytes, sizes of an exchange differ by up to a tolerance, and memory of ended
buffers may wait for a later exchange. A sweep fails soon where less is in use; it proves nothing.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb

from fxwrap.memory_planning.explore import SearchLimits, SearchResult, SearchStatus
from fxwrap.memory_planning.greedy import Buffer, peak_of
from fxwrap.memory_planning.orders import FREEDOM_UNIT, Gathered, Tree, digest, freedom, gather, leaves, mix, node_of

_TOLERANCE = 50
"""Exchanges differ by at most this part of their size: 2%. None if all bytes are in use."""

_ITEM_COST, _DIFFERENCE_COST, _LATE_COST = FREEDOM_UNIT // 10, 4 * FREEDOM_UNIT, FREEDOM_UNIT
"""Costs of each buffer that an exchange chooses, of the largest difference, and of memory that was free before."""

_MAX_ENDED_SETS, _MAX_STARTED_SETS = 2_400, 300
"""Numbers of sets of ended and of started buffers for exchanges."""

_MAX_EXCHANGES = 200
"""Number of exchanges tried in a state."""

_MAX_WHOLE = 12
"""Largest number of buffers that end, or start, for which `_is_one_exchange` looks for smaller exchanges."""

_MAX_SURPLUS = 4
"""How many times the width is collected before the best states are chosen."""


@dataclass(frozen=True)
class _Exchange:
    """Ended buffers and started ones that take over their memory."""

    cost: int
    ended: tuple[int, ...]
    started: tuple[int, ...]


@dataclass(frozen=True)
class _History:
    """The exchanges of a state, the last one first: the order of its ended buffers, and the started ones."""

    earlier: _History | None
    before: Gathered
    started: tuple[int, ...]


@dataclass(frozen=True)
class _State:
    """Orders of the buffers at a section, and the ended ones whose memory is free. `pending` ones start there, too."""

    section: int
    tree: Tree
    free: tuple[int, ...]
    pending: tuple[int, ...]
    cost: int
    score: int
    key: int
    history: _History | None


def sweep(buffers: Sequence[Buffer], capacity: int, width: int, limits: SearchLimits) -> SearchResult:
    """Runs one sweep over buffers whose times are numbers of sections. C++ takes the same steps.

    `width` is the number of states that remain of those with an equal number of buffers. A step tries an exchange.
    """
    return _Sweep(buffers, capacity, width, limits).run()


class _Sweep:
    def __init__(self, buffers: Sequence[Buffer], capacity: int, width: int, limits: SearchLimits) -> None:
        self._buffers = buffers
        self._capacity = capacity
        self._width = width
        self._limits = limits
        self._sections = max([last for _, last, _ in buffers])
        self._started: list[list[int]] = [[] for _ in range(self._sections + 1)]
        self._ended: list[list[int]] = [[] for _ in range(self._sections + 1)]
        self._spare = [capacity] * self._sections
        by_size = sorted(range(len(buffers)), key=lambda index: (-buffers[index][2], index))
        for index in by_size:
            first, last, size = buffers[index]
            self._started[first].append(index)
            self._ended[last].append(index)
            for section in range(first, last):
                self._spare[section] -= size
        self._tolerance = _TOLERANCE if any(self._spare) else 0
        self._whole: list[list[list[int]]] = [[] for _ in range(self._sections)]
        """By section: buffers that end together in one exchange, and all of which are live from there on."""
        for section in range(1, self._sections):
            if self._is_one_exchange(section):
                ended = self._ended[section]
                self._whole[max([buffers[index][0] for index in ended])].append(ended)
        self._states: list[list[_State]] = [[] for _ in range(len(buffers) + 1)]
        self._steps = 0

    def run(self) -> SearchResult:
        initial = self._foresee(node_of(list(self._started[0])), 0)
        if initial is not None:
            self._states[len(self._started[0])] = [_State(0, initial, (), (), 0, 0, 0, None)]
        for count in range(len(self._buffers)):
            exchanges: dict[object, list[_Exchange]] = {}
            for state in self._best(self._states[count]):
                if self._steps >= self._limits.steps or time.monotonic() > self._limits.deadline:
                    return SearchResult(SearchStatus.LIMIT_REACHED, (), self._steps)
                if not state.pending:
                    state = self._advanced(state)
                choices = (state.free, state.pending)
                if choices not in exchanges:
                    found = sorted(self._exchanges(state), key=lambda exchange: exchange.cost)
                    exchanges[choices] = found[:_MAX_EXCHANGES]
                for exchange in exchanges[choices]:
                    self._steps += 1
                    self._try(state, exchange, count + len(exchange.started))
            self._states[count] = []
        for state in self._best(self._states[-1]):
            offsets = self._offsets(state)
            if peak_of(self._buffers, offsets) <= self._capacity:
                return SearchResult(SearchStatus.SOLVED, tuple(offsets), self._steps)
        return SearchResult(SearchStatus.LIMIT_REACHED, (), self._steps)

    def _best(self, states: Iterable[_State]) -> list[_State]:
        """Returns the states with the lowest scores, of those with equal orders only one."""
        best: dict[int, _State] = {}
        for state in sorted(states, key=lambda state: state.score):
            best.setdefault(state.key, state)
            if len(best) == self._width:
                break
        return list(best.values())

    def _advanced(self, state: _State) -> _State:
        section = state.section + 1
        free, pending = (*state.free, *self._ended[section]), tuple(self._started[section])
        return _State(section, state.tree, free, pending, state.cost, state.score, state.key, state.history)

    def _try(self, state: _State, exchange: _Exchange, count: int) -> None:
        """Adds the state after an exchange, if there is one."""
        before = gather(state.tree, frozenset(exchange.ended), node_of(list(exchange.started)))
        if before is None:
            return
        tree: Tree | None = before.tree
        free = tuple([index for index in state.free if index not in exchange.ended])
        pending = tuple([index for index in state.pending if index not in exchange.started])
        if not pending:
            tree = self._foresee(before.tree, state.section)
            if tree is None or self._size(free) > self._spare[state.section]:
                return
        cost = state.cost + exchange.cost
        key = digest(tree, self._digest) + sum([mix(self._digest(index)) for index in pending]) & (1 << 64) - 1
        history = _History(state.history, before, exchange.started)
        states = self._states[count]
        states.append(_State(state.section, tree, free, pending, cost, cost - freedom(tree), key, history))
        if len(states) > _MAX_SURPLUS * self._width:
            self._states[count] = self._best(states)

    def _digest(self, index: int) -> int:
        """Buffers with equal ends and sizes are equal from now on."""
        _, last, size = self._buffers[index]
        return mix(mix(last) ^ size)

    def _foresee(self, tree: Tree, section: int) -> Tree | None:
        """Makes buffers consecutive that one exchange will end, now that the last of them has started: what is between
        them must end there, too."""
        for ended in self._whole[section]:
            gathered = gather(tree, frozenset(ended), None)
            if gathered is None:
                return None
            tree = gathered.tree
        return tree

    def _is_one_exchange(self, section: int) -> bool:
        """Whether all buffers that end at a section have the size of all that start there, and no others."""
        ended, started = self._ended[section], self._started[section]
        total = self._size(started)
        if not 2 <= len(ended) <= _MAX_WHOLE or len(started) > _MAX_WHOLE:
            return False
        if abs(self._size(ended) - total) > self._margin(total):
            return False
        sizes = sorted([self._size(chosen) for chosen in _sets(ended, len(ended) - 1)])
        for chosen in _sets(started, len(started) - 1):
            size = self._size(chosen)
            position = bisect_left(sizes, size - self._margin(size))
            if position < len(sizes) and sizes[position] <= size + self._margin(size):
                return False
        return True

    def _exchanges(self, state: _State) -> Iterator[_Exchange]:
        """Yields exchanges with the first pending buffer.

        Of the free memory and of the pending buffers, an exchange has few, or all but few.
        """
        free, pending, others = state.free, state.pending, state.pending[1:]
        most_free, most_started = _largest_set(len(free), _MAX_ENDED_SETS), _largest_set(len(others), _MAX_STARTED_SETS)
        chosen_sets = [(self._size(chosen), order, chosen) for order, chosen in enumerate(_sets(free, most_free))]
        chosen_sets.sort()
        left_out = [(0, -1, ()), *chosen_sets]
        total_free, total = self._size(free), self._size(pending)
        for others_chosen in ((), *_sets(others, most_started)):
            size = self._size(others_chosen)
            few = (pending[0], *others_chosen)
            many = tuple([index for index in pending if index not in others_chosen])
            for started, started_size in ((few, self._size(few)), (many, total - size)):
                if started is many and len(many) <= most_started + 1:
                    continue
                margin, named = self._margin(started_size), len(others_chosen)
                for _, ended, ended_size in _between(chosen_sets, started_size - margin, started_size + margin):
                    yield self._exchange(state, ended, started, ended_size - started_size, named + len(ended))
                target = total_free - started_size
                for _, rest, rest_size in _between(left_out, target - margin, target + margin):
                    if len(free) - len(rest) > most_free:
                        ended = tuple([index for index in free if index not in rest])
                        yield self._exchange(state, ended, started, target - rest_size, named + len(rest))

    def _exchange(
        self, state: _State, ended: tuple[int, ...], started: tuple[int, ...], difference: int, named: int
    ) -> _Exchange:
        is_late = not any(self._buffers[index][1] == state.section for index in ended)
        cost = named * _ITEM_COST + is_late * _LATE_COST
        cost += abs(difference) * _DIFFERENCE_COST // (self._margin(self._size(started)) + 1)
        return _Exchange(cost, ended, started)

    def _margin(self, size: int) -> int:
        return size // self._tolerance if self._tolerance else 0

    def _size(self, indices: Iterable[int]) -> int:
        return sum([self._buffers[index][2] for index in indices])

    def _offsets(self, state: _State) -> list[int]:
        """Returns the lowest offsets of one of a state's orders, found by undoing its exchanges."""
        order = leaves(state.tree)
        above: list[set[int]] = [set() for _ in self._buffers]
        history = state.history
        while True:
            for lower, upper in zip(order, order[1:]):
                above[lower].add(upper)
            if history is None:
                break
            begin = min(order.index(index) for index in history.started)
            before = history.before
            ended = before.order
            if before.anchor >= 0 and (order.index(before.anchor) < begin) != before.is_anchor_left:
                ended = ended[::-1]
            order[begin : begin + len(history.started)] = ended
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


def _sets(indices: Sequence[int], largest: int) -> Iterator[tuple[int, ...]]:
    """Yields the sets with up to a number of items, except the empty one."""
    for count in range(1, largest + 1):
        yield from combinations(indices, count)


def _largest_set(count: int, limit: int) -> int:
    """Returns the largest number of items of which there are no more sets than a limit; 1 at least."""
    largest, sets = 1, count
    while largest < count and sets + comb(count, largest + 1) <= limit:
        largest += 1
        sets += comb(count, largest)
    return min(largest, count)


def _between(
    table: Sequence[tuple[int, int, tuple[int, ...]]], lowest: int, highest: int
) -> Iterator[tuple[int, tuple[int, ...], int]]:
    """Yields the order, items and size of the sets with sizes in a range."""
    for position in range(bisect_left(table, (lowest, -2, ())), len(table)):
        size, order, chosen = table[position]
        if size > highest:
            return
        yield order, chosen, size
