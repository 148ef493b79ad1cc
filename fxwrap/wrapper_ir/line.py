"""The base of all lines, and the questions that their roles answer."""

from __future__ import annotations

import dataclasses
from abc import ABC
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, Literal

import sympy

from fxwrap.symbolic import SymbolInfo
from fxwrap.wrapper_ir.effects import Effect
from fxwrap.wrapper_ir.origin import Origin
from fxwrap.wrapper_ir.roles import FieldSpec, Role
from fxwrap.wrapper_ir.types import ListType, OptionalType, TensorType, Type, Value


@dataclass(frozen=True, slots=True)
class LineBase(ABC):
    """One step of a program, as plain data. `line_class` makes subclasses and fills what has no default here."""

    opcode: ClassVar[str]
    specs: ClassVar[tuple[FieldSpec, ...]]
    fields_by_role: ClassVar[dict[Role, tuple[str, ...]]]
    target_fields: ClassVar[tuple[tuple[str, str], ...]]
    """The fields that name a kernel or function of the program, each with which of the two."""
    checked_fields: ClassVar[tuple[tuple[str, tuple[type, ...], bool], ...]]
    """The fields whose content has a fixed class: name, classes, and whether they hold for each item."""
    starts_written: ClassVar[bool]
    """Whether the roots that the line defines have content from the start."""
    alias_fields: ClassVar[tuple[tuple[str, str], ...]]
    """The fields of results that share a root, each with the field of the value whose root it is."""
    terminator: ClassVar[Literal["", "program", "block"]] = ""
    """What the line ends, releasing what it gives: the program, a nested block or function, or nothing."""
    bracket: ClassVar[tuple[str, int]] = ("", 0)
    """What the line opens (+1) or closes (-1): such lines nest within a block, and a pair has equal attributes."""
    starts_flight: ClassVar[bool] = False
    """Whether results may be touched only by the line that ends the flight, and operands stay borrowed until then."""
    ends_flight: ClassVar[bool] = False
    on_host: ClassVar[bool] = False
    """Whether the line asks at most for the sizes and the place of memory, so that it runs on no stream."""
    event_step: ClassVar[Literal["", "record", "wait"]] = ""
    """What the line does with an event of a stream. It has a `device` and a `stream`; no line moves across it."""

    origin: Origin | None = field(default=None, compare=False, kw_only=True)

    def effects(self) -> tuple[Effect, ...]:
        """Returns what the line does besides its reads and writes; () for a pure line."""
        return ()

    def alias_of(self, result: Value) -> Value | None:
        """Returns the operand whose root a result shares, or None when the result is a root of its own."""
        for name, base_name in self.alias_fields:
            if getattr(self, name) is result:
                base = getattr(self, base_name)
                return base if isinstance(base, Value) else None
        return None

    def verify_self(self) -> str | None:
        """Returns what is wrong with the line taken alone, or None.

        May raise ValueKindError for an operand that is no tensor. Operands and attributes have the classes that their
        fields declare.
        """
        return None

    def verify_target(self, target: Any) -> str | None:
        """Returns what is wrong with the line given the kernel definition or function block that it names, or None."""
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


def _collect_values(tree: tuple[Any, ...], found: list[Value]) -> None:
    for item in tree:
        kind = type(item)
        if kind is Value:
            found.append(item)
        elif kind is tuple:
            _collect_values(item, found)


def _values_of(line: LineBase, role: Role) -> list[Value]:
    found: list[Value] = []
    for name in line.fields_by_role[role]:
        content = getattr(line, name)
        kind = type(content)
        if kind is Value:
            found.append(content)
        elif kind is tuple:
            _collect_values(content, found)
    return found


def defined(line: LineBase) -> list[Value]:
    """Returns the values the line defines, nested blocks not included."""
    return _values_of(line, Role.DEFINE)


def reads(line: LineBase) -> list[Value]:
    """Returns the values whose memory the line reads; one that is read twice comes twice."""
    return _values_of(line, Role.READ)


def writes(line: LineBase) -> list[Value]:
    """Returns the values whose memory the line writes."""
    return _values_of(line, Role.WRITE)


def consumed(line: LineBase) -> list[Value]:
    """Returns the roots the line takes."""
    return _values_of(line, Role.CONSUME)


def used(line: LineBase) -> list[Value]:
    """Returns every value the line reads, writes or consumes, in this order."""
    found = _values_of(line, Role.READ)
    for role in (Role.WRITE, Role.CONSUME):
        if line.fields_by_role[role]:
            found += _values_of(line, role)
    return found


def defined_symbol(line: LineBase) -> SymbolInfo | None:
    """Returns the symbol the line defines, if it defines one."""
    for name in line.fields_by_role[Role.DEFINE]:
        content = getattr(line, name)
        if type(content) is SymbolInfo:
            return content
    return None


def blocks(line: LineBase) -> list[tuple[str, Block]]:
    """Returns the line's nested blocks with the names of their fields."""
    names = line.fields_by_role[Role.BLOCK]
    return [(name, getattr(line, name)) for name in names] if names else []


def type_symbols(type_: Type) -> list[sympy.Symbol]:
    """Returns the symbols in a type's sizes, strides and offset; one that occurs twice may come twice."""
    if not isinstance(type_, TensorType):
        return type_symbols(type_.element) if isinstance(type_, ListType | OptionalType) else []
    found: list[sympy.Symbol] = []
    for sizes in (type_.sizes, type_.strides, (type_.storage_offset,)):
        for size in sizes:
            if not isinstance(size, int):
                found.extend(_free_symbols(size))
    return found


@lru_cache(maxsize=65536)
def _free_symbols(expression: sympy.Basic) -> tuple[sympy.Symbol, ...]:
    """The symbols of an expression by name: in an order that is the same on every run."""
    return tuple(sorted(expression.free_symbols, key=str))


_WITHOUT_SYMBOLS = frozenset([Value, str, int, float, bool, type(None)])


def symbols_used(line: LineBase, *roles: Role) -> list[sympy.Symbol]:
    """Returns the symbols in the fields of these roles: in attributes and operands, and in types of results."""
    found: list[sympy.Symbol] = []
    for role in roles:
        for name in line.fields_by_role[role]:
            content = getattr(line, name)
            if type(content) is tuple:
                for leaf in leaves(content):
                    _collect_symbols(leaf, role, found)
            else:
                _collect_symbols(content, role, found)
    return found


def _collect_symbols(leaf: Any, role: Role, found: list[sympy.Symbol]) -> None:
    kind = type(leaf)
    if kind is Value and role is Role.DEFINE:
        found.extend(type_symbols(leaf.type))
    elif kind in _WITHOUT_SYMBOLS:
        return
    elif kind is TensorType:
        found.extend(type_symbols(leaf))
    elif isinstance(leaf, sympy.Basic):
        found.extend(_free_symbols(leaf))


def wrong_field(line: LineBase) -> str | None:
    """Returns which field holds something of a class that it does not take, or None."""
    for name, kinds, each in line.checked_fields:
        content = getattr(line, name)
        if not each:
            if not isinstance(content, kinds):
                return _wrong_content(line, name, kinds, content)
        elif type(content) is not tuple:
            return _wrong_content(line, name, (tuple,), content)
        else:
            for item in content:
                if not isinstance(item, kinds):
                    return _wrong_content(line, name, kinds, item)
    return None


def _wrong_content(line: LineBase, name: str, kinds: tuple[type, ...], content: Any) -> str:
    wanted = " or ".join(kind.__name__ for kind in kinds)
    return f"'{name}' of {line.opcode} takes {wanted}, not {type(content).__name__}"


def map_leaves(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Returns the tree with each leaf changed; a tree in which nothing changes is returned itself."""
    if type(tree) is not tuple:
        return change(tree)
    changed = tuple([map_leaves(item, change) for item in tree])
    return tree if all(a is b for a, b in zip(tree, changed)) else changed


def map_line(line: LineBase, change: Callable[[Any], Any], roles: Iterable[Role] = tuple(Role)) -> Any:
    """Returns the line with each leaf of the fields of these roles changed: values, literals, types, blocks."""
    changes = {}
    for role in roles:
        for name in line.fields_by_role[role]:
            before = getattr(line, name)
            after = map_leaves(before, change)
            if after is not before:
                changes[name] = after
    return dataclasses.replace(line, **changes) if changes else line
