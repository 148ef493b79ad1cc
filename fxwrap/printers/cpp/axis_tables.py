"""Tables of values that do not depend on all axes: the indices and weights of an interpolation, scales of channels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fxwrap.loop_ir import (
    OPERATIONS,
    Axis,
    Compute,
    Constant,
    IndexValue,
    Load,
    SymbolicScalar,
    count_points,
    operands,
    value_range,
)
from fxwrap.printers.cpp.loop_plan import LoopPlan
from fxwrap.symbolic import product

MIN_TABLE_COST = 5
"""Smallest cost in instructions of a value that is read from a table instead of being recomputed."""

MAX_TABLE_BYTES = 16384
"""Largest size of the tables of one axis together in bytes, a part of the L1 cache."""

MIN_GRID_COST, MAX_GRID_BYTES = 10, 65536
"""The same for values of several axes, whose tables may be in the L2 cache."""

MAX_ROW_LENGTH = 256
"""The length of rows from which on values that do not vary along them need no tables."""

MIN_REUSE = 8
"""The least number of iterations that read an element of a table."""

_INT32 = torch.iinfo(torch.int32)


@dataclass(frozen=True, slots=True)
class AxisTable:
    """The values of an operation at each index of some axes, in the order of loops. `dtype` holds all of them."""

    position: int
    axes: tuple[Axis, ...]
    dtype: torch.dtype


def choose_tables(plan: LoopPlan) -> list[AxisTable]:
    """Returns the tables of a kernel: expensive values that iterations of other axes would compute again."""
    lane = plan.vector_axis
    if plan.serial or lane is None or plan.kernel.scans:
        return []
    costs = {position: _cost(plan, position) for position in _values_of_few_axes(plan)}
    tables: list[AxisTable] = []
    available = {True: MAX_TABLE_BYTES, False: MAX_GRID_BYTES}
    for position in sorted(costs, key=lambda item: -costs[item]):
        axes, dtype = _loop_order(plan, position), _table_dtype(plan, position)
        is_row = len(axes) == 1
        size = count_points(axes)
        if not isinstance(size, int) or not _is_worthwhile(plan, axes, size, costs[position]):
            continue
        if size * dtype.itemsize <= available[is_row]:
            tables.append(AxisTable(position, axes, dtype))
            available[is_row] -= size * dtype.itemsize
    return tables


def _loop_order(plan: LoopPlan, position: int) -> tuple[Axis, ...]:
    """Returns the axes that a value depends on, the vectorised one last."""
    axes = [axis for axis in (*plan.kernel.axes, *plan.kernel.reduced) if axis in plan.kernel.value_axes[position]]
    return tuple(sorted(axes, key=lambda axis: axis == plan.vector_axis))


def _is_worthwhile(plan: LoopPlan, axes: tuple[Axis, ...], size: int, cost: int) -> bool:
    """Whether iterations read the values of such axes often enough, and loops do not compute them once anyway."""
    kernel, lane = plan.kernel, plan.vector_axis
    count = product([kernel.count, kernel.reduced_count])
    if not isinstance(count, int) or count < MIN_REUSE * size or lane is None:
        return False
    if kernel.reduced and (len(axes) == 1 or not {*axes} & {*kernel.reduced}):
        return False
    if len(axes) > 1:
        return axes[-1] == lane and cost >= MIN_GRID_COST
    has_short_rows = isinstance(lane.size, int) and lane.size <= MAX_ROW_LENGTH
    return cost >= MIN_TABLE_COST and (axes[0] == lane or has_short_rows)


def _values_of_few_axes(plan: LoopPlan) -> list[int]:
    """Returns the computed values that do not depend on all axes, and that an operation which does uses.

    Values with conditions are none of them: segments of loops make these constant, and then have contiguous loads.
    """
    rank = len(plan.kernel.axes) + len(plan.kernel.reduced)
    is_movable: list[bool] = []
    used = set[int]()
    for item, axes in zip(plan.kernel.operations, plan.kernel.value_axes, strict=True):
        kinds = Compute | Constant | IndexValue | Load | SymbolicScalar
        is_number = isinstance(item, kinds) and item.dtype is not torch.bool
        is_movable.append(
            is_number and len(axes) < max(rank, 2) and all(is_movable[operand] for operand in operands(item))
        )
        used.update([at for at in operands(item) if not is_movable[-1] or plan.kernel.value_axes[at] < axes])
    values = [(position, plan.kernel.operations[position]) for position in sorted(used) if is_movable[position]]
    return [
        position
        for position, item in values
        if isinstance(item, Compute) and item.dtype.itemsize >= 4 and plan.kernel.value_axes[position]
    ]


def _cost(plan: LoopPlan, position: int) -> int:
    """Returns the cost of a value; if it has several axes, without operands of fewer: these have their own tables."""
    axes = plan.kernel.value_axes[position]
    chosen = [
        plan.kernel.operations[item]
        for item in plan.kernel.backward_slice([position])
        if len(axes) == 1 or plan.kernel.value_axes[item] == axes
    ]
    return sum(OPERATIONS[item.name].cost for item in chosen if isinstance(item, Compute))


def _table_dtype(plan: LoopPlan, position: int) -> torch.dtype:
    """Returns int32 for integers that fit, which processors convert, combine and gather by faster."""
    operation = plan.kernel.operations[position]
    assert isinstance(operation, Compute)
    if operation.dtype is not torch.int64:
        return operation.dtype
    low, high = value_range(plan.kernel.operations, position)
    return torch.int32 if _INT32.min <= low and high <= _INT32.max else torch.int64
