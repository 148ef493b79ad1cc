"""Bounds of streamed axes: positions that conditions on indices exclude, so that a schedule need not visit them.

A causal mask, a window, the lengths of sequences and the position of a decoding step compare the index of a streamed
axis with a value that does not depend on it. Where such a comparison fails, the elements are neutral: scores are minus
infinity, or weights zero. A bias of large finite numbers is no bound: a row of such scores alone has equal weights.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from fxwrap.loop_ir.atoms import Axis
from fxwrap.loop_ir.body_operations import Compute, Constant, DeviceAssert, IndexValue, Operation, operation_dtype
from fxwrap.loop_ir.index import ZERO, Index, as_index
from fxwrap.loop_ir.kernel import Kernel
from fxwrap.loop_ir.operations import OPPOSITES

_FLIPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}

_LARGEST = 1 << 60
"""More than any index. Numbers are limited to this, so that no sum of some of them overflows."""


@dataclass(frozen=True)
class AxisBound:
    """A bound of the indices of a streamed axis beyond which elements are neutral.

    Fields:
        axis: the axis.
        condition: the operation whose value is `holds` for indices within the bound, and for no others.
        holds: that value.
        limit: the operation of which indices are less; with `is_lower`, at least that.
        is_lower: whether the bound is that of the first index.
    """

    axis: Axis
    condition: int
    holds: bool
    limit: int
    is_lower: bool


@dataclass(frozen=True)
class _LinearValue:
    """A multiple of an axis, plus an index, plus multiples of operations: pairs of a factor and an operation."""

    coefficient: int
    index: Index = ZERO
    terms: tuple[tuple[int, int], ...] = ()

    def plus(self, other: _LinearValue, factor: int) -> _LinearValue:
        terms = (*self.terms, *[(number * factor, position) for number, position in other.terms])
        index = self.index + other.index * factor
        return _LinearValue(self.coefficient + factor * other.coefficient, index, terms)


def find_bounds(
    kernel: Kernel, elements: Sequence[int], neutral: float, axes: Sequence[Axis], inner: Collection[Axis]
) -> tuple[tuple[AxisBound, ...], Kernel]:
    """Returns the bounds of streamed axes beyond which all elements are neutral, and the kernel with their limits.

    Elements are neutral that are 0, or with a negative `neutral`, that are at most that, such as scores without weight.
    Limits are operations of the kernel, or new ones after its last. None depends on its axis, on streamed axes after
    it, or on `inner` axes. A bound that an assertion of excluded positions needs is none.
    """
    return _BoundFinder(kernel, neutral, axes, inner).find(elements)


def find_masks(
    kernel: Kernel, elements: Sequence[int], number: float, axis: Axis, inner: Collection[Axis]
) -> tuple[tuple[AxisBound, ...], Kernel]:
    """Returns comparisons of a streamed axis that mask some of what elements are computed from, and the kernel.

    They select a constant that is at most `number`. Elements beyond them count. The kernel has their limits, which are
    as those of `find_bounds`.
    """
    return _BoundFinder(kernel, number, [axis], inner).find_masks(elements)


@dataclass
class _BoundFinder:
    kernel: Kernel
    neutral: float
    axes: Sequence[Axis]
    inner: Collection[Axis]
    added: list[Operation] = field(default_factory=list)

    def find(self, elements: Sequence[int]) -> tuple[tuple[AxisBound, ...], Kernel]:
        first, *others = [dict.fromkeys(self._literals(position, self.neutral)) for position in elements]
        bounds: list[AxisBound] = []
        for condition, holds in first:
            if all((condition, holds) in item for item in others):
                bound = self._bound(condition, holds)
                bounds += [] if bound is None or self._is_asserted(bound) else [bound]
        return tuple(bounds), self._extended()

    def find_masks(self, elements: Sequence[int]) -> tuple[tuple[AxisBound, ...], Kernel]:
        bounds = dict[int, AxisBound]()
        for position in sorted(self.kernel.backward_slice(elements)):
            operation = self.kernel.operations[position]
            if isinstance(operation, Compute) and operation.name == "where":
                test, *choices = operation.operands
                for holds, other in zip((True, False), reversed(choices), strict=True):
                    for literal in self._conjuncts(test, holds) if self._is_neutral(other, self.neutral) else ():
                        bound = None if literal[0] in bounds else self._bound(*literal)
                        bounds |= {} if bound is None else {literal[0]: bound}
        return tuple(bounds.values()), self._extended()

    def _extended(self) -> Kernel:
        kernel = self.kernel
        operations = (*kernel.operations, *self.added)
        return Kernel(kernel.axes, kernel.reduced, kernel.inputs, kernel.outputs, operations) if self.added else kernel

    # --- conditions -------------------------------------------------------------------------------------------------

    def _literals(self, position: int, neutral: float) -> Iterator[tuple[int, bool]]:
        """Yields conditions, with their values without any of which a value is neutral.

        The products of masked positions do not count, even if they are NaN. A product is 0 where both factors are.
        """
        operation = self.kernel.operations[position]
        if not isinstance(operation, Compute):
            return
        match operation.name, operation.operands:
            case "where", (condition, value, other) if self._is_neutral(other, neutral):
                yield from self._conjuncts(condition, True)
                yield from self._literals(value, neutral)
            case "where", (condition, value, other) if self._is_neutral(value, neutral):
                yield from self._conjuncts(condition, False)
                yield from self._literals(other, neutral)
            case "add", operands if neutral < 0:
                for operand in operands:
                    yield from self._literals(operand, neutral)
            case "cast", (operand,) if operation.dtype.is_floating_point:
                yield from self._literals(operand, neutral)
            case "mul", (one, other) if neutral < 0:
                for operand, factor in ((one, other), (other, one)):
                    number = self._positive(factor)
                    if number is not None:
                        yield from self._literals(operand, neutral / number)
            case "mul", (left, right) if neutral == 0:
                shared = {*self._literals(right, neutral)}
                yield from [item for item in self._literals(left, neutral) if item in shared]
            case _:
                pass

    def _conjuncts(self, condition: int, holds: bool) -> Iterator[tuple[int, bool]]:
        """Yields the conditions, with their values, that a condition with a value implies."""
        operation = self.kernel.operations[condition]
        name = operation.name if isinstance(operation, Compute) else ""
        if isinstance(operation, Compute) and name == ("logical_and" if holds else "logical_or"):
            for operand in operation.operands:
                yield from self._conjuncts(operand, holds)
        elif isinstance(operation, Compute) and name == "logical_not":
            yield from self._conjuncts(operation.operands[0], not holds)
        else:
            yield condition, holds

    def _is_neutral(self, position: int, neutral: float) -> bool:
        operation = self.kernel.operations[position]
        return isinstance(operation, Constant) and (operation.value <= neutral < 0 or operation.value == neutral)

    def _positive(self, position: int) -> float | None:
        """Returns the value of a constant that is positive and finite."""
        operation = self.kernel.operations[position]
        if isinstance(operation, Constant) and 0 < operation.value < math.inf:
            return float(operation.value)
        return None

    def _is_asserted(self, bound: AxisBound) -> bool:
        """Whether an assertion checks positions beyond a bound."""
        for position, operation in enumerate(self.kernel.operations):
            if isinstance(operation, DeviceAssert) and bound.axis in self.kernel.value_axes[position]:
                masks = () if operation.mask is None else self._conjuncts(operation.mask, True)
                if (bound.condition, bound.holds) not in masks:
                    return True
        return False

    # --- comparisons ------------------------------------------------------------------------------------------------

    def _bound(self, condition: int, holds: bool) -> AxisBound | None:
        """Returns the bound that a condition with a value is, if it compares the index of an axis with a limit."""
        test = self.kernel.operations[condition]
        if isinstance(test, Compute) and test.name == ("logical_or" if holds else "logical_and"):
            return self._bound_of_either(condition, holds, test.operands)
        if not isinstance(test, Compute) or test.name not in _FLIPPED:
            return None
        relation, (left, right) = test.name if holds else OPPOSITES[test.name], test.operands
        for axis in self.axes:
            if axis not in self.kernel.value_axes[condition]:
                continue
            count = len(self.added)
            for one, other, name in ((left, right, relation), (right, left, _FLIPPED[relation])):
                limit = self._limit(one, other, axis, name in ("le", "gt"))
                if limit is not None and self._is_known(limit, axis):
                    return AxisBound(axis, condition, holds, limit, name in ("ge", "gt"))
                del self.added[count:]
        return None

    def _bound_of_either(self, condition: int, holds: bool, parts: Sequence[int]) -> AxisBound | None:
        """Returns the bound of two conditions, one of which has to have a value: the wider bound of both."""
        for one, other in (parts, parts[::-1]):
            count, bound = len(self.added), self._single_bound(one, holds)
            limit = None if bound is None else self._wider_limit(bound, other, holds)
            if bound is not None and limit is not None and self._is_known(limit, bound.axis):
                return AxisBound(bound.axis, condition, holds, limit, bound.is_lower)
            del self.added[count:]
        return None

    def _single_bound(self, condition: int, holds: bool) -> AxisBound | None:
        """Returns the bound of a condition that implies no others."""
        literals = [*self._conjuncts(condition, holds)]
        return self._bound(*literals[0]) if len(literals) == 1 else None

    def _wider_limit(self, bound: AxisBound, other: int, holds: bool) -> int | None:
        """Returns the limit of a bound that does not count where another condition has a value.

        That has a bound of the same kind, whose limit counts there, or a value before the loops over all streamed axes.
        """
        limit = self._add(Compute("cast", (bound.limit,), torch.int64))
        if self.kernel.value_axes[other].isdisjoint(self.axes):
            everything = self._add(Constant(0 if bound.is_lower else _LARGEST, torch.int64))
            choice = (everything, limit) if holds else (limit, everything)
            return self._add(Compute("where", (other, *choice), torch.int64))
        second = self._single_bound(other, holds)
        if second is None or (second.axis, second.is_lower) != (bound.axis, bound.is_lower):
            return None
        cast = self._add(Compute("cast", (second.limit,), torch.int64))
        return self._add(Compute("minimum" if bound.is_lower else "maximum", (limit, cast), torch.int64))

    def _is_known(self, limit: int, axis: Axis) -> bool:
        """Whether an operation has a value before the loop over an axis."""
        kernel, inside = self._extended(), {*self.axes[self.axes.index(axis) :], *self.inner}
        has_reduction = not kernel.backward_slice([limit]).isdisjoint(kernel.reductions)
        return inside.isdisjoint(kernel.value_axes[limit]) and not has_reduction

    def _limit(self, left: int, right: int, axis: Axis, is_next: bool) -> int | None:
        """Returns the least number of an axis with which an operation is at least another one, or greater (`is_next`).

        None where the first operation less the second one does not grow with the axis by a constant.
        """
        index = self.kernel.operations[left]
        is_axis = isinstance(index, IndexValue) and index.index.single_axis == axis
        if is_axis and not is_next and axis not in self.kernel.value_axes[right]:
            return right
        one, other = self._linear(left, axis), self._linear(right, axis)
        if one is None or other is None or one.coefficient <= other.coefficient:
            return None
        value, step = other.plus(one, -1), one.coefficient - other.coefficient
        total = self._add(IndexValue(value.index + (step if is_next else step - 1)))
        for factor, position in value.terms:
            term = self._term(position)
            for _ in range(abs(factor)):
                total = self._add(Compute("add" if factor > 0 else "sub", (total, term), torch.int64))
        if step > 1:
            total = self._add(Compute("floor_divide", (total, self._add(Constant(step, torch.int64))), torch.int64))
        return total

    def _term(self, position: int) -> int:
        """Returns the operation of a number, int64, so that no sum of some overflows."""
        term = self._add(Compute("cast", (position,), torch.int64))
        if operation_dtype(self.kernel.operations[position]) is torch.int64:
            for name, limit in (("minimum", _LARGEST), ("maximum", -_LARGEST)):
                term = self._add(Compute(name, (term, self._add(Constant(limit, torch.int64))), torch.int64))
        return term

    def _add(self, operation: Operation) -> int:
        """Returns the position of an equal operation, or of a new one after the last."""
        operations = (*self.kernel.operations, *self.added)
        if operation in operations:
            return operations.index(operation)
        self.added.append(operation)
        return len(operations)

    def _linear(self, position: int, axis: Axis) -> _LinearValue | None:
        """Returns an integer as a multiple of an axis plus what does not depend on it; None for other values.

        Sums of an index of the axis and a number are those that do not overflow.
        """
        operation = self.kernel.operations[position]
        if operation_dtype(operation) not in (torch.int32, torch.int64):
            return None
        match operation:
            case IndexValue():
                stride = operation.index.stride(axis)
                if stride is None or stride.constant is None:
                    return None
                return _LinearValue(stride.constant, operation.index - stride * axis)
            case Constant() if abs(operation.value) < _LARGEST:
                return _LinearValue(0, as_index(int(operation.value)))
            case _ if axis not in self.kernel.value_axes[position]:
                return _LinearValue(0, ZERO, ((1, position),))
            case Compute("cast", (operand,)):
                value = self._linear(operand, axis)
                is_narrowed = operation.dtype is torch.int32 and value is not None and value.terms
                return None if is_narrowed else value
            case Compute("add" | "sub" as name, (one, other)):
                left, right = self._linear(one, axis), self._linear(other, axis)
                return None if left is None or right is None else left.plus(right, 1 if name == "add" else -1)
            case _:
                return None
