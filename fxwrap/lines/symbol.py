"""Lines that define and check symbols: integers, floats and booleans in sizes and scalar expressions."""

from __future__ import annotations

from typing import ClassVar

from fxwrap.symbolic import SymbolInfo, print_expr, symbol_kind
from fxwrap.wrapper_ir import (
    ASSERT,
    Effect,
    Form,
    LineBase,
    ListType,
    Size,
    Tag,
    TensorType,
    Type,
    Value,
    attribute,
    define,
    line_class,
    read,
)

ASSERT_ERRORS = ("RuntimeError", "IndexError", "ValueError", "InputError")
"""The error classes that an assertion may raise."""

GUARD_MESSAGE = "the graph holds for inputs with "
"""Begins the message of an assertion that a guard of the graph became; the condition follows."""


@line_class("symbol.size")
class SizeOf(LineBase):
    """Reads a size, a stride (`of="stride"`) or the storage offset (`of="storage_offset"`) of a tensor, in elements.

    If `rank` is not 0, raises InputError with the tensor's name unless the tensor has this many dimensions.

    Example: `s0 = symbol.size(%x) dim=0 rank=2 range=(2, 4096) hint=512`
    """

    on_host: ClassVar[bool] = True

    symbol: SymbolInfo = define(Form.SYMBOL)
    tensor: Value = read()
    dim: int = attribute()
    of: str = attribute(default="size")
    rank: int = attribute(default=0)

    def verify_self(self) -> str | None:
        known = ("size", "stride", "storage_offset")
        if self.of not in known:
            return f"of is one of {known}, not {self.of!r}"
        if self.of != "storage_offset" and not 0 <= self.dim < len(self.tensor.tensor_type.sizes):
            return f"%{self.tensor.name} has no dimension {self.dim}"
        if self.rank not in (0, len(self.tensor.tensor_type.sizes)):
            return f"%{self.tensor.name} has {len(self.tensor.tensor_type.sizes)} dimensions, not {self.rank}"
        return None


@line_class("symbol.let")
class Let(LineBase):
    """Defines a symbol as the value of an expression.

    Example: `n0 = symbol.let expr=64*s0`
    """

    symbol: SymbolInfo = define(Form.SYMBOL)
    expr: Size = attribute()


@line_class("symbol.item")
class ReadItem(LineBase):
    """Reads the only element of a tensor as an int, float or bool, by the symbol's prefix. Synchronizes the device.

    Example: `u0 = symbol.item(%x) range=(0, 64)`
    """

    symbol: SymbolInfo = define(Form.SYMBOL)
    tensor: Value = read()

    def verify_self(self) -> str | None:
        dtype, kind = self.tensor.tensor_type.dtype, symbol_kind(self.symbol.name)
        if (kind == "float" and not dtype.is_floating_point) or (kind != "float" and dtype.is_floating_point):
            return f"an element of {dtype} is not of kind {kind}"
        return None


@line_class("symbol.bind")
class Bind(LineBase):
    """Reads an unbacked symbol from an operator's result by its key path, whose steps apply from left to right.

    Steps are `size(dim)`, `stride(dim)`, `storage_offset()`, `element(index)` of a list, `divide(constant)` (exact),
    and `truth()` (a bool as 0 or 1).

    Example: `u0 = symbol.bind(%y) path=(size(0), divide(8)) range=(0, inf)`
    """

    on_host: ClassVar[bool] = True

    symbol: SymbolInfo = define(Form.SYMBOL)
    source: Value = read()
    path: tuple[Tag, ...] = attribute(default=(), form=Form.SEQUENCE)

    def verify_self(self) -> str | None:
        type_: Type | None = self.source.type
        steps: tuple[object, ...] = self.path
        for step in steps:
            if not isinstance(step, Tag) or step.name not in _PATH_STEPS:
                shown = step.name if isinstance(step, Tag) else repr(step)
                return f"a step of a path is one of {tuple(_PATH_STEPS)}, not {shown}"
            if not _takes(step):
                return f"{step.name} of a path takes {_PATH_STEPS[step.name] or 'nothing'}, not {step.arguments}"
            if step.name in ("size", "stride") and isinstance(type_, TensorType):
                (dim,) = step.arguments
                if dim >= len(type_.sizes):  # type: ignore[operator]
                    return f"%{self.source.name} has no dimension {dim}"
            type_ = type_.element if step.name == "element" and isinstance(type_, ListType) else None
        return None


_PATH_STEPS = {
    "size": "a dimension", "stride": "a dimension", "storage_offset": "", "element": "an index", "divide": "a divisor",
    "truth": "",
}  # fmt: skip
"""The steps of paths, with the kind of their argument, a number; "" is none. An index may count from the end."""

_LEAST_ARGUMENTS = {"size": 0, "stride": 0, "divide": 1}


def _takes(step: Tag) -> bool:
    """Whether a step has the arguments that it takes."""
    if not _PATH_STEPS[step.name]:
        return not step.arguments
    match step.arguments:
        case (int() as argument,):
            return type(argument) is int and argument >= _LEAST_ARGUMENTS.get(step.name, argument)
        case _:
            return False


@line_class("symbol.assert")
class Assert(LineBase):
    """Raises an error with `message` when a condition over symbols is false.

    `error` is one of `ASSERT_ERRORS`. If `shown`, an integer, is present, ", got " and its value end the message.

    Example: `symbol.assert() condition=u0 <= 64 message="too many"`
    """

    condition: Size | bool = attribute()
    message: str = attribute(default="")
    error: str = attribute(default="RuntimeError")
    shown: Size | None = attribute(default=None)

    @property
    def text(self) -> str:
        """The message, or a default one."""
        return self.message or f"the condition {print_expr(self.condition)} does not hold"

    def verify_self(self) -> str | None:
        if self.error not in ASSERT_ERRORS:
            return f"error is one of {ASSERT_ERRORS}, not {self.error!r}"
        return None

    def effects(self) -> tuple[Effect, ...]:
        return (ASSERT,)
