"""Recognition of streaming reductions: sums over axes whose terms are computed from sums of products.

Such a kernel can be computed in one pass over tiles of the reduced axes: the products of a tile are matmuls, weights
are computed from them element by element, and sums of weights times values are matmuls again. Weights may be
exponentials that a maximum over the same axes shifts; then the pass has a running maximum, and sums are rescaled
whenever it grows (online softmax: Milakov and Gimelshein, 2018). Attention is one, and so are its gradients, whose
maximum is known (FlashAttention: Dao et al., 2022). The kernel's operations say nothing about the pass, which is a
schedule of a printer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from fxwrap.loop_ir.atoms import Axis
from fxwrap.loop_ir.body_operations import Compute, Constant, IndexValue, Operation, Reduce, Store, operands
from fxwrap.loop_ir.kernel import Kernel
from fxwrap.loop_ir.streaming_bounds import AxisBound, find_bounds, find_masks


@dataclass(frozen=True)
class Contraction:
    """A sum of products over axes: operation `position` is the sum of `left` times `right` over `axes`."""

    position: int
    axes: tuple[Axis, ...]
    left: int
    right: int


@dataclass(frozen=True)
class WeightSum:
    """A sum of weights: operation `position` is the sum of `weights` over the streamed axes."""

    position: int
    weights: int


@dataclass(frozen=True)
class ScaledWeights:
    """Weights times a factor of each row and streamed position (dropout): operation `position` multiplies them."""

    position: int
    factor: int


@dataclass(frozen=True)
class Update:
    """A store for each row and streamed position: operation `position` adds or sets `value` where `conditions` hold.

    It happens once for all columns. A value that is set may be cast to the dtype of its buffer.
    """

    position: int
    value: int
    conditions: tuple[int, ...]


_MASKED = -1000.0
"""The largest number that masks scores: models use -10000 and less, which may be rounded."""

_LOWEST = -1e37
"""The largest number that masks scores as the lowest number of its dtype does, and multiples of it by a scale."""

FAR_ABOVE_LOWEST = -1e30
"""Beside a larger score, one below `_LOWEST` has no weight, whatever is added to it."""


@dataclass(frozen=True)
class RunningMaximum:
    """The maximum that shifts weights, as positions of operations.

    Fields:
        scores: the operand of the maximum.
        maximum: the reduction of the scores.
        weights: exp(scores - maximum), with 0 for a maximum of minus infinity.
    """

    scores: int
    maximum: int
    weights: int


@dataclass(frozen=True)
class StreamingReduction:
    """The parts of a streaming reduction, as positions of operations.

    Fields:
        axes: the reduced axes of the sums, the tiles of which are streamed.
        row: the parallel axis of which the second factors of products are independent.
        columns: the parallel axes on which only weighted sums depend, in the kernel's order; each sum on at most one.
        products: the sums of products that weights are computed from: `left` varies over rows, `right` over `axes`.
        softmax: the running maximum of the weights, or None where they are computed from the products alone.
        sums: sums of weights over `axes`.
        weighted_sums: sums over `axes` of weights, `left`, times values that vary over columns and not over rows.
        scaled_weights: weights that a maximum shifts, times factors, which are weights of such sums.
        updates: stores of values of each row and streamed position.
        row_updates: additions of values of each row, which are computed from sums over `axes`.
        bounds: bounds of `axes`, beyond which weights, and values of updates, are zero. Limits may vary over rows.
        masks: bounds of the last axis beyond which scores, or what they are sums of, are large negative numbers,
            which weights may depend on.
        lowest_masks: those beyond which scores have no weight in rows whose maximum is above `FAR_ABOVE_LOWEST`.
        kernel: the kernel, with operations after its last that limits are computed from.
    """

    axes: tuple[Axis, ...]
    row: Axis
    columns: tuple[Axis, ...]
    products: tuple[Contraction, ...]
    softmax: RunningMaximum | None
    sums: tuple[WeightSum, ...]
    weighted_sums: tuple[Contraction, ...]
    scaled_weights: tuple[ScaledWeights, ...]
    updates: tuple[Update, ...]
    row_updates: tuple[Update, ...]
    bounds: tuple[AxisBound, ...]
    masks: tuple[AxisBound, ...]
    lowest_masks: tuple[AxisBound, ...]
    kernel: Kernel

    @property
    def visit_bound(self) -> AxisBound | None:
        """The bound of the number of iterations of an axis before the innermost one, as of the list of a block mask."""
        return next((item for item in self.bounds if item.axis != self.axes[-1] and self.is_exact(item)), None)

    @property
    def row_bounds(self) -> tuple[AxisBound, ...]:
        """Bounds of the last axis whose limits vary over rows, the lowest number's included."""
        bounds = dict.fromkeys([*self.bounds, *self.lowest_masks])
        return tuple([item for item in bounds if item.axis == self.axes[-1] and not self.is_exact(item)])

    def is_exact(self, bound: AxisBound) -> bool:
        """Whether a bound is the same for all rows, so that its condition holds in a loop within it."""
        return self.row not in self.kernel.value_axes[bound.limit]

    @property
    def weights(self) -> tuple[int, ...]:
        """The positions of the different weights that are summed, and of values that are added to memory."""
        used = [*[item.left for item in self.weighted_sums], *[item.weights for item in self.sums]]
        return tuple(dict.fromkeys([*used, *[item.value for item in self.updates]]))

    @property
    def elements(self) -> tuple[int, ...]:
        """The values that are computed element by element: the scores, or the weights where there is no maximum."""
        return self.weights if self.softmax is None else (self.softmax.scores,)

    @property
    def results(self) -> tuple[int, ...]:
        """The positions of the reductions over `axes`."""
        maximum = [] if self.softmax is None else [self.softmax.maximum]
        sums = [*[item.position for item in self.sums], *[item.position for item in self.weighted_sums]]
        return (*maximum, *sums)


def find_streaming_reduction(kernel: Kernel) -> StreamingReduction | None:
    """Returns the parts of a kernel that is one streaming reduction, else None."""
    return None if kernel.scans else _Finder(kernel).find()


_Part = TypeVar("_Part")


def _complete(parts: Sequence[_Part | None]) -> tuple[_Part, ...] | None:
    """Returns the parts, or None if one is None."""
    known = tuple([part for part in parts if part is not None])
    return known if len(known) == len(parts) else None


class _Finder:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.reductions = {item: self._reduction(item) for item in kernel.reductions}

    def _reduction(self, position: int) -> Reduce:
        operation = self.kernel.operations[position]
        assert isinstance(operation, Reduce)
        return operation

    def find(self) -> StreamingReduction | None:
        axes = self._streamed_axes()
        if axes is None:
            return None
        outer = [position for position, item in self.reductions.items() if self.kernel.reduced_by(item) == axes]
        inner = [position for position in self.reductions if position not in outer]
        products = _complete([self._contraction(position, axes) for position in inner])
        row = self._row(products, axes) if products else None
        if not products or row is None:
            return None
        maxima = [position for position in outer if self.reductions[position].kind == "max"]
        softmax = self._softmax(maxima[0], inner) if len(maxima) == 1 else None
        if maxima and softmax is None:
            return None
        sums = _complete([self._sum(position, row, axes, softmax) for position in outer if position not in maxima])
        weighted = tuple([item for item in sums or () if isinstance(item, Contraction)])
        columns = frozenset[Axis]().union(*[self._columns(item) for item in weighted])
        updates = self._updates(columns, outer)
        if sums is None or updates is None:
            return None
        lefts = dict.fromkeys([item.left for item in weighted])
        parts = StreamingReduction(
            axes=axes,
            row=row,
            columns=tuple([axis for axis in self.kernel.axes if axis in columns]),
            products=products,
            softmax=softmax,
            sums=tuple([item for item in sums if isinstance(item, WeightSum)]),
            weighted_sums=weighted,
            scaled_weights=tuple([part for left in lefts if (part := self._scaled(left, softmax)) is not None]),
            updates=tuple([item for item in updates if self.kernel.varying[item.position]]),
            row_updates=tuple([item for item in updates if not self.kernel.varying[item.position]]),
            bounds=(),
            masks=(),
            lowest_masks=(),
            kernel=self.kernel,
        )
        return self._bounded(parts) if self._is_supported(parts) else None

    def _is_supported(self, parts: StreamingReduction) -> bool:
        """Whether a pass has the results: sums on at most one column axis each, of elements that depend on none."""
        elements = [*parts.elements, *[part.factor for part in parts.scaled_weights]]
        return (
            bool(parts.weighted_sums or parts.updates or parts.row_updates)
            and all(len(self._columns(item)) <= 1 for item in parts.weighted_sums)
            and all(self._reduced_axes(item.position) == parts.axes for item in parts.updates)
            and not (parts.softmax and parts.updates)
            and all(self.kernel.value_axes[item].isdisjoint(parts.columns) for item in elements)
        )

    def _operation(self, position: int) -> Operation:
        return self.kernel.operations[position]

    def _streamed_axes(self) -> tuple[Axis, ...] | None:
        """Returns the axes of the last reductions, if they are the same; without others, of products' updates."""
        updated = [position for position in self._stores("add", "set") if self.kernel.varying[position]]
        if updated and not any(self.kernel.stages[position] for position in self.reductions):
            return self._reduced_axes(updated[0])
        last = max([self.kernel.stages[position] for position in self.reductions], default=0)
        spans = {self.kernel.reduced_by(item) for position, item in self.reductions.items()
                 if self.kernel.stages[position] == last}  # fmt: skip
        return spans.pop() if len(spans) == 1 else None

    def _reduced_axes(self, position: int) -> tuple[Axis, ...]:
        """Returns the reduced axes that a value depends on, in the kernel's order."""
        return tuple([axis for axis in self.kernel.reduced if axis in self.kernel.value_axes[position]])

    # --- products ---------------------------------------------------------------------------------------------------

    def _contraction(self, position: int, axes: tuple[Axis, ...]) -> Contraction | None:
        reduction = self.reductions[position]
        product = self._operation(reduction.operands[0])
        if not frozenset(axes).isdisjoint(self.kernel.reduced_by(reduction)):
            return None
        if reduction.kind != "sum" or not isinstance(product, Compute) or product.name != "mul":
            return None
        left, right = product.operands
        return Contraction(position, self.kernel.reduced_by(reduction), left, right)

    def _row(self, products: tuple[Contraction, ...], axes: tuple[Axis, ...]) -> Axis | None:
        """Returns the innermost parallel axis on which all left factors depend and no right one, if there is one."""
        lefts = [self.kernel.value_axes[item.left] for item in products]
        rights = frozenset[Axis]().union(*[self.kernel.value_axes[item.right] for item in products])
        if any(not left.isdisjoint(axes) for left in lefts):
            return None
        rows = [axis for axis in self.kernel.axes if all(axis in left for left in lefts) and axis not in rights]
        return rows[-1] if rows else None

    # --- sums -------------------------------------------------------------------------------------------------------

    def _sum(
        self, position: int, row: Axis, axes: tuple[Axis, ...], softmax: RunningMaximum | None
    ) -> WeightSum | Contraction | None:
        """Returns a sum over the streamed axes; None for other reductions and, with a maximum, for other weights."""
        reduction = self.reductions[position]
        (summed,) = reduction.operands
        if reduction.kind != "sum":
            return None
        if softmax is not None and summed == softmax.weights:
            return WeightSum(position, summed)
        operation = self._operation(summed)
        if isinstance(operation, Compute) and operation.name == "mul":
            for left, right in (operation.operands, operation.operands[::-1]):
                is_weight = row in self.kernel.value_axes[left]
                if softmax is not None:
                    is_weight = left == softmax.weights or self._scaled(left, softmax) is not None
                if is_weight and left != right and row not in self.kernel.value_axes[right]:
                    contraction = Contraction(position, axes, left, right)
                    if softmax is not None or self._columns(contraction):
                        return contraction
        return None if softmax is not None else WeightSum(position, summed)

    def _scaled(self, position: int, softmax: RunningMaximum | None) -> ScaledWeights | None:
        """Returns the parts of a product of the weights and a factor that is computed without sums and the maximum."""
        operation = self._operation(position)
        if softmax is None or not isinstance(operation, Compute) or operation.name != "mul":
            return None
        for weights, factor in (operation.operands, operation.operands[::-1]):
            if weights == softmax.weights and self._preceding(factor).isdisjoint(self.reductions):
                return ScaledWeights(position, factor)
        return None

    def _columns(self, item: Contraction) -> frozenset[Axis]:
        """Returns the parallel axes on which values depend and weights do not."""
        weights, values = self.kernel.value_axes[item.left], self.kernel.value_axes[item.right]
        return values.difference(weights, self.kernel.reduced)

    # --- updates of memory ------------------------------------------------------------------------------------------

    def _stores(self, *modes: str) -> list[int]:
        operations = enumerate(self.kernel.operations)
        return [position for position, item in operations if isinstance(item, Store) and item.mode in modes]

    def _updates(self, columns: frozenset[Axis], sums: list[int]) -> list[Update] | None:
        """Returns the additions to memory, and stores of each streamed position.

        None where one happens for several columns, where others update, and where one of each streamed position is
        computed from `sums` over these.
        """
        updates: list[Update] = []
        if self._stores("max", "min", "prod"):
            return None
        set_inside = [position for position in self._stores("set") if self.kernel.varying[position]]
        for position in sorted([*self._stores("add"), *set_inside]):
            store = self._operation(position)
            assert isinstance(store, Store)
            conditions = [] if store.mask is None else [*self._conjuncts(store.mask)]
            first = {item: axis for item in conditions for axis in columns if self._is_first(item, axis)}
            others = tuple([item for item in conditions if item not in first])
            value = self._uncast(store)
            used = [*others, value]
            axes = self.kernel.address_axes[position].union(*[self.kernel.value_axes[item] for item in used])
            if frozenset(first.values()) != columns or not axes.isdisjoint(columns):
                return None
            if self.kernel.varying[position] and not self._preceding(position).isdisjoint(sums):
                return None
            updates.append(Update(position, value, others))
        return updates

    def _uncast(self, store: Store) -> int:
        """Returns the value of a store before casts, which sums over rows or positions have not."""
        value = store.value
        while store.mode == "set" and isinstance(cast := self._operation(value), Compute) and cast.name == "cast":
            (value,) = cast.operands
        return value

    def _is_first(self, condition: int, axis: Axis) -> bool:
        """Whether a condition is that the index of an axis is 0."""
        test = self._operation(condition)
        if not isinstance(test, Compute) or test.name != "eq":
            return False
        index, zero = map(self._operation, test.operands)
        is_axis = isinstance(index, IndexValue) and index.index.single_axis == axis
        return is_axis and isinstance(zero, Constant) and zero.value == 0

    # --- the shift by the maximum -----------------------------------------------------------------------------------

    def _softmax(self, maximum: int, products: list[int]) -> RunningMaximum | None:
        """Returns the weights that a maximum shifts, if its scores are computed from all products."""
        scores = self.reductions[maximum].operands[0]
        weights = self._weights(scores, maximum)
        if weights is None or not self._preceding(scores).issuperset(products):
            return None
        return RunningMaximum(scores, maximum, weights)

    def _preceding(self, position: int) -> set[int]:
        """Returns the operations that one is computed from, up to reductions."""
        preceding, pending = set[int](), [position]
        while pending:
            at = pending.pop()
            if at not in preceding:
                preceding.add(at)
                pending.extend(() if isinstance(self._operation(at), Reduce) else operands(self._operation(at)))
        return preceding

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

    def _bounded(self, parts: StreamingReduction) -> StreamingReduction:
        """Returns the parts with the bounds beyond which all weights are zero, and scores minus infinity."""
        stores = [self._operation(item.position) for item in parts.updates]
        if any(isinstance(store, Store) and store.mode == "set" for store in stores):
            return parts  # zeros are stored, too
        neutral = 0.0 if parts.softmax is None else -math.inf
        inner = [*parts.columns, *[axis for product in parts.products for axis in product.axes]]
        bounds, kernel = find_bounds(self.kernel, parts.elements, neutral, parts.axes, inner)
        known, masks_of = {item.condition for item in bounds}, dict[float, tuple[AxisBound, ...]]()
        if parts.softmax is None:
            masks, kernel = find_masks(kernel, parts.elements, _MASKED, parts.axes[-1], [*parts.axes[:-1], *inner])
            masks = tuple([item for item in masks if item.condition not in known])
            return replace(parts, bounds=bounds, masks=masks, kernel=kernel)
        for number in (_MASKED, _LOWEST):
            masks, kernel = find_bounds(kernel, parts.elements, number, parts.axes[-1:], [*parts.axes[:-1], *inner])
            masks_of[number] = tuple([item for item in masks if item.condition not in known])
        return replace(parts, bounds=bounds, masks=masks_of[_MASKED], lowest_masks=masks_of[_LOWEST], kernel=kernel)

    def _conjuncts(self, condition: int) -> Iterator[int]:
        operation = self._operation(condition)
        if isinstance(operation, Compute) and operation.name == "logical_and":
            for operand in operation.operands:
                yield from self._conjuncts(operand)
        else:
            yield condition
