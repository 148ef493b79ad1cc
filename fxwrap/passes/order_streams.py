"""Events where the lines of a program would race: recorded after the earlier one, waited for before the later."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from fxwrap.lines import Free, RecordEvent, WaitEvent
from fxwrap.wrapper_ir import (
    START,
    Block,
    Conflict,
    LineBase,
    OpaqueType,
    Program,
    Stream,
    StreamOrder,
    Value,
    blocks,
    defined,
    defined_symbol,
    program_arguments,
    stream_device,
    uses_streams,
)

_EVENT = OpaqueType("Event")


def order_streams(program: Program) -> Program:
    """Returns the program with events where work on two streams touches memory in an order that nothing keeps.

    What a program keeps in order itself stays as it is. A free that must wait for another stream becomes one for that
    stream, if it is the only one; the memory then waits for it, and no stream does. Linear in the number of lines, but
    for the roots that are there at a block's end.
    """
    if not uses_streams(program):
        return program
    names = {value.name for line in program.lines() for value in defined(line)}
    names |= {value.name for value in program_arguments(program)}
    ordering = _Ordering(names)
    body = ordering.block(program.body, program_arguments(program))
    functions = tuple([(name, ordering.block(block, ())) for name, block in program.functions])
    return program.replace(body=body, functions=functions)


class _Ordering:
    """Orders blocks; `names` are those that values have."""

    def __init__(self, names: set[str]) -> None:
        self.names = names
        self.count = 0

    def event(self) -> Value:
        """Returns a new value for an event."""
        while (name := f"event_{self.count}") in self.names:
            self.count += 1
        self.names.add(name)
        return Value(name, _EVENT)

    def block(self, block: Block, given: Iterable[Value]) -> Block:
        """Returns a block, which sees `given` besides its arguments, with what it needs of events."""
        lines = []
        for line in block.lines:
            inner: dict[str, Any] = {name: self.block(nested, ()) for name, nested in blocks(line)}
            same = all(inner[name] is nested for name, nested in blocks(line))
            lines.append(line if same else dataclasses.replace(line, **inner))
        ordered = _Walk(self, lines, [*given, *block.arguments]).run()
        same = len(ordered) == len(block.lines) and all(new is old for new, old in zip(ordered, block.lines))
        return block if same else Block(block.arguments, ordered)


class _Walk:
    """One walk over the lines of a block, which notes what is to be put before and after each."""

    def __init__(self, ordering: _Ordering, lines: Sequence[LineBase], given: Sequence[Value]) -> None:
        self.ordering = ordering
        self.lines = list(lines)
        self.order = StreamOrder(given)
        self.before: dict[int, list[LineBase]] = {}
        self.after: dict[int, list[LineBase]] = {}
        self.fallback = next((str(device) for line in lines if (device := stream_device(line)) is not None), "cpu")

    def run(self) -> tuple[LineBase, ...]:
        """Returns the lines with the events between them."""
        for position, line in enumerate(self.lines):
            conflicts = self.order.conflicts(line)
            if conflicts and isinstance(line, Free):
                line, conflicts = self._free(line, conflicts)
                self.lines[position] = line
            latest: dict[tuple[Stream, Stream], int] = {}
            for conflict in conflicts:
                pair = conflict.earlier, conflict.later
                latest[pair] = max(conflict.position, latest.get(pair, START))
            for (earlier, later), at in latest.items():
                self._put(earlier, at, later, position)
            self.order.add(line, position)
        start = self._start()
        found = list(self.lines[:start]) + self.after.get(START, [])
        for position in range(len(self.lines)):
            found += self.before.get(position, [])
            if position >= start:
                found.append(self.lines[position])
            found += self.after.get(position, [])
        return tuple(found)

    def _start(self) -> int:
        """Returns the first position that does not belong to the reading and checking of inputs."""
        at_start = self.after.get(START) is not None
        return next((at for at, line in enumerate(self.lines) if not line.on_host), 0) if at_start else 0

    def _free(self, line: Free, conflicts: list[Conflict]) -> tuple[Free, list[Conflict]]:
        """Returns a free for the one stream that its memory must wait for, and what is still not in order."""
        if line.stream != self.order.made_on[line.root.name][1]:
            return line, conflicts
        for stream in dict.fromkeys([found.earlier for found in conflicts]):
            changed: Free = line.replace(stream=stream[1])
            if not self.order.conflicts(changed):
                return changed, []
        return line, conflicts

    def _put(self, earlier: Stream, at: int, later: Stream, position: int) -> None:
        """Notes an event on one stream, after a line, and the wait for it on another, before a line."""
        event = self.ordering.event()
        while at != START and at + 1 < position and defined_symbol(self.lines[at + 1]) is not None:
            at += 1  # what binds the symbols of a result follows it directly
        record = RecordEvent(event, earlier[0] or later[0] or self.fallback, earlier[1])
        wait = WaitEvent(event, later[0] or earlier[0] or self.fallback, later[1])
        self.after.setdefault(at, []).append(record)
        self.before.setdefault(position, []).append(wait)
        self.order.learn(later, {earlier: at})


