"""The base of all lines, and the questions that their roles answer."""

from __future__ import annotations

import dataclasses
from abc import ABC
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import sympy

from ..symbolic import SymbolInfo
from .effects import Effect, Origin
from .roles import FieldSpec, Form, Role
from .types import ListType, OptionalType, TensorType, Type, Value


@dataclass(frozen=True, slots=True)
class LineBase(ABC):  # noqa: B024  abstract by purpose: only its subclasses are lines
    """One step of a program, as plain data. Subclasses are made by `line_class`."""

    opcode: ClassVar[str]
    specs: ClassVar[tuple[FieldSpec, ...]]
    terminator: ClassVar[bool] = False
    """Whether the line ends a block and releases what it gives."""
    bracket: ClassVar[tuple[str, int]] = ("", 0)
    """What the line opens (+1) or closes (-1): such lines nest within a block."""
    starts_flight: ClassVar[bool] = False
    """Whether results may be touched only by the line that ends the flight, and operands stay borrowed until then."""
    ends_flight: ClassVar[bool] = False

    origin: Origin | None = field(default=None, compare=False, kw_only=True)

    def effects(self) -> tuple[Effect, ...]:
        """Returns what the line does besides its reads and writes; () for a pure line."""
        return ()

    def alias_of(self, result: Value) -> Value | None:
        """Returns the operand whose root a result shares, or None when the result is a root of its own."""
        for spec in self.specs:
            if spec.role is Role.DEFINE and spec.alias and getattr(self, spec.name) is result:
                base = getattr(self, spec.alias)
                return base if isinstance(base, Value) else None
        return None

    def verify_self(self) -> str | None:
        """Returns what is wrong with the line taken alone, or None."""
        return None

    def replace(self, **changes: Any) -> Any:
        """Returns a copy with some fields changed."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, slots=True)
class Block:
    """A list of lines with arguments, ended by `control.return` (a program's body) or `control.yield`."""

    arguments: tuple[Value, ...]
    lines: tuple[LineBase, ...]


def leaves(tree: Any) -> Iterator[Any]:
    """Yields what a tree of nested tuples holds, from left to right."""
    if type(tree) is tuple:
        for item in tree:
            yield from leaves(item)
    else:
        yield tree


def _values_of(line: LineBase, role: Role) -> Iterator[Value]:
    for spec in line.specs:
        if spec.role is role:
            content = getattr(line, spec.name)
            if type(content) is Value:
                yield content
            elif type(content) is tuple:
                for leaf in leaves(content):
                    if type(leaf) is Value:
                        yield leaf


def defined(line: LineBase) -> Iterator[Value]:
    """Yields the values the line defines, nested blocks not included."""
    return _values_of(line, Role.DEFINE)


def reads(line: LineBase) -> Iterator[Value]:
    """Yields the values whose memory the line reads; one that is read twice comes twice."""
    return _values_of(line, Role.READ)


def writes(line: LineBase) -> Iterator[Value]:
    """Yields the values whose memory the line writes."""
    return _values_of(line, Role.WRITE)


def consumed(line: LineBase) -> Iterator[Value]:
    """Yields the roots the line takes."""
    return _values_of(line, Role.CONSUME)


def used(line: LineBase) -> Iterator[Value]:
    """Yields every value the line reads, writes or consumes."""
    for role in (Role.READ, Role.WRITE, Role.CONSUME):
        yield from _values_of(line, role)


def defined_symbol(line: LineBase) -> SymbolInfo | None:
    """Returns the symbol the line defines, if it defines one."""
    for spec in line.specs:
        if spec.form is Form.SYMBOL:
            symbol: SymbolInfo = getattr(line, spec.name)
            return symbol
    return None


def blocks(line: LineBase) -> Iterator[tuple[str, Block]]:
    """Yields the line's nested blocks with their labels."""
    for spec in line.specs:
        if spec.role is Role.BLOCK:
            yield spec.name, getattr(line, spec.name)


def type_symbols(type_: Type) -> Iterator[sympy.Symbol]:
    """Yields the symbols in a type's sizes, strides and offset."""
    if isinstance(type_, TensorType):
        for size in (*type_.sizes, *type_.strides, type_.storage_offset):
            if type(size) is not int:
                yield from size.free_symbols
    elif isinstance(type_, ListType | OptionalType):
        yield from type_symbols(type_.element)


def symbols_used(line: LineBase, *roles: Role) -> Iterator[sympy.Symbol]:
    """Yields the symbols that the fields of these roles mention: in attributes and operands, and in types of results."""
    for spec in line.specs:
        if spec.role not in roles:
            continue
        content = getattr(line, spec.name)
        for leaf in (content,) if type(content) is not tuple else leaves(content):
            if type(leaf) is Value:
                if spec.role is Role.DEFINE:
                    yield from type_symbols(leaf.type)
            elif type(leaf) is TensorType:
                yield from type_symbols(leaf)
            elif isinstance(leaf, sympy.Basic):
                yield from leaf.free_symbols  # type: ignore[misc]


def map_leaves(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Returns the tree with each leaf changed; a tree in which nothing changes is returned itself."""
    if type(tree) is not tuple:
        return change(tree)
    changed = tuple(map_leaves(item, change) for item in tree)
    return tree if all(a is b for a, b in zip(tree, changed, strict=True)) else changed


def map_line(line: LineBase, change: Callable[[Any], Any], roles: Iterable[Role] = tuple(Role)) -> Any:
    """Returns the line with each leaf of the fields of these roles changed (values, symbols, literals, types)."""
    changes = {}
    for spec in line.specs:
        if spec.role in roles:
            before = getattr(line, spec.name)
            after = map_leaves(before, change)
            if after is not before:
                changes[spec.name] = after
    return dataclasses.replace(line, **changes) if changes else line
