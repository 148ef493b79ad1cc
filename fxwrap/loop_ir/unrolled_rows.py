"""Reductions of rows of a few elements as formulas of each row: a vector's norm, or the product of two vectors.

An iteration has a whole row, so that what depends on the row's results is computed once, not for each element.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import product as cartesian

from fxwrap.loop_ir.builder import eliminate_dead_operations
from fxwrap.loop_ir.contraction import find_contraction
from fxwrap.loop_ir.index import Atom, IndexLike
from fxwrap.loop_ir.kernel import (
    Compute,
    Kernel,
    Operation,
    Reduce,
    Store,
    map_operation,
    operation_dtype,
    renumber_index,
)
from fxwrap.loop_ir.segment_fusion import MAX_UNROLLED
from fxwrap.loop_ir.split import reduces_columns
from fxwrap.loop_ir.verify import verify_kernel

_COMBINATIONS: Mapping[str, str] = {
    "sum": "add", "prod": "mul", "max": "maximum", "min": "minimum", "any": "logical_or", "all": "logical_and",
}  # fmt: skip
"""The operations that combine two elements, by the kind of reduction."""


def unroll_short_rows(kernel: Kernel) -> Kernel:
    """Returns a kernel that reduces contiguous rows of up to MAX_UNROLLED elements as a pointwise kernel of rows.

    The stores of the elements of a row follow all loads. Other kernels are returned unchanged: rows of a power of two
    elements, which are whole vectors, reductions that are no combinations of two elements, and matmuls.
    """
    if not _has_short_rows(kernel) or reduces_columns(kernel) or find_contraction(kernel) is not None:
        return kernel
    sizes = [range(int(axis.size)) for axis in kernel.reduced]
    points: list[dict[Atom, IndexLike]] = [dict(zip(kernel.reduced, at, strict=True)) for at in cartesian(*sizes)]
    operations: list[Operation] = []
    numbers: dict[Operation, int] = {}
    stores: list[Store] = []
    places: list[list[int]] = []

    def add(operation: Operation) -> int:
        if operation not in numbers:
            numbers[operation] = len(operations)
            operations.append(operation)
        return numbers[operation]

    def element(number: int, position: int) -> int:
        return places[position][number if len(places[position]) > 1 else 0]

    for operation, varies in zip(kernel.operations, kernel.varying, strict=True):
        if isinstance(operation, Reduce):
            total, *others = [element(number, operation.operands[0]) for number in range(len(points))]
            for other in others:
                name = _COMBINATIONS[operation.kind]
                total = add(Compute(name, (total, other), operation.dtype, operation.origin))
            places.append([total])
            continue
        copies = []
        for number, point in enumerate(points if varies else points[:1]):
            position = partial(element, number)
            copy = map_operation(operation, position, partial(renumber_index, position, point if varies else {}))
            if isinstance(copy, Store):
                stores.append(copy)
            else:
                copies.append(add(copy))
        places.append(copies)
    buffers = [buffer.name for buffer in kernel.outputs]
    stores.sort(key=lambda store: buffers.index(store.buffer))
    unrolled = replace(kernel, reduced=(), operations=(*operations, *stores))
    return verify_kernel(eliminate_dead_operations(unrolled))


def _has_short_rows(kernel: Kernel) -> bool:
    """Whether rows are short, and all their reductions combine elements one after another."""
    count = kernel.reduced_count
    if not isinstance(count, int) or count & (count - 1) == 0 or count > MAX_UNROLLED or not kernel.axes:
        return False
    if kernel.scans or kernel.reduces_in_steps or kernel.combines_values:
        return False
    return all(
        isinstance(item := kernel.operations[at], Reduce)
        and item.kind in _COMBINATIONS
        and operation_dtype(kernel.operations[item.operands[0]]) is item.dtype
        for at in kernel.reductions
    )
