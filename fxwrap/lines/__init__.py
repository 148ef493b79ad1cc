"""The lines of the Wrapper IR, one file for each family, and their closed union."""

from typing import TypeAlias, get_args

from fxwrap.lines.check import CheckLayout
from fxwrap.lines.collective import StartCollective, WaitCollective
from fxwrap.lines.control import CallFunction, Cond, Map, Return, ScanLoop, While, Yield
from fxwrap.lines.device import EnterDevice, ExitDevice, RecordEvent, WaitEvent
from fxwrap.lines.extension import ExtensionLine
from fxwrap.lines.extern import SCATTER_OPERATORS, ExternCall, IndexPut, Mutate, Scatter
from fxwrap.lines.kernel import Launch
from fxwrap.lines.memory import Alloc, Free, Pool, PoolSlice, Reuse, View, Workspace
from fxwrap.lines.note import Comment, EnterRange, ExitRange
from fxwrap.lines.random import ExchangeRngState, RestoreRngState, SaveRngState
from fxwrap.lines.symbol import GUARD_MESSAGE, Assert, Bind, Let, ReadItem, SizeOf
from fxwrap.wrapper_ir import LineBase

CoreLine: TypeAlias = (
    Alloc | Free | Reuse | View | Pool | PoolSlice | Workspace
    | Launch
    | ExternCall | Mutate | Scatter | IndexPut
    | SizeOf | Let | ReadItem | Bind | Assert
    | Cond | While | ScanLoop | Map | CallFunction | Yield | Return
    | SaveRngState | RestoreRngState | ExchangeRngState
    | EnterDevice | ExitDevice | RecordEvent | WaitEvent
    | StartCollective | WaitCollective
    | CheckLayout
    | Comment | EnterRange | ExitRange
)  # fmt: skip

CORE_LINES: tuple[type[LineBase], ...] = get_args(CoreLine)
"""All core line classes, by family."""

Line: TypeAlias = CoreLine | ExtensionLine
"""The closed union of lines; vendors subclass `ExtensionLine`."""

__all__ = [
    "CORE_LINES", "GUARD_MESSAGE", "SCATTER_OPERATORS",
    "Alloc", "Assert", "Bind", "CallFunction", "CheckLayout", "Comment", "Cond",
    "CoreLine", "EnterDevice", "EnterRange", "ExchangeRngState", "ExitDevice", "ExitRange", "ExtensionLine",
    "ExternCall", "Free", "IndexPut", "Launch", "Let", "Line", "Map", "Mutate", "Pool", "PoolSlice", "ReadItem",
    "RecordEvent", "RestoreRngState", "Return", "Reuse", "SaveRngState", "ScanLoop", "Scatter", "SizeOf",
    "StartCollective", "View", "WaitCollective", "WaitEvent", "While", "Workspace", "Yield",
]  # fmt: skip
