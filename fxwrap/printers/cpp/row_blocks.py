"""Short rows in blocks of one long row, so that loops have whole vectors.

Values that each row repeats, as a bias, are in tables. Rows with gaps between them are moved to a block before the loop
that reads them, and from a block after the loop that writes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from typing_extensions import TypeIs

from fxwrap.loop_ir import (
    HALF_PRECISION,
    Atom,
    Axis,
    DeviceAssert,
    Index,
    IndexLike,
    IndirectIndex,
    Kernel,
    Load,
    Operation,
    Store,
    as_index,
    can_merge_axes,
    indices,
    operands,
    operation_dtype,
    replace_axes,
    replace_indices,
)
from fxwrap.printers.cpp.loop_plan import MAX_OVERLAPPING, MIN_OVERLAPPING, VECTOR_LANES, LoopPlan
from fxwrap.printers.cpp.loops import PointwisePrinter, loop_head
from fxwrap.printers.cpp.operations import CPP_TYPES
from fxwrap.printers.cpp.statements import CppSourceWriter, EmittedValues

MIN_BLOCK = 256
"""The least number of elements of a block of many rows."""

MIN_BLOCKS = 8
"""The least number of blocks that read a table, for the sake of which it is written."""

MAX_MOVED = 16
"""The most accesses to rows with gaps for which moving their elements takes less time than loops over short rows."""


@dataclass(frozen=True)
class MovedRows:
    """Rows with gaps that an operation accesses: their buffer, a block's first element in it, and their distance."""

    buffer: str
    first: Index
    stride: Index


@dataclass(frozen=True)
class RowBlocks:
    """A kernel whose last axis, the vectorised one, goes through a block of rows, and the one before it through blocks.

    Fields:
        plan: its plan.
        length: the number of elements of a row.
        elements: that of all rows: the last block may have fewer rows.
        repeated: the positions of values that each row repeats.
        moved: the rows with gaps by the position of the operation that accesses them, which accesses a block instead.
    """

    plan: LoopPlan
    length: int
    elements: int
    repeated: tuple[int, ...]
    moved: Mapping[int, MovedRows]

    @property
    def block(self) -> int:
        """The number of elements of a block."""
        size = self.plan.kernel.axes[-1].size
        assert isinstance(size, int)
        return size


def plan_row_blocks(kernel: Kernel) -> RowBlocks | None:
    """Returns the plan of a pointwise kernel of short rows of an uneven length; None for others."""
    if len(kernel.axes) < 2 or kernel.reduced:
        return None
    *outer, row, element = kernel.axes
    length = element.size
    if not isinstance(row.size, int) or not isinstance(length, int):
        return None
    if not 1 < length < MAX_OVERLAPPING or length % VECTOR_LANES == 0 or row.size < 2:
        return None
    if not all(_is_movable(item, row, element) for item in kernel.operations):
        return None
    if any(element not in axes and row in axes for axes in kernel.value_axes):
        return None
    repeated = _repeated_values(kernel, row, element)
    gaps = {position: item for position, item in enumerate(kernel.operations) if _has_gaps(item, row, element)}
    elements = row.size * length
    whole = math.lcm(length, VECTOR_LANES)
    block = min(whole * -(-MIN_BLOCK // whole), elements)
    is_number = all(operation_dtype(kernel.operations[position]) is not torch.bool for position in repeated)
    if repeated and (outer or not is_number or elements < MIN_BLOCKS * block):
        return None
    if not (repeated or gaps) or (gaps and not _are_worth_moving(kernel, len(gaps), length)):
        return None
    number, lane = Axis(row.name, -(-elements // block)), Axis(element.name, block)
    at: dict[Atom, IndexLike] = {
        row: as_index(number) * (block // length) + as_index(lane) // length,
        element: as_index(lane) % length,
    }
    first: dict[Atom, IndexLike] = {row: as_index(number) * (block // length), element: 0}
    moved = {}
    flat = replace_axes(kernel, [*outer, number, lane], (), at)
    operations = list(flat.operations)
    for position, item in gaps.items():
        stride = item.index.stride(row)
        assert stride is not None
        moved[position] = MovedRows(item.buffer, item.index.substitute(first), stride)
        operations[position] = replace(item, buffer=f"{item.buffer}_{position}_rows", index=as_index(lane))
    plan = LoopPlan(replace(flat, operations=tuple(operations)), lane)
    return RowBlocks(plan, length, elements, repeated, moved)


def _are_worth_moving(kernel: Kernel, accesses: int, length: int) -> bool:
    """Whether rows with gaps are moved: loops over them have no blocks of vectors that overlap."""
    dtypes = {buffer.dtype for buffer in (*kernel.inputs, *kernel.outputs)}
    is_short = length < MIN_OVERLAPPING or (dtypes & HALF_PRECISION and length < VECTOR_LANES)
    return bool(is_short) and accesses <= MAX_MOVED


def _repeated_values(kernel: Kernel, row: Axis, element: Axis) -> tuple[int, ...]:
    """Returns the values that each row repeats, of those that an operation on others reads."""
    repeated = [element in axes and row not in axes for axes in kernel.value_axes]
    return tuple(
        sorted({
            operand
            for position, item in enumerate(kernel.operations)
            if not repeated[position]
            for operand in operands(item)
            if repeated[operand]
        })
    )  # fmt: skip


def _has_gaps(item: Operation, row: Axis, element: Axis) -> TypeIs[Load | Store]:
    """Whether an operation accesses contiguous rows that are not next to each other."""
    if not isinstance(item, Load | Store) or row not in item.index.axes() or can_merge_axes(item.index, row, element):
        return False
    along, across = item.index.stride(element), item.index.stride(row)
    if along is None or along.constant != 1 or across is None or across.constant is None:
        return False
    return isinstance(item, Load) or (isinstance(element.size, int) and across.constant >= element.size)


def _is_movable(item: Operation, row: Axis, element: Axis) -> bool:
    """Whether the elements that an operation accesses are those of contiguous rows, or the same in each row."""
    if isinstance(item, DeviceAssert) or (isinstance(item, Store) and (item.mode != "set" or item.mask is not None)):
        return False
    if isinstance(item, Load) and item.mask is not None:
        return False
    for index in indices(item):
        if any(isinstance(atom, IndirectIndex) for atom in index.atoms()):
            return False
        is_repeated = row not in index.axes() and not isinstance(item, Store)
        if not is_repeated and not can_merge_axes(index, row, element) and not _has_gaps(item, row, element):
            return False
    return True


class RowBlockPrinter(PointwisePrinter):
    """A kernel whose iterations read repeated values from tables, and rows with gaps from blocks."""

    def __init__(self, rows: RowBlocks, writer: CppSourceWriter, origin_comments: bool) -> None:
        super().__init__(rows.plan, writer, origin_comments)
        self.rows = rows

    def print(self) -> None:
        """Writes the tables, then the loops over blocks."""
        (*outer, number, lane), block = self.kernel.axes, self.rows.block
        tables = {position: f"{self.statements.name(position)}_table" for position in self.rows.repeated}
        for position, table in tables.items():
            self.writer.line(f"{self.statements.type(position)} {table}[{block}];")
        if tables:
            self.write_tables(tables)
        known = {position: f"{table}[{lane.name}]" for position, table in tables.items()}
        with self.writer.nest([loop_head(axis) for axis in (*outer, number)], self.parallel()):
            count = str(block)
            if self.rows.elements % block:
                count = "count"
                rest = f"{self.rows.elements} - {number.name} * {block}"
                self.writer.line(f"const int64_t count = fxwrap::min<int64_t>({block}, {rest});")
            moved = {position: self.kernel.operations[position] for position in self.rows.moved}
            for position, item in moved.items():
                self.write_block(position, item, count)
            self.hoist(known)
            self.write_store_loop(self.kernel.stores, known, "0", count)
            for position, item in moved.items():
                if isinstance(item, Store):
                    rows, stride = self.rows_of(position)
                    arguments = f"{item.buffer}, {count} / {self.rows.length}, {rows}, {stride}"
                    self.writer.line(f"store_rows<{self.rows.length}>({arguments});")

    def write_block(self, position: int, item: Operation, count: str) -> None:
        """Declares the block of an access to rows with gaps, and moves rows that are loaded."""
        assert isinstance(item, Load | Store)
        dtype = item.dtype if isinstance(item, Load) else self.statements.dtype(item.value)
        self.writer.line(f"alignas(64) {CPP_TYPES[dtype]} {item.buffer}[{self.rows.block}];")
        if isinstance(item, Load):
            rows, stride = self.rows_of(position)
            arguments = f"{rows}, {stride}, {count} / {self.rows.length}, {item.buffer}"
            self.writer.line(f"load_rows<{self.rows.length}>({arguments});{self.statements.comment(item)}")

    def rows_of(self, position: int) -> tuple[str, str]:
        """Returns the texts of the address of a block's first row in memory, and of the distance of rows."""
        rows, index = self.rows.moved[position], self.statements.index({})
        return f"{rows.buffer} + {index(rows.first)}", index(rows.stride)

    def write_tables(self, tables: Mapping[int, str]) -> None:
        """Writes the first row of tables, and its copies."""
        lane, length = self.kernel.axes[-1], self.rows.length
        element = Axis(lane.name, length)
        first: dict[Atom, IndexLike] = {lane: as_index(element)}
        self.statements.kernel = replace_indices(self.kernel, lambda index: index.substitute(first))
        with self.writer.nest([loop_head(element)], "#pragma omp simd"):
            values: EmittedValues = {}
            self.statements.write(tables, values)
            for position, table in tables.items():
                self.writer.line(f"{table}[{lane.name}] = {values[position]};")
        self.statements.kernel = self.kernel
        copies = [f"for (int64_t start = {length}; start < {self.rows.block}; start += {length})", loop_head(element)]
        with self.writer.nest(copies):
            for table in tables.values():
                self.writer.line(f"{table}[start + {lane.name}] = {table}[{lane.name}];")
