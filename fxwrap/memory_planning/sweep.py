"""A beam search in the order of time, for problems in which all bytes are in use at all times.

There, buffers that start take over the memory of buffers that end: both divide into exchanges of the same size, each
consecutive in memory. A state of the search is a set of orders of the buffers at a time, a PQ-tree (`orders.py`),
rather than offsets. It branches on the exchanges, and keeps the states with the most orders, which stand for the most
partial packings. A sweep proves nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import comb

from fxwrap.memory_planning.explore import SearchLimits, SearchResult, SearchStatus
from fxwrap.memory_planning.greedy import Buffer, peak_of
from fxwrap.memory_planning.orders import FREEDOM_UNIT, Gathered, Tree, digest, freedom, gather, leaves, mix, node_of

_ITEM_COST = FREEDOM_UNIT // 10
"""Cost of each buffer by which an exchange is chosen: small exchanges come first."""

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
    """Orders of the buffers at a section, with `ended` ones in place of the `pending` ones that start there."""

    section: int
    tree: Tree
    ended: tuple[int, ...]
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
        by_size = sorted(range(len(buffers)), key=lambda index: (-buffers[index][2], index))
        for index in by_size:
            self._started[buffers[index][0]].append(index)
            self._ended[buffers[index][1]].append(index)
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
                choices = (state.ended, state.pending)
                if choices not in exchanges:
                    by_cost = sorted(self._exchanges(state), key=lambda exchange: exchange.cost)
                    exchanges[choices] = by_cost[:_MAX_EXCHANGES]
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
        ended, pending = tuple(self._ended[section]), tuple(self._started[section])
        return _State(section, state.tree, ended, pending, state.cost, state.score, state.key, state.history)

    def _try(self, state: _State, exchange: _Exchange, count: int) -> None:
        """Adds the state after an exchange, if there is one."""
        before = gather(state.tree, frozenset(exchange.ended), node_of(list(exchange.started)))
        if before is None:
            return
        ended = tuple([index for index in state.ended if index not in exchange.ended])
        pending = tuple([index for index in state.pending if index not in exchange.started])
        tree = before.tree if pending else self._foresee(before.tree, state.section)
        if tree is None:
            return
        cost = state.cost + exchange.cost
        key = digest(tree, self._digest) + sum([mix(self._digest(index)) for index in pending]) & (1 << 64) - 1
        history = _History(state.history, before, exchange.started)
        states = self._states[count]
        states.append(_State(state.section, tree, ended, pending, cost, cost - freedom(tree), key, history))
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
        """Whether no buffers that end at a section have the size of some that start there, except all of them."""
        ended, started = self._ended[section], self._started[section]
        if not 2 <= len(ended) <= _MAX_WHOLE or len(started) > _MAX_WHOLE:
            return False
        sizes = {self._size(chosen) for chosen in _sets(ended, len(ended) - 1)}
        return not any(self._size(chosen) in sizes for chosen in _sets(started, len(started) - 1))

    def _exchanges(self, state: _State) -> Iterator[_Exchange]:
        """Yields exchanges with the first pending buffer, of few ended or pending ones or of all but few."""
        pending, others = state.pending, state.pending[1:]
        most_ended = _largest_set(len(state.ended), _MAX_ENDED_SETS)
        most_started = _largest_set(len(others), _MAX_STARTED_SETS)
        sets: dict[int, list[tuple[int, ...]]] = {}
        for chosen in ((), *_sets(state.ended, most_ended)):
            sets.setdefault(self._size(chosen), []).append(chosen)
        total_ended, total = self._size(state.ended), self._size(pending)
        for chosen in ((), *_sets(others, most_started)):
            few = (pending[0], *chosen)
            choices = [(few, self._size(few))]
            if len(pending) - len(chosen) > most_started + 1:
                rest = tuple([index for index in pending if index not in chosen])
                choices.append((rest, total - self._size(chosen)))
            for started, size in choices:
                for ended in sets.get(size, ()):
                    yield _Exchange((len(chosen) + len(ended)) * _ITEM_COST, ended, started)
                for left in sets.get(total_ended - size, ()):
                    if len(state.ended) - len(left) > most_ended:
                        ended = tuple([index for index in state.ended if index not in left])
                        yield _Exchange((len(chosen) + len(left)) * _ITEM_COST, ended, started)

    def _size(self, indices: Iterable[int]) -> int:
        return sum([self._buffers[index][2] for index in indices])

    def _offsets(self, state: _State) -> list[int]:
        """Returns the lowest offsets of one of a state's orders, found by undoing its exchanges."""
        order = leaves(state.tree)
        above: list[set[int]] = [set() for _ in self._buffers]
        history = state.history
        while True:
            for lower, upper in pairwise(order):
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
