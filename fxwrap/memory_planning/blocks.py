"""Merging of buffers into blocks that a search places as one buffer.

A block is a set of buffers whose sizes add up to the same number of bytes at each time between its first and its last:
packed within this size, it is a rectangle of time and bytes. Dense problems, and programs whose buffers hand their
memory on, consist of blocks inside of blocks; merging them leaves a much smaller problem. With a tolerance, sizes are
nearly equal and the block is padded, as far as bytes are free. Each solution of the merged problem is one of the
buffers. The converse is false: merging is greedy, and what fits together by size need not belong together. So a search
alternates with `Blocks.improve`, a large neighbourhood search (Shaw, 1998) for fewer blocks, which splits some of them
and merges again.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from time import monotonic
from typing import TypeVar

from fxwrap.memory_planning.explore import pack_block
from fxwrap.memory_planning.greedy import Buffer

EXACT = (0.0,)
APPROXIMATE = (0.0, 0.005, 0.025)
"""Tolerances of sizes that take over one another's memory, relative. Merging uses them in turn: equal sizes first."""

_MAX_BLOCK = 40
"""Largest number of items of a block."""

_MAX_EXCHANGE = 6
"""Largest number of items of an exchange."""

_MAX_ENUMERATED = 14
"""Largest number of items that start, or end, at a time for exchanges of more than 3 items."""

_SPLIT_COUNTS, _SPLIT_DEPTHS, _SPLIT_DISTANCES = (1, 2, 3, 5, 8), (1, 1, 2, 3, 6), (0, 1, 2, 5)
"""How many blocks a step of `improve` splits at most, how deep, and at which distance in sections of a time."""

_KEPT_APART = 0.5
"""The share of split blocks that are not merged again in the same step."""

_SPLIT_FURTHER = 0.7
"""The share of the blocks in a split block that are split, too."""

_ACCEPT_MORE = 0.05
"""The share of steps that may end with one more block."""

_Value = TypeVar("_Value")


class Generator:
    """A pseudorandom generator that native code has too: SplitMix64 (Steele, Lea and Flood, 2014)."""

    def __init__(self) -> None:
        self._state = 0

    def bits(self) -> int:
        """Returns 64 bits."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _64_BITS
        value = self._state
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _64_BITS
        return value ^ (value >> 31)

    def random(self) -> float:
        """Returns a number from 0 to 1, exclusive."""
        return (self.bits() >> 11) * 2.0**-53

    def choose(self, values: Sequence[_Value]) -> _Value:
        """Returns one of the values."""
        return values[self.bits() % len(values)]

    def shuffle(self, values: list[int]) -> None:
        """Permutes a list in place."""
        for last in range(len(values) - 1, 0, -1):
            other = self.bits() % (last + 1)
            values[last], values[other] = values[other], values[last]


_64_BITS = (1 << 64) - 1


@dataclass(frozen=True, eq=False)
class _Exchange:
    """Items that end at a time, and items of the same total size that start there and take over their memory."""

    ended: tuple[int, ...]
    started: tuple[int, ...]

    @property
    def items(self) -> tuple[int, ...]:
        return self.ended + self.started


@dataclass(frozen=True)
class _Candidate:
    """A block that may be merged: items, their first time, and their live bytes at each time from there on."""

    items: tuple[int, ...]
    begin: int
    live: list[int]

    @property
    def size(self) -> int:
        return max(self.live)

    @property
    def waste(self) -> float:
        """The share of padding."""
        return 1 - sum(self.live) / (self.size * len(self.live))


class Blocks:
    """Items by number: buffers, and blocks of items, which form a forest. The roots are to be placed.

    Each item is a buffer, whose size includes padding. `steps` counts the work, in units that take about as long as a
    step of the depth-first search.
    """

    def __init__(self, buffers: Sequence[Buffer], capacity: int, tolerances: Sequence[float]) -> None:
        """Merges buffers, whose times are numbers of sections, until no block is left."""
        self._count = len(buffers)
        self._random = Generator()
        self._items: dict[int, Buffer] = dict(enumerate(buffers))
        self._members: dict[int, list[tuple[int, int]]] = {}  # of blocks, with offsets
        self._keys = {index: self._random.bits() for index in self._items}  # blocks of the same buffers: equal
        self._roots = set(self._items)
        self._next = self._count
        self._end = max([last for _, last, _ in buffers])
        self._free = [capacity] * self._end
        self._ended: list[set[int]] = [set() for _ in range(self._end + 1)]
        self._started: list[set[int]] = [set() for _ in range(self._end + 1)]
        self._exchanges: list[list[_Exchange]] = [[] for _ in range(self._end + 1)]
        self._at_end: dict[int, _Exchange] = {}
        self._at_start: dict[int, _Exchange] = {}
        self._packed: dict[tuple[int, tuple[Buffer, ...]], Sequence[int]] = {}
        self._apart: set[int] = set()  # keys of blocks that are not merged
        self._journal: list[tuple[int, bool]] = []  # blocks that were merged (True) or split
        self.steps = 0
        for index in self._items:
            self._add(index)
        for self._tolerance in tolerances:
            self._merge_all(range(1, self._end))
        self._journal.clear()

    @property
    def buffers(self) -> list[Buffer]:
        """The roots as buffers."""
        return [self._items[index] for index in sorted(self._roots)]

    @property
    def has_blocks(self) -> bool:
        """Whether a root is a block."""
        return len(self._roots) < self._count

    def expand(self, offsets: Sequence[int]) -> list[int]:
        """Returns the offsets of the buffers from those of the roots."""
        expanded = [0] * self._count
        pending = list(zip(sorted(self._roots), offsets, strict=True))
        while pending:
            index, offset = pending.pop()
            if index < self._count:
                expanded[index] = offset
            else:
                pending += [(member, offset + relative) for member, relative in self._members[index]]
        return expanded

    def improve(self, steps: int, deadline: float = math.inf) -> None:
        """Splits blocks near a random time and merges again, while there are steps; undoes what leaves more roots.

        `deadline` is a value of `time.monotonic()`.
        """
        until = self.steps + steps
        while self.has_blocks and len(self._roots) > 1 and self.steps < until and monotonic() < deadline:
            before = len(self._roots)
            self._merge_all(self._split_some())
            self._apart.clear()
            if len(self._roots) <= before + (self._random.random() < _ACCEPT_MORE):
                self._journal.clear()
            else:
                self._undo()

    def _split_some(self) -> set[int]:
        """Splits some blocks near an end of a random root; returns the times that changed."""
        choose = self._random.choose
        roots = sorted(self._roots)
        first, last, _ = self._items[choose(roots)]
        center, distance = choose((first, last)), choose((*_SPLIT_DISTANCES, self._end // 20))
        low, high = center - distance, center + distance
        near = [index for index in roots if index >= self._count
                and self._items[index][0] <= high and self._items[index][1] >= low]  # fmt: skip
        self._random.shuffle(near)
        depth = choose(_SPLIT_DEPTHS)
        changed = {first, last}
        pending = [(index, depth) for index in near[: choose(_SPLIT_COUNTS)]]
        while pending:
            index, rest = pending.pop()
            if self._random.random() < _KEPT_APART:
                self._apart.add(self._keys[index])
            changed |= self._split(index)
            self._journal.append((index, False))
            pending += [(member, rest - 1) for member, _ in self._members[index] if rest > 1
                        and member >= self._count and self._random.random() < _SPLIT_FURTHER]  # fmt: skip
        return changed

    def _undo(self) -> None:
        changed: set[int] = set()
        while self._journal:
            index, is_merged = self._journal.pop()
            changed.update(self._items[index][:2])
            if is_merged:
                changed |= self._split(index)
                del self._items[index], self._members[index], self._keys[index]
                self._next = index
                continue
            for member, _ in self._members[index]:
                changed.update(self._items[member][:2])
                self._remove(member)
            self._add(index)
        self._update_exchanges(changed)

    def _merge_all(self, changed: Iterable[int]) -> None:
        """Merges stacks of items with equal live ranges, else other blocks, until none is left.

        It looks near the times that changed.
        """
        while changed:
            self._update_exchanges(changed)
            near = {time for changed_at in changed for index in (*self._started[changed_at], *self._ended[changed_at])
                    for time in self._items[index][:2]}  # fmt: skip
            times = sorted(near.union(changed))
            changed = (
                self._merge_stacks(times, True) or self._merge_candidates(times) or self._merge_stacks(times, False)
            )

    def _merge_stacks(self, times: Sequence[int], is_linked: bool) -> set[int]:
        """Stacks items with equal live ranges, either all or those that belong together at both ends."""
        stacks: dict[object, list[int]] = {}
        for time in times:
            for index in sorted(self._started[time], key=lambda index: (-self._items[index][2], index)):
                links = (self._at_start.get(index), self._at_end.get(index)) if is_linked else ()
                stacks.setdefault((*self._items[index][:2], links), []).append(index)
        changed: set[int] = set()
        for stack in stacks.values():
            if len(stack) > 1 and self._key(stack) not in self._apart:
                offsets, size = [], 0
                for index in stack:
                    offsets.append(size)
                    size += self._items[index][2]
                changed |= self._merge(stack, offsets, size)
        return changed

    def _merge_candidates(self, times: Sequence[int]) -> set[int]:
        """Merges blocks, small ones first."""
        exchanges = [exchange for time in times for exchange in self._exchanges[time]]
        closures = {closure: self._random.random() for exchange in exchanges if (closure := self._closure(exchange))}
        self.steps += len(exchanges)
        candidates = [(self._candidate(closure), tie) for closure, tie in closures.items()
                      if self._key(closure) not in self._apart]  # fmt: skip
        candidates.sort(key=lambda pair: (len(pair[0].items), pair[0].waste, pair[1]))
        merged: set[int] = set()
        changed: set[int] = set()
        for candidate, _ in candidates:
            if merged.isdisjoint(candidate.items) and (offsets := self._offsets(candidate)):
                chosen = zip(offsets, candidate.items, strict=True)
                size = max([offset + self._items[index][2] for offset, index in chosen])
                changed |= self._merge(candidate.items, offsets, size)
                merged.update(candidate.items)
        return changed

    def _candidate(self, items: tuple[int, ...]) -> _Candidate:
        begin = min([self._items[index][0] for index in items])
        changes = [0] * (max([self._items[index][1] for index in items]) - begin + 1)
        for index in items:
            first, last, size = self._items[index]
            changes[first - begin] += size
            changes[last - begin] -= size
        live, total = [], 0
        for change in changes[:-1]:
            total += change
            live.append(total)
        return _Candidate(items, begin, live)

    def _offsets(self, candidate: _Candidate) -> Sequence[int]:
        """Returns the offsets of the items of a block, which is padded as far as bytes are free; () for none."""
        begin, size, live = candidate.begin, candidate.size, candidate.live
        free = self._free[begin : begin + len(live)]
        spare = min([there + bytes_live for there, bytes_live in zip(free, live)]) - size
        if spare < 0:
            return ()
        chosen = tuple([self._items[index] for index in candidate.items])
        for capacity in sorted({size, size + min(spare, int(size * self._tolerance))}):
            if (capacity, chosen) not in self._packed:
                self._packed[capacity, chosen] = pack_block(chosen, capacity)
            if offsets := self._packed[capacity, chosen]:
                return offsets
        return ()

    def _closure(self, exchange: _Exchange) -> tuple[int, ...]:
        """Returns the smallest block with an exchange; () if it is large, or if there is none.

        It has the exchanges of all its items that start after the first or end before the last of them.
        """
        closure = set(exchange.items)
        while len(closure) <= _MAX_BLOCK:
            ranges = [(index, *self._items[index][:2]) for index in closure]
            begin, end = min([first for _, first, _ in ranges]), max([last for _, _, last in ranges])
            more: set[int] = set()
            for index, first, last in ranges:
                for is_inner, exchanges in ((first > begin, self._at_start), (last < end, self._at_end)):
                    if is_inner:
                        if index not in exchanges:
                            return ()
                        more.update(exchanges[index].items)
            if more <= closure:
                return tuple(sorted(closure))
            closure |= more
        return ()

    def _update_exchanges(self, times: Iterable[int]) -> None:
        for time in sorted(times):
            self.steps += 1
            for exchange in self._exchanges[time]:
                for index in exchange.ended:
                    self._at_end.pop(index, None)
                for index in exchange.started:
                    self._at_start.pop(index, None)
            self._exchanges[time] = list(self._exchanges_at(time)) if 0 < time < self._end else []
            for exchange in self._exchanges[time]:
                self._at_end |= dict.fromkeys(exchange.ended, exchange)
                self._at_start |= dict.fromkeys(exchange.started, exchange)

    def _exchanges_at(self, time: int) -> Iterator[_Exchange]:
        """Yields disjoint exchanges at one time, the smallest first, equal ones in random order."""
        ended, started = sorted(self._ended[time]), sorted(self._started[time])
        self._random.shuffle(ended)
        self._random.shuffle(started)
        largest = 3 if max(len(ended), len(started)) > _MAX_ENUMERATED else _MAX_EXCHANGE
        count = 2
        while ended and started and count <= min(largest, len(ended) + len(started)):
            exchange = self._exchange(time, ended, started, count)
            if exchange is None:
                count += 1
                continue
            yield exchange
            ended = [index for index in ended if index not in exchange.ended]
            started = [index for index in started if index not in exchange.started]

    def _exchange(self, time: int, ended: list[int], started: list[int], count: int) -> _Exchange | None:
        """Returns the exchange of a number of items whose sizes differ least, within the tolerance, if there is one."""
        best: _Exchange | None = None
        least = 2.0
        for number in range(max(1, count - len(started)), min(count - 1, len(ended)) + 1):
            table = sorted([(self._size(chosen), order, chosen)
                            for order, chosen in enumerate(combinations(ended, number))])  # fmt: skip
            for chosen in combinations(started, count - number):
                size = self._size(chosen)
                margin = int(self._tolerance * size)
                position = bisect_left(table, (size - min(margin, self._free[time - 1]),))
                highest = size + min(margin, self._free[time])
                while position < len(table) and table[position][0] <= highest:
                    difference = abs(table[position][0] - size) / size
                    if difference < least:
                        best, least = _Exchange(table[position][2], chosen), difference
                    position += 1
        return best

    def _size(self, indices: Sequence[int]) -> int:
        return sum([self._items[index][2] for index in indices])

    def _key(self, indices: Iterable[int]) -> int:
        key = 0
        for index in indices:
            key ^= self._keys[index]
        return key

    def _merge(self, indices: Sequence[int], offsets: Sequence[int], size: int) -> set[int]:
        """Makes a block of roots; returns its ends."""
        chosen = [self._items[index] for index in indices]
        begin, end = min([first for first, _, _ in chosen]), max([last for _, last, _ in chosen])
        block = self._next
        self._next += 1
        self._items[block] = (begin, end, size)
        self._members[block] = list(zip(indices, offsets, strict=True))
        self._keys[block] = self._key(indices)
        for index in indices:
            self._remove(index)
        self._add(block)
        self._journal.append((block, True))
        return {begin, end}

    def _split(self, block: int) -> set[int]:
        """Makes the members of a block roots; returns their ends."""
        self._remove(block)
        for member, _ in self._members[block]:
            self._add(member)
        return {time for member, _ in self._members[block] for time in self._items[member][:2]}

    def _add(self, index: int) -> None:
        first, last, size = self._items[index]
        self._roots.add(index)
        self._started[first].add(index)
        self._ended[last].add(index)
        for section in range(first, last):
            self._free[section] -= size

    def _remove(self, index: int) -> None:
        first, last, size = self._items[index]
        self._roots.discard(index)
        self._started[first].discard(index)
        self._ended[last].discard(index)
        self._at_start.pop(index, None)
        self._at_end.pop(index, None)
        for section in range(first, last):
            self._free[section] += size
