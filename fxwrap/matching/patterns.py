"""Patterns over the data flow of lines, as immutable data.

A pattern is a tree or graph: inner nodes are operations, leaves are wildcards or literals. One `Operation` object that
occurs twice is one line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, Literal, TypeAlias

import torch

from fxwrap.wrapper_ir import KernelDefinition, LineBase, TensorType, Type, Value

LinePredicate: TypeAlias = Callable[[Any], bool]
"""A condition on a line."""

KernelPredicate: TypeAlias = Callable[[KernelDefinition, LineBase], bool]
"""A condition on a kernel: its definition and the line that launches it."""


@dataclass(frozen=True, slots=True)
class TypePattern:
    """Conditions on the type of a value; a field that is None imposes none.

    `dtype` is one dtype or several, `sizes` has one entry for each dimension (None for any size), `rank` is the number
    of dimensions, `device` a device type ("cuda") or a device ("cuda:1"), `contiguous` states whether strides are dense
    and row-major.
    """

    dtype: torch.dtype | tuple[torch.dtype, ...] | None = None
    sizes: tuple[int | None, ...] | None = None
    rank: int | None = None
    device: str | None = None
    contiguous: bool | None = None

    def mismatch(self, type_: Type) -> str | None:
        """Returns why a type does not match, or None."""
        if not isinstance(type_, TensorType):
            return "it is no tensor"
        dtypes = self.dtype if isinstance(self.dtype, tuple) else (self.dtype,)
        if self.dtype is not None and type_.dtype not in dtypes:
            return f"its dtype is {type_.dtype}"
        rank = len(self.sizes) if self.sizes is not None else self.rank
        if rank is not None and len(type_.sizes) != rank:
            return f"it has {len(type_.sizes)} dimensions, not {rank}"
        if any(size is not None and size != other for size, other in zip(self.sizes or (), type_.sizes)):
            return f"its sizes are {type_.sizes}"
        if self.device is not None and self.device not in (type_.device.type, str(type_.device)):
            return f"it is on {type_.device}"
        if self.contiguous is not None and type_.is_contiguous != self.contiguous:
            return "it is not contiguous" if self.contiguous else "it is contiguous"
        return None


@dataclass(frozen=True, slots=True)
class Wildcard:
    """Matches any operand of a kind and captures it by name; two with one name must capture the same.

    `kind` is "tensor" (a value), "number" (a number or an expression over symbols) or "any". `condition` is a predicate
    on the captured operand. With `no_other_uses`, only the lines of the match may read the value.
    """

    name: str
    kind: Literal["tensor", "number", "any"] = "any"
    type: TypePattern | None = None
    condition: Callable[[Any], bool] | None = None
    no_other_uses: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """A line that computes something: an operator's call, a kernel's launch, a view, or a line by its class.

    Constructed by `call`, `launch`, `computed`, `view` and `line`; the methods return changed copies.

    Fields:
        kind: "call", "launch", "computed", "view" or "line".
        target: names of operators or kernels, the operators that a kernel computes, or a predicate.
        operands, keywords: a pattern or literal for each.
        allow_more_operands: whether the line may have further operands.
        any_position: whether each operand's pattern may match any operand of the line.
        commutative: whether the first two operands may be swapped.
        label: the line's name in the match.
        type, condition: conditions on the first result, and on the line.
        optional: for a view, whether it may be absent.
        allow_uses_outside: whether lines outside of the match may read its results; the line is then retained.
    """

    kind: Literal["call", "launch", "computed", "view", "line"]
    target: frozenset[str] | Computes | LinePredicate | KernelPredicate | type | None
    operands: tuple[object, ...] = ()
    keywords: tuple[tuple[str, object], ...] = ()
    allow_more_operands: bool = False
    any_position: bool = False
    commutative: bool = False
    label: str = ""
    type: TypePattern | None = None
    condition: LinePredicate | None = None
    optional: bool = False
    allow_uses_outside: bool = False

    def named(self, label: str) -> Operation:
        """Returns the pattern with a name for `Match.line`."""
        return dataclasses.replace(self, label=label)

    def typed(self, **fields: Any) -> Operation:
        """Returns the pattern for lines whose first result matches these fields of `TypePattern`."""
        return dataclasses.replace(self, type=TypePattern(**fields))

    def where(self, condition: LinePredicate) -> Operation:
        """Returns the pattern for lines that fulfil a condition."""
        return dataclasses.replace(self, condition=condition)

    def as_commutative(self) -> Operation:
        """Returns the pattern for lines whose first two operands may be swapped."""
        if self.kind == "computed" and isinstance(self.target, Computes):
            swapped = tuple([item.as_commutative() for item in self.target.roots if isinstance(item, Operation)])
            return dataclasses.replace(self, target=Computes(swapped))
        return dataclasses.replace(self, commutative=True)

    def allow_other_uses(self) -> Operation:
        """Returns the pattern for lines whose results other lines may read; the line is then retained."""
        return dataclasses.replace(self, allow_uses_outside=True)

    def output(self, index: int) -> Output:
        """Returns the pattern for the result with an index; an operation as an operand is its first result."""
        return Output(self, index)

    def __str__(self) -> str:
        match self.target:
            case frozenset():
                return " or ".join(sorted(self.target))
            case type():
                return str(getattr(self.target, "opcode", self.target.__name__))
            case None:
                return self.kind
            case Computes():
                return f"{self.kind}({', '.join(map(str, self.target.calls))})"
            case _:
                return f"a {self.kind} that {getattr(self.target, '__name__', self.target)} accepts"


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """One of the results of an operation."""

    operation: Operation
    index: int

    def __str__(self) -> str:
        return f"result {self.index} of {self.operation}"


@dataclass(frozen=True, slots=True, eq=False)
class OneOf:
    """The first of several patterns that matches."""

    choices: tuple[object, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Computes:
    """The operators that a kernel computes: their names, or patterns of its results.

    Names are those of all its operators in order, views included; without `exactly`, those of some. Patterns are those
    of calls, one for each of its outputs; together they name all its operators.
    """

    calls: tuple[object, ...]
    exactly: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """The names of operators; empty for patterns."""
        return tuple([item for item in self.calls if isinstance(item, str)])

    @property
    def roots(self) -> tuple[Operation | Output, ...]:
        """The patterns of the results; empty for names."""
        return tuple([item for item in self.calls if isinstance(item, Operation | Output)])

    def __str__(self) -> str:
        return f"computes({', '.join(map(str, self.calls))})"


Pattern: TypeAlias = Operation | Output | OneOf | Wildcard


# --- constructors -------------------------------------------------------------------------------------------------


def tensor(
    name: str, *, where: Callable[[Value], bool] | None = None, no_other_uses: bool = False, **type_: Any
) -> Wildcard:
    """Returns a wildcard for a tensor.

    Args:
        name: the name in the match.
        where: a condition on the value.
        no_other_uses: whether only the match may read it.
        type_: fields of `TypePattern`: dtype, sizes, rank, device, contiguous.
    """
    return Wildcard(name, "tensor", TypePattern(**type_) if type_ else None, where, no_other_uses)


def tensors(names: str) -> tuple[Wildcard, ...]:
    """Returns a wildcard for each of the names, separated by blanks."""
    return tuple([tensor(name) for name in names.split()])


def number(name: str, *, where: Callable[[Any], bool] | None = None) -> Wildcard:
    """Returns a wildcard for a number: a constant, or an expression over the program's symbols."""
    return Wildcard(name, "number", None, where)


def anything(name: str, *, where: Callable[[Any], bool] | None = None) -> Wildcard:
    """Returns a wildcard for any argument: a tensor, a number, a list, a dtype, None."""
    return Wildcard(name, "any", None, where)


def call(target: str | tuple[str, ...] | LinePredicate, *operands: object, **keywords: object) -> Operation:
    """Returns the pattern of an operator's call.

    Args:
        target: the operator's name in the IR ("aten.mm.default"), several names, or a predicate on the line.
        operands: a pattern or a literal for each argument; a last `...` matches all others. Other arguments must have
            the default of the operator's schema.
        keywords: the same by name.
    """
    patterns, allow_more_operands = _split_ellipsis(operands)
    return Operation("call", _names(target), patterns, tuple(sorted(keywords.items())), allow_more_operands)


def launch(target: str | tuple[str, ...] | Computes | KernelPredicate, *operands: object) -> Operation:
    """Returns the pattern of a kernel's launch. Its results are its outputs.

    The operands of a kernel by its name, or by a predicate, are the launch's arguments, tensors and numbers, then its
    outputs that are initialised before (it may update them in place). Those of `computes` with names are the operands
    of the named operators by role; `computes` with patterns has its operands there. A last `...` matches all others.

    Args:
        target: the kernel's name in the program, several, a predicate on definition and line, or `computes(...)`.
        operands: a pattern or a literal for each operand.
    """
    patterns, allow_more_operands = _split_ellipsis(operands)
    return Operation("launch", _names(target), patterns, (), allow_more_operands)


def computes(*calls: str | Operation | Output, exactly: bool = True) -> Computes:
    """Returns the target of `launch` for kernels that compute these operators and no others.

    Operands are bound by role, that is, as the operators of the graph take them; their order in the launch depends on
    fusion and on the outputs that the kernel writes in place.

    Args:
        calls: names of operators in the order of the graph ("aten.add.Tensor"), views included. The operands of the
            launch are then the arguments of these operators in order, numbers and lists included, without those that
            the kernel computes and those that have the default of the schema. Or a pattern of `call`s for each output
            of the kernel, in any order; results of the launch then have the order of the patterns. A call within them
            is computed by the kernel, or by a line before it.
        exactly: False for kernels that compute at least the operators with these names. Their operands have no roles:
            the operand of such a launch is `...`.
    """
    return Computes(calls, exactly)


def computed(operator: str, *operands: object, **keywords: object) -> Operation:
    """Returns the pattern of an operator's result in any form of a program: of its call, or of a kernel for it alone.

    Operands are those of `call`, by role.
    """
    return Operation("computed", Computes((call(operator, *operands, **keywords),)))


def view(base: object, *, optional: bool = False) -> Operation:
    """Returns the pattern of a view: `memory.view`, or a view operator's call. An optional one matches the base too."""
    return Operation("view", None, (base,), optional=optional)


def line(target: type | LinePredicate, *operands: object) -> Operation:
    """Returns the pattern of a line by its class or a predicate; operands are the values that it reads, in order."""
    patterns, allow_more_operands = _split_ellipsis(operands)
    return Operation("line", target, patterns, (), allow_more_operands)


def with_operands_anywhere(operation: Operation) -> Operation:
    """Returns the pattern with operands at any positions; other operands may be anything."""
    return dataclasses.replace(operation, any_position=True, allow_more_operands=True)


def one_of(*choices: object) -> OneOf:
    """Returns the pattern that matches as the first matching one of several."""
    return OneOf(choices)


def _names(target: Any) -> Any:
    if isinstance(target, str):
        return frozenset([target])
    return frozenset(target) if isinstance(target, tuple | list | set | frozenset) else target


def _split_ellipsis(operands: tuple[object, ...]) -> tuple[tuple[object, ...], bool]:
    if operands and isinstance(operands[-1], EllipsisType):
        return operands[:-1], True
    return operands, False


def operations_of(pattern: object) -> list[Operation]:
    """Returns the operations of a pattern, each once, producers before consumers."""
    operations = [item for child in children_of(pattern) for item in operations_of(child)]
    if isinstance(pattern, Operation):
        operations.append(pattern)
    return list({id(item): item for item in operations}.values())


def wildcards_of(pattern: object) -> list[Wildcard]:
    """Returns the wildcards of a pattern; one that occurs twice is listed twice."""
    if isinstance(pattern, Wildcard):
        return [pattern]
    return [item for child in children_of(pattern) for item in wildcards_of(child)]


def children_of(pattern: object) -> Sequence[object]:
    """Returns the patterns directly inside of a pattern."""
    match pattern:
        case Operation():
            roots = pattern.target.roots if isinstance(pattern.target, Computes) else ()
            return (*roots, *pattern.operands, *[item for _, item in pattern.keywords])
        case Output():
            return (pattern.operation,)
        case OneOf():
            return pattern.choices
        case tuple() | list():
            return pattern
        case _:
            return ()
