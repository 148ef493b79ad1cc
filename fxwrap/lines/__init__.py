"""Every line of the Wrapper IR, one file a family, and their closed union."""

from typing import TypeAlias

from ..wrapper_ir import LineBase
from .check import CheckLayout
from .collective import StartCollective, WaitCollective
from .control import CallFunction, Cond, Map, Return, Scan, While, Yield
from .device import EnterDevice, ExitDevice, RecordEvent, WaitEvent
from .extension import ExtensionLine
from .extern import Call, IndexPut, Mutate, Scatter
from .kernel import Launch
from .memory import Alloc, Free, Pool, PoolSlice, Reuse, View, Workspace
from .note import Comment, EnterRange, ExitRange
from .random import RestoreState, SaveState
from .symbol import Assert, Bind, Item, Let, SizeOf

CORE_LINES: tuple[type[LineBase], ...] = (
    Alloc, Free, Reuse, View, Pool, PoolSlice, Workspace,
    Launch,
    Call, Mutate, Scatter, IndexPut,
    SizeOf, Let, Item, Bind, Assert,
    Cond, While, Scan, Map, CallFunction, Yield, Return,
    SaveState, RestoreState,
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
    | SaveState | RestoreState
    | EnterDevice | ExitDevice | RecordEvent | WaitEvent
    | StartCollective | WaitCollective
    | CheckLayout
    | Comment | EnterRange | ExitRange
    | ExtensionLine
)  # fmt: skip
"""The closed union of lines, with its one open door."""

__all__ = [cls.__name__ for cls in CORE_LINES] + ["CORE_LINES", "ExtensionLine", "Line"]
