"""Short rows under conditions on their number, as those of a concatenation along dimension 0, as one long row."""

from __future__ import annotations

import torch

from fxwrap.loop_ir import (
    Atom,
    Axis,
    AxisComparison,
    DeviceAssert,
    IndexLike,
    IndexValue,
    Kernel,
    OperationCopier,
    Store,
    as_index,
    axis_comparisons,
    can_merge_axes,
    eliminate_dead_operations,
    indices,
    replace_axes,
)

MAX_FLAT_ROW = 256
"""The length of rows from which on a loop for each is as fast."""


def flatten_rows(kernel: Kernel) -> Kernel:
    """Returns a pointwise kernel with its last axes merged where only comparisons of the row's number hinder that.

    `row < 5` is `element < 5 * length`. The loop over elements is then split where a condition changes, into long ones.
    """
    while len(kernel.axes) > 1 and not kernel.reduced:
        row, element = kernel.axes[-2:]
        comparisons = _comparisons_of_rows(kernel, row, element)
        if not comparisons:
            return kernel
        kernel = _RowFlattener(kernel, row, element, comparisons).run()
    return kernel


def _comparisons_of_rows(kernel: Kernel, row: Axis, element: Axis) -> dict[int, AxisComparison]:
    """Returns the comparisons of a row's number with constants; none where something else prevents a merge."""
    if not isinstance(element.size, int) or not 1 < element.size < MAX_FLAT_ROW or not isinstance(row.size, int):
        return {}
    comparisons = axis_comparisons(kernel, row)
    if any(len(item.points) > 1 or item.points[0].constant is None for item in comparisons.values()):
        return {}
    for position, item in enumerate(kernel.operations):
        if isinstance(item, DeviceAssert) or (isinstance(item, Store) and item.mode != "set"):
            return {}
        if isinstance(item, IndexValue) and {row, element} & item.index.axes():
            if not comparisons.keys() >= {*kernel.users[position]} or item.index.axes() != {row}:
                return {}
        elif not all(can_merge_axes(index, row, element) for index in indices(item)):
            return {}
    return comparisons


class _RowFlattener(OperationCopier):
    def __init__(self, kernel: Kernel, row: Axis, element: Axis, comparisons: dict[int, AxisComparison]) -> None:
        super().__init__(kernel)
        self.row = row
        self.element = element
        self.comparisons = comparisons

    def run(self) -> Kernel:
        assert isinstance(self.row.size, int) and isinstance(self.element.size, int)
        flat = Axis(self.row.name, self.row.size * self.element.size)
        number = self.add(IndexValue(as_index(flat)))
        for position, item in enumerate(self.kernel.operations):
            comparison = self.comparisons.get(position)
            if comparison is None:
                self.copy(position)
                continue
            self.origin = item.origin
            point = comparison.points[0].constant
            assert point is not None
            limit = self.constant(point * self.element.size, torch.int64)
            name = "lt" if comparison.name in ("lt", "le") else "ge"
            self.new[position] = self.compute(name, number, limit, dtype=torch.bool)
        kernel = self.kernel
        live = Kernel(kernel.axes, (), kernel.inputs, kernel.outputs, tuple(self.operations))
        whole = as_index(flat)
        mapping: dict[Atom, IndexLike] = {self.row: whole // self.element.size, self.element: whole % self.element.size}
        return replace_axes(eliminate_dead_operations(live), [*kernel.axes[:-2], flat], (), mapping)
