"""The one place that tells lines apart: every converter is a flat subclass of `Converter`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from typing_extensions import assert_never

from fxwrap.device_registry import line_handlers
from fxwrap.errors import Unsupported
from fxwrap.lines import (
    Alloc,
    Assert,
    Bind,
    Call,
    CallFunction,
    CheckLayout,
    Comment,
    Cond,
    EnterDevice,
    EnterRange,
    ExchangeState,
    ExitDevice,
    ExitRange,
    ExtensionLine,
    Free,
    IndexPut,
    Item,
    Launch,
    Let,
    Line,
    Map,
    Mutate,
    Pool,
    PoolSlice,
    RecordEvent,
    RestoreState,
    Return,
    Reuse,
    SaveState,
    Scan,
    Scatter,
    SizeOf,
    StartCollective,
    View,
    WaitCollective,
    WaitEvent,
    While,
    Workspace,
    Yield,
)
from fxwrap.wrapper_ir import LineBase, defined, is_release, print_line, stream_of

Handler = Callable[[Any, Any], None]
"""Runs a vendor's line in one converter: `handler(converter, line)`."""


class Converter(ABC):
    """Walks lines in order, one method a line class.

    A subclass that leaves out a method cannot be made; one that cannot express a line says so by `unsupported`. A
    vendor's line goes to the handler given for its class, else through the core lines of its `expand()`; with None as
    `handlers`, to those that registered devices have for the converter's name.

    A line on another stream than the one that the guards around it make current gets a guard of its own.
    """

    name: ClassVar[str]

    def __init__(self, handlers: Mapping[type[ExtensionLine], Handler] | None = None) -> None:
        self.handlers = dict(line_handlers(self.name) if handlers is None else handlers)
        self.entered: list[tuple[str, int]] = []
        self._made_on: dict[str, int] = {}  # roots that are not made on stream 0

    def convert(self, line: LineBase) -> None:
        """Converts one line."""
        stream = getattr(line, "stream", 0)
        if stream and not (line.event_step or line.bracket[1] or is_release(line)):
            self._on_stream(line, stream)
        else:
            self._dispatch(line)  # type: ignore[arg-type]  # programs hold lines of the union only

    def _on_stream(self, line: LineBase, stream: int) -> None:
        """Converts a line that runs on another stream than the current one."""
        self._made_on.update([(value.name, stream) for value in defined(line) if line.alias_of(value) is None])
        wanted = stream_of(line)
        if self.entered and self.entered[-1] == wanted:
            self._dispatch(line)  # type: ignore[arg-type]
            return
        self._dispatch(EnterDevice(*wanted))
        self._dispatch(line)  # type: ignore[arg-type]
        self._dispatch(ExitDevice(*wanted))

    def waits_for(self, line: Free) -> bool:
        """Whether memory that is freed waits for a stream besides the one that it was made on."""
        return line.stream != self._made_on.get(line.root.name, 0)

    def _dispatch(self, line: Line) -> None:
        match line:
            case Call():
                self.call(line)
            case View():
                self.view(line)
            case Free():
                self.free(line)
            case Alloc():
                self.alloc(line)
            case Reuse():
                if line.root.name in self._made_on:
                    self._made_on[line.result.name] = self._made_on[line.root.name]
                self.reuse(line)
            case Pool():
                self.pool(line)
            case PoolSlice():
                self.pool_slice(line)
            case Workspace():
                self.workspace(line)
            case Launch():
                self.launch(line)
            case Mutate():
                self.mutate(line)
            case Scatter():
                self.scatter(line)
            case IndexPut():
                self.index_put(line)
            case SizeOf():
                self.size(line)
            case Let():
                self.let(line)
            case Item():
                self.item(line)
            case Bind():
                self.bind(line)
            case Assert():
                self.assertion(line)
            case Cond():
                self.cond(line)
            case While():
                self.while_(line)
            case Scan():
                self.scan(line)
            case Map():
                self.map(line)
            case CallFunction():
                self.call_function(line)
            case Yield():
                self.yield_(line)
            case Return():
                self.return_(line)
            case SaveState():
                self.save_state(line)
            case RestoreState():
                self.restore_state(line)
            case ExchangeState():
                self.exchange_state(line)
            case EnterDevice():
                self.entered.append((line.device, line.stream))
                self.enter_device(line)
            case ExitDevice():
                self.entered.pop()
                self.exit_device(line)
            case RecordEvent():
                self.record_event(line)
            case WaitEvent():
                self.wait_event(line)
            case StartCollective():
                self.start_collective(line)
            case WaitCollective():
                self.wait_collective(line)
            case CheckLayout():
                self.check_layout(line)
            case Comment():
                self.comment(line)
            case EnterRange():
                self.enter_range(line)
            case ExitRange():
                self.exit_range(line)
            case ExtensionLine():
                self.extension(line)
            case _:
                assert_never(line)

    def extension(self, line: ExtensionLine) -> None:
        """Converts a vendor's line."""
        handler = self.handlers.get(type(line))
        if handler is not None:
            handler(self, line)
            return
        for core in line.expand():
            self.convert(core)

    def unsupported(self, line: LineBase, reason: str) -> Unsupported:
        """Returns the error for a line that this converter cannot express."""
        return Unsupported(print_line(line).partition("\n")[0], self.name, reason)

    @abstractmethod
    def call(self, line: Call) -> None: ...

    @abstractmethod
    def view(self, line: View) -> None: ...

    @abstractmethod
    def free(self, line: Free) -> None: ...

    @abstractmethod
    def alloc(self, line: Alloc) -> None: ...

    @abstractmethod
    def reuse(self, line: Reuse) -> None: ...

    @abstractmethod
    def pool(self, line: Pool) -> None: ...

    @abstractmethod
    def pool_slice(self, line: PoolSlice) -> None: ...

    @abstractmethod
    def workspace(self, line: Workspace) -> None: ...

    @abstractmethod
    def launch(self, line: Launch) -> None: ...

    @abstractmethod
    def mutate(self, line: Mutate) -> None: ...

    @abstractmethod
    def scatter(self, line: Scatter) -> None: ...

    @abstractmethod
    def index_put(self, line: IndexPut) -> None: ...

    @abstractmethod
    def size(self, line: SizeOf) -> None: ...

    @abstractmethod
    def let(self, line: Let) -> None: ...

    @abstractmethod
    def item(self, line: Item) -> None: ...

    @abstractmethod
    def bind(self, line: Bind) -> None: ...

    @abstractmethod
    def assertion(self, line: Assert) -> None: ...

    @abstractmethod
    def cond(self, line: Cond) -> None: ...

    @abstractmethod
    def while_(self, line: While) -> None: ...

    @abstractmethod
    def scan(self, line: Scan) -> None: ...

    @abstractmethod
    def map(self, line: Map) -> None: ...

    @abstractmethod
    def call_function(self, line: CallFunction) -> None: ...

    @abstractmethod
    def yield_(self, line: Yield) -> None: ...

    @abstractmethod
    def return_(self, line: Return) -> None: ...

    @abstractmethod
    def save_state(self, line: SaveState) -> None: ...

    @abstractmethod
    def restore_state(self, line: RestoreState) -> None: ...

    @abstractmethod
    def exchange_state(self, line: ExchangeState) -> None: ...

    @abstractmethod
    def enter_device(self, line: EnterDevice) -> None: ...

    @abstractmethod
    def exit_device(self, line: ExitDevice) -> None: ...

    @abstractmethod
    def record_event(self, line: RecordEvent) -> None: ...

    @abstractmethod
    def wait_event(self, line: WaitEvent) -> None: ...

    @abstractmethod
    def start_collective(self, line: StartCollective) -> None: ...

    @abstractmethod
    def wait_collective(self, line: WaitCollective) -> None: ...

    @abstractmethod
    def check_layout(self, line: CheckLayout) -> None: ...

    @abstractmethod
    def comment(self, line: Comment) -> None: ...

    @abstractmethod
    def enter_range(self, line: EnterRange) -> None: ...

    @abstractmethod
    def exit_range(self, line: ExitRange) -> None: ...
