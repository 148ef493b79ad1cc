"""Insertion of stream events between lines of a program that would race."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fxwrap import wrapper_ir as ir
from fxwrap.lines import Free, RecordEvent, WaitEvent

_EVENT = ir.OpaqueType("Event")


def insert_stream_events(program: ir.Program) -> ir.Program:
    """Returns the program with events between conflicting accesses on two streams that nothing else orders.

    A free that must wait for one other stream is retargeted to that stream: then the memory waits, not the stream.
    Linear in the number of lines, except for the roots at a block's end.
    """
    if not ir.uses_streams(program):
        return program
    names = {value.name for line in program.lines() for value in ir.defined(line)}
    names |= {value.name for value in ir.program_arguments(program)}
    inserter = _EventInserter(names)
    body = inserter.block(program.body, ir.program_arguments(program))
    functions = tuple([(name, inserter.block(block, ())) for name, block in program.functions])
    return program.replace(body=body, functions=functions)


class _EventInserter:
    def __init__(self, names: set[str]) -> None:
        self.names = names
        self.count = 0

    def event(self) -> ir.Value:
        """Returns a new value for an event."""
        while (name := f"event_{self.count}") in self.names:
            self.count += 1
        self.names.add(name)
        return ir.Value(name, _EVENT)

    def block(self, block: ir.Block, inputs: Iterable[ir.Value]) -> ir.Block:
        """Returns a block with events. `inputs` are visible besides its arguments."""
        lines = []
        for line in block.lines:
            inner = {name: self.block(nested, ()) for name, nested in ir.blocks(line)}
            same = all(inner[name] is nested for name, nested in ir.blocks(line))
            lines.append(line if same else line.replace(**inner))
        ordered = _LineOrdering(self, lines, [*inputs, *block.arguments]).run()
        same = len(ordered) == len(block.lines) and all(new is old for new, old in zip(ordered, block.lines))
        return block if same else ir.Block(block.arguments, ordered)


class _LineOrdering:
    """Collects the events to insert before and after each line of a block."""

    def __init__(self, inserter: _EventInserter, lines: Sequence[ir.LineBase], inputs: Sequence[ir.Value]) -> None:
        self.inserter = inserter
        self.lines = list(lines)
        self.order = ir.StreamOrder(inputs)
        self.before: dict[int, list[ir.LineBase]] = {}
        self.after: dict[int, list[ir.LineBase]] = {}
        self.fallback = next((str(device) for line in lines if (device := ir.stream_device(line)) is not None), "cpu")

    def run(self) -> tuple[ir.LineBase, ...]:
        """Returns the lines with the events between them."""
        for position, line in enumerate(self.lines):
            if isinstance(line, Free):
                line = self.lines[position] = self.order.retarget_release(line)
            conflicts = self.order.conflicts(line)
            latest: dict[tuple[ir.Stream, ir.Stream], int] = {}
            for conflict in conflicts:
                pair = conflict.earlier, conflict.later
                latest[pair] = max(conflict.position, latest.get(pair, ir.ENTRY_POSITION))
            for (earlier, later), at in latest.items():
                self._insert_event(earlier, at, later, position)
            self.order.add(line, position)
        start = self._first_line_after_inputs()
        ordered = self.lines[:start] + self.after.get(ir.ENTRY_POSITION, [])
        for position in range(len(self.lines)):
            ordered += self.before.get(position, [])
            if position >= start:
                ordered.append(self.lines[position])
            ordered += self.after.get(position, [])
        return tuple(ordered)

    def _first_line_after_inputs(self) -> int:
        """Returns the first position after the binding and checks of inputs."""
        at_start = self.after.get(ir.ENTRY_POSITION) is not None
        return next((at for at, line in enumerate(self.lines) if not line.on_host), 0) if at_start else 0

    def _insert_event(self, earlier: ir.Stream, at: int, later: ir.Stream, position: int) -> None:
        """Adds the record of an event on one stream after a line, and a wait on another before a line."""
        event = self.inserter.event()
        while at != ir.ENTRY_POSITION and at + 1 < position and ir.defined_symbol(self.lines[at + 1]) is not None:
            at += 1  # symbol definitions directly follow their result
        record = RecordEvent(event, earlier[0] or later[0] or self.fallback, earlier[1])
        wait = WaitEvent(event, later[0] or earlier[0] or self.fallback, later[1])
        self.after.setdefault(at, []).append(record)
        self.before.setdefault(position, []).append(wait)
        self.order.synchronize(later, {earlier: at})
