"""The base class of lines, and queries over the roles of their fields."""

from __future__ import annotations

import dataclasses
from abc import ABC
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

import sympy
from typing_extensions import Self

from fxwrap.caching import bounded_cache
from fxwrap.symbolic import Size, SymbolInfo
from fxwrap.wrapper_ir.effects import Effect
from fxwrap.wrapper_ir.origin import Origin
from fxwrap.wrapper_ir.roles import FieldSpec, Role
from fxwrap.wrapper_ir.types import Leaf, ListType, Operand, OptionalType, TensorType, Type, Value

Terminator = Literal["", "program", "block"]
EventStep = Literal["", "record", "wait"]


@dataclass(frozen=True, slots=True)
class LineBase(ABC):
    """One step of a program, as plain data. `line_class` sets the class attributes that have no default here."""

    opcode: ClassVar[str]
    specs: ClassVar[tuple[FieldSpec, ...]]
    fields_by_role: ClassVar[dict[Role, tuple[str, ...]]]
    target_fields: ClassVar[tuple[tuple[str, str], ...]]
    """The fields that name a kernel or function of the program, each with "kernel" or "function"."""
    checked_fields: ClassVar[tuple[tuple[str, tuple[type, ...], bool], ...]]
    """The fields with a checked content: name, accepted classes, and whether these are the classes of its items."""
    results_initialized: ClassVar[bool]
    """Whether the roots that the line defines are initialized."""
    alias_fields: ClassVar[tuple[tuple[str, str], ...]]
    """The result fields that alias an operand, each with the operand's field."""
    has_stream: ClassVar[bool]
    """Whether the line class declares a `stream`."""
    terminator: ClassVar[Terminator] = ""
    """Whether the line ends the program, or a nested block or function. It releases the values that it returns."""
    bracket: ClassVar[tuple[str, int]] = ("", 0)
    """The kind of bracket that the line opens (+1) or closes (-1). A pair nests in a block and has equal attributes."""
    is_async_start: ClassVar[bool] = False
    """Whether the results are in flight, and the operands borrowed, until a line with `is_async_wait`."""
    is_async_wait: ClassVar[bool] = False
    on_host: ClassVar[bool] = False
    """Whether the line uses only the sizes and addresses of tensors, not their content, and so needs no stream."""
    event_step: ClassVar[EventStep] = ""
    """Whether the line records an event or waits for one. Such a line has a `device` and a `stream` and never moves."""

    origin: Origin | None = field(default=None, compare=False, kw_only=True)

    @property
    def stream(self) -> int:
        """The stream that the line runs on; 0 is the current stream. A line class may declare it as a field."""
        return 0

    @property
    def dependent(self) -> bool:
        """Whether the line may start before the launch before it has ended. A line class may declare it as a field."""
        return False

    @property
    def device(self) -> str:
        """The device that the line names, or "" for none. A line class may declare it as a field."""
        return ""

    @property
    def zeroed(self) -> bool:
        """Whether the line fills the memory that it allocates with zeros. A line class may declare it as a field."""
        return False

    def effects(self) -> tuple[Effect, ...]:
        """Returns the effects of the line besides its reads and writes; () for a pure line."""
        return ()

    def alias_of(self, result: Value) -> Value | None:
        """Returns the operand that a result aliases, or None if the result is a new root."""
        for name, base_name in self.alias_fields:
            if getattr(self, name) is result:
                base = getattr(self, base_name)
                return base if isinstance(base, Value) else None
        return None

    def window(self) -> tuple[Value, Value, Size] | None:
        """Returns the result of a line that only retypes memory, its base, and its start in bytes in the base's memory.

        None for all other lines. The memory of a base is its pool slice, else its root.
        """
        return None

    def verify_self(self) -> str | None:
        """Returns the first error of the line in isolation, or None.

        Operands and attributes already have the classes that their fields declare. Raises ValueKindError for an operand
        that must be a tensor and is not.
        """
        return None

    def verify_kernel(self, signature: tuple[str, ...]) -> str | None:
        """Returns the first error of the line given the signature of the kernel that it names, or None."""
        return None

    def verify_function(self, function: FunctionSummary) -> str | None:
        """Returns the first error of the line given the function that it names, or None."""
        return None

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with some fields changed."""
        return dataclasses.replace(self, **changes)


LineT = TypeVar("LineT", bound=LineBase)


@dataclass(frozen=True, slots=True)
class Block:
    """A list of lines with arguments, ended by `control.return` (a program's body) or `control.yield`."""

    arguments: tuple[Value, ...]
    lines: tuple[LineBase, ...]


@dataclass(frozen=True, slots=True)
class FunctionSummary:
    """A verified function: its block, the free symbols it uses, and the names of the arguments it writes."""

    block: Block
    symbols: set[str]
    written: set[str]


def leaves(tree: Operand) -> Iterator[Leaf]:
    """Yields the items of a tree of nested tuples, from left to right."""
    if type(tree) is tuple:
        for item in tree:
            yield from leaves(item)
    else:
        yield tree


def values_in(tree: object) -> list[Value]:
    """Returns the values in a tree of nested tuples, from left to right, with repetitions."""
    if type(tree) is Value:
        return [tree]
    values: list[Value] = []
    for item in tree if type(tree) is tuple else ():
        if type(item) is Value:
            values.append(item)
        elif type(item) is tuple:
            values += values_in(item)
    return values


def _values_of(line: LineBase, role: Role) -> list[Value]:
    values: list[Value] = []
    for name in line.fields_by_role[role]:
        content = getattr(line, name)
        if type(content) is Value:
            values.append(content)
        elif type(content) is tuple:
            values += values_in(content)
    return values


def defined(line: LineBase) -> list[Value]:
    """Returns the values that the line defines, nested blocks excluded."""
    return _values_of(line, Role.DEFINE)


def reads(line: LineBase) -> list[Value]:
    """Returns the values whose memory the line reads, with repetitions."""
    return _values_of(line, Role.READ)


def writes(line: LineBase) -> list[Value]:
    """Returns the values whose memory the line writes."""
    return _values_of(line, Role.WRITE)


def consumed(line: LineBase) -> list[Value]:
    """Returns the roots that the line consumes."""
    return _values_of(line, Role.CONSUME)


def used(line: LineBase) -> list[Value]:
    """Returns every value that the line reads, writes or consumes, in this order."""
    return [*reads(line), *writes(line), *consumed(line)]


def defined_symbol(line: LineBase) -> SymbolInfo | None:
    """Returns the symbol that the line defines, if any."""
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
    """Returns the symbols in a type's sizes, strides and offset, with repetitions."""
    if not isinstance(type_, TensorType):
        return type_symbols(type_.element) if isinstance(type_, ListType | OptionalType) else []
    symbols: list[sympy.Symbol] = []
    for sizes in (type_.sizes, type_.strides, (type_.storage_offset,)):
        for size in sizes:
            if not isinstance(size, int):
                symbols.extend(_free_symbols(size))
    return symbols


@bounded_cache(65536)
def _free_symbols(expression: sympy.Basic) -> tuple[sympy.Symbol, ...]:
    """Returns the symbols of an expression sorted by name, so that the order is deterministic."""
    return tuple(sorted(expression.free_symbols, key=str))


_WITHOUT_SYMBOLS = frozenset([str, int, float, bool, type(None)])


def symbols_used(line: LineBase, *roles: Role) -> list[sympy.Symbol]:
    """Returns the symbols in the fields of these roles: in attributes and operands, and in the types of results."""
    symbols: list[sympy.Symbol] = []
    for role in roles:
        for name in line.fields_by_role[role]:
            content = getattr(line, name)
            for leaf in leaves(content) if type(content) is tuple else (content,):
                if type(leaf) is Value:
                    symbols.extend(type_symbols(leaf.type) if role is Role.DEFINE else ())
                elif type(leaf) in _WITHOUT_SYMBOLS:
                    continue
                elif isinstance(leaf, TensorType):
                    symbols.extend(type_symbols(leaf))
                elif isinstance(leaf, sympy.Basic):
                    symbols.extend(_free_symbols(leaf))
    return symbols


def field_type_error(line: LineBase) -> str | None:
    """Returns an error for the first field whose content has a wrong class, or None."""
    for name, kinds, per_item in line.checked_fields:
        content = getattr(line, name)
        if per_item and type(content) is not tuple:
            items, kinds = (content,), (tuple,)
        else:
            items = content if per_item else (content,)
        for item in items:
            if not isinstance(item, kinds):
                accepted = " or ".join([kind.__name__ for kind in kinds])
                return f"'{name}' of {line.opcode} takes {accepted}, not {type(item).__name__}"
    return None


def map_leaves(tree: object, change: Callable[[Any], object]) -> Any:
    """Returns the tree with each leaf changed, or the tree itself if no leaf changes."""
    if type(tree) is not tuple:
        return change(tree)
    changed = tuple([map_leaves(item, change) for item in tree])
    return tree if all(a is b for a, b in zip(tree, changed)) else changed


def map_line(line: LineT, change: Callable[[Any], object], roles: Iterable[Role] = tuple(Role)) -> LineT:
    """Returns the line with each leaf of the fields of these roles changed: values, literals, types, blocks."""
    changes = {}
    for role in roles:
        for name in line.fields_by_role[role]:
            before = getattr(line, name)
            after = map_leaves(before, change)
            if after is not before:
                changes[name] = after
    return dataclasses.replace(line, **changes) if changes else line
