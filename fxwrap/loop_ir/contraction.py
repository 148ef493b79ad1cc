"""Contractions: kernels whose sums multiply two operands, of which each varies along axes that the other does not.

A matmul is a contraction: `sum_k left[m, k] * right[k, n]`. It is an ordinary kernel of the loop IR; printers may
compute it in tiles of rows and columns, which load each element of an operand once per tile instead of once per
product.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch

from fxwrap.loop_ir.index import Axis, IndirectIndex
from fxwrap.loop_ir.kernel import Compute, DeviceAssert, Kernel, Load, Reduce, Store, indices, operands, operation_dtype
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

    The parallel axes are split into those that no operand or both operands vary along (`batch`), those of the row
    operand alone and those of the column operand alone; `columns` has the most points, and `rows` may be empty. All
    `sums` have the same axes. Operations outside of the sums run once per element of the parallel axes: epilogues. In a
    grouped contraction the column operands depend on the rows through the index `group` alone: the matrix of a row.
    """

    kernel: Kernel
    batch: tuple[Axis, ...]
    rows: tuple[Axis, ...]
    columns: tuple[Axis, ...]
    sums: tuple[ProductSum, ...]
    group: IndirectIndex | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The widest dtype of the sums."""
        summed = [operation_dtype(self.kernel.operations[item.reduction]) for item in self.sums]
        return max(summed, key=lambda dtype: dtype.itemsize)

    @property
    def row_count(self) -> Size:
        """The number of rows of one element of the batch."""
        return product(axis.size for axis in self.rows)

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

    Every reduction is a sum of floating-point products, no operand depends on another reduction, and nothing is written
    per element of the reduced axes.
    """
    if not kernel.reductions or kernel.scans or kernel.reduces_in_steps:
        return None
    if any(store.mode != "set" for store in kernel.stores):
        return None
    dependent = _dependent_axes(kernel)
    forms: set[tuple[frozenset[Axis], frozenset[Axis]]] = set()
    sums = []
    for position in kernel.reductions:
        summed = kernel.operations[position]
        assert isinstance(summed, Reduce)
        multiplied = kernel.operations[summed.operands[0]]
        if summed.kind != "sum" or not summed.dtype.is_floating_point or kernel.stages[position] != 0:
            return None
        if not isinstance(multiplied, Compute) or multiplied.name != "mul":
            return None
        left, right = multiplied.operands
        if not (kernel.varying[left] and kernel.varying[right]):
            return None
        (rows, row_operand), (columns, column_operand) = sorted(
            ((dependent[left] - dependent[right], left), (dependent[right] - dependent[left], right)),
            key=lambda item: _order(kernel, item[0]),
        )
        sums.append(ProductSum(position, row_operand, column_operand))
        forms.add((rows, columns))
    if len(forms) != 1:
        return None
    ((rows, columns),) = forms
    if not columns or _writes_reduced(kernel):
        return None
    return ContractionForm(
        kernel,
        tuple([axis for axis in kernel.axes if axis not in rows and axis not in columns]),
        tuple([axis for axis in kernel.axes if axis in rows]),
        tuple([axis for axis in kernel.axes if axis in columns]),
        tuple(sums),
    )


def find_grouped_contraction(kernel: Kernel) -> ContractionForm | None:
    """Returns the form of a contraction whose rows select a matrix by an index that the kernel loads, or None.

    `find_contraction` returns the rows of such a kernel as a batch, of which each element has its own matrix. Printers
    that know the group of a tile of rows load the elements of its matrix once for all of them.
    """
    form = find_contraction(kernel)
    if form is None or form.rows:
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
        through_group = _dependent_axes(kernel, leaves=(group.operation,))
        own = frozenset[Axis]().union(*[through_group[item.column_operand] for item in form.sums])
        rows = tuple([axis for axis in form.batch if axis not in own])
        if rows and not _shares_matrices(form, group.operation, columns):
            batch = tuple([axis for axis in form.batch if axis in own])
            return replace(form, batch=batch, rows=rows, group=group)
    return None


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
    inner = max([kernel.axes.index(axis) for axis in axes], default=-1)
    return (0.5 if symbolic else float(count), inner)


def _dependent_axes(kernel: Kernel, leaves: Collection[int] = ()) -> list[frozenset[Axis]]:
    """Returns the parallel axes that each operation's value depends on, other than through the `leaves`."""
    dependent: list[frozenset[Axis]] = []
    parallel = frozenset(kernel.axes)
    for position, operation in enumerate(kernel.operations):
        if position in leaves:
            dependent.append(frozenset())
            continue
        axes = frozenset([axis for index in indices(operation) for axis in index.axes()])
        axes = axes.union(*[dependent[operand] for operand in operands(operation)])
        dependent.append(axes & parallel)
    return dependent


def _writes_reduced(kernel: Kernel) -> bool:
    """Whether a store or an assertion runs per element of the reduced axes."""
    return any(
        varies and isinstance(operation, Store | DeviceAssert)
        for operation, varies in zip(kernel.operations, kernel.varying, strict=True)
    )
