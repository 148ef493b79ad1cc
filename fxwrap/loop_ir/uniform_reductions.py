"""Reductions of values that do not vary along the reduced axes: they need no pass over a row."""

from __future__ import annotations

from fxwrap.loop_ir.atoms import count_points
from fxwrap.loop_ir.body_operations import Reduce
from fxwrap.loop_ir.builder import OperationCopier, replace_operations
from fxwrap.loop_ir.kernel import Kernel

_UNCHANGED = frozenset({"max", "min", "any", "all"})
"""The kinds of reductions of equal values that return such a value."""


def fold_uniform_reductions(kernel: Kernel) -> Kernel:
    """Returns a kernel whose sums of equal values, as of a broadcast gradient, are products with their number.

    Maxima and the like are the value. Kernels that reduce nothing else, or that may reduce nothing, stay as they are.
    """
    folded, others = set[int](), set[int]()
    for position, item in enumerate(kernel.operations):
        if isinstance(item, Reduce):
            count = count_points(kernel.reduced_by(item))
            is_uniform = kernel.value_axes[item.operands[0]].isdisjoint(kernel.reduced_by(item))
            is_folded = is_uniform and isinstance(count, int) and count > 0 and item.operand_precision is None
            is_known = item.kind in _UNCHANGED or (item.kind == "sum" and item.dtype.is_floating_point)
            (folded if is_folded and is_known else others).add(position)
    reduced = {axis for position in others for axis in kernel.reduced_by(_reduce(kernel, position))}
    if not folded or reduced != {*kernel.reduced}:
        return kernel
    return replace_operations(kernel, folded, _fold)


def _fold(body: OperationCopier, position: int) -> int:
    """Adds what a reduction of equal values is."""
    reduction = _reduce(body.kernel, position)
    value = body.new[reduction.operands[0]]
    if reduction.kind != "sum":
        return value
    count = count_points(body.kernel.reduced_by(reduction))
    return body.compute("mul", value, body.size(count, reduction.dtype), dtype=reduction.dtype)


def _reduce(kernel: Kernel, position: int) -> Reduce:
    operation = kernel.operations[position]
    assert isinstance(operation, Reduce)
    return operation
