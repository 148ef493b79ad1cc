"""Comparisons of what a kernel computes from one small integer with what it knows: those of the integer itself.

The backward of a max pooling reads, for each window over an element, the offset of its maximum, which is a byte. Its
formula computes the maximum's index in the plane from that and the window, to compare it with the element's index. The
difference of the indices of the element and the window is one of a few numbers: a constant where windows begin at each
element, else a function of the element's position modulo the stride.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import TypeAlias

import torch

from fxwrap.loop_ir.body_operations import Compute, Constant, IndexValue, Load, operands, operation_dtype
from fxwrap.loop_ir.builder import OperationCopier, replace_operations
from fxwrap.loop_ir.index import Atom, Index, as_index
from fxwrap.loop_ir.kernel import Kernel
from fxwrap.loop_ir.operations import OPERATIONS
from fxwrap.loop_ir.ranges import index_range

_SMALL = frozenset({torch.int8, torch.uint8})
"""The dtypes of which a function is computed for each number."""
_MAX_POINTS = 64


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
        byte, known = body.new[load], number.constant
        if known is not None:
            other = body.constant(known, operation_dtype(kernel.operations[load]))
        else:
            byte = body.compute("cast", byte, dtype=torch.int32)
            other = body.compute("cast", body.add(IndexValue(number, origin=body.origin)), dtype=torch.int32)
        return body.compute(comparison.name, byte, other, dtype=torch.bool)

    return replace_operations(kernel, solved, compare)


def _solve(kernel: Kernel, comparison: Compute) -> tuple[int, Index | None] | None:
    """Returns the load of a byte, and its only value for which both sides are equal, None if there is none.

    Returns None where the sides depend on more than a byte and indices of few values, or several bytes make them equal.
    """
    left, right = comparison.operands
    if operation_dtype(kernel.operations[left]) is not torch.int64:
        return None
    terms: dict[int, int] = {}
    difference = add_terms(kernel, left, 1, terms) + add_terms(kernel, right, -1, terms)
    points = _points(difference)
    if points is None or not terms:
        return None
    every_load = {at for at, item in enumerate(kernel.operations) if isinstance(item, Load)}
    needed = sorted(kernel.backward_slice(terms, every_load))
    loads = sorted({used for at in needed for used in operands(kernel.operations[at])} & every_load)
    if len(loads) != 1 or operation_dtype(kernel.operations[loads[0]]) not in _SMALL:
        return None
    values = _values(kernel, needed, loads[0])
    if values is None:
        return None
    total = sum([coefficient * values[at] for at, coefficient in terms.items()])
    equal = [values[loads[0]][total == -at].tolist() for at in points.values()]
    if any(len(numbers) > 1 for numbers in equal):
        return None
    if not any(equal):
        return loads[0], None
    solution = _linear_index(difference, dict(zip(points, [numbers[0] if numbers else None for numbers in equal])))
    return None if solution is None else (loads[0], solution)


_Point: TypeAlias = tuple[int, ...]
"""The numbers of the atoms of an index, in the order of `_atoms`."""


def _atoms(index: Index) -> list[Atom]:
    return sorted({atom for monomial, _ in index.terms for atom in monomial}, key=lambda atom: atom.key)


def _points(index: Index) -> dict[_Point, int] | None:
    """Returns the values of an index for all numbers of its atoms; None if these are unknown or many."""
    atoms = _atoms(index)
    ranges = [index_range(Index((((atom,), 1),)), {}) for atom in atoms]
    if math.prod([high - low + 1 for low, high in ranges]) > _MAX_POINTS:
        return None
    points = itertools.product(*[range(int(low), int(high) + 1) for low, high in ranges])
    return {point: _value(index, dict(zip(atoms, point, strict=True))) for point in points}


def _value(index: Index, numbers: Mapping[Atom, int]) -> int:
    return sum([number * math.prod([numbers[atom] for atom in monomial]) for monomial, number in index.terms])


def _linear_index(index: Index, values: Mapping[_Point, int | None]) -> Index | None:
    """Returns an index with given values at the points of another index, linear in its atoms; None if there is none."""
    atoms = _atoms(index)
    origin = next(iter(values))
    result = as_index(values[origin] or 0)
    for dim, atom in enumerate(atoms):
        step = (*origin[:dim], origin[dim] + 1, *origin[dim + 1 :])
        if step in values:
            slope = (values[step] or 0) - (values[origin] or 0)
            result = result + (Index((((atom,), 1),)) - origin[dim]) * slope
    is_exact = all(_value(result, dict(zip(atoms, point, strict=True))) == value for point, value in values.items())
    return result if is_exact else None


def add_terms(kernel: Kernel, position: int, factor: int, terms: dict[int, int]) -> Index:
    """Collects the sum that a 64-bit integer is.

    Adds the terms of a value times a factor to those with coefficients; returns the sum of its indices.
    """
    match kernel.operations[position]:
        case IndexValue(index=index):
            return index * factor
        case Constant(value=value):
            return as_index(int(value) * factor)
        case Compute(name="add", operands=(left, right)):
            return add_terms(kernel, left, factor, terms) + add_terms(kernel, right, factor, terms)
        case Compute(name="sub", operands=(left, right)):
            return add_terms(kernel, left, factor, terms) + add_terms(kernel, right, -factor, terms)
        case Compute(name="mul", operands=(left, right)):
            for number, other in ((left, right), (right, left)):
                constant = kernel.operations[number]
                if isinstance(constant, Constant):
                    return add_terms(kernel, other, factor * int(constant.value), terms)
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
