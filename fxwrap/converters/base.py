"""The base class of converters, which dispatches on the line classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, TypeAlias

import fxwrap.lines as lines
from fxwrap.devices import line_handlers
from fxwrap.errors import UnsupportedError
from fxwrap.torch_compat import UnknownOperatorError
from fxwrap.wrapper_ir import LineBase, defined, is_release, line_text, stream_of

Handler = Callable[..., None]
"""Converts an extension line in one converter: `handler(converter, line)`."""
Handlers: TypeAlias = Mapping[type[lines.ExtensionLine], Handler]

METHODS: Mapping[type[LineBase], str] = {
    lines.Alloc: "alloc", lines.Free: "free", lines.Reuse: "reuse", lines.View: "view", lines.Pool: "pool",
    lines.PoolSlice: "pool_slice", lines.Workspace: "workspace", lines.Launch: "launch", lines.ExternCall: "call",
    lines.Mutate: "mutate", lines.Scatter: "scatter", lines.IndexPut: "index_put", lines.SizeOf: "size",
    lines.Let: "let", lines.ReadItem: "item", lines.Bind: "bind", lines.Assert: "assertion", lines.Cond: "cond",
    lines.While: "while_", lines.ScanLoop: "scan", lines.Map: "map", lines.CallFunction: "call_function",
    lines.Yield: "yield_", lines.Return: "return_", lines.SaveRngState: "save_state",
    lines.RestoreRngState: "restore_state", lines.ExchangeRngState: "exchange_state",
    lines.EnterDevice: "enter_device", lines.ExitDevice: "exit_device", lines.RecordEvent: "record_event",
    lines.WaitEvent: "wait_event", lines.StartCollective: "start_collective", lines.WaitCollective: "wait_collective",
    lines.CheckLayout: "check_layout", lines.Comment: "comment", lines.EnterRange: "enter_range",
    lines.ExitRange: "exit_range",
}  # fmt: skip
"""The method of a converter for each core line class."""


class Converter:
    """Converts lines in program order, with one method for each line class, see `METHODS`.

    A converter that cannot express a line raises `unsupported`. An extension line goes to the handler registered for
    its class, else its `expand()` is converted. If `handlers` is None, the handlers are those of the registered devices
    for the converter's name.

    A line on a stream other than the current one is wrapped in a device guard, unless its guard is already open.
    """

    name: ClassVar[str]

    def __init__(self, handlers: Handlers | None = None) -> None:
        self.handlers = dict(line_handlers(self.name) if handlers is None else handlers)
        self.guard_stack: list[tuple[str, int]] = []
        self._allocation_streams: dict[str, int] = {}  # of roots allocated on another stream than 0

    def convert(self, line: LineBase) -> None:
        """Converts one line."""
        if not line.stream or line.event_step or line.bracket[1] or is_release(line):
            self._dispatch(line)
            return
        self._allocation_streams |= {value.name: line.stream for value in defined(line) if line.alias_of(value) is None}
        stream = stream_of(line)
        guarded = bool(self.guard_stack) and self.guard_stack[-1] == stream
        if not guarded:
            self._dispatch(lines.EnterDevice(*stream))
        self._dispatch(line)
        if not guarded:
            self._dispatch(lines.ExitDevice(*stream))

    def needs_record_stream(self, line: lines.Free) -> bool:
        """Returns whether the freed memory is used by a stream other than the one that allocated it."""
        return line.stream != self._allocation_streams.get(line.root.name, 0)

    def _dispatch(self, line: LineBase) -> None:
        match line:
            case lines.ExtensionLine():
                self.extension(line)
                return
            case lines.Reuse() if line.root.name in self._allocation_streams:
                self._allocation_streams[line.result.name] = self._allocation_streams[line.root.name]
            case lines.EnterDevice():
                self.guard_stack.append((line.device, line.stream))
            case lines.ExitDevice():
                self.guard_stack.pop()
            case _:
                pass
        try:
            getattr(self, METHODS[type(line)])(line)
        except UnknownOperatorError as error:
            raise self.unsupported(line, str(error)) from None

    def extension(self, line: lines.ExtensionLine) -> None:
        """Converts a line that is not a core line."""
        handler = self.handlers.get(type(line))
        if handler is not None:
            handler(self, line)
        else:
            for core in line.expand():
                self.convert(core)

    def unsupported(self, line: LineBase, reason: str) -> UnsupportedError:
        """Returns the error to raise for a line that this converter cannot express."""
        return UnsupportedError(line_text(line), self.name, reason)
