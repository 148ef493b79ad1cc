"""Tables of values that depend on one axis alone: the indices and weights of an interpolation, scales of channels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fxwrap.loop_ir import OPERATIONS, Axis, Compute, Constant, IndexValue, Load, SymbolicScalar, operands, value_range
from fxwrap.printers.cpp.loop_plan import LoopPlan

MIN_TABLE_COST = 5
"""Smallest cost in instructions of a value that is read from a table instead of being recomputed."""

MAX_TABLE_BYTES = 16384
"""Largest size of all tables in bytes, a part of the L1 cache."""

MAX_ROW_LENGTH = 256
"""The length of rows from which on values that do not vary along them need no tables."""

MIN_REUSE = 8
"""The least number of iterations that read an element of a table."""

_INT32 = torch.iinfo(torch.int32)


@dataclass(frozen=True, slots=True)
class AxisTable:
    """The values of an operation at each index of an axis, in a dtype that holds all of them."""

    position: int
    axis: Axis
    dtype: torch.dtype


def choose_tables(plan: LoopPlan) -> list[AxisTable]:
    """Returns the tables of a pointwise kernel: expensive values that iterations of other axes would compute again."""
    kernel, lane = plan.kernel, plan.vector_axis
    if plan.serial or lane is None or not isinstance(kernel.count, int):
        return []
    has_short_rows = isinstance(lane.size, int) and lane.size <= MAX_ROW_LENGTH
    costs = {position: _cost(plan, position) for position in _values_of_one_axis(plan)}
    tables: list[AxisTable] = []
    available = MAX_TABLE_BYTES
    for position in sorted(costs, key=lambda item: -costs[item]):
        (axis,), dtype = plan.dependent_axes[position], _table_dtype(plan, position)
        if not isinstance(axis.size, int) or kernel.count < MIN_REUSE * axis.size or costs[position] < MIN_TABLE_COST:
            continue
        size = axis.size * dtype.itemsize
        if size <= available and (axis == lane or has_short_rows):
            tables.append(AxisTable(position, axis, dtype))
            available -= size
    return tables


def _values_of_one_axis(plan: LoopPlan) -> list[int]:
    """Returns the computed values that depend on one axis alone, and that an operation with more axes uses.

    Values with conditions are none of them: segments of loops make these constant, and then have contiguous loads.
    """
    is_movable: list[bool] = []
    used = set[int]()
    for item, axes in zip(plan.kernel.operations, plan.dependent_axes, strict=True):
        kinds = Compute | Constant | IndexValue | Load | SymbolicScalar
        is_number = isinstance(item, kinds) and item.dtype is not torch.bool
        is_movable.append(is_number and len(axes) <= 1 and all(is_movable[operand] for operand in operands(item)))
        if not is_movable[-1]:
            used.update(operands(item))
    values = [(position, plan.kernel.operations[position]) for position in sorted(used) if is_movable[position]]
    return [
        position
        for position, item in values
        if isinstance(item, Compute) and item.dtype.itemsize >= 4 and plan.dependent_axes[position]
    ]


def _cost(plan: LoopPlan, position: int) -> int:
    used = [plan.kernel.operations[item] for item in plan.kernel.backward_slice([position])]
    return sum(OPERATIONS[item.name].cost for item in used if isinstance(item, Compute))


def _table_dtype(plan: LoopPlan, position: int) -> torch.dtype:
    """Returns int32 for integers that fit, which processors convert, combine and gather by faster."""
    operation = plan.kernel.operations[position]
    assert isinstance(operation, Compute)
    if operation.dtype is not torch.int64:
        return operation.dtype
    low, high = value_range(plan.kernel.operations, position)
    return torch.int32 if _INT32.min <= low and high <= _INT32.max else torch.int64
