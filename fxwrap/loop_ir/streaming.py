"""Recognition of streaming reductions: a maximum, and sums of exponentials that it shifts, over the same axes.

Such a kernel can be computed in one pass over tiles of the reduced axes, with a running maximum and with sums that are
rescaled whenever it grows (online softmax: Milakov and Gimelshein, 2018; FlashAttention: Dao et al., 2022). Attention
is one. The kernel's operations say nothing about the pass, which is a schedule of a printer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from fxwrap.loop_ir.index import Axis
from fxwrap.loop_ir.kernel import Compute, Constant, IndexValue, Kernel, Operation, Reduce, operands


@dataclass(frozen=True)
class Contraction:
    """A sum of products over axes: operation `position` is the sum of `left` times `right` over `axes`."""

    position: int
    axes: tuple[Axis, ...]
    left: int
    right: int


@dataclass(frozen=True)
class TileBound:
    """The number of iterations of an axis that count: `condition` is that its index is less than operation `count`."""

    axis: Axis
    condition: int
    count: int


@dataclass(frozen=True)
class StreamingReduction:
    """The parts of a streaming reduction, as positions of operations.

    Fields:
        axes: the reduced axes of the maximum and the sums, the tiles of which are streamed.
        row: the parallel axis of which the second factors of products are independent.
        column: the parallel axis on which only the weighted sums depend, or None.
        product: the sum of products that the scores are computed from: `left` varies over rows, `right` over `axes`.
        scores: the operand of the maximum.
        maximum: the reduction of the scores.
        weights: exp(scores - maximum), with 0 for a maximum of minus infinity.
        sums: sums of weights over `axes`.
        weighted_sums: sums over `axes` of the weights times values that vary over columns and not over rows.
        bound: a number of iterations of one of `axes`, beyond which scores are minus infinity.
    """

    axes: tuple[Axis, ...]
    row: Axis
    column: Axis | None
    product: Contraction
    scores: int
    maximum: int
    weights: int
    sums: tuple[int, ...]
    weighted_sums: tuple[Contraction, ...]
    bound: TileBound | None

    @property
    def results(self) -> tuple[int, ...]:
        """The positions of the reductions over `axes`."""
        return (self.maximum, *self.sums, *[item.position for item in self.weighted_sums])


def find_streaming_reduction(kernel: Kernel) -> StreamingReduction | None:
    """Returns the parts of a kernel that is one streaming reduction, else None."""
    return None if kernel.scans else _Finder(kernel).find()


class _Finder:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.reductions = {item: self._reduction(item) for item in kernel.reductions}

    def _reduction(self, position: int) -> Reduce:
        operation = self.kernel.operations[position]
        assert isinstance(operation, Reduce)
        return operation

    def find(self) -> StreamingReduction | None:
        maxima = [position for position, item in self.reductions.items() if item.kind == "max"]
        if len(maxima) != 1:
            return None
        maximum = maxima[0]
        scores, axes = self._reduction(maximum).operands[0], self.kernel.reduced_by(self._reduction(maximum))
        inner = [item for item in self.reductions if self.kernel.reduced_by(self.reductions[item]) != axes]
        product = self._contraction(inner[0]) if len(inner) == 1 else None
        weights = self._weights(scores, maximum)
        if product is None or weights is None or not self._precedes(product.position, scores):
            return None
        row = self._row(product, axes)
        sums: list[int] = []
        weighted: list[Contraction] = []
        for position, reduction in self.reductions.items():
            if position in (maximum, product.position):
                continue
            if reduction.kind != "sum":
                return None
            if reduction.operands[0] == weights:
                sums.append(position)
                continue
            factors = self._factors(reduction.operands[0], weights)
            if factors is None:
                return None
            weighted.append(Contraction(position, axes, weights, factors))
        columns = self._columns(scores, weighted)
        if row is None or len(columns) > 1 or not weighted:
            return None
        values = [item.right for item in weighted]
        if any(row in self.kernel.value_axes[value] for value in values):
            return None
        bound = self._bound(scores, row, axes)
        parts = (product, scores, maximum, weights, tuple(sums), tuple(weighted), bound)
        return StreamingReduction(axes, row, next(iter(columns), None), *parts)

    def _operation(self, position: int) -> Operation:
        return self.kernel.operations[position]

    def _precedes(self, position: int, other: int) -> bool:
        """Whether an operation is among those that another is computed from, without reductions between them."""
        stack = [other]
        while stack:
            at = stack.pop()
            if at == position:
                return True
            if not isinstance(self._operation(at), Reduce):
                stack.extend(operands(self._operation(at)))
        return False

    def _contraction(self, position: int) -> Contraction | None:
        reduction = self.reductions[position]
        product = self._operation(reduction.operands[0])
        if reduction.kind != "sum" or not isinstance(product, Compute) or product.name != "mul":
            return None
        left, right = product.operands
        return Contraction(position, self.kernel.reduced_by(reduction), left, right)

    def _row(self, product: Contraction, axes: tuple[Axis, ...]) -> Axis | None:
        """Returns the innermost parallel axis of which only the left factor depends, if the factors are separable."""
        left, right = self.kernel.value_axes[product.left], self.kernel.value_axes[product.right]
        if not left.isdisjoint(axes):
            return None
        rows = [axis for axis in self.kernel.axes if axis in left and axis not in right]
        return rows[-1] if rows else None

    def _factors(self, position: int, weights: int) -> int | None:
        """Returns the value that a product multiplies the weights with."""
        operation = self._operation(position)
        if not isinstance(operation, Compute) or operation.name != "mul" or operation.operands.count(weights) != 1:
            return None
        return next(item for item in operation.operands if item != weights)

    def _columns(self, scores: int, weighted: list[Contraction]) -> set[Axis]:
        """Returns the parallel axes on which values depend and scores do not."""
        own = self.kernel.value_axes[scores].union(self.kernel.reduced)
        return {axis for item in weighted for axis in self.kernel.value_axes[item.right] - own}

    # --- the shift by the maximum -----------------------------------------------------------------------------------

    def _weights(self, scores: int, maximum: int) -> int | None:
        """Returns the position of exp(scores - maximum)."""
        for position, operation in enumerate(self.kernel.operations):
            if isinstance(operation, Compute) and operation.name == "exp":
                difference = self._operation(operation.operands[0])
                if isinstance(difference, Compute) and difference.name == "sub" and difference.operands[0] == scores:
                    if self._is_shift(difference.operands[1], maximum):
                        return position
        return None

    def _is_shift(self, position: int, maximum: int) -> bool:
        """Whether a value is the maximum, or a finite number instead of minus infinity."""
        if position == maximum:
            return True
        operation = self._operation(position)
        if not isinstance(operation, Compute) or operation.name != "where":
            return False
        condition, number, other = operation.operands
        test = self._operation(condition)
        if not isinstance(test, Compute) or test.name != "eq" or other != maximum:
            return False
        left, right = test.operands
        constant = self._operation(number)
        is_lowest = left == maximum and self._is_constant(right, -math.inf)
        return is_lowest and isinstance(constant, Constant) and math.isfinite(constant.value)

    def _is_constant(self, position: int, value: float) -> bool:
        operation = self._operation(position)
        return isinstance(operation, Constant) and operation.value == value

    # --- bounds -----------------------------------------------------------------------------------------------------

    def _bound(self, scores: int, row: Axis, axes: tuple[Axis, ...]) -> TileBound | None:
        """Returns the bound of a streamed axis beyond which all scores are minus infinity."""
        varying = {row, *axes, *self.kernel.reduced}
        for condition in self._conditions(scores):
            test = self._operation(condition)
            if isinstance(test, Compute) and test.name == "lt":
                index, count = test.operands
                value = self._operation(index)
                axis = value.index.single_axis if isinstance(value, IndexValue) else None
                if axis is not None and axis in axes and varying.isdisjoint(self.kernel.value_axes[count]):
                    return TileBound(axis, condition, count)
        return None

    def _conditions(self, scores: int) -> Iterator[int]:
        """Yields conditions without any of which the scores are minus infinity."""
        operation = self._operation(scores)
        while isinstance(operation, Compute) and operation.name == "where":
            condition, value, other = operation.operands
            if not self._is_constant(other, -math.inf):
                return
            yield from self._conjuncts(condition)
            operation = self._operation(value)

    def _conjuncts(self, condition: int) -> Iterator[int]:
        operation = self._operation(condition)
        if isinstance(operation, Compute) and operation.name == "logical_and":
            for operand in operation.operands:
                yield from self._conjuncts(operand)
        else:
            yield condition
