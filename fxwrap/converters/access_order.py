"""The order of reads and writes of one memory in the in-place form, as evidence for graphs that a tool reorders.

torch.fx has no edges for memory: a tool that moves nodes by their operands alone may exchange two writes. Each emitted
node that accesses memory which is written more than once records the number of writes that it comes after. Memory is an
allocation, an input or a whole pool; the checker compares the bytes that two nodes access in it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from torch.fx import Node

from fxwrap import wrapper_ir as ir
from fxwrap.lines import Alloc, PoolSlice, View
from fxwrap.symbolic import Size, SymbolInfo, bounds, difference, total
from fxwrap.wrapper_ir import LineBase, Value

META_KEY = "fxwrap_access"

Accesses: TypeAlias = Mapping[str, tuple[int, bool]]
"""For each memory that a node accesses, by name: the number of writes before a read, or up to and including a write,
and whether it writes."""


def access_order(lines: Sequence[LineBase], arguments: Iterable[Value]) -> dict[int, Accesses]:
    """Returns the accesses of each line, by its id, of memory that is written after another access."""
    memory_of = {value.name: value.name for value in arguments}
    writes: dict[str, int] = {}
    accesses: dict[int, dict[str, tuple[int, bool]]] = {}
    ordered: set[str] = set()
    seen: set[str] = set()
    for line in lines:
        own: dict[str, tuple[int, bool]] = {}
        for value in ir.defined(line):
            base = line.alias_of(value)
            memory_of[value.name] = value.name if base is None else memory_of[base.name]
        if isinstance(line, View | Alloc | PoolSlice) or line.on_host or line.terminator:
            continue
        for value in ir.reads(line):
            memory = memory_of[value.name]
            own[memory] = writes.get(memory, 0), False
        for memory in dict.fromkeys([memory_of[value.name] for value in ir.writes(line)]):
            if memory in seen:
                ordered.add(memory)
            writes[memory] = writes.get(memory, 0) + 1
            own[memory] = writes[memory], True
        seen.update(own)
        if own:
            accesses[id(line)] = own
    written = {key: {name: access for name, access in own.items() if name in ordered} for key, own in accesses.items()}
    return {key: own for key, own in written.items() if own}


_Bytes: TypeAlias = tuple[Size, Size]
"""The first byte of a memory that a value may access, and the one after the last."""


@dataclass(frozen=True)
class Conflict:
    """Two accesses of one memory in the wrong order: `earlier` comes first in the graph, but came second.

    `bytes` are those that both may access, None if their numbers are unknown.
    """

    memory: str
    earlier: Node
    earlier_writes: bool
    writes: bool
    bytes: tuple[int, int] | None


@dataclass(frozen=True, eq=False)
class _Access:
    node: Node
    count: int
    writes: bool
    ranges: tuple[_Bytes | None, ...]


@dataclass(eq=False)
class _Order:
    """The accesses of one memory so far: reads and writes, sorted by count, and the nodes' records."""

    reads: list[_Access] = field(default_factory=list)
    writes: list[_Access] = field(default_factory=list)
    recorded: set[int] = field(default_factory=set)

    def later(self, access: _Access) -> list[_Access]:
        """Returns the known accesses that must come after one."""
        after = bisect_right(self.writes, access.count, key=_count)
        if not access.writes:
            return self.writes[after:]
        return [*self.writes[after:], *self.reads[bisect_left(self.reads, access.count, key=_count) :]]

    def add(self, access: _Access) -> None:
        insort(self.writes if access.writes else self.reads, access, key=_count)


def _count(access: _Access) -> int:
    return access.count


@dataclass(eq=False)
class AccessChecker:
    """Compares the order of accesses in a graph with the recorded one. `symbols` has the ranges of symbols."""

    symbols: Mapping[str, SymbolInfo] = field(default_factory=dict)
    _orders: dict[tuple[str, str], _Order] = field(default_factory=dict)
    _slices: dict[str, Size] = field(default_factory=dict)

    def define(self, line: LineBase) -> None:
        """Records the first byte of the pool that each value of a slice counts from."""
        if isinstance(line, PoolSlice):
            self._slices[line.result.name] = line.offset
            return
        for value in ir.defined(line):
            base = line.alias_of(value)
            if base is not None and base.name in self._slices:
                self._slices[value.name] = self._slices[base.name]

    def conflict(self, node: Node, line: LineBase, root_of: Mapping[str, str]) -> Conflict | None:
        """Records the accesses of a node's line; returns one that conflicts with an earlier access, if any does."""
        recorded = node.meta.get(META_KEY)
        if not recorded:
            return None
        written = ir.writes(line)
        names = {value.name for value in written}
        roots: dict[str, list[Value]] = {}
        for value in (*written, *ir.reads(line)):
            if value.name in root_of:
                roots.setdefault(root_of[value.name], []).append(value)
        for memory, (count, writes) in recorded.items():
            for root, values in roots.items():
                if writes != any(value.name in names for value in values):
                    continue  # another memory of the same node
                access = _Access(node, count, writes, tuple([self._bytes(value) for value in values]))
                conflict = self._add((root, memory), access, id(recorded))
                if conflict is not None:
                    return conflict
        return None

    def _bytes(self, value: Value) -> _Bytes | None:
        if not isinstance(value.type, ir.TensorType):
            return None
        start, type_ = self._slices.get(value.name, 0), value.type
        if type_.storage_bytes == 0:
            return 0, 0
        first = type_.storage_offset * type_.dtype.itemsize
        return total((start, first)), total((start, type_.end_bytes))

    def _add(self, key: tuple[str, str], access: _Access, recorded: int) -> Conflict | None:
        """Returns the conflict with an earlier access of overlapping memory that must come after this one, if any."""
        order = self._orders.setdefault(key, _Order())
        if recorded in order.recorded:  # a copy of an earlier node: another run of the same graph begins
            order = self._orders[key] = _Order()
        order.recorded.add(recorded)
        for other in order.later(access):
            for one in access.ranges:
                for two in other.ranges:
                    if self._may_overlap(one, two):
                        return Conflict(key[1], other.node, other.writes, access.writes, _common(one, two))
        order.add(access)
        return None

    def _may_overlap(self, one: _Bytes | None, two: _Bytes | None) -> bool:
        if one is None or two is None:
            return True
        return self._may_be_less(one[0], two[1]) and self._may_be_less(two[0], one[1])

    def _may_be_less(self, left: Size, right: Size) -> bool:
        """Whether a number may be less than another one for some values of their symbols."""
        if isinstance(left, int) and isinstance(right, int):
            return left < right
        _, upper = bounds(difference(right, left), self.symbols)
        return upper is None or bool(upper > 0)


def _common(one: _Bytes | None, two: _Bytes | None) -> tuple[int, int] | None:
    """Returns the bytes that two ranges share, None if a number is unknown."""
    numbers = [number for number in (*(one or ()), *(two or ())) if isinstance(number, int)]
    if len(numbers) < 4:
        return None
    start, end, other_start, other_end = numbers
    return max(start, other_start), min(end, other_end)
