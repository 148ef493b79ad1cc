"""The order of work on streams: the memory that a line may use, given the events recorded and waited for before it.

Work on one stream runs in the order of lines. Work on two streams is unordered, unless an event is recorded after the
first work and waited for before the second. Lines without a stream run on stream 0, which is one stream for all
devices, since torch's copies between devices order the current streams of both. The program's inputs are written on
stream 0, and all work must be ordered before the program's return on stream 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from fxwrap.wrapper_ir.analyses import alias_roots, is_release
from fxwrap.wrapper_ir.line import LineBase, consumed, defined, reads, used, writes
from fxwrap.wrapper_ir.program import Program
from fxwrap.wrapper_ir.types import OpaqueType, ScalarType, TensorType, TokenType, Value

Stream: TypeAlias = tuple[str, int]
"""A device and the number of one of its streams; `CURRENT_STREAM` for stream 0 of any device."""

CURRENT_STREAM: Stream = ("", 0)
ENTRY_POSITION = -1
"""The position of work before the first line."""


@dataclass(frozen=True, slots=True)
class StreamConflict:
    """A line on stream `later` uses a value while the line at `position` on stream `earlier` may use its memory."""

    value: str
    earlier: Stream
    position: int
    later: Stream
    was_write: bool


def uses_streams(program: Program) -> bool:
    """Returns whether any line of a program runs on a side stream or uses an event."""
    return any(line.event_step or line.stream for line in program.lines())


def stream_device(line: LineBase) -> torch.device | None:
    """Returns the device that a line runs on: that of its results or operands; None for a line without tensors.

    Devices with an index come first: a copy between such a device and the CPU runs on the device's stream.
    """
    devices = [value.type.device for value in (*defined(line), *writes(line), *reads(line), *consumed(line))
             if isinstance(value.type, TensorType)]  # fmt: skip
    return next((device for device in devices if has_device_index(device)), devices[0] if devices else None)


def has_device_index(device: torch.device) -> bool:
    """Returns whether a device has an index."""
    return ":" in str(device)


def stream_of(line: LineBase) -> Stream:
    """Returns the stream that a line runs on."""
    return (str(line.device or stream_device(line) or ""), line.stream) if line.stream else CURRENT_STREAM


def stream_name(stream: Stream) -> str:
    """Returns the name of a stream for error messages."""
    return "the current stream" if stream == CURRENT_STREAM else f"stream {stream[1]} of {stream[0]}"


def multi_stream_roots(lines: Sequence[LineBase], arguments: Iterable[Value]) -> frozenset[str]:
    """Returns the names of the roots of a block that lines on more than one stream define, use or release.

    Arguments are of stream 0. The position of the release of such a root matters: work on another stream than that of
    the last use may be in progress.
    """
    if not any(line.stream for line in lines):
        return frozenset()
    arguments = list(arguments)
    root_of = alias_roots(lines, arguments)
    streams: dict[str, set[Stream]] = {value.name: {CURRENT_STREAM} for value in arguments}
    for line in lines:
        if not (line.event_step or line.bracket[1] or line.on_host or line.terminator):
            for value in (*defined(line), *used(line)):
                streams.setdefault(root_of[value.name], set()).add(stream_of(line))
            for memory in consumed(line):  # whose streams are those of the root that reuses it
                for value in defined(line):
                    streams[root_of[value.name]] |= streams[memory.name]
    return frozenset([name for name, users in streams.items() if len(users) > 1])


class StreamOrder:
    """Tracks the streams of a block's lines. Call `conflicts(line)`, then `add(line, position)`, for each line."""

    def __init__(self, arguments: Iterable[Value]) -> None:
        self.allocation_stream: dict[str, Stream] = {}  # by root
        self._root_of: dict[str, str] = {}
        self._written: dict[str, tuple[Stream, int]] = {}  # by root: the last write
        self._accesses: dict[str, dict[Stream, int]] = {}  # by root: the last use on each stream since then
        self._clocks: dict[Stream, dict[Stream, int]] = {}  # by stream: the work done before its next work
        self._events: dict[str, dict[Stream, int]] = {}
        self._async_clocks: dict[str, dict[Stream, int]] = {}
        for value in arguments:
            self._define(value, value.name, CURRENT_STREAM, ENTRY_POSITION)

    # --- queries ----------------------------------------------------------------------------------------------------

    def conflicts(self, line: LineBase) -> list[StreamConflict]:
        """Returns the earlier uses of the line's memory that no event orders before the line."""
        if line.event_step or line.bracket[1] or line.on_host:
            return []
        if line.terminator:
            return [conflict for root in self._accesses for conflict in self._unordered(root, root, CURRENT_STREAM)]
        if is_release(line):
            freed = [value for value in consumed(line) if value.name in self.allocation_stream]
            return [conflict for value in freed for conflict in self._free_conflicts(line, value)]
        if line.is_async_wait:
            return []
        later, written = stream_of(line), {value.name for value in (*writes(line), *consumed(line))}
        conflicts: dict[StreamConflict, None] = {}
        for value in (*writes(line), *consumed(line), *reads(line)):
            root = self._root_of.get(value.name)
            if root is not None:
                conflicts |= dict.fromkeys(self._unordered(root, value.name, later, value.name in written))
        return list(conflicts)

    def _free_conflicts(self, line: LineBase, value: Value) -> list[StreamConflict]:
        """A free is ordered after work that precedes the next work of its own or of the allocation's stream."""
        conflicts = self._unordered(value.name, value.name, self.allocation_stream[value.name])
        stream = self.free_stream(line, value)
        return [item for item in conflicts if not self._happens_before(item.earlier, item.position, stream)]

    def free_stream(self, line: LineBase, root: Value) -> Stream:
        """Returns the stream that a free of a root is ordered on."""
        device = str(root.type.device) if isinstance(root.type, TensorType) else ""
        return (device, line.stream) if line.stream else CURRENT_STREAM

    def _unordered(self, root: str, name: str, later: Stream, is_write: bool = True) -> list[StreamConflict]:
        """Returns the uses of a root that are unordered with a write on a stream, or with a read (writes only)."""
        uses = [(*self._written[root], True)]
        if is_write:
            uses += [(stream, position, False) for stream, position in self._accesses[root].items()]
        return [
            StreamConflict(name, stream, position, later, was_write)
            for stream, position, was_write in uses
            if not self._happens_before(stream, position, later)
        ]

    def _happens_before(self, stream: Stream, position: int, later: Stream) -> bool:
        return stream == later or self._clocks.get(later, {}).get(stream, ENTRY_POSITION - 1) >= position

    # --- updates ----------------------------------------------------------------------------------------------------

    def add(self, line: LineBase, position: int) -> None:
        """Records the uses, definitions and events of the line at a position."""
        stream = stream_of(line)
        if line.event_step == "record":
            for value in defined(line):
                self._events[value.name] = {**self._clocks.get(stream, {}), stream: position}
            return
        if line.event_step == "wait":
            for value in consumed(line):
                self.synchronize(stream, self._events.pop(value.name, {}))
            return
        self._record_accesses(line, stream, position)
        inherited = [self.allocation_stream.pop(value.name, None) for value in consumed(line)]
        for value in consumed(line):
            self._written.pop(value.name, None)
            self._accesses.pop(value.name, None)
        for value in defined(line):
            base = line.alias_of(value)
            if base is not None:
                self._root_of[value.name] = self._root_of[base.name]
            else:
                self._define(value, value.name, stream, position, next(filter(None, inherited), None))

    def _record_accesses(self, line: LineBase, stream: Stream, position: int) -> None:
        if line.on_host or line.terminator or is_release(line):
            return
        written = {self._root_of[value.name] for value in writes(line) if value.name in self._root_of}
        for value in reads(line):
            root = self._root_of.get(value.name, "")
            if root in self._accesses:
                self._accesses[root][stream] = position
            if line.is_async_wait:
                self.synchronize(stream, self._async_clocks.pop(root, {}))
        for root in written:
            self._written[root] = (stream, position)
            self._accesses[root] = {}
        if line.is_async_start:
            for value in defined(line):
                base = line.alias_of(value)
                root = value.name if base is None else self._root_of[base.name]
                self._async_clocks[root] = {**self._clocks.get(stream, {}), stream: position}

    def synchronize(self, stream: Stream, done: Mapping[Stream, int]) -> None:
        """Records that the work of other streams up to these positions precedes the next work of a stream."""
        known = self._clocks.setdefault(stream, {})
        for other, position in done.items():
            known[other] = max(position, known.get(other, ENTRY_POSITION - 1))

    def _define(self, value: Value, root: str, stream: Stream, position: int, allocation: Stream | None = None) -> None:
        if isinstance(value.type, OpaqueType | ScalarType | TokenType):
            return
        self._root_of[value.name] = root
        self.allocation_stream[root] = allocation or stream
        self._written[root] = (stream, position)
        self._accesses[root] = {}
