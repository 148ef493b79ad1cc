"""The order of work on streams: which memory a line may touch, given the events recorded and waited for before it.

Work on one stream runs in the order of lines. Work on two streams runs in any order, unless an event is recorded on the
first after the one and waited for on the second before the other. Lines without a stream run on stream 0, which is one
for all devices, since torch's copies between devices order the current streams of both. Memory that a program is given
was made on stream 0, and all that it leaves behind must be done there when it returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from fxwrap.wrapper_ir.analyses import is_release
from fxwrap.wrapper_ir.line import LineBase, consumed, defined, reads, writes
from fxwrap.wrapper_ir.program import Program
from fxwrap.wrapper_ir.types import OpaqueType, ScalarType, TensorType, TokenType, Value

Stream: TypeAlias = tuple[str, int]
"""A device and the number of a stream of it; `MAIN` for stream 0 of any."""

MAIN: Stream = ("", 0)
START = -1
"""The position of what was done before the first line."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """A line on stream `later` touches a value, whose memory the line at `position` on `earlier` may be at work on."""

    value: str
    earlier: Stream
    position: int
    later: Stream
    was_write: bool


def uses_streams(program: Program) -> bool:
    """Returns whether any line of a program is on another stream than the current one, or about events."""
    return any(line.event_step or getattr(line, "stream", 0) for line in program.lines())


def stream_device(line: LineBase) -> torch.device | None:
    """Returns the device that a line's work runs on: of what it makes, writes or reads; None for a line without memory.

    Devices that come in several, with an index, go before the others: the stream of a copy from one of them is its own.
    """
    found = [value.type.device for value in (*defined(line), *writes(line), *reads(line), *consumed(line))
             if isinstance(value.type, TensorType)]  # fmt: skip
    return next((device for device in found if is_one_of_several(device)), found[0] if found else None)


def is_one_of_several(device: torch.device) -> bool:
    """Returns whether a device has an index, as those have of which there may be several."""
    return ":" in str(device)


def stream_of(line: LineBase) -> Stream:
    """Returns the stream that a line runs on."""
    number: int = getattr(line, "stream", 0)
    if number == 0:
        return MAIN
    device = getattr(line, "device", None) or stream_device(line)
    return str(device or ""), number


def stream_name(stream: Stream) -> str:
    """Returns a stream's name for people."""
    return "the current stream" if stream == MAIN else f"stream {stream[1]} of {stream[0]}"


class StreamOrder:
    """The walk over a block's lines: `conflicts(line)` says what is not in order, then `add` goes past the line."""

    def __init__(self, arguments: Iterable[Value]) -> None:
        self.made_on: dict[str, Stream] = {}  # by root
        self._root_of: dict[str, str] = {}
        self._written: dict[str, tuple[Stream, int]] = {}  # by root: the last write
        self._touched: dict[str, dict[Stream, int]] = {}  # by root: the last touch on each stream since that
        self._known: dict[Stream, dict[Stream, int]] = {}  # what is done before a stream's next work
        self._events: dict[str, dict[Stream, int]] = {}
        self._flights: dict[str, dict[Stream, int]] = {}
        for value in arguments:
            self._define(value, value.name, MAIN, START)

    # --- questions --------------------------------------------------------------------------------------------------

    def conflicts(self, line: LineBase) -> list[Conflict]:
        """Returns the touches of memory that may still be under way, in another order than the line needs."""
        if line.event_step or line.bracket[1] or line.on_host:
            return []
        if line.terminator:
            return [found for root in self._touched for found in self._open(root, root, MAIN)]
        if is_release(line):
            freed = [value for value in consumed(line) if value.name in self.made_on]
            return [found for value in freed for found in self._of_free(line, value)]
        if line.ends_flight:
            return []
        later, written = stream_of(line), {value.name for value in (*writes(line), *consumed(line))}
        found: dict[Conflict, None] = {}
        for value in (*writes(line), *consumed(line), *reads(line)):
            root = self._root_of.get(value.name)
            if root is not None:
                found.update(dict.fromkeys(self._open(root, value.name, later, value.name in written)))
        return list(found)

    def _of_free(self, line: LineBase, value: Value) -> list[Conflict]:
        """A free is in order after what is done before its own stream's next work, or that of where it was made."""
        made, own = self.made_on[value.name], self.free_stream(line, value)
        left = self._open(value.name, value.name, made)
        return [found for found in left if not self._is_done(found.earlier, found.position, own)]

    def free_stream(self, line: LineBase, root: Value) -> Stream:
        """Returns the stream whose work a free is after."""
        number: int = getattr(line, "stream", 0)
        device = str(root.type.device) if isinstance(root.type, TensorType) else ""
        return (device, number) if number else MAIN

    def _open(self, root: str, name: str, later: Stream, writes_: bool = True) -> list[Conflict]:
        """Returns the touches of a root that are not done for a stream; only writes where the line only reads."""
        stream, position = self._written[root]
        found = [] if self._is_done(stream, position, later) else [Conflict(name, stream, position, later, True)]
        if writes_:
            found += [
                Conflict(name, stream, position, later, False) for stream, position in self._touched[root].items()
                if not self._is_done(stream, position, later)
            ]  # fmt: skip
        return found

    def _is_done(self, stream: Stream, position: int, later: Stream) -> bool:
        return stream == later or self._known.get(later, {}).get(stream, START - 1) >= position

    # --- the walk ---------------------------------------------------------------------------------------------------

    def add(self, line: LineBase, position: int) -> None:
        """Goes past a line: records what it touches, makes, takes, and which work it knows to be done."""
        stream = stream_of(line)
        if line.event_step == "record":
            for value in defined(line):
                self._events[value.name] = {**self._known.get(stream, {}), stream: position}
            return
        if line.event_step == "wait":
            for value in consumed(line):
                self.learn(stream, self._events.pop(value.name, {}))
            return
        self._touch(line, stream, position)
        taken = [self.made_on.pop(value.name, None) for value in consumed(line)]
        for value in consumed(line):
            self._written.pop(value.name, None)
            self._touched.pop(value.name, None)
        for value in defined(line):
            base = line.alias_of(value)
            if base is not None:
                self._root_of[value.name] = self._root_of[base.name]
            else:
                self._define(value, value.name, stream, position, next((made for made in taken if made), None))

    def _touch(self, line: LineBase, stream: Stream, position: int) -> None:
        if line.on_host or line.terminator or is_release(line):
            return
        written = {self._root_of[value.name] for value in writes(line) if value.name in self._root_of}
        for value in reads(line):
            root = self._root_of.get(value.name, "")
            if root in self._touched:
                self._touched[root][stream] = position
            if line.ends_flight:
                self.learn(stream, self._flights.pop(root, {}))
        for root in written:
            self._written[root] = (stream, position)
            self._touched[root] = {}
        if line.starts_flight:
            for value in defined(line):
                base = line.alias_of(value)
                root = value.name if base is None else self._root_of[base.name]
                self._flights[root] = {**self._known.get(stream, {}), stream: position}

    def learn(self, stream: Stream, done: Mapping[Stream, int]) -> None:
        """Records that what other streams have done up to these positions is done before a stream's next work."""
        known = self._known.setdefault(stream, {})
        for other, position in done.items():
            known[other] = max(position, known.get(other, START - 1))

    def _define(self, value: Value, root: str, stream: Stream, position: int, made: Stream | None = None) -> None:
        if isinstance(value.type, OpaqueType | ScalarType | TokenType):
            return
        self._root_of[value.name] = root
        self.made_on[root] = made or stream
        self._written[root] = (stream, position)
        self._touched[root] = {}
