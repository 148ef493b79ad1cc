"""Contractions: kernels whose sums multiply two operands, of which each varies along axes that the other does not.

A matmul is a contraction: `sum_k left[m, k] * right[k, n]`. It is an ordinary kernel of the loop IR; printers may
compute it in tiles of rows and columns, which load each element of an operand once per tile instead of once per
product. Reductions along columns, such as the statistics of a norm, may follow in the same kernel.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch

from fxwrap.loop_ir.atoms import Axis, IndirectIndex, count_points
from fxwrap.loop_ir.body_operations import (
    Compute,
    Constant,
    DeviceAssert,
    Load,
    Reduce,
    Store,
    indices,
    operands,
    operation_dtype,
)
from fxwrap.loop_ir.kernel import Kernel
from fxwrap.loop_ir.offsets import linearize_index
from fxwrap.symbolic import Size, product


@dataclass(frozen=True, slots=True)
class ProductSum:
    """A sum of products: the position of the reduction, and those of the operands that vary along rows and columns."""

    reduction: int
    row_operand: int
    column_operand: int


@dataclass(frozen=True)
class ContractionForm:
    """The form of a kernel that is a contraction.

    The axes of results are split into those that no operand or both operands vary along (`batch`), those of the row
    operand alone and those of the column operand alone; `columns` has the most points, and `rows` may be empty. All
    `sums` have the same axes and are over the axes `summed`. Operations outside of the sums run once per element of the
    other axes: epilogues. `row_reductions` are reductions of these elements over the `reduced_columns`. In a
    grouped contraction the column operands depend on the rows through the index `group` alone: the matrix of a row.
    """

    kernel: Kernel
    batch: tuple[Axis, ...]
    rows: tuple[Axis, ...]
    columns: tuple[Axis, ...]
    summed: tuple[Axis, ...]
    sums: tuple[ProductSum, ...]
    row_reductions: tuple[int, ...] = ()
    group: IndirectIndex | None = None

    @property
    def reduced_columns(self) -> tuple[Axis, ...]:
        """The columns that row reductions reduce, in the kernel's order."""
        return tuple([axis for axis in self.kernel.reduced if axis in self.columns])

    @property
    def summed_count(self) -> Size:
        """The number of products of a sum."""
        return count_points(self.summed)

    @property
    def reduced_column_count(self) -> Size:
        """The number of columns that row reductions reduce; 1 without any."""
        return count_points(self.reduced_columns)

    @property
    def dtype(self) -> torch.dtype:
        """The widest dtype of the sums."""
        summed = [operation_dtype(self.kernel.operations[item.reduction]) for item in self.sums]
        return max(summed, key=lambda dtype: dtype.itemsize)

    @property
    def row_count(self) -> Size:
        """The number of rows of one element of the batch."""
        return count_points(self.rows)

    def prologue(self, position: int) -> list[int]:
        """Returns the operations that compute an operand, in order."""
        needed: set[int] = set()
        stack = [position]
        while stack:
            at = stack.pop()
            if at not in needed:
                needed.add(at)
                stack.extend(operands(self.kernel.operations[at]))
        return sorted(needed)

    def is_contiguous(self, position: int, axis: Axis) -> bool:
        """Whether all loads of an operand are contiguous along an axis, or do not depend on it."""
        loads = [self.kernel.operations[at] for at in self.prologue(position)]
        strides = [item.index.stride(axis) for item in loads if isinstance(item, Load)]
        return all(stride is not None and stride.constant in (0, 1) for stride in strides)


def find_contraction(kernel: Kernel) -> ContractionForm | None:
    """Returns the form of a kernel that is a contraction, or None.

    Every first reduction is a sum of floating-point products, no operand depends on another reduction, and nothing is
    written per element of the summed axes. Later reductions are over columns.
    """
    if not kernel.reductions or kernel.scans or kernel.combines_values:
        return None
    first = [position for position in kernel.reductions if kernel.stages[position] == 0]
    later = tuple([position for position in kernel.reductions if kernel.stages[position] != 0])
    summed = {reduced_axes(kernel, position) for position in first}
    over = {reduced_axes(kernel, position) for position in later}
    if len(summed) != 1 or len(over) > 1:
        return None
    (over_sums,), over_rows = summed, next(iter(over), ())
    if len(over_sums) + len(over_rows) != len(kernel.reduced) or not {*over_sums}.isdisjoint(over_rows):
        return None
    sums = _ProductSums(kernel, frozenset((*kernel.axes, *over_rows)), frozenset(over_rows)).find(first)
    if sums is None or _writes_along(kernel, over_sums) or not _reduces_products(kernel, sums, later):
        return None
    results = [*kernel.axes, *over_rows]
    return ContractionForm(
        kernel,
        tuple([axis for axis in results if axis not in sums.rows and axis not in sums.columns]),
        tuple([axis for axis in results if axis in sums.rows]),
        tuple([axis for axis in results if axis in sums.columns]),
        over_sums,
        sums.items,
        later,
    )


def reduced_axes(kernel: Kernel, position: int) -> tuple[Axis, ...]:
    """Returns the axes over which the reduction at a position reduces."""
    operation = kernel.operations[position]
    assert isinstance(operation, Reduce)
    return kernel.reduced_by(operation)


@dataclass(frozen=True)
class _MatmulSums:
    items: tuple[ProductSum, ...]
    rows: frozenset[Axis]
    columns: frozenset[Axis]


@dataclass(frozen=True)
class _ProductSums:
    """Finds the sums of products of a kernel whose results have the axes `results`, of which `reduced` are columns."""

    kernel: Kernel
    results: frozenset[Axis]
    reduced: frozenset[Axis]

    def find(self, positions: Sequence[int]) -> _MatmulSums | None:
        """Returns the sums at these positions if all are sums of products with the same rows and columns."""
        dependent = _dependent_axes(self.kernel, self.results)
        items = [self._product_sum(position, dependent) for position in positions]
        forms = {(rows, columns) for rows, columns, _ in [item for item in items if item is not None]}
        if None in items or len(forms) != 1:
            return None
        ((rows, columns),) = forms
        if not columns or not self.reduced <= columns:
            return None
        return _MatmulSums(tuple([item[2] for item in items if item is not None]), rows, columns)

    def _product_sum(
        self, position: int, dependent: Sequence[frozenset[Axis]]
    ) -> tuple[frozenset[Axis], frozenset[Axis], ProductSum] | None:
        kernel = self.kernel
        total = kernel.operations[position]
        assert isinstance(total, Reduce)
        multiplied = kernel.operations[total.operands[0]]
        if total.kind != "sum" or not total.dtype.is_floating_point:
            return None
        if not isinstance(multiplied, Compute) or multiplied.name != "mul":
            return None
        left, right = multiplied.operands
        summed = frozenset(kernel.reduced_by(total))
        if any(summed.isdisjoint(kernel.value_axes[operand]) for operand in (left, right)):
            return None
        (rows, row_operand), (columns, column_operand) = sorted(
            ((dependent[left] - dependent[right], left), (dependent[right] - dependent[left], right)),
            key=lambda item: (not self.reduced.isdisjoint(item[0]), *_order(kernel, item[0])),
        )
        return rows, columns, ProductSum(position, row_operand, column_operand)


def _reduces_products(kernel: Kernel, sums: _MatmulSums, later: Sequence[int]) -> bool:
    """Whether the operands of later reductions vary along axes of the sums alone."""
    axes = frozenset[Axis]().union(*[kernel.value_axes[item.reduction] for item in sums.items])
    return all(kernel.value_axes[operands(kernel.operations[position])[0]] <= axes for position in later)


def find_grouped_contraction(kernel: Kernel) -> ContractionForm | None:
    """Returns the form of a contraction whose rows select a matrix by an index that the kernel loads, or None.

    `find_contraction` returns the rows of such a kernel as a batch, of which each element has its own matrix, or as
    columns where rows that share their elements select several matrices, as the experts of one token. Printers that
    know the group of a tile of rows load the elements of its matrix once for all of them.
    """
    form = find_contraction(kernel)
    if form is None or form.rows or form.row_reductions:
        return None
    columns = set[int]().union(*[form.prologue(item.column_operand) for item in form.sums])
    indirect = {
        atom
        for position in columns
        for index in indices(kernel.operations[position])
        for atom in index.atoms()
        if isinstance(atom, IndirectIndex) and not kernel.varying[atom.operation]
    }
    for group in sorted(indirect, key=lambda atom: atom.operation):
        through_group = _dependent_axes(kernel, frozenset(kernel.axes), leaves=(group.operation,))
        own = frozenset[Axis]().union(*[through_group[item.column_operand] for item in form.sums])
        rows = tuple([axis for axis in kernel.axes if axis in (*form.batch, *form.columns) and axis not in own])
        if rows and own.intersection(form.columns) and not _shares_matrices(form, group.operation, columns):
            batch, own_columns = [tuple([axis for axis in axes if axis in own]) for axes in (form.batch, form.columns)]
            return replace(form, batch=batch, rows=rows, columns=own_columns, group=group)
    return None


def has_ascending_groups(form: ContractionForm) -> bool:
    """Whether the groups of a grouped contraction's rows ascend in row-major order: each group is consecutive rows."""
    kernel = form.kernel
    if form.group is None:
        return False
    operation = kernel.operations[form.group.operation]
    while isinstance(operation, Compute) and operation.name in ("cast", "maximum", "minimum"):
        others = [at for at in operation.operands if not isinstance(kernel.operations[at], Constant)]
        if len(others) != 1:
            return False
        operation = kernel.operations[others[0]]
    if not isinstance(operation, Load) or operation.mask is not None:
        return False
    position = linearize_index(form.rows, [axis.size for axis in form.rows])
    is_ascending = any(item.is_ascending for item in kernel.inputs if item.name == operation.buffer)
    return is_ascending and operation.index == position


def group_dependent(kernel: Kernel, group: int) -> frozenset[int]:
    """Returns the operations that depend on the operation `group`, which is not one of them."""
    dependent: set[int] = set()
    for position, operation in enumerate(kernel.operations):
        if any(used == group or used in dependent for used in operands(operation)):
            dependent.add(position)
    return frozenset(dependent)


def _shares_matrices(form: ContractionForm, group: int, columns: Collection[int]) -> bool:
    """Whether row operands or epilogues use elements of a group's matrix, of which only the sums have the group."""
    dependent = group_dependent(form.kernel, group).intersection(columns)
    sums = {item.reduction for item in form.sums}
    products = {form.kernel.operations[item].operands[0] for item in sums}  # type: ignore[union-attr]
    return any(
        not dependent.isdisjoint(operands(operation))
        for position, operation in enumerate(form.kernel.operations)
        if position not in columns and position not in products
    )


def _order(kernel: Kernel, axes: frozenset[Axis]) -> tuple[float, int]:
    """Orders the axes of operands: more points are columns, and of equal or symbolic ones the inner axes."""
    sizes = [axis.size for axis in axes]
    count = product([size for size in sizes if isinstance(size, int)]) if sizes else 0
    symbolic = any(not isinstance(size, int) for size in sizes)
    assert isinstance(count, int)
    space = [*kernel.axes, *kernel.reduced]
    inner = max([space.index(axis) for axis in axes], default=-1)
    return (0.5 if symbolic else float(count), inner)


def _dependent_axes(kernel: Kernel, results: frozenset[Axis], leaves: Collection[int] = ()) -> list[frozenset[Axis]]:
    """Returns which of the axes `results` each operation's value depends on, other than through the `leaves`."""
    dependent: list[frozenset[Axis]] = []
    for position, operation in enumerate(kernel.operations):
        if position in leaves:
            dependent.append(frozenset())
            continue
        axes = frozenset([axis for index in indices(operation) for axis in index.axes()])
        axes = axes.union(*[dependent[operand] for operand in operands(operation)])
        dependent.append(axes & results)
    return dependent


def _writes_along(kernel: Kernel, axes: Collection[Axis]) -> bool:
    """Whether a store or an assertion runs per element of some axes."""
    return any(
        varies and isinstance(operation, Store | DeviceAssert)
        for operation, varies in zip(kernel.operations, kernel.varying_along(axes), strict=True)
    )
