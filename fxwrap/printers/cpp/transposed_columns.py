"""Kernels of rows whose lanes are rows: a softmax over a few classes, or channels-last images of few channels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from fxwrap.loop_ir import Axis, DeviceAssert, Index, IndirectIndex, Kernel, Load, Store, as_index
from fxwrap.printers.cpp.columns import ColumnPrinter
from fxwrap.printers.cpp.loop_plan import VECTOR_LANES, LoopPlan, is_transposed
from fxwrap.printers.cpp.operations import CPP_TYPES, print_size
from fxwrap.printers.cpp.statements import EmittedValues

ROWS = 32
"""Rows that are loaded together."""

MAX_ROW_LENGTH = 31
"""Largest number of elements of rows. Longer ones fill vectors along them."""

MIN_VECTOR = 8
"""Smallest number of elements of gathered vectors that lanes go along."""

MIN_SHORT_ROW = 3
"""Smallest number of elements of rows that pointwise kernels transpose: loads and stores of pairs are interleaved."""

MAX_COLUMN_LENGTH = 256
"""The same where results are stored across rows: vectors along rows would have to be transposed, too."""


def plan_transposed_columns(plan: LoopPlan) -> LoopPlan | None:
    """Returns the plan of a kernel of short rows whose lanes are rows; None for others.

    An access to elements of rows is contiguous along rows or across them.
    """
    if len(plan.kernel.reduced) != 1 or plan.serial or plan.splits_reduction:
        return None
    operations, (row,) = plan.kernel.operations, plan.kernel.reduced
    accesses = [item for item in operations if isinstance(item, Load | Store) and row in item.index.axes()]
    if any(item.mask is not None for item in accesses):
        return None
    stores = [item for item in accesses if isinstance(item, Store)]
    if len({store.buffer for store in stores}) < len(stores):
        return None
    for lane in plan.kernel.axes:
        if (isinstance(lane.size, int) and lane.size < ROWS) or _gathers_vectors(plan.kernel, lane):
            continue
        if all(_is_row(item.index, row, lane) or _is_column(item.index, lane) for item in accesses):
            is_transposed_anyway = any(
                isinstance(item, Store) and not _is_row(item.index, row, lane) for item in accesses
            )
            longest = MAX_COLUMN_LENGTH if is_transposed_anyway else MAX_ROW_LENGTH
            is_short = isinstance(row.size, int) and row.size <= longest
            has_rows = any(_is_row(item.index, row, lane) for item in accesses)
            return replace(plan, vector_axis=lane) if has_rows and is_short else None
    return None


def plan_short_columns(plan: LoopPlan) -> LoopPlan | None:
    """Returns the plan of a pointwise kernel that accesses short rows along and across them; None for others.

    The short axis is the reduced one of the plan, which has no reductions: so are images of few channels converted
    from one layout to another.
    """
    kernel, operations = plan.kernel, plan.kernel.operations
    if any(isinstance(item, DeviceAssert) for item in operations) or kernel.combines_values:
        return None
    accesses = [item for item in operations if isinstance(item, Load | Store)]
    for row in kernel.axes:
        if not isinstance(row.size, int) or not MIN_SHORT_ROW <= row.size < VECTOR_LANES:
            continue
        others = tuple([axis for axis in kernel.axes if axis is not row])
        columns = plan_transposed_columns(LoopPlan(replace(kernel, axes=others, reduced=(row,)), None))
        if columns is None or columns.vector_axis is None:
            continue
        lane = columns.vector_axis
        if any(
            row in item.index.axes() and lane in item.index.axes() and not _is_row(item.index, row, lane)
            for item in accesses
        ):
            return columns
    return None


def _gathers_vectors(kernel: Kernel, lane: Axis) -> bool:
    """Whether lanes load elements of vectors that another axis goes along, at an index of each element of a row."""
    for position, item in enumerate(kernel.operations):
        if not isinstance(item, Load) or not kernel.varying[position]:
            continue
        indirect = [atom for atom in item.index.atoms() if isinstance(atom, IndirectIndex)]
        if any(lane in kernel.value_axes[atom.operation] for atom in indirect):
            long = [axis for axis in kernel.axes if axis is not lane and not _is_narrow(axis)]
            strides = [item.index.stride(axis) for axis in long]
            if any(stride is not None and stride.constant == 1 for stride in strides):
                return True
    return False


def _is_narrow(axis: Axis) -> bool:
    return isinstance(axis.size, int) and axis.size < MIN_VECTOR


def _is_row(index: Index, row: Axis, lane: Axis) -> bool:
    return lane in index.axes() and is_transposed(index, row, lane)


def _is_column(index: Index, lane: Axis) -> bool:
    stride = index.stride(lane)
    return stride is not None and stride.constant in (0, 1)


class TransposedColumnPrinter(ColumnPrinter):
    """A kernel that transposes blocks of rows, so that each operation is one on vectors."""

    def choose_block(self) -> int:
        """Returns the number of rows that are loaded together."""
        return ROWS

    @contextmanager
    def column_block(self) -> Iterator[None]:
        """Opens a function of the number of a block's rows, which is a constant in whole blocks."""
        count = f"{print_size(self.vector_axis.size)} - {self.vector_axis.name}_0"
        if self.lane_count != "lanes":
            yield
            return
        with self.writer.block(f"for_lane_block<{self.block}>({count}, [&](auto lanes)", "});"):
            yield

    def load_columns(self) -> EmittedValues:
        """Writes the tiles of rows and their loads; returns the texts of their elements."""
        (row,), known = self.kernel.reduced, EmittedValues()
        for position, operation in enumerate(self.kernel.operations):
            if not isinstance(operation, Load | Store) or not self.is_across(operation):
                continue
            name = operation.buffer if isinstance(operation, Store) else self.statements.name(position)
            dtype = operation.dtype if isinstance(operation, Load) else self.statements.dtype(operation.value)
            self.writer.line(f"alignas(64) {CPP_TYPES[dtype]} {name}_tile[{row.size}][{self.block}];")
            if isinstance(operation, Store):
                self.tile_rows[operation] = f"{name}_tile[{row.name}]"
            else:
                rows, stride = self.lines(operation, {row: as_index(0)})
                arguments = f"{rows}, {stride}, {self.lane_count}, &{name}_tile[0][0], {self.block}"
                self.writer.line(f"load_columns<{row.size}>({arguments});{self.statements.comment(operation)}")
                known[position] = self.statements.element(f"{name}_tile[{row.name}][lane]", operation.dtype)
        return known

    def is_across(self, access: Load | Store) -> bool:
        """Whether an access is one of rows, which are short: they are in tiles as a whole."""
        (row,) = self.kernel.reduced
        return _is_row(access.index, row, self.vector_axis)

    def store_columns(self) -> None:
        """Writes the stores of tiles as rows."""
        (row,) = self.kernel.reduced
        for store in self.kernel.stores:
            if self.is_across(store):
                rows, stride = self.lines(store, {row: as_index(0)})
                tile = f"&{store.buffer}_tile[0][0], {self.block}, {self.lane_count}"
                self.writer.line(f"store_columns<{row.size}>({tile}, {rows}, {stride});")
