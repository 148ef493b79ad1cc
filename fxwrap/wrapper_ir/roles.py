"""Roles of a line's fields.

A line is a frozen dataclass whose fields say what they are to the program: what they define, read, write, consume or
merely carry. Printing, parsing, verification, uses and live ranges follow from these roles alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import MISSING, dataclass
from enum import Enum
from typing import Any, TypeVar

import sympy
from typing_extensions import dataclass_transform

from fxwrap.symbolic import SymbolInfo
from fxwrap.wrapper_ir.types import TensorType, Value


class Role(Enum):
    """What a field of a line is to the program."""

    DEFINE = "define"
    READ = "read"
    WRITE = "write"
    CONSUME = "consume"
    ATTR = "attr"
    BLOCK = "block"

    # Roles are keys of tables that are looked up several times a line; identity is the fastest hash.
    __hash__ = object.__hash__


class Form(Enum):
    """How a field's content is written in the text form."""

    VALUE = "value"  # one value, in the parentheses (or before '=' when defined)
    VALUES = "values"  # any number of values, in the parentheses
    ARGUMENTS = "arguments"  # literals that may hold values, in the parentheses
    NAMED = "named"  # pairs of name and literal, in the parentheses as name=literal
    RESULTS = "results"  # a tree of values and none, before '='
    SYMBOL = "symbol"  # one SymbolInfo, before '='; its range, hint and divisor follow as attributes
    LITERAL = "literal"  # key=literal; for values key=(%a, %b)
    SEQUENCE = "sequence"  # key=(literal, ...)
    TARGET = "target"  # @name
    TYPE = "type"  # after ':'
    BLOCK = "block"  # in braces, labelled with the field's name

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """One field of a line class: its name, role, form and default.

    `alias` names the field whose root a result shares; `written` says that a defined root has content from the start;
    `refers` says what a target names: "operator", "kernel" or "function". `kinds` are the classes that the content
    may have, or each item of it where `each` is true; () where the field takes anything.
    """

    name: str
    role: Role
    form: Form
    default: Any = MISSING
    alias: str = ""
    written: bool = True
    refers: str = ""
    kinds: tuple[type, ...] = ()
    each: bool = False


_KINDS: dict[str, tuple[tuple[type, ...], bool]] = {
    "bool": ((bool,), False),
    "int": ((int,), False),
    "str": ((str,), False),
    "Size": ((int, sympy.Expr), False),
    "SymbolInfo": ((SymbolInfo,), False),
    "TensorType": ((TensorType,), False),
    "Value": ((Value,), False),
    "tuple[Size, ...]": ((int, sympy.Expr), True),
    "tuple[Value, ...]": ((Value,), True),
    "tuple[Value | None, ...]": ((Value, type(None)), True),
}
"""The annotations whose content is checked, by their text."""


def _field(role: Role, form: Form, default: Any = MISSING, **facts: Any) -> Any:
    metadata = {"spec": (role, form, facts)}
    if default is MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def define(form: Form = Form.VALUE, *, alias: str = "", written: bool = True) -> Any:
    """Declares what the line defines: a value, a tree of results, or a symbol.

    A defined value is a new root, unless `alias` names the field of the value whose root it shares. With `written`
    false, its memory has no content yet.
    """
    return _field(Role.DEFINE, form, alias=alias, written=written)


def read(form: Form = Form.VALUE, *, default: Any = MISSING) -> Any:
    """Declares values whose memory the line reads."""
    return _field(Role.READ, form, default)


def write(form: Form = Form.LITERAL, *, default: Any = MISSING) -> Any:
    """Declares values whose memory the line writes; what it also reads of them it need not say."""
    return _field(Role.WRITE, form, default)


def consume() -> Any:
    """Declares a root that the line takes: it is gone afterwards."""
    return _field(Role.CONSUME, Form.VALUE)


def attribute(*, default: Any = MISSING, form: Form = Form.LITERAL) -> Any:
    """Declares plain data."""
    return _field(Role.ATTR, form, default)


def target(refers: str = "operator") -> Any:
    """Declares the name of the operator, kernel or function that the line calls, written `@name`."""
    return _field(Role.ATTR, Form.TARGET, refers=refers)


def block() -> Any:
    """Declares a nested block, which sees its arguments and the program's symbols and nothing else."""
    return _field(Role.BLOCK, Form.BLOCK)


ClassT = TypeVar("ClassT", bound=type)


@dataclass_transform(frozen_default=True, field_specifiers=(define, read, write, consume, attribute, target, block))
def line_class(opcode: str) -> Callable[[ClassT], ClassT]:
    """Makes a class a line class: a frozen, slotted dataclass that knows its opcode and the roles of its fields."""

    def decorate(cls: ClassT) -> ClassT:
        made: Any = dataclass(frozen=True, slots=True)(cls)
        specs = tuple(_spec(item) for item in dataclasses.fields(made) if "spec" in item.metadata)
        made.opcode = opcode
        made.specs = specs
        made.fields_by_role = {role: tuple(spec.name for spec in specs if spec.role is role) for role in Role}
        made.starts_written = all(spec.written for spec in specs)
        made.target_fields = tuple((spec.name, spec.refers) for spec in specs if spec.refers in ("kernel", "function"))
        made.checked_fields = tuple((spec.name, spec.kinds, spec.each) for spec in specs if spec.kinds)
        made.alias_fields = tuple((spec.name, spec.alias) for spec in specs if spec.alias)
        made.__doc__ = cls.__doc__
        result: ClassT = made
        return result

    return decorate


def _spec(item: dataclasses.Field[Any]) -> FieldSpec:
    role, form, facts = item.metadata["spec"]
    annotation = item.type.__name__ if isinstance(item.type, type) else str(item.type)
    kinds, each = _KINDS.get(annotation, ((), False))
    return FieldSpec(item.name, role, form, item.default, **facts, kinds=kinds, each=each)
