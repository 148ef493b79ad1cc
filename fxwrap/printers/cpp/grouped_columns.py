"""Reductions of groups of adjacent columns, as those of a group norm of channels-last images."""

from __future__ import annotations

from dataclasses import replace

from fxwrap.loop_ir import (
    Atom,
    Axis,
    DeviceAssert,
    Index,
    IndexLike,
    Kernel,
    Load,
    Reduce,
    Scan,
    as_index,
    map_operation,
)
from fxwrap.printers.cpp.loop_plan import COLUMN_BLOCK, LoopPlan

MIN_COLUMN_LENGTH = 16
"""Smallest number of elements of a column for which lanes are columns."""

_KINDS = frozenset({"sum", "max", "min", "any", "all"})


def plan_grouped_columns(kernel: Kernel) -> LoopPlan | None:
    """Returns the plan of a kernel that reduces groups of adjacent columns, whose lanes are columns; None for others.

    Rows of a group are too short for vectors, and columns of one group are strided. In the planned kernel, the axis of
    groups and that of a group's columns are one parallel axis. Its reductions have a result for each column; the
    printer combines those of a group.
    """
    reductions = [item for item in kernel.operations if isinstance(item, Reduce)]
    if not all(item.axes in ((), kernel.reduced) and item.kind in _KINDS for item in reductions):
        return None
    if any(isinstance(item, Scan | DeviceAssert) for item in kernel.operations):
        return None
    if kernel.combines_values:
        return None
    for column in kernel.reduced:
        for group in kernel.axes:
            if _are_long(kernel, column) and _are_adjacent(kernel, group, column):
                return _merge(kernel, group, column)
    return None


def _are_long(kernel: Kernel, column: Axis) -> bool:
    sizes = [axis.size for axis in kernel.reduced if axis != column]
    return any(isinstance(size, int) and size >= MIN_COLUMN_LENGTH for size in sizes)


def _are_adjacent(kernel: Kernel, group: Axis, column: Axis) -> bool:
    """Whether all accesses that vary along a group are contiguous along all groups.

    Each column stores the results of its group, so their memory may not be read.
    """
    if not isinstance(group.size, int) or not isinstance(column.size, int) or not 1 < column.size <= COLUMN_BLOCK // 2:
        return False
    loads = [item for item in kernel.operations if isinstance(item, Load)]
    read = {load.buffer for load in loads}
    if any(store.buffer in read and column not in store.index.axes() for store in kernel.stores):
        return False
    accesses = [*[load.index for load in loads], *[store.index for store in kernel.stores]]
    strides = {(_stride(index, column), _stride(index, group)) for index in accesses if column in index.axes()}
    return strides == {(1, column.size)}


def _stride(index: Index, axis: Axis) -> int | None:
    stride = index.stride(axis)
    return None if stride is None else stride.constant


def _merge(kernel: Kernel, group: Axis, column: Axis) -> LoopPlan:
    assert isinstance(group.size, int) and isinstance(column.size, int)
    merged = Axis(group.name, group.size * column.size)
    at: dict[Atom, IndexLike] = {group: as_index(merged) // column.size, column: as_index(merged) % column.size}
    operations = [
        map_operation(item, lambda position: position, lambda index: index.substitute(at)) for item in kernel.operations
    ]
    plain = [replace(item, axes=()) if isinstance(item, Reduce) else item for item in operations]
    axes = tuple([merged if axis == group else axis for axis in kernel.axes])
    reduced = tuple([axis for axis in kernel.reduced if axis != column])
    return LoopPlan(replace(kernel, axes=axes, reduced=reduced, operations=tuple(plain)), merged, column.size)
