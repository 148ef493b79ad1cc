"""Every line of the Wrapper IR, one file a family, and their closed union."""

from typing import TypeAlias

from fxwrap.lines.check import CheckLayout
from fxwrap.lines.collective import StartCollective, WaitCollective
from fxwrap.lines.control import CallFunction, Cond, Map, Return, Scan, While, Yield
from fxwrap.lines.device import EnterDevice, ExitDevice, RecordEvent, WaitEvent
from fxwrap.lines.extension import ExtensionLine
from fxwrap.lines.extern import SCATTER_OPERATORS, Call, IndexPut, Mutate, Scatter
from fxwrap.lines.kernel import Launch
from fxwrap.lines.memory import Alloc, Free, Pool, PoolSlice, Reuse, View, Workspace
from fxwrap.lines.note import Comment, EnterRange, ExitRange
from fxwrap.lines.random import ExchangeState, RestoreState, SaveState
from fxwrap.lines.symbol import Assert, Bind, Item, Let, SizeOf
from fxwrap.wrapper_ir import LineBase

CORE_LINES: tuple[type[LineBase], ...] = (
    Alloc, Free, Reuse, View, Pool, PoolSlice, Workspace,
    Launch,
    Call, Mutate, Scatter, IndexPut,
    SizeOf, Let, Item, Bind, Assert,
    Cond, While, Scan, Map, CallFunction, Yield, Return,
    SaveState, RestoreState, ExchangeState,
    EnterDevice, ExitDevice, RecordEvent, WaitEvent,
    StartCollective, WaitCollective,
    CheckLayout,
    Comment, EnterRange, ExitRange,
)  # fmt: skip
"""All core line classes, by family."""

Line: TypeAlias = (
    Alloc | Free | Reuse | View | Pool | PoolSlice | Workspace
    | Launch
    | Call | Mutate | Scatter | IndexPut
    | SizeOf | Let | Item | Bind | Assert
    | Cond | While | Scan | Map | CallFunction | Yield | Return
    | SaveState | RestoreState | ExchangeState
    | EnterDevice | ExitDevice | RecordEvent | WaitEvent
    | StartCollective | WaitCollective
    | CheckLayout
    | Comment | EnterRange | ExitRange
    | ExtensionLine
)  # fmt: skip
"""The closed union of lines, with its one open door."""

__all__ = [
    "CORE_LINES",
    "SCATTER_OPERATORS",
    "Alloc",
    "Assert",
    "Bind",
    "Call",
    "CallFunction",
    "CheckLayout",
    "Comment",
    "Cond",
    "EnterDevice",
    "EnterRange",
    "ExchangeState",
    "ExitDevice",
    "ExitRange",
    "ExtensionLine",
    "Free",
    "IndexPut",
    "Item",
    "Launch",
    "Let",
    "Line",
    "Map",
    "Mutate",
    "Pool",
    "PoolSlice",
    "RecordEvent",
    "RestoreState",
    "Return",
    "Reuse",
    "SaveState",
    "Scan",
    "Scatter",
    "SizeOf",
    "StartCollective",
    "View",
    "WaitCollective",
    "WaitEvent",
    "While",
    "Workspace",
    "Yield",
]
