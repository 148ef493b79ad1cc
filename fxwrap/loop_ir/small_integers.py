"""Comparisons of what a kernel computes from one small integer with what it knows: those of the integer itself.

The backward of a max pooling reads, for each window over an element, the offset of its maximum, which is a byte. Its
formula computes the maximum's index in the plane from that and the window, to compare it with the element's index. The
difference of the indices of the element and the window is a constant where windows begin at each element.
"""

from __future__ import annotations

import torch

from fxwrap.loop_ir.builder import OperationCopier, replace_operations
from fxwrap.loop_ir.index import Index, as_index
from fxwrap.loop_ir.kernel import Compute, Constant, IndexValue, Kernel, Load, operands, operation_dtype
from fxwrap.loop_ir.operations import OPERATIONS

_SMALL = frozenset({torch.int8, torch.uint8})
"""The dtypes of which a function is computed for each number."""


def compare_small_integers(kernel: Kernel) -> Kernel:
    """Returns a kernel that compares loaded bytes where it compared what it computes from one byte and constants.

    Sums of 64-bit integers are equal if their differences are; indices that are in both sides cancel out.
    """
    if not any(isinstance(item, Load) and item.dtype in _SMALL for item in kernel.operations):
        return kernel
    solved = {}
    for position, item in enumerate(kernel.operations):
        if isinstance(item, Compute) and item.name in ("eq", "ne"):
            solution = _solve(kernel, item)
            if solution is not None:
                solved[position] = solution
    if not solved:
        return kernel

    def compare(body: OperationCopier, position: int) -> int:
        comparison, (load, number) = kernel.operations[position], solved[position]
        assert isinstance(comparison, Compute)
        if number is None:
            return body.constant(comparison.name == "ne", torch.bool)
        constant = body.constant(number, operation_dtype(kernel.operations[load]))
        return body.compute(comparison.name, body.new[load], constant, dtype=torch.bool)

    return replace_operations(kernel, solved, compare)


def _solve(kernel: Kernel, comparison: Compute) -> tuple[int, int | None] | None:
    """Returns the load of a byte, and its only value for which both sides are equal, None if there is none.

    Returns None where the sides depend on more than a byte, or several values make them equal.
    """
    left, right = comparison.operands
    if operation_dtype(kernel.operations[left]) is not torch.int64:
        return None
    terms: dict[int, int] = {}
    difference = (_collect(kernel, left, 1, terms) + _collect(kernel, right, -1, terms)).constant
    if difference is None or not terms:
        return None
    every_load = {at for at, item in enumerate(kernel.operations) if isinstance(item, Load)}
    needed = sorted(kernel.backward_slice(terms, every_load))
    loads = sorted({used for at in needed for used in operands(kernel.operations[at])} & every_load)
    if len(loads) != 1 or operation_dtype(kernel.operations[loads[0]]) not in _SMALL:
        return None
    values = _values(kernel, needed, loads[0])
    if values is None:
        return None
    total = difference + sum([coefficient * values[at] for at, coefficient in terms.items()])
    equal = values[loads[0]][total == 0].tolist()
    return (loads[0], equal[0] if equal else None) if len(equal) <= 1 else None


def _collect(kernel: Kernel, position: int, factor: int, terms: dict[int, int]) -> Index:
    """Adds the terms of a value times a factor to those with coefficients; returns the sum of its indices."""
    match kernel.operations[position]:
        case IndexValue(index=index):
            return index * factor
        case Constant(value=value):
            return as_index(int(value) * factor)
        case Compute(name="add", operands=(left, right)):
            return _collect(kernel, left, factor, terms) + _collect(kernel, right, factor, terms)
        case Compute(name="sub", operands=(left, right)):
            return _collect(kernel, left, factor, terms) + _collect(kernel, right, -factor, terms)
        case Compute(name="mul", operands=(left, right)):
            for number, other in ((left, right), (right, left)):
                constant = kernel.operations[number]
                if isinstance(constant, Constant):
                    return _collect(kernel, other, factor * int(constant.value), terms)
        case _:
            pass
    terms[position] = terms.get(position, 0) + factor
    return as_index(0)


def _values(kernel: Kernel, needed: list[int], load: int) -> dict[int, torch.Tensor] | None:
    """Returns the values of operations for each number that a load may return; None if they depend on more."""
    limits = torch.iinfo(operation_dtype(kernel.operations[load]))
    values = {load: torch.arange(limits.min, limits.max + 1, dtype=operation_dtype(kernel.operations[load]))}
    for position in needed:
        match kernel.operations[position]:
            case Load():
                continue
            case Constant(value=value, dtype=dtype):
                values[position] = torch.tensor(value, dtype=dtype)
            case Compute(name=name, operands=used, dtype=dtype):
                spec, arguments = OPERATIONS[name], [values[item] for item in used]
                declared = (dtype,) if spec.result == "declared" else ()
                values[position] = spec.reference(*arguments, *declared)
            case _:
                return None
    return values
