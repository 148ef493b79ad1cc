"""The order of reads and writes of one memory in the in-place form, as evidence for graphs that a tool reorders.

torch.fx has no edges for memory: a tool that moves nodes by their operands alone may exchange two writes. Each emitted
node that accesses memory which is written more than once records the number of writes that it comes after.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from torch.fx import Node

from fxwrap import wrapper_ir as ir
from fxwrap.lines import Alloc, PoolSlice, View
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
            base = None if isinstance(line, PoolSlice) else line.alias_of(value)
            memory_of[value.name] = value.name if base is None else memory_of[base.name]
        if isinstance(line, View | Alloc | PoolSlice) or line.on_host or line.terminator:
            continue
        for value in ir.reads(line):
            memory = memory_of[value.name]
            own[memory] = writes.get(memory, 0), False
        for value in ir.writes(line):
            memory = memory_of[value.name]
            if memory in seen:
                ordered.add(memory)
            writes[memory] = writes.get(memory, 0) + 1
            own[memory] = writes[memory], True
        seen.update(own)
        if own:
            accesses[id(line)] = own
    written = {key: {name: access for name, access in own.items() if name in ordered} for key, own in accesses.items()}
    return {key: own for key, own in written.items() if own}


@dataclass(frozen=True)
class Conflict:
    """Two accesses of one memory in the wrong order: `earlier` comes first in the graph, but came second."""

    memory: str
    earlier: Node
    earlier_writes: bool
    writes: bool


@dataclass(frozen=True)
class _Access:
    node: Node
    count: int
    writes: bool
    values: tuple[Value, ...]


@dataclass(eq=False)
class AccessChecker:
    """Compares the order of accesses in a graph with the recorded one."""

    _accesses: dict[tuple[str, str], list[_Access]] = field(default_factory=dict)
    _latest: dict[tuple[str, str], int] = field(default_factory=dict)
    _recorded: dict[tuple[str, str], set[int]] = field(default_factory=dict)

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
                access = _Access(node, count, writes, tuple(values))
                earlier = self._add((root, memory), access, id(recorded))
                if earlier is not None:
                    return Conflict(memory, earlier.node, earlier.writes, access.writes)
        return None

    def _add(self, key: tuple[str, str], access: _Access, recorded: int) -> _Access | None:
        """Returns an earlier access of overlapping memory that must come after this one, else records this one."""
        known = self._recorded.setdefault(key, set())
        if recorded in known:  # a copy of an earlier node: another run of the same graph begins
            self._accesses[key], self._latest[key] = [], 0
            known.clear()
        known.add(recorded)
        if self._latest.get(key, 0) >= access.count:
            for other in self._accesses.get(key, ()):
                if _must_follow(other, access) and _overlap(other, access):
                    return other
        self._accesses.setdefault(key, []).append(access)
        self._latest[key] = max(self._latest.get(key, 0), access.count)
        return None


def _must_follow(other: _Access, access: _Access) -> bool:
    """Whether an access must come after another: they differ in the writes that they come after, or do."""
    if access.writes:
        return other.count > access.count if other.writes else other.count >= access.count
    return other.writes and other.count > access.count


def _overlap(one: _Access, other: _Access) -> bool:
    """Whether two accesses may share bytes."""
    return any(_may_share_bytes(a, b) for a in one.values for b in other.values)


def _may_share_bytes(one: Value, other: Value) -> bool:
    ranges = [(v.tensor_type.storage_offset * v.tensor_type.dtype.itemsize, v.tensor_type.end_bytes)
              for v in (one, other) if isinstance(v.type, ir.TensorType)]  # fmt: skip
    if len(ranges) < 2 or not all(isinstance(number, int) for pair in ranges for number in pair):
        return True
    (start, end), (other_start, other_end) = ranges
    return bool(start < other_end and other_start < end)
