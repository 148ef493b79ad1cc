"""Sums of a row times a one-hot vector, as in losses against one-hot labels.

If the row's sum is finite, so is each element, and all products but one are 0. The kernel sums the row itself and
computes the element at the label again. Only if the sum is not finite it sums the products, since 0 times infinity is
NaN. This needs fewer instructions an element than the multiplication.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fxwrap.loop_ir import (
    Axis,
    Compute,
    Constant,
    IndexValue,
    IndirectIndex,
    Kernel,
    Load,
    Operation,
    OperationCopier,
    Reduce,
    as_index,
)


@dataclass(frozen=True)
class SelectedElement:
    """The positions of a row and of the element that equals the sum of products if the row's sum is finite."""

    row: int
    element: int


@dataclass(frozen=True)
class _OneHotProduct:
    """The positions of the row and of the label whose one-hot vector multiplies it."""

    row: int
    label: int


def select_one_hot_elements(kernel: Kernel) -> tuple[Kernel, dict[int, SelectedElement]]:
    """Returns a kernel that also computes the selected elements, and these by the position of their sum."""
    products = {position: item for position in kernel.reductions if (item := _one_hot(kernel, position)) is not None}
    if not products:
        return kernel, {}
    copier = _KernelCopier(kernel)
    selected: dict[int, SelectedElement] = {}
    for position in range(len(kernel.operations)):
        product = products.get(position)
        element = copier.add_selected(product) if product is not None else None
        copier.copy(position)
        if product is not None and element is not None:
            selected[copier.new[position]] = SelectedElement(copier.new[product.row], element)
    return replace(kernel, operations=tuple(copier.operations)), selected


def _one_hot(kernel: Kernel, position: int) -> _OneHotProduct | None:
    """Returns the operand of a sum if it is the product of a row with a one-hot vector."""
    reduction = kernel.operations[position]
    if not isinstance(reduction, Reduce) or reduction.kind != "sum" or not reduction.dtype.is_floating_point:
        return None
    product = kernel.operations[reduction.operands[0]]
    if not isinstance(product, Compute) or product.name != "mul":
        return None
    for flag, row in (product.operands, product.operands[::-1]):
        label = _label(kernel, flag)
        if label is not None and kernel.varying[row] and _is_selectable(kernel, row):
            return _OneHotProduct(row, label)
    return None


def _label(kernel: Kernel, flag: int) -> int | None:
    """Returns the label of a one-hot vector: 1 where the index along the row equals the label, 0 elsewhere."""
    cast = kernel.operations[flag]
    if not isinstance(cast, Compute) or cast.name != "cast" or len(kernel.reduced) != 1:
        return None
    equal = kernel.operations[cast.operands[0]]
    if not isinstance(equal, Compute) or equal.name != "eq" or not isinstance(kernel.reduced[0].size, int):
        return None
    along = as_index(kernel.reduced[0])
    for index, label in (equal.operands, equal.operands[::-1]):
        value = kernel.operations[index]
        if isinstance(value, IndexValue) and value.index == along and not kernel.varying[label]:
            return label
    return None


def _is_selectable(kernel: Kernel, row: int) -> bool:
    """Whether an element of a row depends only on loads at its position and on values that do not vary."""
    written = {buffer.name for buffer in kernel.outputs}
    operations = [kernel.operations[position] for position in _varying_slice(kernel, row)]
    if not all(isinstance(item, Load | Compute | Constant) for item in operations):
        return False
    return not any(isinstance(item, Load) and item.buffer in written for item in operations)


def _varying_slice(kernel: Kernel, row: int) -> list[int]:
    """Returns the varying operations that an element of a row depends on, in order."""
    return sorted(kernel.backward_slice([row], within=kernel.varying))


class _KernelCopier(OperationCopier):
    def add_selected(self, product: _OneHotProduct) -> int:
        """Adds the element of the row at the label, 0 if the label is out of range."""
        axis, label = self.kernel.reduced[0], self.new[product.label]
        self.origin = self.kernel.operations[product.row].origin
        zero, size = self.constant(0, torch.int64), self.constant(int(axis.size), torch.int64)
        above = self.compute("ge", label, zero, dtype=torch.bool)
        below = self.compute("lt", label, size, dtype=torch.bool)
        inside = self.compute("logical_and", above, below, dtype=torch.bool)
        index = self.compute("where", inside, label, zero, dtype=torch.int64)
        element = self._element(product.row, axis, index)
        dtype = _dtype(self.operations[element])
        return self.compute("where", inside, element, self.constant(0.0, dtype), dtype=dtype)

    def _element(self, row: int, axis: Axis, index: int) -> int:
        """Adds the computation of the element of a row at an index."""
        element = OperationCopier(self.kernel, {axis: as_index(IndirectIndex(index, axis.size))})
        element.operations = self.operations
        element.new.update(self.new)
        for position in _varying_slice(self.kernel, row):
            element.copy(position)
        return element.new[row]


def _dtype(operation: Operation) -> torch.dtype:
    assert isinstance(operation, Compute | Load), "an element of a row is loaded or computed"
    return operation.dtype
