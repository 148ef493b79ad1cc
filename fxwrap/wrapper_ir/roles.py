"""Roles of the fields of lines.

A line is a frozen dataclass. The role of each field declares whether it defines, reads, writes or consumes values.
Printing, parsing, verification, uses and live ranges follow from the roles.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import MISSING, dataclass
from enum import Enum
from typing import Any, TypeVar, cast

import sympy
from typing_extensions import dataclass_transform

from fxwrap.symbolic import SymbolInfo
from fxwrap.wrapper_ir.types import TensorType, Value


class Role(Enum):
    """The relation of a line to the content of a field."""

    DEFINE = "define"
    READ = "read"
    WRITE = "write"
    CONSUME = "consume"
    ATTR = "attr"
    BLOCK = "block"

    # Roles are keys of frequently used tables; identity is the fastest hash.
    __hash__ = object.__hash__


class Form(Enum):
    """The position and syntax of a field in the text form."""

    VALUE = "value"  # one value, in the parentheses (or before '=' if defined)
    VALUES = "values"  # any number of values, in the parentheses
    ARGUMENTS = "arguments"  # operands, in the parentheses
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
    """A field of a line class.

    `alias` is the field of the operand that a result aliases. `initialized` is whether a defined root is initialized.
    `target_kind` is the kind of a target: "operator", "kernel" or "function". `checked_types` are the accepted classes
    of the content, or, if `per_item`, of its items; () accepts everything.
    """

    name: str
    role: Role
    form: Form
    default: Any = MISSING
    alias: str = ""
    initialized: bool = True
    target_kind: str = ""
    checked_types: tuple[type, ...] = ()
    per_item: bool = False


_CHECKED_ANNOTATIONS: dict[str, tuple[tuple[type, ...], bool]] = {
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
"""The checked annotations, with the accepted classes and whether these apply to the items."""


def _field(role: Role, form: Form, default: Any = MISSING, **properties: str | bool) -> Any:
    metadata = {"spec": (role, form, properties)}
    if default is MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def define(form: Form = Form.VALUE, *, alias: str = "", initialized: bool = True) -> Any:
    """Declares a definition: a value, a tree of results, or a symbol.

    A defined value aliases the operand in the field `alias`, or is a new root, with memory that is initialized if
    `initialized`.
    """
    return _field(Role.DEFINE, form, alias=alias, initialized=initialized)


def read(form: Form = Form.VALUE, *, default: Any = MISSING) -> Any:
    """Declares operands that the line reads."""
    return _field(Role.READ, form, default)


def write(form: Form = Form.LITERAL, *, default: Any = MISSING) -> Any:
    """Declares operands that the line writes, and may read."""
    return _field(Role.WRITE, form, default)


def consume() -> Any:
    """Declares a root that the line consumes."""
    return _field(Role.CONSUME, Form.VALUE)


def attribute(*, default: Any = MISSING, form: Form = Form.LITERAL) -> Any:
    """Declares an attribute."""
    return _field(Role.ATTR, form, default)


def target(target_kind: str = "operator") -> Any:
    """Declares the name of the operator, kernel or function that the line calls."""
    return _field(Role.ATTR, Form.TARGET, target_kind=target_kind)


def block() -> Any:
    """Declares a nested block, which sees only its arguments and the program's symbols."""
    return _field(Role.BLOCK, Form.BLOCK)


ClassT = TypeVar("ClassT", bound=type)


@dataclass_transform(frozen_default=True, field_specifiers=(define, read, write, consume, attribute, target, block))
def line_class(opcode: str) -> Callable[[ClassT], ClassT]:
    """Returns a decorator that makes a class a line: a frozen, slotted dataclass with an opcode and field roles."""

    def decorate(cls: ClassT) -> ClassT:
        line: Any = dataclass(frozen=True, slots=True)(cls)
        specs = tuple([_spec(item) for item in dataclasses.fields(line) if "spec" in item.metadata])
        line.opcode = opcode
        line.specs = specs
        line.fields_by_role = {role: tuple([spec.name for spec in specs if spec.role is role]) for role in Role}
        line.has_stream = any(spec.name == "stream" for spec in specs)
        line.results_initialized = all(spec.initialized for spec in specs)
        targets = [spec for spec in specs if spec.target_kind in ("kernel", "function")]
        line.target_fields = tuple([(spec.name, spec.target_kind) for spec in targets])
        checked = [spec for spec in specs if spec.checked_types]
        line.checked_fields = tuple([(spec.name, spec.checked_types, spec.per_item) for spec in checked])
        line.alias_fields = tuple([(spec.name, spec.alias) for spec in specs if spec.alias])
        line.__doc__ = cls.__doc__
        return cast(ClassT, line)

    return decorate


def _spec(item: dataclasses.Field[object]) -> FieldSpec:
    role, form, properties = item.metadata["spec"]
    annotation = item.type.__name__ if isinstance(item.type, type) else str(item.type)
    checked_types, per_item = _CHECKED_ANNOTATIONS.get(annotation, ((), False))
    return FieldSpec(item.name, role, form, item.default, **properties, checked_types=checked_types, per_item=per_item)
