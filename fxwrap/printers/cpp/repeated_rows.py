"""Short rows that are one long row but for values that each row repeats, as a bias, in loops over whole vectors."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fxwrap.loop_ir import (
    Atom,
    Axis,
    DeviceAssert,
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
from fxwrap.printers.cpp.loop_plan import MAX_OVERLAPPING, VECTOR_LANES, LoopPlan
from fxwrap.printers.cpp.loops import PointwisePrinter, loop_head
from fxwrap.printers.cpp.statements import CppSourceWriter

MIN_BLOCK = 256
"""The least number of elements of the rows that a table has."""

MIN_BLOCKS = 8
"""The least number of blocks that read a table, for the sake of which it is written."""


@dataclass(frozen=True)
class RepeatedRows:
    """A kernel of one long row, the length of its short rows, and the values that these repeat, by position."""

    plan: LoopPlan
    length: int
    values: tuple[int, ...]

    @property
    def block(self) -> int:
        """The number of elements of as many rows as fill whole vectors."""
        whole = math.lcm(self.length, VECTOR_LANES)
        return whole * -(-MIN_BLOCK // whole)


def plan_repeated_rows(kernel: Kernel) -> RepeatedRows | None:
    """Returns the plan of a pointwise kernel of short rows of an uneven length; None for others."""
    if len(kernel.axes) != 2 or kernel.reduced:
        return None
    row, element = kernel.axes
    if not isinstance(row.size, int) or not isinstance(element.size, int):
        return None
    if not 1 < element.size < MAX_OVERLAPPING or element.size % VECTOR_LANES == 0:
        return None
    if not all(_is_movable(item, row, element) for item in kernel.operations):
        return None
    repeated = [axes == {element} for axes in kernel.value_axes]
    if any(axes == {row} for axes in kernel.value_axes):
        return None
    used = {
        operand
        for position, item in enumerate(kernel.operations)
        if not repeated[position]
        for operand in operands(item)
        if repeated[operand]
    }
    flat = Axis(row.name, row.size * element.size)
    whole = as_index(flat)
    mapping: dict[Atom, IndexLike] = {row: whole // element.size, element: whole % element.size}
    rows = RepeatedRows(LoopPlan(replace_axes(kernel, [flat], (), mapping), flat), element.size, tuple(sorted(used)))
    is_number = all(operation_dtype(kernel.operations[position]) is not torch.bool for position in used)
    return rows if used and is_number and row.size * element.size >= MIN_BLOCKS * rows.block else None


def _is_movable(item: Operation, row: Axis, element: Axis) -> bool:
    """Whether the elements that an operation accesses are those of one long row, or the same in each row."""
    if isinstance(item, DeviceAssert) or (isinstance(item, Store) and (item.mode != "set" or item.mask is not None)):
        return False
    if isinstance(item, Load) and item.mask is not None:
        return False
    for index in indices(item):
        if any(isinstance(atom, IndirectIndex) for atom in index.atoms()):
            return False
        is_repeated = row not in index.axes() and not isinstance(item, Store)
        if not is_repeated and not can_merge_axes(index, row, element):
            return False
    return True


class RepeatedRowPrinter(PointwisePrinter):
    """A kernel whose iterations read the repeated values from tables of several rows."""

    def __init__(self, rows: RepeatedRows, writer: CppSourceWriter, origin_comments: bool) -> None:
        super().__init__(rows.plan, writer, origin_comments)
        self.rows = rows

    def print(self) -> None:
        """Writes the tables, then the loops over blocks of as many elements."""
        lane, block = self.vector_axis, self.rows.block
        tables = {position: f"{self.statements.name(position)}_table" for position in self.rows.values}
        for position, table in tables.items():
            self.writer.line(f"{self.statements.type(position)} {table}[{block}];")
        self.write_rows(tables)
        known = {position: f"{table}[{lane.name} - start]" for position, table in tables.items()}
        self.hoist(known)
        with self.writer.nest([f"for (int64_t start = 0; start < {lane.size}; start += {block})"], self.parallel()):
            self.writer.line(f"const int64_t end = fxwrap::min<int64_t>(start + {block}, {lane.size});")
            self.write_store_loop(self.kernel.stores, known, "start", "end")

    def write_rows(self, tables: dict[int, str]) -> None:
        """Writes the first row of tables, and its copies."""
        lane, length = self.vector_axis, self.rows.length
        element = Axis(lane.name, length)
        first: dict[Atom, IndexLike] = {lane: as_index(element)}
        self.statements.kernel = replace_indices(self.kernel, lambda index: index.substitute(first))
        with self.writer.nest([loop_head(element)], "#pragma omp simd"):
            values: dict[int, str] = {}
            self.statements.write(tables, values)
            for position, table in tables.items():
                self.writer.line(f"{table}[{lane.name}] = {values[position]};")
        self.statements.kernel = self.kernel
        copies = [f"for (int64_t start = {length}; start < {self.rows.block}; start += {length})", loop_head(element)]
        with self.writer.nest(copies):
            for table in tables.values():
                self.writer.line(f"{table}[start + {lane.name}] = {table}[{lane.name}];")
