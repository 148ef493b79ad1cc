"""Index-set splitting: an axis is cut where conditions on it change, so that each segment needs no masks.

A segment of cat or pad is a plain copy from one tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from fxwrap.loop_ir.atoms import Axis, IndirectIndex
from fxwrap.loop_ir.body_operations import (
    Compute,
    Constant,
    DeviceAssert,
    IndexValue,
    Load,
    Operation,
    Store,
    indices,
    map_operation,
)
from fxwrap.loop_ir.index import Atom, FloorDivide, Index, IndexLike, Modulo, as_index
from fxwrap.loop_ir.kernel import Kernel
from fxwrap.loop_ir.operations import COMPARISONS, EXACT_NUMBERS, OPPOSITES, STORAGE_ONLY, WITH_INFINITIES
from fxwrap.loop_ir.piecewise import piece_of, piecewise_indices

MAX_SEGMENTS = 8

MAX_WRAPS = 2
"""The most places of an axis at which an index begins anew and loops are split."""

_ABSORBING_VALUES = {"logical_and": False, "bitwise_and": False, "logical_or": True, "bitwise_or": True}


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of an axis's range, from `start` to before `end`."""

    start: int
    end: int


def split_loop(kernel: Kernel, axis: Axis, wraps: bool = False) -> list[Segment]:
    """Returns the segments of an axis between changes of conditions; none if there are no changes or too many.

    With `wraps`, segments also end where an index begins anew, as that of a roll, or turns, as that of a reflection.
    """
    if not isinstance(axis.size, int):
        return []
    points = {point.constant for item in axis_comparisons(kernel, axis).values() for point in item.points}
    changes = {point for point in points if point is not None and 0 < point < axis.size}
    if wraps:
        wrapped = changes.union(*_quotient_changes(kernel, axis).values())
        wrapped = wrapped.union(*piecewise_indices(kernel, axis).values()) - {0}
        changes = wrapped if len(wrapped) < MAX_SEGMENTS else changes
    if not changes or len(changes) >= MAX_SEGMENTS:
        return []
    bounds = [0, *sorted(changes), axis.size]
    return [Segment(start, end) for start, end in itertools.pairwise(bounds)]


def specialise(kernel: Kernel, axis: Axis, segment: Segment) -> Kernel:
    """Returns the kernel specialised to a segment of an axis; operations keep positions."""
    start = segment.start
    comparisons = {
        position: item
        for position, item in axis_comparisons(kernel, axis).items()
        if all(point.constant is not None for point in item.points)
    }
    is_before = partial(_precedes, start)
    kernel = decide_comparisons(kernel, {at: item.holds(is_before) for at, item in comparisons.items()})
    quotients: dict[Atom, IndexLike] = {}
    for atom, changes in _quotient_changes(kernel, axis).items():
        if not any(start < point < segment.end for point in changes):
            quotient = atom.base.substitute({axis: start}) // atom.divisor
            quotients[atom] = quotient if isinstance(atom, FloorDivide) else atom.base - quotient * atom.divisor
    for indirect, pieces in piecewise_indices(kernel, axis).items():
        piece = piece_of(pieces, start, segment.end)
        if piece is not None:
            quotients[indirect] = piece
    if not quotients:
        return kernel
    operations = [
        map_operation(item, lambda position: position, lambda index: index.substitute(quotients))
        for item in kernel.operations
    ]
    return replace(kernel, operations=tuple(operations))


def _precedes(start: int, point: Index) -> bool:
    return point.constant is not None and start < point.constant


# --- divisions of an axis --------------------------------------------------------------------------------------------


def unwrapped(index: Index, axis: Axis) -> Index:
    """Returns an index that goes on along an axis where it would begin anew, if that is in at most two places."""
    remainders: dict[Atom, IndexLike] = {
        atom: atom.base for atom in _quotient_changes_of([index], axis) if isinstance(atom, Modulo)
    }
    return index.substitute(remainders)


def _quotient_changes(kernel: Kernel, axis: Axis) -> dict[FloorDivide | Modulo, list[int]]:
    return _quotient_changes_of([index for item in kernel.operations for index in indices(item)], axis)


def _quotient_changes_of(expressions: Sequence[Index], axis: Axis) -> dict[FloorDivide | Modulo, list[int]]:
    """Returns the divisions of the axis plus a number by a number with the positions at which the quotient changes.

    Those with more than two such positions are left out.
    """
    changes_of: dict[FloorDivide | Modulo, list[int]] = {}
    for atom in dict.fromkeys([atom for index in expressions for atom in index.atoms()]):
        if not isinstance(atom, FloorDivide | Modulo) or not isinstance(axis.size, int):
            continue
        shift, divisor = (atom.base - axis).constant, atom.divisor.constant
        if shift is not None and divisor is not None and axis.size <= MAX_WRAPS * divisor:
            first = divisor - shift % divisor
            changes = [point for point in range(first, axis.size, divisor) if point > 0]
            if changes and len(changes) <= MAX_WRAPS:
                changes_of[atom] = changes
    return changes_of


# --- conditions on an axis -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AxisComparison:
    """A comparison of an axis with a number, by the operation's name.

    `points` are the positions along the axis at which its value changes: one, or two for equality.
    """

    name: str
    points: tuple[Index, ...]

    def holds(self, precedes: Callable[[Index], bool]) -> bool:
        """Whether it is true in a segment; `precedes` returns whether that begins before a point."""
        is_before = precedes(self.points[0])
        match self.name:
            case "lt" | "le":
                return is_before
            case "ge" | "gt":
                return not is_before
            case _:
                return (not is_before and precedes(self.points[-1])) is (self.name == "eq")


def axis_comparisons(kernel: Kernel, axis: Axis) -> dict[int, AxisComparison]:
    """Returns the comparisons of the axis with numbers, by position."""
    comparisons = {position: _comparison(kernel, item, axis) for position, item in enumerate(kernel.operations)}
    return {position: comparison for position, comparison in comparisons.items() if comparison is not None}


def _comparison(kernel: Kernel, operation: Operation, axis: Axis) -> AxisComparison | None:
    """Returns a comparison of the axis with a number or a size; None for other operations."""
    compared = _compared_indices(kernel, operation)
    if compared is None or not isinstance(operation, Compute):
        return None
    index, limit = compared
    stride = index.stride(axis)
    scale = None if stride is None else stride.constant
    if scale is None or scale <= 0:
        return None
    number = limit - (index - as_index(axis) * scale)
    if not _is_uniform(number) or (scale > 1 and number.constant is None):
        return None
    first_not_less, first_larger = -(-number // scale), number // scale + 1
    points = {"lt": (first_not_less,), "ge": (first_not_less,), "le": (first_larger,), "gt": (first_larger,)}
    return AxisComparison(operation.name, points.get(operation.name, (first_not_less, first_larger)))


def comparisons_at(kernel: Kernel, axis: Axis, element: int) -> dict[int, bool]:
    """Returns the comparisons of index values with numbers that have one result where an axis has a value.

    Returns results by position.
    """
    results: dict[int, bool] = {}
    for position, operation in enumerate(kernel.operations):
        compared = _compared_indices(kernel, operation)
        if compared is not None:
            assert isinstance(operation, Compute), "comparisons are computed"
            result = _result(operation.name, compared[0].substitute({axis: element}) - compared[1])
            if result is not None:
                results[position] = result
    return results


def _result(name: str, difference: Index) -> bool | None:
    """Returns the result of a comparison of a difference with 0, or None if it may have several."""
    known = {
        "ge": difference.is_nonnegative(),
        "lt": (-difference - 1).is_nonnegative(),
        "gt": (difference - 1).is_nonnegative(),
        "le": (-difference).is_nonnegative(),
        "eq": difference.constant == 0,
    }
    known["ne"] = known["gt"] or known["lt"]
    if known[name]:
        return True
    return False if known[OPPOSITES[name]] else None


def _compared_indices(kernel: Kernel, operation: Operation) -> tuple[Index, Index] | None:
    """Returns an index value and the number or size that it is compared with; None for other operations."""
    if not isinstance(operation, Compute) or operation.name not in COMPARISONS:
        return None
    left, right = [kernel.operations[operand] for operand in operation.operands]
    limit = _uniform_index(right) if isinstance(left, IndexValue) else None
    return (left.index, limit) if isinstance(left, IndexValue) and limit is not None else None


def _uniform_index(operation: Operation) -> Index | None:
    """Returns the value of an operation that is the same in every iteration as an index, or None."""
    if isinstance(operation, Constant):
        return as_index(int(operation.value))
    return operation.index if isinstance(operation, IndexValue) and _is_uniform(operation.index) else None


def _is_uniform(index: Index) -> bool:
    return not any(isinstance(atom, Axis | IndirectIndex) for atom in index.atoms())


# --- specialisation --------------------------------------------------------------------------------------------------


def decide_comparisons(kernel: Kernel, results: Mapping[int, bool]) -> Kernel:
    """Returns the kernel specialised to a segment, in which comparisons have these results, by position.

    Operations keep their positions.
    """
    new: list[Operation] = []
    same = list(range(len(kernel.operations)))
    truth: dict[int, bool] = {}

    for position, old in enumerate(kernel.operations):
        operation = map_operation(old, same.__getitem__)
        if position in results:
            truth[position] = results[position]
        elif isinstance(operation, Compute):
            _fold(operation, position, same, truth)
            _fold_cast(operation, position, same, new)
        if position in truth:
            operation = Constant(truth[position], torch.bool)
        new.append(_fold_constant_cast(_fold_mask(operation, truth), new))
    return replace(kernel, operations=tuple(new))


def _fold(operation: Compute, position: int, same: list[int], truth: dict[int, bool]) -> None:
    """Records a constant bool in `truth`, and an operation that equals another one in `same`."""
    known = [truth.get(operand) for operand in operation.operands]
    if operation.name == "where" and known[0] is not None:
        chosen = operation.operands[1 if known[0] else 2]
        same[position] = same[chosen]
        if chosen in truth:
            truth[position] = truth[chosen]
    elif operation.name == "logical_not" and known[0] is not None:
        truth[position] = not known[0]
    elif operation.dtype is torch.bool and operation.name in _ABSORBING_VALUES:
        decisive = _ABSORBING_VALUES[operation.name]
        if decisive in known:
            truth[position] = decisive
        elif known == [not decisive, not decisive]:
            truth[position] = not decisive
        elif (not decisive) in known:
            other = operation.operands[0 if known[0] is None else 1]
            same[position] = same[other]


def _fold_cast(operation: Compute, position: int, same: list[int], new: list[Operation]) -> None:
    """Records in `same` a half-precision value that is widened and narrowed again, as in a segment of a cat."""
    if operation.name != "cast" or operation.dtype not in STORAGE_ONLY:
        return
    wide = new[operation.operands[0]]
    if isinstance(wide, Compute) and wide.name == "cast":
        source = new[wide.operands[0]]
        if isinstance(source, Load) and source.dtype is operation.dtype:
            same[position] = wide.operands[0]


def _fold_constant_cast(operation: Operation, new: list[Operation]) -> Operation:
    """Returns a constant instead of a cast of one, as of the infinity that a mask selects."""
    if not isinstance(operation, Compute) or operation.name != "cast":
        return operation
    constant = new[operation.operands[0]]
    if not isinstance(constant, Constant) or not {constant.dtype, operation.dtype} <= WITH_INFINITIES:
        return operation
    return Constant(constant.value, operation.dtype) if constant.value in EXACT_NUMBERS else operation


def _fold_mask(operation: Operation, truth: dict[int, bool]) -> Operation:
    """Returns an operation without a constant mask; one that is always masked becomes a constant."""
    if not isinstance(operation, Load | Store | DeviceAssert) or operation.mask not in truth:
        return operation
    if truth[operation.mask]:
        return replace(operation, mask=None)
    return Constant(operation.other, operation.dtype) if isinstance(operation, Load) else Constant(0, torch.int64)
