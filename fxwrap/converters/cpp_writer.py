"""The statements of an emitted C++ program: blocks with their live values, arguments of call sites, results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

from fxwrap.converters.cpp_text import (
    DTYPE_NAMES,
    CppUnit,
    comment_text,
    float_text,
    int_text,
    place,
    string_text,
)
from fxwrap.errors import Unsupported
from fxwrap.symbolic import expression_kind
from fxwrap.wrapper_ir import (
    GENERATOR,
    Block,
    LineBase,
    ListType,
    ScalarType,
    Size,
    TensorType,
    Type,
    Value,
    leaves,
    print_line,
)  # fmt: skip


@dataclass
class Scope:
    """A block while it is written.

    `windows` holds the slots of the live values over each root; `expressions` the symbols of expressions worked out so
    far; `given` what the block yields or the program returns.
    """

    statements: list[str] = field(default_factory=list)
    windows: dict[str, dict[str, str]] = field(default_factory=dict)
    root_of: dict[str, str] = field(default_factory=dict)
    expressions: dict[Any, str] = field(default_factory=dict)
    given: tuple[Any, ...] = ()


def unsupported(line: LineBase, reason: str) -> Unsupported:
    """Returns the error for a line that C++ cannot express."""
    return Unsupported(print_line(line).partition("\n")[0], "cpp", reason)


def is_whole(type_: Type) -> bool:
    """Whether values of a type are kept as one thing, whatever is in it: lists of any length, and generators."""
    return isinstance(type_, ListType) or type_ == GENERATOR


class CppWriter:
    """Writes blocks. Every value has a slot of its own in the program's one frame; `convert` writes a line."""

    def __init__(self, unit: CppUnit, convert: Callable[[LineBase], None]) -> None:
        self.unit = unit
        self.scope = Scope()
        self._convert = convert
        self._origin = ""

    def lines(self, block: Block) -> None:
        """Writes the lines of a block into the current scope, each after a remark on where it came from."""
        for line in block.lines:
            origin = str(line.origin) if line.origin is not None else ""
            if origin and origin != self._origin:
                self.say(comment_text(origin))
            self._origin = origin
            self._convert(line)

    def say(self, statement: str) -> None:
        """Adds a statement."""
        self.scope.statements.append(statement)

    # --- values -----------------------------------------------------------------------------------------------------

    def own(self, value: Value, base: Value | None = None) -> None:
        """Notes a value that holds something, and the root it is a window on, so that a free lets go of all windows."""
        if not isinstance(value.type, TensorType) and not is_whole(value.type):
            return
        roots = self.scope.root_of
        root = roots[base.name] if base is not None else value.name
        roots[value.name] = root
        self.scope.windows.setdefault(root, {})[value.name] = self.name_of(value)

    def define(self, value: Value, base: Value | None = None) -> str:
        """Notes a tensor that the next statement makes; returns its slot."""
        self.own(value, base)
        return self.unit.slot(value.name)

    def name_of(self, value: Value) -> str:
        """Returns the slot of a tensor, a list or a generator, or the symbol of a number."""
        if isinstance(value.type, ScalarType):
            return self.unit.scalar(value.name, value.type.kind)
        return self.unit.list_slot(value.name) if is_whole(value.type) else self.unit.slot(value.name)

    def check_type(self, line: LineBase, value: Value) -> None:
        """Raises Unsupported for a value that is neither a tensor, a list, a generator nor a real number."""
        real = isinstance(value.type, ScalarType) and value.type.kind in ("int", "float", "bool")
        if not real and not isinstance(value.type, TensorType) and not is_whole(value.type):
            raise unsupported(line, f"%{value.name} is neither a tensor, a list, a generator nor a real number")

    def drop(self, slots: Sequence[str]) -> None:
        """Lets go of tensors."""
        if slots:
            self.say(" ".join([f"drop(f, {slot});" for slot in slots]))

    # --- arguments --------------------------------------------------------------------------------------------------

    def argument(self, line: LineBase, item: Any) -> list[str]:
        """Returns the texts of an argument of a call site: several for a list."""
        match item:
            case Value():
                self.check_type(line, item)
                return [self.name_of(item)]
            case None:
                return ["none"]
            case bool():
                return ["true" if item else "false"]
            case int():
                return [int_text(item)]
            case float():
                return [float_text(item)]
            case str():
                return [string_text(item)]
            case tuple():
                return [f"list({len(item)})", *self.arguments(line, item)]
            case sympy.Basic():
                return [self._symbol(item)]
            case _:
                return [self._constant(line, item)]

    def arguments(self, line: LineBase, items: Sequence[Any]) -> list[str]:
        """Returns the texts of arguments of a call site."""
        return [text for item in items for text in self.argument(line, item)]

    def _symbol(self, expression: sympy.Basic) -> str:
        """Returns the symbol of an expression, which is worked out first where it has none."""
        if isinstance(expression, sympy.Symbol):
            return self.unit.symbol(expression.name)
        known = self.scope.expressions.get(expression)
        if known is None:
            kind = expression_kind(expression)
            known = self.scope.expressions[expression] = self.unit.fresh_symbol("number", kind)
            self.say(f"{place(known, kind)} = {self.unit.number(expression)};")
        return known

    def _constant(self, line: LineBase, item: Any) -> str:
        match item:
            case complex():
                return f"complex({float_text(item.real)}, {float_text(item.imag)})"
            case torch.dtype():
                return self.dtype(line, item)
            case torch.device():
                return self.unit.device(item)
            case torch.layout():
                return f"Layout::{str(item).removeprefix('torch.')}"
            case torch.memory_format():
                return f"MemoryFormat::{str(item).removeprefix('torch.')}"
            case _:
                raise unsupported(line, f"C++ has no form for an argument of class {type(item).__name__}")

    def dtype(self, line: LineBase, dtype: torch.dtype) -> str:
        """Returns the bridge's name of an element type."""
        if dtype not in DTYPE_NAMES:
            raise unsupported(line, f"the C++ bridge has no name for {dtype}")
        return f"DType::{DTYPE_NAMES[dtype]}"

    def number(self, item: Any) -> str:
        """Returns the text of a size, condition or number."""
        if isinstance(item, Value) and isinstance(item.type, ScalarType):
            return place(self.name_of(item), item.type.kind)
        return self.unit.number(item)

    def truth(self, item: Any) -> str:
        """Returns the text of a condition: of a tensor, a number or an expression."""
        if isinstance(item, Value) and isinstance(item.type, TensorType):
            return f"item_bool(f, {self.name_of(item)})"
        return self.number(item)

    # --- statements -------------------------------------------------------------------------------------------------

    def call(self, target: str, arguments: Sequence[str], results: Sequence[str] = ()) -> None:
        """Says a call of the operator "namespace.name.overload"."""
        self.say(f"CALL(f, {self.unit.operator(target)}, ({', '.join(arguments)}), ({', '.join(results)}));")

    def results(self, results: tuple[Any, ...]) -> list[str]:
        """Returns the texts of a call site's results."""
        texts: list[str] = []
        for item in results:
            if type(item) is tuple:
                texts += [f"list({len(item)})", *self.results(item)]
            else:
                texts.append("none" if item is None else self.name_of(item))
        return texts

    def empty(self, line: LineBase, slot: str, type_: TensorType) -> None:
        """Says an allocation."""
        sizes, strides = self.unit.sizes(type_.sizes), self.unit.sizes(type_.strides)
        dtype, device = self.dtype(line, type_.dtype), self.unit.device(type_.device)
        self.say(f"empty_strided(f, {slot}, {sizes}, {strides}, {dtype}, {device});")

    def window(self, slot: str, base: str, sizes: Sequence[Size], strides: Sequence[Size], offset: str) -> None:
        """Says a view; `offset` is the text of the distance from the base's first element."""
        self.say(f"view(f, {slot}, {base}, {self.unit.sizes(sizes)}, {self.unit.sizes(strides)}, {offset});")

    # --- blocks -----------------------------------------------------------------------------------------------------

    def block(
        self,
        block: Block,
        take: Callable[[tuple[Any, ...]], None],
        *,
        begin: Callable[[], None] = lambda: None,
        keep: Sequence[Value] = (),
    ) -> list[str]:
        """Returns the statements of a nested block.

        They start with what `begin` says, end with what `take` says to do with the values that the block yields, and
        let go of all others but those in `keep`.
        """
        outer, self.scope = self.scope, Scope()
        for value in block.arguments:
            self.own(value)
        begin()
        self.lines(block)
        given = self.scope.given
        take(given)
        kept = {value.name for value in (*keep, *leaves(given)) if isinstance(value, Value)}
        windows = self.scope.windows.values()
        self.drop([slot for window in windows for name, slot in window.items() if name not in kept])
        statements, self.scope = self.scope.statements, outer
        return self.unit.part(statements)

    def lend(self, arguments: Sequence[Value], operands: Sequence[Any]) -> None:
        """Says what a block's arguments are; tensors are shared with the operands."""
        for argument, operand in zip(arguments, operands):
            self._give(argument, operand, "alias")

    def hand_over(self, results: tuple[Any, ...], given: tuple[Any, ...]) -> None:
        """Says that what a block yielded becomes these results."""
        for result, item in zip(leaves(results), leaves(given)):
            if result is not None:
                self._give(result, item, "move")

    def own_results(self, results: tuple[Any, ...]) -> None:
        """Notes the results of a line that holds blocks."""
        for value in leaves(results):
            if value is not None:
                self.own(value)

    def _give(self, value: Value, item: Any, how: str) -> None:
        if isinstance(value.type, ScalarType):
            self.say(f"{place(self.name_of(value), value.type.kind)} = {self.number(item)};")
        elif item is None:
            self.drop([self.name_of(value)])
        else:
            self.say(f"{how}(f, {self.name_of(value)}, {self.name_of(item)});")
