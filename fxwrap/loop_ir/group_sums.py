"""Contractions of quantised weights whose scales and zero points are applied to the sums of groups.

The weight of a group is an affine function of a small number, with a scale and a zero point that its group shares:
`sum_k x[k] * (n[k] - zero[g]) * scale[g]` is `sum_g scale[g] * (sum_k x[k] * n[k] - zero[g] * sum_k x[k])`. The inner
sums multiply numbers that half precision represents, so that only the results of groups are computed in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product as cartesian

import torch

from fxwrap.loop_ir.atoms import Axis, IndirectIndex, count_points
from fxwrap.loop_ir.body_operations import (
    Compute,
    DeviceAssert,
    IndexValue,
    Load,
    Operation,
    Reduce,
    Store,
    map_operation,
    operands,
    operation_dtype,
    renumber_index,
)
from fxwrap.loop_ir.builder import KernelBuilder, Scalar
from fxwrap.loop_ir.contraction import ContractionForm, ProductSum, reduced_axes
from fxwrap.loop_ir.index import Atom, Index, IndexLike, as_index
from fxwrap.loop_ir.kernel import Kernel
from fxwrap.loop_ir.operations import FLOAT8, HALF_PRECISION, OPERATIONS
from fxwrap.loop_ir.ranges import value_range
from fxwrap.symbolic import Number

NUMBER_BIAS: Mapping[torch.dtype, int] = {torch.bfloat16: 128, torch.float16: 1024}
"""By half-precision dtype, a power of two whose mantissa bits count: its bits plus n are those of its sum with n."""

_MAX_UNROLLED = 8
"""The largest number of weights in one packed element."""

_LARGEST_EXACT = {torch.bfloat16: 256, torch.float16: 2048}
"""By half-precision dtype, the integer up to which it represents all."""


@dataclass(frozen=True)
class GroupSum:
    """A sum over the elements of a group: of the products of pairs of operands, or of operands with None, by one."""

    reduction: int
    terms: tuple[tuple[int, int | None], ...]


@dataclass(frozen=True)
class GroupedSums:
    """The form of a kernel that sums groups: the contraction that it computes, and its steps.

    `contraction` has the axes of the results; its `summed` axes are those of a group's elements. `groups` are the
    reduced axes of groups, over which the reductions `totals` add values that are computed of the `sums` of a group.
    """

    contraction: ContractionForm
    groups: tuple[Axis, ...]
    sums: tuple[GroupSum, ...]
    totals: tuple[int, ...]


def sum_groups(contraction: ContractionForm, biased: bool = True) -> Kernel | None:
    """Returns a contraction with the coefficients of groups applied to sums of groups, or None where it has none.

    Packed elements are unpacked by as many products: the axes along which weights of one element lie are unrolled.
    If `biased`, natural numbers have `NUMBER_BIAS` added.
    """
    plans = _plans(contraction)
    return None if contraction.row_reductions or not plans else _GroupSummer(contraction, plans, biased=biased).run()


def split_sums(contraction: ContractionForm, size: int) -> Kernel | None:
    """Returns a contraction whose sums are those of parts of `size` products, or None.

    The column operands are exact in the half precision of the rows, and the products are along one axis of such parts.
    """
    (axis, *others), items = contraction.summed, contraction.sums
    row_dtypes = {row_precision(contraction, item) for item in items}
    count = axis.size
    if others or not isinstance(count, int) or count % size or contraction.row_reductions or contraction.group:
        return None
    (row_dtype, *more) = row_dtypes
    if more or row_dtype is None or contraction.dtype is not torch.float32:
        return None
    if not all(is_exact(contraction.kernel, item.column_operand, row_dtype) for item in items):
        return None
    part, inner = Axis(f"{axis.name}_part", count // size), Axis(f"{axis.name}_inner", size)
    plans = {item.reduction: _Plan(item, item.column_operand, (), row_dtype, (part,), (inner,), ()) for item in items}
    return _GroupSummer(contraction, plans, {axis: size * as_index(part) + inner}).run()


def has_groups(contraction: ContractionForm) -> bool:
    """Whether a contraction, without its row reductions, has coefficients of groups."""
    return bool(_plans(contraction))


def _plans(contraction: ContractionForm) -> dict[int, _Plan]:
    """Returns the plan of each sum if all have the same groups; else none."""
    plans = {item.reduction: _plan(contraction, item) for item in contraction.sums}
    planned = {at: plan for at, plan in plans.items() if plan is not None}
    shared = {(plan.row_dtype, plan.groups, plan.inner, plan.unrolled) for plan in planned.values()}
    return planned if len(planned) == len(plans) and len(shared) == 1 and contraction.group is None else {}


def find_grouped_sums(kernel: Kernel, contraction: ContractionForm) -> GroupedSums:
    """Returns the form of a kernel of `sum_groups`, which computes a contraction."""
    first = [position for position in kernel.reductions if kernel.stages[position] == 0]
    columns = frozenset(contraction.columns)
    sums = []
    for position in first:
        terms = [_operands_of(kernel, at, columns) for at in _addends(kernel, operands(kernel.operations[position])[0])]
        sums.append(GroupSum(position, tuple(terms)))
    inner = reduced_axes(kernel, first[0])
    products = [
        ProductSum(item.reduction, row, column) for item in sums for row, column in item.terms if column is not None
    ]
    return GroupedSums(
        replace(contraction, kernel=kernel, summed=inner, sums=tuple(products)),
        tuple([axis for axis in kernel.reduced if axis not in inner]),
        tuple(sums),
        tuple([position for position in kernel.reductions if kernel.stages[position] != 0]),
    )


def _addends(kernel: Kernel, position: int) -> list[int]:
    operation = kernel.operations[position]
    if isinstance(operation, Compute) and operation.name == "add" and not _is_operand(kernel, position):
        return [at for used in operation.operands for at in _addends(kernel, used)]
    return [position]


def _is_operand(kernel: Kernel, position: int) -> bool:
    """Whether a value is multiplied, so that it is no sum of products."""
    return any(
        isinstance(item, Compute) and item.name == "mul" and position in item.operands for item in kernel.operations
    )


def _operands_of(kernel: Kernel, position: int, columns: frozenset[Axis]) -> tuple[int, int | None]:
    """Returns the row and the column operand of a product, or a row operand alone."""
    operation = kernel.operations[position]
    if kernel.value_axes[position].isdisjoint(columns):
        return position, None
    assert isinstance(operation, Compute) and operation.name == "mul", "sums of groups add products"
    left, right = operation.operands
    return (right, left) if not kernel.value_axes[left].isdisjoint(columns) else (left, right)


# --- analysis -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Step:
    """An operation of a weight with a coefficient of its group; `is_left` states whether the weight is on the left."""

    name: str
    coefficient: int
    is_left: bool


@dataclass(frozen=True)
class _Plan:
    """A sum of products with a weight, which `steps` compute from a small number, the innermost first.

    `groups` and `inner` are the axes of groups and of their elements, `unrolled` those of weights in a packed element.
    """

    item: ProductSum
    number: int
    steps: tuple[_Step, ...]
    row_dtype: torch.dtype
    groups: tuple[Axis, ...]
    inner: tuple[Axis, ...]
    unrolled: tuple[Axis, ...]


def _plan(contraction: ContractionForm, item: ProductSum) -> _Plan | None:
    kernel, summed = contraction.kernel, frozenset(contraction.summed)
    loads = [kernel.operations[at] for at in contraction.prologue(item.column_operand)]
    loaded = [load.index.axes() & summed for load in loads if isinstance(load, Load) and load.index.axes() & summed]
    row_dtype = row_precision(contraction, item)
    if operation_dtype(kernel.operations[item.reduction]) is not torch.float32 or row_dtype is None or not loaded:
        return None
    if any(isinstance(atom, IndirectIndex) for load in loads if isinstance(load, Load) for atom in load.index.atoms()):
        return None
    own = max(loaded, key=len)
    groups = frozenset[Axis]().union(*[axes for axes in loaded if axes < own])
    inner, unrolled = own - groups, summed - own
    if not inner or not groups or not all(axes <= own for axes in loaded):
        return None
    packed = count_points(unrolled)
    if any(not isinstance(axis.size, int) for axis in summed) or not isinstance(packed, int) or packed > _MAX_UNROLLED:
        return None
    number, steps = _affine(kernel, item.column_operand, frozenset(inner | unrolled))
    if not steps or not is_exact(kernel, number, row_dtype):
        return None
    ordered = [tuple([axis for axis in kernel.reduced if axis in part]) for part in (groups, inner, unrolled)]
    return _Plan(item, number, steps, row_dtype, *ordered)


def row_precision(contraction: ContractionForm, item: ProductSum) -> torch.dtype | None:
    """Returns the half precision in which eager mode has a row operand: the matmul's, or a widened value's; or None."""
    reduction = contraction.kernel.operations[item.reduction]
    assert isinstance(reduction, Reduce), "sums are reductions"
    widened = widened_dtype(contraction.kernel, item.row_operand)
    return reduction.operand_precision or (widened if widened in HALF_PRECISION else None)


def _affine(kernel: Kernel, position: int, axes: frozenset[Axis]) -> tuple[int, tuple[_Step, ...]]:
    """Returns the number that a weight is an affine function of, and the steps from it to the weight."""
    operation, steps = kernel.operations[position], list[_Step]()
    varying = kernel.varying_along(axes)
    while isinstance(operation, Compute) and operation.name in ("add", "sub", "mul"):
        left, right = operation.operands
        if varying[left] == varying[right]:
            break
        position, coefficient = (left, right) if varying[left] else (right, left)
        steps.insert(0, _Step(operation.name, coefficient, varying[left]))
        operation = kernel.operations[position]
    return position, tuple(steps)


def widened_dtype(kernel: Kernel, position: int) -> torch.dtype:
    """Returns the dtype of the value that an operation casts, or of the operation itself."""
    operation = kernel.operations[position]
    if isinstance(operation, Compute) and operation.name == "cast":
        operation = kernel.operations[operation.operands[0]]
    return operation_dtype(operation)


def is_exact(kernel: Kernel, position: int, dtype: torch.dtype) -> bool:
    """Whether a float32 number is a widened one that a dtype of half precision represents."""
    operation = kernel.operations[position]
    if not isinstance(operation, Compute) or operation.name != "cast" or operation.dtype is not torch.float32:
        return False
    (source,) = operation.operands
    widened = operation_dtype(kernel.operations[source])
    if widened.is_floating_point:
        return widened in (dtype, *FLOAT8)
    low, high = value_range(kernel.operations, source)
    return max(-low, high) <= _LARGEST_EXACT[dtype]


# --- construction ---------------------------------------------------------------------------------------------------


class _Point:
    """A point of the unrolled axes, with the copies of operations there by position; `axes` replace the kernel's."""

    def __init__(self, axes: Mapping[Axis, Index | int]) -> None:
        self.axes: dict[Atom, IndexLike] = {}
        self.axes.update(axes.items())
        self.copies: dict[int, Scalar] = {}


class _GroupSummer:
    """Builds the kernel: weights in packed elements are unrolled, and steps are applied to the sums of groups."""

    def __init__(
        self,
        contraction: ContractionForm,
        plans: Mapping[int, _Plan],
        axes: Mapping[Axis, Index] | None = None,
        biased: bool = True,
    ) -> None:
        self.biased = biased
        self.kernel = contraction.kernel
        self.contraction = contraction
        self.plans = plans
        self.body = KernelBuilder()
        plan = next(iter(plans.values()))
        self.groups, self.inner = plan.groups, plan.inner
        sizes = [range(int(axis.size)) for axis in plan.unrolled]
        self.points = [
            _Point({**(axes or {}), **dict(zip(plan.unrolled, point, strict=True))}) for point in cartesian(*sizes)
        ]
        self.whole = _Point({})

    def run(self) -> Kernel:
        for position, operation in enumerate(self.kernel.operations):
            if position in self.plans:
                self.whole.copies[position] = self._total(self.plans[position])
            elif isinstance(operation, Store | DeviceAssert):
                copies = {used: self._copy(used, self.whole).position for used in operands(operation)}
                self.body.operations.append(map_operation(operation, copies.__getitem__))
        kernel = self.kernel
        return self.body.finish(kernel.axes, (*self.groups, *self.inner), kernel.inputs, kernel.outputs)

    def _total(self, plan: _Plan) -> Scalar:
        """Adds the sums of a plan's groups and returns the sum of these."""
        bias = self._bias(plan)
        rows = [self._copy(plan.item.row_operand, point) for point in self.points]
        numbers = [self._copy(plan.number, point) + bias if bias else self._copy(plan.number, point)
                   for point in self.points]  # fmt: skip
        value = self._sum([row * number for row, number in zip(rows, numbers, strict=True)])
        pending: float = bias
        for step in plan.steps:
            coefficient = self._copy(step.coefficient, self.whole)
            if step.name == "mul":
                value = (value - self._sum(rows) * pending if pending else value) * coefficient
            elif step.name == "add":
                value = value + self._sum(rows) * (coefficient - pending if pending else coefficient)
            elif step.is_left:
                value = value + self._sum(rows) * (-pending - coefficient) if pending else (
                    value - self._sum(rows) * coefficient)  # fmt: skip
            else:
                value = self._sum(rows) * (coefficient + pending if pending else coefficient) - value
            pending = 0
        (total,) = self.body.reduce("sum", value, self.groups)
        return total

    def _bias(self, plan: _Plan) -> int:
        """Returns the number that is added to natural numbers, so that their bits need no conversion; else 0."""
        if not self.biased:
            return 0
        bias, (source,) = NUMBER_BIAS[plan.row_dtype], operands(self.kernel.operations[plan.number])
        number = self._copy(source, self.points[0])
        low, high = value_range(self.body.operations, number.position)
        return bias if number.dtype is torch.uint8 and low >= 0 and high < bias else 0

    def _sum(self, values: Sequence[Scalar]) -> Scalar:
        """Adds the sum of some values over the elements of a group."""
        total = values[0]
        for value in values[1:]:
            total = total + value
        return self.body.reduce("sum", total, self.inner)[0]

    def _copy(self, position: int, point: _Point) -> Scalar:
        """Adds an operation at a point of the unrolled axes, simplified where that decides conditions."""
        if position not in point.copies:
            operation = self.kernel.operations[position]
            self.body.origin = operation.origin
            point.copies[position] = self._simplified(operation, point)
        return point.copies[position]

    def _simplified(self, operation: Operation, point: _Point) -> Scalar:
        match operation:
            case IndexValue():
                return self.body.index(self._index(operation.index, point)).to(operation.dtype)
            case Compute("where", (condition, inside, other)):
                chosen = self._copy(condition, point).constant
                if chosen is not None:
                    return self._copy(inside if chosen else other, point)
            case Load(mask=int()):
                assert operation.mask is not None
                holds = self._copy(operation.mask, point).constant
                if holds:
                    return self._simplified(replace(operation, mask=None, other=0), point)
                if holds is not None and operation.dtype not in HALF_PRECISION:
                    return self.body.constant(operation.other, operation.dtype)
            case _:
                pass
        used = {at: self._copy(at, point) for at in operands(operation)}
        if isinstance(operation, Compute) and all(item.constant is not None for item in used.values()):
            return self.body.constant(_folded(operation, [used[at] for at in operation.operands]), operation.dtype)
        copied = map_operation(operation, lambda at: used[at].position, lambda index: self._index(index, point))
        assert not isinstance(copied, Store | DeviceAssert), "values alone are copied"
        return self.body.add(copied)

    def _index(self, index: Index, point: _Point) -> Index:
        return renumber_index(lambda at: self._copy(at, point).position, point.axes, index)


def _folded(operation: Compute, values: Sequence[Scalar]) -> Number:
    """Returns the result of an operation on constants."""
    numbers = [torch.tensor(item.constant, dtype=item.dtype) for item in values]
    spec = OPERATIONS[operation.name]
    result = spec.reference(*numbers, operation.dtype) if spec.result == "declared" else spec.reference(*numbers)
    number: Number = result.item()
    return number
