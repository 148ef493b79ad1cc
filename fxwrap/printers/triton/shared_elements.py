"""Loads of contractions whose elements several consecutive products share: packed weights, and scales of groups.

A byte with two int4 weights, or the scale of a group of 64, is loaded once and repeated in registers. A load for each
product would be as many instructions as for weights of half precision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product as cartesian
from operator import eq, ge, gt, le, lt, ne

from fxwrap.loop_ir import (
    Axis,
    Compute,
    Constant,
    IndexValue,
    IndirectIndex,
    Kernel,
    Load,
    find_contraction,
)
from fxwrap.symbolic import product

_MAX_JOINED = 8
"""The longest run that joins of registers repeat; longer ones are broadcast."""

_COMPARISONS = {"lt": lt, "le": le, "gt": gt, "ge": ge, "eq": eq, "ne": ne}


def order_reduced_axes(kernel: Kernel) -> Kernel:
    """Returns a contraction whose inner reduced axes are those along which the largest operand's elements are shared.

    The order of a sum does not matter to its meaning.
    """
    contraction = find_contraction(kernel)
    if contraction is None:
        return kernel
    columns = [at for item in contraction.sums for at in contraction.prologue(item.column_operand)]
    loads = [kernel.operations[at] for at in columns if kernel.varying[at]]
    largest = max(
        [item for item in loads if isinstance(item, Load)],
        key=lambda item: math.prod([axis.size for axis in item.index.axes() if isinstance(axis.size, int)]),
        default=None,
    )  # fmt: skip
    if largest is None:
        return kernel
    own = largest.index.axes()
    ordered = sorted(kernel.reduced, key=lambda axis: axis not in own)
    return replace(kernel, reduced=tuple(ordered))


def shared_run(kernel: Kernel, position: int, block: int) -> int:
    """Returns how many consecutive elements of a block of the reduced axes share one element of a load; else 1."""
    load = kernel.operations[position]
    if not isinstance(load, Load) or not kernel.varying[position]:
        return 1
    own = load.index.axes()
    if any(isinstance(atom, IndirectIndex) and kernel.varying[atom.operation] for atom in load.index.atoms()):
        return 1
    inner: list[Axis] = []
    for axis in reversed(kernel.reduced):
        if axis in own:
            break
        inner.insert(0, axis)
    run = product([axis.size for axis in inner])
    if len(inner) == len(kernel.reduced) or not isinstance(run, int) or run < 2 or run & (run - 1) or block % run:
        return 1
    return run if load.mask is None or _holds_in_each_run(kernel, load.mask, inner) else 1


def _holds_in_each_run(kernel: Kernel, mask: int, inner: Sequence[Axis]) -> bool:
    """Whether a condition on the inner axes alone is true of an element of each run, which all load then."""
    points = cartesian(*[range(int(axis.size)) for axis in inner])
    return any(_value(kernel, mask, dict(zip(inner, point, strict=True))) for point in points)


def _value(kernel: Kernel, position: int, axes: Mapping[Axis, int]) -> int | float | None:
    """Returns the value of a comparison of indices at a point of some axes; None where it depends on more."""
    operation = kernel.operations[position]
    match operation:
        case Constant():
            return operation.value
        case IndexValue():
            return operation.index.substitute(dict(axes)).constant
        case Compute(name="logical_and"):
            values = [_value(kernel, item, axes) for item in operation.operands]
            return None if None in values else int(all(values))
        case Compute() if operation.name in _COMPARISONS:
            left, right = [_value(kernel, item, axes) for item in operation.operands]
            return None if left is None or right is None else int(_COMPARISONS[operation.name](left, right))
        case _:
            return None


def repeat_text(value: str, shape: Sequence[str], dimension: int, run: int) -> str:
    """Returns the text of a block in which each element along a dimension is repeated; `shape` is the result's."""
    if dimension == len(shape) - 1 and run <= _MAX_JOINED:
        text, count = value, 1
        while count < run:
            text, count = f"tl.join({text}, {text})", 2 * count
    else:
        subscript = ", ".join([":, None" if n == dimension else ":" for n in range(len(shape))])
        wide = [f"{size} // {run}, {run}" if n == dimension else size for n, size in enumerate(shape)]
        text = f"tl.broadcast_to({value}[{subscript}], ({', '.join(wide)}))"
    return f"tl.reshape({text}, ({', '.join(shape)}{',' if len(shape) == 1 else ''}))"
