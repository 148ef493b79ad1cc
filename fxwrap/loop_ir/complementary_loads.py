"""Loads of one element under complementary masks are one load: in each iteration one of the masks holds.

A sum of a lower and an upper triangle, or two selections by one condition, read each element once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch

from fxwrap.loop_ir.body_operations import (
    Compute,
    Constant,
    Load,
    Operation,
    Store,
    map_operation,
    operands,
    operation_dtype,
)
from fxwrap.loop_ir.builder import eliminate_dead_operations
from fxwrap.loop_ir.index import Index
from fxwrap.loop_ir.kernel import Kernel
from fxwrap.loop_ir.operations import OPPOSITES, STORAGE_ONLY


def merge_complementary_loads(kernel: Kernel) -> Kernel:
    """Returns a kernel in which a load without a mask replaces two of one element whose masks are complementary.

    The index is in bounds in all iterations, because one of the masks holds in each. Selections give what each load
    returned where its mask did not hold. Kernels that store into a loaded buffer are unchanged.
    """
    written = {item.buffer for item in kernel.operations if isinstance(item, Store)}
    waiting: dict[tuple[str, Index, torch.dtype], list[int]] = {}
    first: dict[int, int] = {}  # a masked load -> the first load of its element
    for position, item in enumerate(kernel.operations):
        if not isinstance(item, Load) or item.mask is None or item.buffer in written:
            continue
        others = waiting.setdefault((item.buffer, item.index, item.dtype), [])
        partner = next((other for other in others if _are_complementary(kernel, other, position)), None)
        if partner is None:
            others.append(position)
        else:
            others.remove(partner)
            first |= {partner: partner, position: partner}
    selected = _selected_values(kernel, first)
    return kernel if not first or selected is None else _with_selections(kernel, first, selected)


def _are_complementary(kernel: Kernel, one: int, other: int) -> bool:
    """Whether the masks of two loads are opposite comparisons of the same integers."""
    first, second = [kernel.operations[_mask_of(kernel.operations[position])] for position in (one, other)]
    if not isinstance(first, Compute) or not isinstance(second, Compute) or first.operands != second.operands:
        return False
    dtypes = {operation_dtype(kernel.operations[position]) for position in first.operands}
    return OPPOSITES.get(first.name) == second.name and dtypes <= {torch.int32, torch.int64}


def _mask_of(load: Operation) -> int:
    assert isinstance(load, Load) and load.mask is not None
    return load.mask


def _selected_values(kernel: Kernel, loads: Collection[int]) -> dict[int, int] | None:
    """Returns the values among which a selection chooses, with their loads: the loads, or casts of narrow elements.

    None if something else reads a narrow element.
    """
    narrow = [position for position in loads if operation_dtype(kernel.operations[position]) in STORAGE_ONLY]
    selected = {position: position for position in loads if position not in narrow}
    for position, item in enumerate(kernel.operations):
        for operand in set(operands(item)).intersection(narrow):
            if not isinstance(item, Compute) or item.name != "cast":
                return None
            selected[position] = operand
    return selected


def _with_selections(kernel: Kernel, first: Mapping[int, int], selected: Mapping[int, int]) -> Kernel:
    """Returns the kernel with one load for each value of `first`, and a selection for each of `selected`."""
    operations: list[Operation] = []
    new: dict[int, int] = {}
    unmasked: dict[int, int] = {}

    def add(operation: Operation) -> int:
        operations.append(operation)
        return len(operations) - 1

    for position, operation in enumerate(kernel.operations):
        moved = map_operation(operation, new.__getitem__)
        if position in first:
            assert isinstance(moved, Load)
            if first[position] not in unmasked:
                unmasked[first[position]] = add(replace(moved, mask=None, other=0))
            new[position] = unmasked[first[position]]
        else:
            new[position] = add(moved)
        if position in selected:
            load = kernel.operations[selected[position]]
            assert isinstance(load, Load)
            dtype = operation_dtype(operation)
            other = add(Constant(load.other, dtype, load.origin))
            mask = new[_mask_of(load)]
            new[position] = add(Compute("where", (mask, new[position], other), dtype, load.origin))
    return eliminate_dead_operations(replace(kernel, operations=tuple(operations)))
