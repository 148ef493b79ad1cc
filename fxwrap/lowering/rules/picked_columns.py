"""Elements of matmuls at one column of each row, as sums over the row in which all other columns count as zero.

Such a sum is computed by the kernel of the matmul, so that a cross entropy needs no logits in memory: an element at an
index that is read from memory could only be loaded after all of them are stored.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import sympy
import torch

from fxwrap.loop_ir import Atom, Axis, IndexLike, KernelBuilder, Scalar
from fxwrap.lowering.fusion.definitions import Definition, ElementReader, Indices, Pointwise, Reduced, reduction
from fxwrap.lowering.fusion.tracing import IndexTuple, resolve_views, trace_with
from fxwrap.lowering.rules.registry import OperatorCall, may_reduce_rows
from fxwrap.symbolic import Number

_MAX_COST = 100
"""The most instructions between a matmul and the element, which are repeated for it."""

Column = Callable[[ElementReader, Indices], Scalar]
"""Returns the column of a row, int64."""


@dataclass(frozen=True)
class PickedColumns:
    """The sums that replace elements of matmuls: `sums` has one element for each row."""

    sums: Mapping[Definition, Definition]

    def load(self, reader: ElementReader, definition: Definition, at: Indices, row: Indices) -> Scalar:
        """Returns the element of a definition at the column of a row, whose indices are `at`."""
        return (_PickingReader(reader, self.sums, row) if self.sums else reader).load(definition, at)


def pick_columns(call: OperatorCall, matrix: Definition, column: Column) -> PickedColumns:
    """Returns the sums for elements of a matrix that is computed from kernels of matmuls; none for another matrix."""
    rows = matrix.sizes[0] if len(matrix.sizes) == 2 else 0
    if len(matrix.sizes) != 2 or not may_reduce_rows(call.matmul_kernels, call.tunes_matmuls, call.spec, rows):
        return PickedColumns({})
    trace = trace_with(matrix, lambda other: "inlined" if isinstance(other, Pointwise) else "fetched")
    if not isinstance(matrix, Pointwise) or trace.cost > _MAX_COST:
        return PickedColumns({})
    row_axis, column_axis = trace.axes
    sums: dict[Definition, Definition] = {}
    reads: dict[Definition, set[IndexTuple]] = defaultdict(set)
    for definition, at in trace.reads:
        reads[definition].add(at)
    for definition, points in reads.items():
        if not isinstance(definition, Reduced) or definition.source.kind != "sum" or len(points) > 1:
            continue  # a matmul that is read at several indices needs several elements of it
        (at,) = points
        if at and at[-1].single_axis == column_axis and definition.sizes[-1] == matrix.sizes[1]:
            if any(column_axis in index.axes() for index in at[:-1]):
                continue
            sums[definition] = _picked(definition, matrix, at, (row_axis, column_axis), column)
    return PickedColumns(sums)


def _picked(
    definition: Definition, matrix: Definition, at: IndexTuple, axes: tuple[Axis, Axis], column: Column
) -> Definition:
    """Returns the sum over the columns of elements of a definition, at indices `at` over the axes of the matrix."""

    def body(reader: ElementReader, row: Indices, reduced: Indices) -> Scalar:
        point: dict[Atom, IndexLike] = dict(zip(axes, (*row, *reduced), strict=True))
        is_picked = column(reader, row).equals(reader.body.index(reduced[0]))
        return is_picked.where(reader.load(definition, [index.substitute(point) for index in at]), 0.0)

    rows, columns, dtype = matrix.sizes[:1], matrix.sizes[1:], definition.compute_dtype
    (total,) = reduction("sum", rows, columns, definition.device, dtype, body, (dtype,))
    return total


@dataclass(frozen=True)
class _PickingReader:
    """An element reader at the column of a row, which reads sums in place of matmuls."""

    reader: ElementReader
    sums: Mapping[Definition, Definition]
    row: Indices

    @property
    def body(self) -> KernelBuilder:
        return self.reader.body

    def load(self, definition: Definition, indices: Indices, other: Number = 0) -> Scalar:
        definition, at = resolve_views(definition, indices)
        if definition in self.sums:
            return self.reader.load(self.sums[definition], self.row)
        if isinstance(definition, Pointwise):
            return definition.body(self, at)
        return self.reader.load(definition, at, other)

    def number(self, number: Number | sympy.Basic, dtype: torch.dtype) -> Scalar:
        return self.reader.number(number, dtype)
