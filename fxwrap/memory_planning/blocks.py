"""Merging of buffers into blocks that a search places as one buffer.

A block is a set of buffers whose sizes add up to the same number of bytes at each time between its first and its last:
packed within this size, it is a rectangle of time and bytes. Dense problems, and programs whose buffers hand their
memory on, consist of blocks inside of blocks; merging them leaves a much smaller problem. Each solution of it is one of
the buffers. The converse is false, so that a search without blocks must follow if there is none.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import TypeAlias

from fxwrap.memory_planning.greedy import Buffer

_MAX_BLOCK = 40
"""Largest number of items of a block."""

_MAX_EXCHANGE = 8
"""Largest number of items of an exchange."""

_MAX_ENUMERATED = 14
"""Largest number of items that start, or end, at a time for exchanges of more than 3 items."""

Pack: TypeAlias = Callable[[Sequence[Buffer], int], Sequence[int]]
"""Returns offsets of buffers within a capacity; () for none."""


class Grouping(enum.Enum):
    """Which buffers with equal live ranges are stacked: those that belong together at both ends of it, or all."""

    LINKED = "linked"
    EQUAL_RANGES = "equal ranges"


@dataclass(frozen=True, eq=False)
class _Exchange:
    """Items that end at a time, and items of the same total size that start there and take over their memory."""

    ended: tuple[int, ...]
    started: tuple[int, ...]


@dataclass(frozen=True)
class MergedBuffers:
    """Blocks, as buffers, and how to get the offsets of their members."""

    buffers: list[Buffer]
    count: int
    _members: list[list[tuple[int, int]]]
    """By block: the offsets of buffers in it."""

    def expand(self, offsets: Sequence[int]) -> list[int]:
        """Returns the offsets of the buffers from those of the blocks."""
        expanded = [0] * self.count
        for offset, members in zip(offsets, self._members):
            for index, relative in members:
                expanded[index] = offset + relative
        return expanded


def merge_blocks(buffers: Sequence[Buffer], grouping: Grouping | None, pack: Pack) -> MergedBuffers:
    """Merges buffers into blocks until none is left, small ones first; without a grouping, each is a block.

    `pack` places the members of a block. Blocks that it cannot pack are left out.
    """
    merger = _Merger(dict(enumerate(buffers)), pack)
    if grouping is not None:
        while merger.merge_once(grouping):
            pass
    return MergedBuffers(list(merger.items.values()), len(buffers), list(merger.members.values()))


@dataclass
class _Merger:
    """Items, that is buffers and blocks, by number."""

    items: dict[int, Buffer]
    pack: Pack
    members: dict[int, list[tuple[int, int]]] = field(init=False)
    _next: int = field(init=False)
    _rejected: set[tuple[int, ...]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.members = {index: [(index, 0)] for index in self.items}
        self._next = len(self.items)

    def merge_once(self, grouping: Grouping) -> bool:
        """Merges stacks of items with equal live ranges, else other blocks; returns whether there were any."""
        at_end: dict[int, _Exchange] = {}
        at_start: dict[int, _Exchange] = {}
        exchanges = self._exchanges()
        for exchange in exchanges:
            at_end |= dict.fromkeys(exchange.ended, exchange)
            at_start |= dict.fromkeys(exchange.started, exchange)
        stacks: dict[object, list[int]] = {}
        for index, (first, last, _) in self.items.items():
            link = (at_start.get(index), at_end.get(index)) if grouping is Grouping.LINKED else ()
            stacks.setdefault((first, last, link), []).append(index)
        chosen = [stack for stack in stacks.values() if len(stack) > 1]
        for stack in chosen:
            self._stack(stack)
        return bool(chosen) or self._merge_closures(exchanges, at_start, at_end)

    def _exchanges(self) -> list[_Exchange]:
        started: dict[int, list[int]] = {}
        ended: dict[int, list[int]] = {}
        for index, (first, last, _) in self.items.items():
            started.setdefault(first, []).append(index)
            ended.setdefault(last, []).append(index)
        return [exchange for instant in ended if instant in started
                for exchange in self._exchanges_at(ended[instant], started[instant])]  # fmt: skip

    def _exchanges_at(self, ended: list[int], started: list[int]) -> Iterator[_Exchange]:
        """Yields disjoint exchanges at one time, the smallest first."""
        largest = 3 if max(len(ended), len(started)) > _MAX_ENUMERATED else _MAX_EXCHANGE
        count = 2
        while ended and started and count <= min(largest, len(ended) + len(started)):
            exchange = self._exchange(ended, started, count)
            if exchange is None:
                count += 1
                continue
            yield exchange
            ended = [index for index in ended if index not in exchange.ended]
            started = [index for index in started if index not in exchange.started]

    def _exchange(self, ended: list[int], started: list[int], count: int) -> _Exchange | None:
        """Returns an exchange of a number of items, if there is one."""
        for number in range(max(1, count - len(started)), min(count - 1, len(ended)) + 1):
            by_size: dict[int, tuple[int, ...]] = {}
            for chosen in combinations(ended, number):
                by_size.setdefault(self._size(chosen), chosen)
            for chosen in combinations(started, count - number):
                if (size := self._size(chosen)) in by_size:
                    return _Exchange(by_size[size], chosen)
        return None

    def _size(self, indices: Sequence[int]) -> int:
        return sum([self.items[index][2] for index in indices])

    def _merge_closures(
        self, exchanges: list[_Exchange], at_start: dict[int, _Exchange], at_end: dict[int, _Exchange]
    ) -> bool:
        closures = {closure for exchange in exchanges if (closure := self._closure(exchange, at_start, at_end))}
        merged: set[int] = set()
        for closure in sorted(closures, key=lambda closure: (len(closure), closure)):
            if closure in self._rejected or not merged.isdisjoint(closure):
                continue
            chosen = [self.items[index] for index in closure]
            begin = min([first for first, _, _ in chosen])
            size = sum([size for first, _, size in chosen if first == begin])
            offsets = self.pack(chosen, size)
            if not offsets:
                self._rejected.add(closure)
                continue
            self._merge(closure, offsets, size)
            merged.update(closure)
        return bool(merged)

    def _closure(
        self, exchange: _Exchange, at_start: dict[int, _Exchange], at_end: dict[int, _Exchange]
    ) -> tuple[int, ...]:
        """Returns the smallest block with an exchange; () if it is large, or if there is none.

        It has the exchanges of all its items that start after the first or end before the last of them.
        """
        found = {*exchange.ended, *exchange.started}
        while len(found) <= _MAX_BLOCK:
            begin = min([self.items[index][0] for index in found])
            end = max([self.items[index][1] for index in found])
            inner = {at_start.get(index) for index in found if self.items[index][0] > begin}
            inner |= {at_end.get(index) for index in found if self.items[index][1] < end}
            more: set[int] = set()
            for item in inner:
                if item is None:
                    return ()
                more.update(item.ended, item.started)
            if more <= found:
                return tuple(sorted(found))
            found |= more
        return ()

    def _stack(self, indices: Sequence[int]) -> None:
        """Merges items with equal live ranges, the largest at the bottom."""
        offsets, size = [], 0
        indices = sorted(indices, key=lambda index: -self.items[index][2])
        for index in indices:
            offsets.append(size)
            size += self.items[index][2]
        self._merge(indices, offsets, size)

    def _merge(self, indices: Sequence[int], offsets: Sequence[int], size: int) -> None:
        chosen = [self.items.pop(index) for index in indices]
        self.members[self._next] = [(index, offset + relative) for item, offset in zip(indices, offsets)
                                    for index, relative in self.members.pop(item)]  # fmt: skip
        self.items[self._next] = (min(first for first, _, _ in chosen), max(last for _, last, _ in chosen), size)
        self._next += 1
