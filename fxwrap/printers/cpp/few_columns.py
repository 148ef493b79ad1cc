"""Reductions of a few columns, as the mean of each of ten features: lanes are the elements of several rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fxwrap.loop_ir import (
    Atom,
    Axis,
    DeviceAssert,
    Index,
    IndexLike,
    IndexValue,
    IndirectIndex,
    Kernel,
    Load,
    Reduce,
    Scan,
    Store,
    as_index,
    indices,
    replace_axes,
    replace_indices,
)
from fxwrap.printers.cpp.columns import ColumnPrinter
from fxwrap.printers.cpp.loop_plan import COLUMN_BLOCK, VECTOR_LANES, LoopPlan
from fxwrap.printers.cpp.statements import CppSourceWriter, EmittedValues

MAX_FEW_COLUMNS = 32
"""Largest number of columns whose rows are too short for vectors."""

MAX_BLOCK = 256
"""The most elements of a block of rows, where fewer do not fill whole vectors."""

MIN_STEPS = 8
"""The least number of blocks of rows: their columns are combined once at the end."""

_KINDS = frozenset({"sum", "prod", "max", "min", "any", "all"})


@dataclass(frozen=True)
class FewColumns:
    """A kernel that reduces blocks of rows, with a result for each of their elements.

    Fields:
        plan: its plan. The vectorised axis goes through the elements of a block of rows.
        columns: the number of elements of a row.
        rest: the number of rows after whole blocks, which are the block behind the end of the reduced axis.
    """

    plan: LoopPlan
    columns: int
    rest: int


def plan_few_columns(kernel: Kernel) -> FewColumns | None:
    """Returns the plan of a kernel that reduces a few columns of contiguous rows; None for others."""
    if len(kernel.reduced) != 1 or kernel.combines_values:
        return None
    (row,) = kernel.reduced
    for column in kernel.axes:
        if not isinstance(column.size, int) or not isinstance(row.size, int):
            continue
        if not 1 < column.size <= MAX_FEW_COLUMNS or column.size % VECTOR_LANES == 0:
            continue
        rows = _rows_of_block(kernel, column.size)
        is_long = row.size >= MIN_STEPS * rows
        if is_long and all(_is_movable(kernel, item, row, column) for item in range(len(kernel.operations))):
            return _merge(kernel, row, column, rows)
    return None


def _merge(kernel: Kernel, row: Axis, column: Axis, rows: int) -> FewColumns:
    assert isinstance(row.size, int) and isinstance(column.size, int)
    block, step = Axis(column.name, rows * column.size), Axis(row.name, row.size // rows)
    at: dict[Atom, IndexLike] = {
        row: as_index(step) * rows + as_index(block) // column.size,
        column: as_index(block) % column.size,
    }
    axes = [block if axis == column else axis for axis in kernel.axes]
    return FewColumns(LoopPlan(replace_axes(kernel, axes, [step], at), block), column.size, row.size % rows)


def _is_movable(kernel: Kernel, position: int, row: Axis, column: Axis) -> bool:
    """Whether an operation accesses contiguous rows, or the same elements in all rows."""
    item = kernel.operations[position]
    if isinstance(item, Scan | DeviceAssert) or (isinstance(item, Reduce) and item.kind not in _KINDS):
        return False
    if isinstance(item, Load | Store) and item.mask is not None:
        return False
    if isinstance(item, Store) and kernel.varying[position] and row not in item.index.axes():
        return False
    for index in indices(item):
        if any(isinstance(atom, IndirectIndex) for atom in index.atoms()):
            return False
        is_repeated = row not in index.axes() and not isinstance(item, IndexValue)
        if not is_repeated and (_stride(index, row), _stride(index, column)) != (column.size, 1):
            return False
    return True


def _stride(index: Index, axis: Axis) -> int | None:
    stride = index.stride(axis)
    return None if stride is None else stride.constant


def _rows_of_block(kernel: Kernel, columns: int) -> int:
    """Returns the number of rows of a block, which fills whole vectors where rows of so many columns can."""
    widest = max([buffer.dtype.itemsize for buffer in (*kernel.inputs, *kernel.outputs)])
    unit = math.lcm(columns, VECTOR_LANES * 4 // max(widest, 4))
    most = COLUMN_BLOCK if unit <= COLUMN_BLOCK or unit > MAX_BLOCK else MAX_BLOCK
    return (most // unit * unit or most) // columns


class FewColumnPrinter(ColumnPrinter):
    """A kernel whose lanes are the elements of blocks of rows. Those of a column are combined after each pass."""

    def __init__(self, few: FewColumns, writer: CppSourceWriter, origin_comments: bool) -> None:
        super().__init__(few.plan, writer, origin_comments)
        self.few = few

    def choose_block(self) -> int:
        """Returns the number of elements of a block of rows."""
        size = self.vector_axis.size
        assert isinstance(size, int)
        return size

    def fitting_block(self, columns: int) -> int:
        """Returns the number of elements of a block if at least so many columns fit, else 0."""
        return self.block if self.block <= columns else 0

    def column_length(self) -> int:
        """Returns the number of blocks, the rest included."""
        (row,) = self.kernel.reduced
        assert isinstance(row.size, int)
        return row.size + (self.few.rest > 0)

    def print_stage(self, reductions: list[int], stores: list[Store], known: EmittedValues) -> None:
        """Writes one pass over whole blocks, and the rest; then combines the elements of each column."""
        before = dict(known)
        super().print_stage(reductions, stores, known)
        (row,), targets = self.kernel.reduced, self.targets(reductions, stores)
        if self.few.rest and targets:
            new = {*reductions, *self.new_buffers(targets, before)}
            inner = {position: text for position, text in known.items() if position not in new}
            with self.writer.block(""), self.first_lanes(self.few.rest * self.few.columns):
                self.writer.line(f"const int64_t {row.name} = {row.size};")
                self.column_body(reductions, stores, inner)
        for position in reductions:
            name, combine = self.statements.name(position), self.combine(position)
            self.writer.line(f"{name}_lanes.combine_rows<{self.few.columns}>({combine});")

    @contextmanager
    def first_lanes(self, count: int) -> Iterator[None]:
        """Writes what follows for the first lanes of a block."""
        lane_count, self.lane_count = self.lane_count, str(count)
        yield
        self.lane_count = lane_count

    def write_final_stores(self, known: EmittedValues) -> None:
        """Writes the results of the first row of a block: other rows have the same."""
        lane = self.vector_axis
        first: dict[Atom, IndexLike] = {lane: as_index(Axis(lane.name, self.few.columns))}
        self.statements.kernel = replace_indices(self.kernel, lambda index: index.substitute(first))
        with self.first_lanes(self.few.columns):
            super().write_final_stores(known)
        self.statements.kernel = self.kernel
