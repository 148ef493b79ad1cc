"""The base class of converters, which dispatches on the line classes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, TypeAlias

from typing_extensions import assert_never

import fxwrap.lines as lines
from fxwrap.devices import line_handlers
from fxwrap.errors import UnsupportedError
from fxwrap.wrapper_ir import LineBase, defined, is_release, line_text, stream_of

Handler = Callable[..., None]
"""Converts an extension line in one converter: `handler(converter, line)`."""
Handlers: TypeAlias = Mapping[type[lines.ExtensionLine], Handler]


class Converter(ABC):
    """Converts lines in program order, with one method for each line class.

    Every method is abstract; a converter that cannot express a line raises `unsupported`. An extension line goes to the
    handler registered for its class, else its `expand()` is converted. If `handlers` is None, the handlers are those of
    the registered devices for the converter's name.

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
            self._dispatch(line)  # type: ignore[arg-type]  # programs hold lines of the union only
            return
        self._allocation_streams |= {value.name: line.stream for value in defined(line) if line.alias_of(value) is None}
        stream = stream_of(line)
        guarded = bool(self.guard_stack) and self.guard_stack[-1] == stream
        if not guarded:
            self._dispatch(lines.EnterDevice(*stream))
        self._dispatch(line)  # type: ignore[arg-type]
        if not guarded:
            self._dispatch(lines.ExitDevice(*stream))

    def needs_record_stream(self, line: lines.Free) -> bool:
        """Returns whether the freed memory is used by a stream other than the one that allocated it."""
        return line.stream != self._allocation_streams.get(line.root.name, 0)

    def _dispatch(self, line: lines.Line) -> None:
        match line:
            case lines.ExternCall():
                self.call(line)
            case lines.View():
                self.view(line)
            case lines.Free():
                self.free(line)
            case lines.Alloc():
                self.alloc(line)
            case lines.Reuse():
                if line.root.name in self._allocation_streams:
                    self._allocation_streams[line.result.name] = self._allocation_streams[line.root.name]
                self.reuse(line)
            case lines.Pool():
                self.pool(line)
            case lines.PoolSlice():
                self.pool_slice(line)
            case lines.Workspace():
                self.workspace(line)
            case lines.Launch():
                self.launch(line)
            case lines.Mutate():
                self.mutate(line)
            case lines.Scatter():
                self.scatter(line)
            case lines.IndexPut():
                self.index_put(line)
            case lines.SizeOf():
                self.size(line)
            case lines.Let():
                self.let(line)
            case lines.ReadItem():
                self.item(line)
            case lines.Bind():
                self.bind(line)
            case lines.Assert():
                self.assertion(line)
            case lines.Cond():
                self.cond(line)
            case lines.While():
                self.while_(line)
            case lines.ScanLoop():
                self.scan(line)
            case lines.Map():
                self.map(line)
            case lines.CallFunction():
                self.call_function(line)
            case lines.Yield():
                self.yield_(line)
            case lines.Return():
                self.return_(line)
            case lines.SaveRngState():
                self.save_state(line)
            case lines.RestoreRngState():
                self.restore_state(line)
            case lines.ExchangeRngState():
                self.exchange_state(line)
            case lines.EnterDevice():
                self.guard_stack.append((line.device, line.stream))
                self.enter_device(line)
            case lines.ExitDevice():
                self.guard_stack.pop()
                self.exit_device(line)
            case lines.RecordEvent():
                self.record_event(line)
            case lines.WaitEvent():
                self.wait_event(line)
            case lines.StartCollective():
                self.start_collective(line)
            case lines.WaitCollective():
                self.wait_collective(line)
            case lines.CheckLayout():
                self.check_layout(line)
            case lines.Comment():
                self.comment(line)
            case lines.EnterRange():
                self.enter_range(line)
            case lines.ExitRange():
                self.exit_range(line)
            case lines.ExtensionLine():
                self.extension(line)
            case _:
                assert_never(line)

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

    @abstractmethod
    def call(self, line: lines.ExternCall) -> None: ...

    @abstractmethod
    def view(self, line: lines.View) -> None: ...

    @abstractmethod
    def free(self, line: lines.Free) -> None: ...

    @abstractmethod
    def alloc(self, line: lines.Alloc) -> None: ...

    @abstractmethod
    def reuse(self, line: lines.Reuse) -> None: ...

    @abstractmethod
    def pool(self, line: lines.Pool) -> None: ...

    @abstractmethod
    def pool_slice(self, line: lines.PoolSlice) -> None: ...

    @abstractmethod
    def workspace(self, line: lines.Workspace) -> None: ...

    @abstractmethod
    def launch(self, line: lines.Launch) -> None: ...

    @abstractmethod
    def mutate(self, line: lines.Mutate) -> None: ...

    @abstractmethod
    def scatter(self, line: lines.Scatter) -> None: ...

    @abstractmethod
    def index_put(self, line: lines.IndexPut) -> None: ...

    @abstractmethod
    def size(self, line: lines.SizeOf) -> None: ...

    @abstractmethod
    def let(self, line: lines.Let) -> None: ...

    @abstractmethod
    def item(self, line: lines.ReadItem) -> None: ...

    @abstractmethod
    def bind(self, line: lines.Bind) -> None: ...

    @abstractmethod
    def assertion(self, line: lines.Assert) -> None: ...

    @abstractmethod
    def cond(self, line: lines.Cond) -> None: ...

    @abstractmethod
    def while_(self, line: lines.While) -> None: ...

    @abstractmethod
    def scan(self, line: lines.ScanLoop) -> None: ...

    @abstractmethod
    def map(self, line: lines.Map) -> None: ...

    @abstractmethod
    def call_function(self, line: lines.CallFunction) -> None: ...

    @abstractmethod
    def yield_(self, line: lines.Yield) -> None: ...

    @abstractmethod
    def return_(self, line: lines.Return) -> None: ...

    @abstractmethod
    def save_state(self, line: lines.SaveRngState) -> None: ...

    @abstractmethod
    def restore_state(self, line: lines.RestoreRngState) -> None: ...

    @abstractmethod
    def exchange_state(self, line: lines.ExchangeRngState) -> None: ...

    @abstractmethod
    def enter_device(self, line: lines.EnterDevice) -> None: ...

    @abstractmethod
    def exit_device(self, line: lines.ExitDevice) -> None: ...

    @abstractmethod
    def record_event(self, line: lines.RecordEvent) -> None: ...

    @abstractmethod
    def wait_event(self, line: lines.WaitEvent) -> None: ...

    @abstractmethod
    def start_collective(self, line: lines.StartCollective) -> None: ...

    @abstractmethod
    def wait_collective(self, line: lines.WaitCollective) -> None: ...

    @abstractmethod
    def check_layout(self, line: lines.CheckLayout) -> None: ...

    @abstractmethod
    def comment(self, line: lines.Comment) -> None: ...

    @abstractmethod
    def enter_range(self, line: lines.EnterRange) -> None: ...

    @abstractmethod
    def exit_range(self, line: lines.ExitRange) -> None: ...
