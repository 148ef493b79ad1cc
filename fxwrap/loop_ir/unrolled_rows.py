"""Reductions of a few elements as formulas: a vector's norm, the product of two vectors, or a sum of gathered rows.

An iteration has a whole row, so that what depends on the row's results is computed once, not for each element. Sums of
a few gathered rows load each index once, not for each element of a column.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import product as cartesian

from fxwrap.loop_ir.atoms import IndirectIndex
from fxwrap.loop_ir.body_operations import (
    Compute,
    Load,
    Operation,
    Reduce,
    Store,
    map_operation,
    operation_dtype,
    renumber_index,
)
from fxwrap.loop_ir.builder import eliminate_dead_operations
from fxwrap.loop_ir.contraction import find_contraction
from fxwrap.loop_ir.index import ONE, Atom, IndexLike
from fxwrap.loop_ir.kernel import Kernel
from fxwrap.loop_ir.segment_fusion import MAX_UNROLLED
from fxwrap.loop_ir.split import reduces_columns
from fxwrap.loop_ir.verify import verify_kernel

_COMBINATIONS: Mapping[str, str] = {
    "sum": "add", "prod": "mul", "max": "maximum", "min": "minimum", "any": "logical_or", "all": "logical_and",
}  # fmt: skip
"""The operations that combine two elements, by the kind of reduction."""


_MAX_GATHERED = 8
"""The most gathered rows, each of whose elements one thread combines."""


def unroll_short_rows(kernel: Kernel) -> Kernel:
    """Returns a kernel that reduces contiguous rows of up to MAX_UNROLLED elements as a pointwise kernel of rows.

    So are columns of up to _MAX_GATHERED rows whose places are loaded. The stores of the elements of a row follow all
    loads. Other kernels are returned unchanged: rows of a power of two elements, which are whole vectors, reductions
    that are no combinations of two elements, and matmuls.
    """
    if not _is_short(kernel) or not _combines_pairs(kernel) or _is_matmul(kernel):
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


def _is_short(kernel: Kernel) -> bool:
    """Whether rows are short and no vectors, or columns have a few gathered rows."""
    count = kernel.reduced_count
    if not isinstance(count, int) or not 1 < count <= _MAX_GATHERED or not kernel.axes:
        return False
    if reduces_columns(kernel):
        return _gathers_rows(kernel)
    return count <= MAX_UNROLLED and count & (count - 1) != 0


def _gathers_rows(kernel: Kernel) -> bool:
    """Whether loads have contiguous columns of a row whose place is loaded once for all columns."""
    column = kernel.axes[-1]
    loads = [item for item in kernel.operations if isinstance(item, Load) and item.index.stride(column) == ONE]
    places = {atom.operation for item in loads for atom in item.index.atoms() if isinstance(atom, IndirectIndex)}
    return any(kernel.varying[at] and column not in kernel.value_axes[at] for at in places)


def _is_matmul(kernel: Kernel) -> bool:
    """Whether a kernel multiplies matrices: a weighted sum of rows does not, if no others have their elements."""
    contraction = find_contraction(kernel)
    return contraction is not None and (bool(contraction.rows) or not reduces_columns(kernel))


def _combines_pairs(kernel: Kernel) -> bool:
    """Whether all reductions combine elements one after another."""
    if kernel.scans or kernel.reduces_in_steps or kernel.combines_values:
        return False
    return all(
        isinstance(item := kernel.operations[at], Reduce)
        and item.kind in _COMBINATIONS
        and operation_dtype(kernel.operations[item.operands[0]]) is item.dtype
        for at in kernel.reductions
    )
