"""Statements: the operations of a loop's body as C++ constants, with cheap ones written inside those that use them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from typing_extensions import assert_never

from fxwrap.loop_ir import (
    STORAGE_ONLY,
    Compute,
    Constant,
    IndexValue,
    Kernel,
    Load,
    Operation,
    Part,
    Reduce,
    Require,
    Scan,
    SizeValue,
    Store,
    operands,
)
from fxwrap.printers.cpp.index_text import IndexText, grouped, size_text
from fxwrap.printers.cpp.operations import CHEAP, expression
from fxwrap.printers.cpp.types import CPP_TYPES, literal

_INLINE_WIDTH = 72
_COMBINE = {"add": "sum", "max": "max", "min": "min", "prod": "prod"}
_COMBINE_BOOLS = {"add": "any", "max": "any", "min": "all", "prod": "all"}


@dataclass
class Writer:
    """Lines of text at a depth of indentation."""

    lines: list[str] = field(default_factory=list)
    depth: int = 1

    def line(self, text: str) -> None:
        """Adds a line; a pragma is indented as the code is."""
        self.lines.append("  " * self.depth + text)

    @contextmanager
    def block(self, head: str, end: str = "}") -> Iterator[None]:
        """Indents what is written inside, below `head {`."""
        self.line(f"{head} {{" if head else "{")
        self.depth += 1
        yield
        self.depth -= 1
        self.line(end)


Known = dict[int, str]
"""The text that stands for an operation's value where statements are being written."""


@dataclass
class Statements:
    """Writes operations of one kernel as statements."""

    kernel: Kernel
    writer: Writer
    origins: bool
    scan: Callable[[int, Known], str] | None = None
    """Writes a scan's step, and returns the text of its result; for loops that go along the scanned axis."""
    gathered: frozenset[int] = frozenset()
    """Loads of half-precision elements whose places differ from lane to lane."""

    def operands_of(self, position: int) -> tuple[int, ...]:
        """Returns the positions that an operation uses."""
        return operands(self.kernel.operations[position])

    def needed(self, targets: Iterable[int], known: Known) -> list[int]:
        """Returns the positions to compute for the targets, in order, down to what is known."""
        found: set[int] = set()
        stack = list(targets)
        while stack:
            position = stack.pop()
            if position not in found and position not in known:
                found.add(position)
                stack.extend(operands(self.kernel.operations[position]))
        return sorted(found)

    def write(self, targets: Iterable[int], known: Known, keep: Iterable[int] = ()) -> None:
        """Writes statements for the targets and adds their texts to `known`; those in `keep` get a name."""
        targets = list(targets)
        positions = self.needed(targets, known)
        uses: dict[int, int] = {}
        for position in positions:
            for operand in operands(self.kernel.operations[position]):
                uses[operand] = uses.get(operand, 0) + 1
        for target in targets:
            uses[target] = uses.get(target, 0) + 1
        for target in keep:
            uses[target] = uses.get(target, 0) + 2
        for position in positions:
            operation = self.kernel.operations[position]
            if isinstance(operation, Scan) and self.scan is not None:
                known[position] = self.scan(position, known)
                continue
            text = self.expression(position, known)
            inlined = isinstance(operation, Constant) or (
                uses[position] == 1
                and self._cheap(operation)
                and (len(text) <= _INLINE_WIDTH or self.dtype(position) in STORAGE_ONLY)
            )
            known[position] = text if inlined else self.declare(position, text)

    def declare(self, position: int, text: str) -> str:
        """Writes a constant for an operation's value and returns its name."""
        operation = self.kernel.operations[position]
        name = self.name(position)
        self.writer.line(f"const {self.type(position)} {name} = {text};{self.comment(operation)}")
        return name

    def expression(self, position: int, known: Known) -> str:
        """Returns an operation's C++ expression over known values."""
        operation = self.kernel.operations[position]
        match operation:
            case Load():
                place = self.index(known)(operation.index)
                gathered = position in self.gathered
                text = f"gathered({operation.buffer}, {place})" if gathered else f"{operation.buffer}[{place}]"
                if operation.dtype is torch.bool:
                    text = f"is_true({text})"
                if operation.mask is None:
                    return text
                return f"{grouped(known[operation.mask])} ? {text} : {literal(operation.other, operation.dtype)}"
            case Constant():
                return literal(operation.value, operation.dtype)
            case SizeValue():
                return f"{CPP_TYPES[operation.dtype]}({size_text(operation.expression)})"
            case IndexValue():
                return f"int64_t({self.index(known)(operation.index)})"
            case Compute():
                used = [known[operand] for operand in operation.operands]
                return expression(operation, used, self.dtype(operation.operands[-1]))
            case Part():
                return f"{known[operation.operation]}.{('value', 'position')[operation.position]}"
            case Reduce() | Scan() | Store() | Require():
                raise AssertionError("loops write reductions, scans, stores and requirements")
            case _:
                assert_never(operation)

    def store(self, store: Store, known: Known) -> None:
        """Writes a store of a known value."""
        element = f"{store.buffer}[{self.index(known)(store.index)}]"
        value = known[store.value]
        text = f"{element} = {value};"
        if store.mode != "set":
            text = f"update({element}, {value}, combine::{self.store_combine(store)});"
        condition = "" if store.mask is None else f"if ({known[store.mask]}) "
        self.writer.line(f"{condition}{text}{self.comment(store)}")

    def require(self, requirement: Require, bit: int, known: Known) -> None:
        """Writes a check of a known condition, which sets its bit in `failed`."""
        condition = f"!{grouped(known[requirement.condition])}"
        if requirement.mask is not None:
            condition = f"{grouped(known[requirement.mask])} & {condition}"
        self.writer.line(f"failed |= {grouped(condition)} ? {1 << bit} : 0;{self.comment(requirement)}")

    def store_combine(self, store: Store) -> str:
        """Returns what a store's mode is called among the ways to combine."""
        return (_COMBINE_BOOLS if self.dtype(store.value) is torch.bool else _COMBINE)[store.mode]

    def index(self, known: Known) -> IndexText:
        """Returns the printer of indices over known values."""

        def value(position: int) -> str:
            return known[position] if self.dtype(position) is torch.int64 else f"int64_t({known[position]})"

        return IndexText(value)

    def name(self, position: int) -> str:
        """Returns the name of an operation's value."""
        operation = self.kernel.operations[position]
        match operation:
            case Compute(name):
                return f"{name}_{position}"
            case Load(buffer):
                return f"{buffer}_{position}"
            case Reduce(kind) | Scan(kind):
                return f"{kind}_{position}"
            case _:
                return f"{type(operation).__name__.lower()}_{position}"

    def dtype(self, position: int) -> torch.dtype:
        """Returns the dtype of an operation's value."""
        operation = self.kernel.operations[position]
        assert not isinstance(operation, Store | Require)
        return operation.dtype

    def type(self, position: int) -> str:
        """Returns the C++ type of an operation's value."""
        return CPP_TYPES[self.dtype(position)]

    def comment(self, operation: Operation) -> str:
        """Returns the origin of an operation as a comment, or nothing."""
        origin = re.sub(r"\s+", " ", operation.origin).replace("\\", "/")
        return f"  // {origin}" if self.origins and origin else ""

    def _cheap(self, operation: Operation) -> bool:
        match operation:
            case Load():
                return operation.mask is None
            case Compute(name):
                return name in CHEAP
            case _:
                return isinstance(operation, IndexValue | SizeValue | Part)
