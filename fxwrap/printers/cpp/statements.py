"""Statements of a loop's body: operations as C++ constants, cheap ones inlined into their single use."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch
from typing_extensions import assert_never

from fxwrap.loop_ir import (
    STORAGE_ONLY,
    Axis,
    Compute,
    Constant,
    DeviceAssert,
    IndexValue,
    IndirectIndex,
    Kernel,
    Load,
    Operation,
    Reduce,
    ReductionResult,
    Scan,
    Store,
    SymbolicScalar,
    as_index,
    indices,
    operands,
    operation_dtype,
)
from fxwrap.printers.cpp.operations import (
    CPP_TYPES,
    INLINABLE,
    CppIndexPrinter,
    expression,
    literal,
    parenthesize,
    print_size,
)
from fxwrap.symbolic import Size

_INLINE_WIDTH = 72
_COMBINE = {"add": "sum", "max": "max", "min": "min", "prod": "prod"}
_COMBINE_BOOLS = {"add": "any", "max": "any", "min": "all", "prod": "all"}


@dataclass
class CppSourceWriter:
    """Lines of text at a depth of indentation."""

    lines: list[str] = field(default_factory=list)
    depth: int = 1

    def line(self, text: str) -> None:
        """Adds a line."""
        self.lines.append("  " * self.depth + text)

    @contextmanager
    def block(self, head: str, end: str = "}") -> Iterator[None]:
        """Opens a block below `head {`."""
        self.line(f"{head} {{" if head else "{")
        self.depth += 1
        yield
        self.depth -= 1
        self.line(end)

    @contextmanager
    def nest(self, heads: Sequence[str], pragma: str = "") -> Iterator[None]:
        """Opens perfectly nested loops, below a pragma that collapses them."""
        if not heads:
            yield
            return
        if pragma:
            clause = f" collapse({len(heads)})" if len(heads) > 1 else ""
            self.line(pragma.replace(" COLLAPSE", clause))
        for head in heads[:-1]:
            self.line(head)
            self.depth += 1
        with self.block(heads[-1]):
            yield
        self.depth -= len(heads) - 1


EmittedValues = dict[int, str]
"""The text of operations' values in the current scope, by position."""


@dataclass
class StatementPrinter:
    """Writes operations of one kernel as statements."""

    kernel: Kernel
    writer: CppSourceWriter
    origin_comments: bool
    scan: Callable[[int, EmittedValues], str] | None = None
    """Writes a scan's step and returns the text of its result, in a loop along the scanned axis."""
    gather_loads: frozenset[int] = frozenset()
    """Loads of elements of one or two bytes that lanes have in different places."""
    lane: Axis | None = None
    """The axis of the vectorised loop, where rows along it may be masked."""

    @cached_property
    def _input_extents(self) -> dict[str, Size]:
        """The extents of buffers that the kernel only reads."""
        return {buffer.name: buffer.extent for buffer in self.kernel.inputs}

    def write(self, targets: Iterable[int], known: EmittedValues, named: Iterable[int] = ()) -> None:
        """Writes statements for the targets and adds their texts to `known`; those in `named` become constants."""
        targets = list(targets)
        positions = sorted(self.kernel.backward_slice(targets, known))
        uses = Counter([used for position in positions for used in operands(self.kernel.operations[position])])
        uses.update([*targets, *named, *named])
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

    def declare(self, position: int, text: str, kind: str = "") -> str:
        """Writes a constant for an operation's value, of that value's C++ type by default, and returns its name."""
        operation = self.kernel.operations[position]
        name = self.name(position)
        self.writer.line(f"const {kind or self.type(position)} {name} = {text};{self.comment(operation)}")
        return name

    def expression(self, position: int, known: EmittedValues) -> str:
        """Returns an operation's C++ expression over known values."""
        operation = self.kernel.operations[position]
        match operation:
            case Load():
                index = self.index(known)(operation.index)
                is_gather = position in self.gather_loads and not self._is_adjacent(operation)
                plain = self.element(f"{operation.buffer}[{index}]", operation.dtype)
                text = f"gather({operation.buffer}, {index})" if is_gather else plain
                if operation.mask is None:
                    return text
                condition, other = known[operation.mask], literal(operation.other, operation.dtype)
                if self._has_row_mask(operation):
                    return f"op::where({condition}, {self._row_element(operation, condition, known)}, {other})"
                return f"{parenthesize(condition)} ? {text} : {other}"
            case Constant():
                return literal(operation.value, operation.dtype)
            case SymbolicScalar():
                return f"{CPP_TYPES[operation.dtype]}({print_size(operation.expression)})"
            case IndexValue():
                return f"int64_t({self.index(known)(operation.index)})"
            case Compute():
                used = [known[operand] for operand in operation.operands]
                return expression(operation, used, self.dtype(operation.operands[-1]))
            case ReductionResult():
                return f"{known[operation.operation]}.{('value', 'position')[operation.position]}"
            case Reduce() | Scan() | Store() | DeviceAssert():
                raise AssertionError("loops write reductions, scans, stores and assertions")
            case _:
                assert_never(operation)

    def element(self, text: str, dtype: torch.dtype) -> str:
        """Returns the value of an element of memory."""
        return f"load_bool({text})" if dtype is torch.bool else text

    def store(self, store: Store, known: EmittedValues) -> None:
        """Writes a store of a known value."""
        element = f"{store.buffer}[{self.index(known)(store.index)}]"
        value = known[store.value]
        text = f"{element} = {value};"
        if store.mode != "set":
            text = f"update({element}, {value}, combine::{self.store_reduction(store)});"
        condition = "" if store.mask is None else f"if ({known[store.mask]}) "
        self.writer.line(f"{condition}{text}{self.comment(store)}")

    def write_device_assert(self, operation: DeviceAssert, bit: int, known: EmittedValues) -> None:
        """Writes the check of an assertion, which sets its bit in `failed`."""
        condition = f"!{parenthesize(known[operation.condition])}"
        if operation.mask is not None:
            condition = f"{parenthesize(known[operation.mask])} & {condition}"
        self.writer.line(f"failed |= {parenthesize(condition)} ? {1 << bit} : 0;{self.comment(operation)}")

    def store_reduction(self, store: Store) -> str:
        """Returns the combining function of a store's mode."""
        return (_COMBINE_BOOLS if self.dtype(store.value) is torch.bool else _COMBINE)[store.mode]

    def index(self, known: EmittedValues) -> CppIndexPrinter:
        """Returns the printer of indices over known values."""

        def value(position: int) -> str:
            text = known[position] if self.dtype(position) is torch.int64 else f"int64_t({known[position]})"
            return f"{parenthesize(text)} ^ zero" if self._derives_from_bool(position) else text

        return CppIndexPrinter(value)

    def has_indices_from_bools(self) -> bool:
        """Returns whether indices refer to `zero`, which the kernel then has to declare."""
        atoms = [atom for item in self.kernel.operations for index in indices(item) for atom in index.atoms()]
        return any(isinstance(atom, IndirectIndex) and self._derives_from_bool(atom.operation) for atom in atoms)

    def _derives_from_bool(self, position: int) -> bool:
        """Returns whether the compiler may simplify a value to an integer conversion of a condition.

        Conditions that limit one of the selected values (`where(i < 0, i + n, i)`) leave its origin as it is.
        """
        stack, visited = [position], set[int]()
        while stack:
            at = stack.pop()
            if at in visited:
                continue
            visited.add(at)
            operation = self.kernel.operations[at]
            if self.dtype(at) is torch.bool:
                return True
            match operation:
                case Load():
                    continue
                case Compute("where", (condition, *values)) if {*values} & self.kernel.backward_slice([condition]):
                    stack.extend(values)
                case _:
                    stack.extend(operands(operation))
        return False

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
        return operation_dtype(self.kernel.operations[position])

    def type(self, position: int) -> str:
        """Returns the C++ type of an operation's value."""
        return CPP_TYPES[self.dtype(position)]

    def comment(self, operation: Operation) -> str:
        """Returns the origin of an operation as a comment; "" if it has none."""
        origin = re.sub(r"\s+", " ", operation.origin).replace("\\", "/")
        return f"  // {origin}" if self.origin_comments and origin else ""

    def _has_row_mask(self, load: Load) -> bool:
        """Whether a mask belongs to a whole row along the lanes, and the buffer's first elements can stand in for it.

        Compilers do not vectorise a load under a condition, and do one whose row a condition selects.
        """
        if self.lane is None or load.mask is None or load.dtype is torch.bool:
            return False
        stride, extent = load.index.stride(self.lane), self._input_extents.get(load.buffer)
        if stride is None or not isinstance(extent, int) or not isinstance(self.lane.size, int):
            return False
        step = stride.constant
        if step is None or not 0 <= step * (self.lane.size - 1) < extent:
            return False
        used = [self.kernel.operations[at] for at in self.kernel.backward_slice([load.mask])]
        return not any(self.lane in index.axes() for item in used for index in indices(item))

    def _is_adjacent(self, load: Load) -> bool:
        """Whether lanes load adjacent elements, as in a segment of the lane's axis where an index is linear."""
        lane, atoms = self.lane, load.index.atoms()
        if lane is None or any(
            isinstance(item, IndirectIndex) and lane in self.kernel.value_axes[item.operation] for item in atoms
        ):
            return False
        stride = load.index.stride(lane)
        return stride is not None and stride.constant in (-1, 0, 1)

    def _row_element(self, load: Load, condition: str, known: EmittedValues) -> str:
        """Returns the element of a load, or of the buffer's first row where a condition is false."""
        assert self.lane is not None
        along = as_index(self.lane) * (load.index.stride(self.lane) or 0)
        index = self.index(known)
        return f"{load.buffer}[op::where<int64_t>({condition}, {index(load.index - along)}, 0) + {index(along)}]"

    def _cheap(self, operation: Operation) -> bool:
        match operation:
            case Load():
                return operation.mask is None
            case Compute(name):
                return name in INLINABLE
            case _:
                return isinstance(operation, IndexValue | SymbolicScalar | ReductionResult)
