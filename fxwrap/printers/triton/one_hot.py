"""Sums of a row times a one-hot: the one element that counts is computed by itself.

A loss against one-hot labels multiplies every element of a row by 0 or 1 and adds all of it: five instructions an
element, more than memory leaves time for. Where the row's sum is finite, so is each of its elements, and all products
but one are 0. So the row is summed as it is, and one element is computed once more, at the label. Only where the sum is
not finite are the products added, since 0 times infinity is NaN. An H200 took 22.2 us for such a loss instead of 25.5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from fxwrap.loop_ir import (
    Atom,
    Axis,
    Compute,
    Constant,
    Gathered,
    Index,
    IndexLike,
    IndexValue,
    Kernel,
    Load,
    Operation,
    Reduce,
    as_index,
    map_operation,
    operands,
)


@dataclass(frozen=True)
class PickedElement:
    """The element of a row that a sum is, where `row` has a finite sum: positions of operations."""

    row: int
    element: int


@dataclass(frozen=True)
class _OneHot:
    """A product of a row with a one-hot: positions of the row and of what the positions along it are compared with."""

    row: int
    label: int


def with_picked_elements(kernel: Kernel) -> tuple[Kernel, dict[int, PickedElement]]:
    """Returns a kernel that also computes the picked element of each sum over a one-hot, by position of the sum."""
    found = {position: one for position in kernel.reductions if (one := _one_hot(kernel, position)) is not None}
    if not found:
        return kernel, {}
    copying = _Copying(kernel)
    picked: dict[int, PickedElement] = {}
    for position in range(len(kernel.operations)):
        one = found.get(position)
        element = copying.picked(one) if one is not None else None
        copying.copy(position)
        if one is not None and element is not None:
            picked[copying.new[position]] = PickedElement(copying.new[one.row], element)
    return replace(kernel, operations=tuple(copying.operations)), picked


def _one_hot(kernel: Kernel, position: int) -> _OneHot | None:
    """Returns what a reduction sums, where that is a row times a comparison of its positions with one number."""
    reduction = kernel.operations[position]
    if not isinstance(reduction, Reduce) or reduction.kind != "sum" or not reduction.dtype.is_floating_point:
        return None
    product = kernel.operations[reduction.operands[0]]
    if not isinstance(product, Compute) or product.name != "mul":
        return None
    for flag, row in (product.operands, product.operands[::-1]):
        label = _label(kernel, flag)
        if label is not None and kernel.varying[row] and _can_be_picked(kernel, row):
            return _OneHot(row, label)
    return None


def _label(kernel: Kernel, flag: int) -> int | None:
    """Returns the number of the row that its positions are compared with, where a value is 1 there and 0 elsewhere."""
    cast = kernel.operations[flag]
    if not isinstance(cast, Compute) or cast.name != "cast" or len(kernel.reduced) != 1:
        return None
    equal = kernel.operations[cast.operands[0]]
    if not isinstance(equal, Compute) or equal.name != "eq" or not isinstance(kernel.reduced[0].size, int):
        return None
    along = as_index(kernel.reduced[0])
    for index, label in (equal.operands, equal.operands[::-1]):
        place = kernel.operations[index]
        if isinstance(place, IndexValue) and place.index == along and not kernel.varying[label]:
            return label
    return None


def _can_be_picked(kernel: Kernel, row: int) -> bool:
    """Whether an element of a row is computed from loads at its position, and from what the whole row shares."""
    written = {buffer.name for buffer in kernel.outputs}
    along = _along_row(kernel, row)
    operations = [kernel.operations[position] for position in along]
    if not all(isinstance(item, Load | Compute | Constant) for item in operations):
        return False
    return not any(isinstance(item, Load) and item.buffer in written for item in operations)


def _along_row(kernel: Kernel, row: int) -> list[int]:
    """Returns the operations that an element of a row is computed with and that vary along it, in order."""
    found, pending = {row}, [row]
    while pending:
        for used in operands(kernel.operations[pending.pop()]):
            if kernel.varying[used] and used not in found:
                found.add(used)
                pending.append(used)
    return sorted(found)


class _Copying:
    """The operations of a new kernel, copied from an old one and added to."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.operations: list[Operation] = []
        self.new: dict[int, int] = {}

    def _add(self, operation: Operation) -> int:
        self.operations.append(operation)
        return len(self.operations) - 1

    def copy(self, position: int) -> None:
        operation = self.kernel.operations[position]
        renumber = _renumbered(self.new.__getitem__, {})
        self.new[position] = self._add(map_operation(operation, self.new.__getitem__, renumber))

    def picked(self, one: _OneHot) -> int:
        """Adds the element of the row at the label, 0 where the label is no position of it."""
        axis, label = self.kernel.reduced[0], self.new[one.label]
        origin = self.kernel.operations[one.row].origin
        zero = self._add(Constant(0, torch.int64, origin))
        size = self._add(Constant(int(axis.size), torch.int64, origin))
        above = self._add(Compute("ge", (label, zero), torch.bool, origin))
        below = self._add(Compute("lt", (label, size), torch.bool, origin))
        inside = self._add(Compute("logical_and", (above, below), torch.bool, origin))
        place = self._add(Compute("where", (inside, label, zero), torch.int64, origin))
        element = self._element(one.row, axis, place)
        dtype = _dtype(self.operations[element])
        nothing = self._add(Constant(0.0, dtype, origin))
        return self._add(Compute("where", (inside, element, nothing), dtype, origin))

    def _element(self, row: int, axis: Axis, place: int) -> int:
        """Adds what computes the element of a row at a place."""
        at: dict[int, int] = {}

        def position(old: int) -> int:
            return at.get(old, self.new[old])

        renumber = _renumbered(position, {axis: as_index(Gathered(place, axis.size))})
        for old in _along_row(self.kernel, row):
            at[old] = self._add(map_operation(self.kernel.operations[old], position, renumber))
        return at[row]


def _renumbered(position: Callable[[int], int], mapping: dict[Atom, IndexLike]) -> Callable[[Index], Index]:
    """Returns what renumbers the operations that an index names, and replaces atoms of it."""

    def index(old: Index) -> Index:
        gathered: dict[Atom, IndexLike] = {
            atom: Gathered(position(atom.operation), atom.size) for atom in old.atoms() if isinstance(atom, Gathered)
        }
        return old.substitute({**mapping, **gathered})

    return index


def _dtype(operation: Operation) -> torch.dtype:
    assert isinstance(operation, Compute | Load), "an element of a row is loaded or computed"
    return operation.dtype
