"""Patterns: what lines of a program look like as data flow, as immutable data.

A pattern is a tree (or graph: one `Operation` that stands in two places is one line) whose inner nodes are operations
and whose leaves are wildcards or literals.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, TypeAlias

import torch

from fxwrap.wrapper_ir import KernelDefinition, LineBase, TensorType, Type, Value

LinePredicate: TypeAlias = Callable[[Any], bool]
"""Says whether a line is meant."""

KernelPredicate: TypeAlias = Callable[[KernelDefinition, LineBase], bool]
"""Says whether a kernel is meant, by its definition and the line that launches it."""


@dataclass(frozen=True, slots=True)
class TypePattern:
    """What the type of a value must be; what is None may be anything.

    `dtype` is one or several element types, `sizes` one entry a dimension (None for any size), `rank` the number of
    dimensions, `device` a device's type ("cuda") or a device ("cuda:1"), `contiguous` whether it is dense in row-major
    order.
    """

    dtype: torch.dtype | tuple[torch.dtype, ...] | None = None
    sizes: tuple[int | None, ...] | None = None
    rank: int | None = None
    device: str | None = None
    contiguous: bool | None = None

    def mismatch(self, type_: Type) -> str | None:
        """Returns what is wrong with a type, or None."""
        if not isinstance(type_, TensorType):
            return "it is no tensor"
        dtypes = self.dtype if isinstance(self.dtype, tuple) else (self.dtype,)
        if self.dtype is not None and type_.dtype not in dtypes:
            return f"its dtype is {type_.dtype}"
        rank = len(self.sizes) if self.sizes is not None else self.rank
        if rank is not None and len(type_.sizes) != rank:
            return f"it has {len(type_.sizes)} dimensions, not {rank}"
        if any(want is not None and want != have for want, have in zip(self.sizes or (), type_.sizes)):
            return f"its sizes are {type_.sizes}"
        if self.device is not None and self.device not in (type_.device.type, str(type_.device)):
            return f"it is on {type_.device}"
        if self.contiguous is not None and type_.is_contiguous != self.contiguous:
            return "it is not contiguous" if self.contiguous else "it is contiguous"
        return None


@dataclass(frozen=True, slots=True)
class Wildcard:
    """Stands for whatever is there, and captures it under its name; one that stands twice is the same thing twice.

    `kind` is "tensor" (a value), "number" (a number or an expression over symbols) or "any". `condition` is asked with
    what is captured. With `only_here`, nothing but the lines of the match may read the value.
    """

    name: str
    kind: str = "any"
    type: TypePattern | None = None
    condition: Callable[[Any], bool] | None = None
    only_here: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """A line that computes something: an operator's call, a kernel's launch, a view, or a line by its class.

    Made by `call`, `launch`, `view` and `line`; the methods return changed copies.

    Fields:
        kind: "call", "launch", "view" or "line".
        target: names of operators or kernels, or a predicate.
        operands, keywords: a pattern or literal for each.
        rest: whether there may be more operands than the patterns.
        anywhere: whether each operand's pattern may match any operand of the line.
        either_order: whether the first two operands may be the other way round.
        label: under what the line is found in the match.
        optional: for a view, whether it may be absent.
        kept: whether its results may be read outside of the match too; the line then stays.
    """

    kind: str
    target: frozenset[str] | LinePredicate | KernelPredicate | type | None
    operands: tuple[Any, ...] = ()
    keywords: tuple[tuple[str, Any], ...] = ()
    rest: bool = False
    anywhere: bool = False
    either_order: bool = False
    label: str = ""
    type: TypePattern | None = None
    condition: LinePredicate | None = None
    optional: bool = False
    kept: bool = False

    def named(self, label: str) -> Operation:
        """Returns the pattern with a name, under which `Match.line` gives the line."""
        return dataclasses.replace(self, label=label)

    def typed(self, **wishes: Any) -> Operation:
        """Returns the pattern for lines whose first result is as these fields of `TypePattern` say."""
        return dataclasses.replace(self, type=TypePattern(**wishes))

    def where(self, condition: LinePredicate) -> Operation:
        """Returns the pattern for lines of which the condition holds too."""
        return dataclasses.replace(self, condition=condition)

    def in_either_order(self) -> Operation:
        """Returns the pattern for lines whose first two operands may be the other way round."""
        return dataclasses.replace(self, either_order=True)

    def also_used(self) -> Operation:
        """Returns the pattern for lines whose results other lines may read as well; the line then stays."""
        return dataclasses.replace(self, kept=True)

    def output(self, index: int) -> Output:
        """Returns the pattern for one result, by its position; as an operand an operation itself is its first one."""
        return Output(self, index)

    def __str__(self) -> str:
        match self.target:
            case frozenset():
                return " or ".join(sorted(self.target))
            case type():
                return str(getattr(self.target, "opcode", self.target.__name__))
            case None:
                return self.kind
            case _:
                return f"a {self.kind} that {getattr(self.target, '__name__', self.target)} accepts"


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """One of the results of an operation."""

    operation: Operation
    index: int


@dataclass(frozen=True, slots=True, eq=False)
class OneOf:
    """Whichever of several patterns matches first."""

    choices: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Computes:
    """Accepts kernels by the ATen operators that they compute, as their launches' origins name them.

    With `exactly`, they compute these and no others, in this order; else these among others.
    """

    operators: tuple[str, ...]
    exactly: bool = True

    def __call__(self, kernel: KernelDefinition, line: LineBase) -> bool:
        found = tuple(line.origin.operators) if line.origin is not None else ()
        wanted = tuple([name.removesuffix(".default") for name in self.operators])
        return found == wanted if self.exactly else set(wanted) <= set(found)

    def __str__(self) -> str:
        return f"computes({', '.join(self.operators)})"


Pattern: TypeAlias = Operation | Output | OneOf | Wildcard


# --- what users write -------------------------------------------------------------------------------------------------


def tensor(
    name: str, *, where: Callable[[Value], bool] | None = None, only_here: bool = False, **type_: Any
) -> Wildcard:
    """Returns a wildcard for a tensor.

    Args:
        name: under what the match captures it.
        where: a condition on the value.
        only_here: whether nothing but the match may read it.
        type_: fields of `TypePattern`: dtype, sizes, rank, device, contiguous.
    """
    return Wildcard(name, "tensor", TypePattern(**type_) if type_ else None, where, only_here)


def tensors(names: str) -> tuple[Wildcard, ...]:
    """Returns a wildcard for each of the names, which blanks separate."""
    return tuple([tensor(name) for name in names.split()])


def number(name: str, *, where: Callable[[Any], bool] | None = None) -> Wildcard:
    """Returns a wildcard for a number: a plain one, or an expression over the program's symbols."""
    return Wildcard(name, "number", None, where)


def anything(name: str, *, where: Callable[[Any], bool] | None = None) -> Wildcard:
    """Returns a wildcard for any argument: a tensor, a number, a list, a dtype, none."""
    return Wildcard(name, "any", None, where)


def call(target: str | tuple[str, ...] | LinePredicate, *operands: Any, **keywords: Any) -> Operation:
    """Returns the pattern of an operator's call.

    Args:
        target: the operator as the IR names it ("aten.mm.default"), several of them, or a predicate on the line.
        operands: a pattern or a literal for each argument; `...` at the end stands for all others. Arguments that the
            pattern leaves out must be at their default, as the operator's schema has it.
        keywords: the same by name.
    """
    given, rest = _rest(operands)
    return Operation("call", _names(target), given, tuple(sorted(keywords.items())), rest)


def launch(target: str | tuple[str, ...] | KernelPredicate, *operands: Any) -> Operation:
    """Returns the pattern of a kernel's launch.

    The operands are the launch's arguments, tensors and numbers, then those of its outputs that held something before
    (memory that it may update in place); `...` at the end stands for all others. Its results are its outputs.

    Args:
        target: the kernel's name in the program, several, or a predicate on definition and line such as `computes`.
        operands: a pattern or a literal for each operand.
    """
    given, rest = _rest(operands)
    return Operation("launch", _names(target), given, (), rest)


def computes(*operators: str, exactly: bool = True) -> Computes:
    """Returns a predicate on kernels: those that compute these ATen operators, in this order, and no others.

    Without `exactly`, these among others.
    """
    return Computes(operators, exactly)


def view(base: Any, *, optional: bool = False) -> Operation:
    """Returns the pattern of a view (`memory.view`); an optional one matches the base itself too."""
    return Operation("view", None, (base,), optional=optional)


def line(target: type | LinePredicate, *operands: Any) -> Operation:
    """Returns the pattern of any line by its class, or by a predicate; operands are what it reads, in order."""
    given, rest = _rest(operands)
    return Operation("line", target, given, (), rest)


def reading(operation: Operation) -> Operation:
    """Returns the pattern with operands in any order and place; other operands may be anything."""
    return dataclasses.replace(operation, anywhere=True, rest=True)


def one_of(*choices: Any) -> OneOf:
    """Returns the pattern that matches what the first fitting one of several matches."""
    return OneOf(choices)


def _names(target: Any) -> Any:
    if isinstance(target, str):
        return frozenset([target])
    return frozenset(target) if isinstance(target, tuple | list | set | frozenset) else target


def _rest(operands: tuple[Any, ...]) -> tuple[tuple[Any, ...], bool]:
    if operands and isinstance(operands[-1], EllipsisType):
        return operands[:-1], True
    return operands, False


def operations_of(pattern: Any) -> list[Operation]:
    """Returns the operations of a pattern, each once, what computes operands before what reads them."""
    found: dict[int, Operation] = {}

    def visit(item: Any) -> None:
        match item:
            case Operation():
                for inner in (*item.operands, *[given for _, given in item.keywords]):
                    visit(inner)
                found.setdefault(id(item), item)
            case Output():
                visit(item.operation)
            case OneOf() | tuple() | list():
                for inner in item.choices if isinstance(item, OneOf) else item:
                    visit(inner)
            case _:
                pass

    visit(pattern)
    return list(found.values())
