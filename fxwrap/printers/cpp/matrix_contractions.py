"""Contractions of bfloat16 matrices, which processors with matrix instructions multiply in tiles of their own."""

from __future__ import annotations

import torch

from fxwrap.loop_ir import Atom, Axis, Compute, Index, IndexLike, Kernel, Load, ProductSum, as_index, operation_dtype
from fxwrap.printers.cpp.contractions import ContractionPlan, ContractionPrinter, is_direct
from fxwrap.printers.cpp.operations import print_size


class MatrixContractionPrinter(ContractionPrinter):
    """A contraction whose factors are bfloat16, as `is_matrix_contraction` says.

    `matrices.h` chooses: matrix instructions, or products of factors.
    """

    columns_of_tile = "matrix_columns"
    columns_in_tile = "limit"

    def print_row_operands(self) -> None:
        """Writes the rows in the form in which tiles multiply them."""
        axis, (rows, rest) = self.tiles.row_axis, self.tiles.tile_rows
        for operand in dict.fromkeys(item.row_operand for item in self.contraction.sums):
            narrow = _narrow_value(self.kernel, operand)
            assert narrow is not None, "operands of matrix contractions are bfloat16"
            rows_at, index = self.direct_rows(narrow) or self.write_panel(narrow)
            stride = as_index(0) if axis is None else index.stride(axis)
            assert stride is not None, "panels and direct rows have strides"
            text, name = self.statements.index({}), f"{self.statements.name(operand)}_rows"
            size, count = "1" if axis is None else print_size(axis.size), print_size(self.tiles.vector_axis.size)
            first = text(self.first(index, {} if axis is None else {axis: 0}))
            kind = f"MatrixRows<{rows}, {rest}>"
            self.writer.line(f"const {kind} {name}({rows_at} + {first}, {text(stride)}, {size}, {count});")
            self.panels[operand] = name, as_index(0)

    def print_column_tile(self) -> None:
        """Writes the computation of a tile of columns; the last tile has fewer."""
        columns = self.tiles.column_axis
        start = f"{columns.name}_0"
        self.writer.line("constexpr Constant<width> columns;")
        self.writer.line(f"const int64_t {start} = tile * width;")
        self.writer.line(f"const int limit = int(fxwrap::min<int64_t>(width, {print_size(columns.size)} - {start}));")
        self.print_rows()

    def print_sum(self, item: ProductSum, tile: str) -> None:
        """Writes the tile of a sum, which is computed as a whole."""
        column, row = self.tiles.column_axis, self.tiles.row_axis
        load = _column_load(self.kernel, item.column_operand)
        stride = None if load is None else load.index.stride(column)
        assert load is not None and stride is not None, "columns have strides"
        text = self.statements.index({})
        first = text(self.first(load.index, {column: Axis(f"{column.name}_0", column.size)}))
        start = "0" if row is None else f"{row.name}_0"
        name, _ = self.panels[item.row_operand]
        comment = self.statements.comment(self.kernel.operations[item.reduction])
        arguments = f"{name}, {start}, {load.buffer} + {first}, {text(stride)}, limit"
        self.writer.line(f"const MatrixTile<rows, columns, group> {tile}({arguments});{comment}")

    def first(self, index: Index, start: dict[Atom, IndexLike]) -> Index:
        """Returns the index of the first term of a row or column."""
        return index.substitute({**start, self.tiles.vector_axis: 0})


def is_matrix_contraction(plan: ContractionPlan) -> bool:
    """Whether all factors are bfloat16: a constant number of rows, and columns in memory at a stride."""
    contraction, row, vector = plan.contraction, plan.row_axis, plan.vector_axis
    kernel = contraction.kernel
    if contraction.batch or len(contraction.rows) > 1 or kernel.reduced != (vector,):
        return False
    if row is not None and not isinstance(row.size, int):
        return False
    for item in contraction.sums:
        load = _column_load(kernel, item.column_operand)
        if load is None or _narrow_value(kernel, item.row_operand) is None:
            return False
        if load.index.stride(vector) != as_index(1) or load.index.stride(plan.column_axis) is None:
            return False
    return True


def _narrow_value(kernel: Kernel, operand: int) -> int | None:
    """Returns the bfloat16 value that an operand widens, or None."""
    operation = kernel.operations[operand]
    if not isinstance(operation, Compute) or operation.name != "cast" or operation.dtype is not torch.float32:
        return None
    (narrow,) = operation.operands
    return narrow if operation_dtype(kernel.operations[narrow]) is torch.bfloat16 else None


def _column_load(kernel: Kernel, operand: int) -> Load | None:
    """Returns the load that the operand of columns widens, at an index that no other value selects, or None."""
    narrow = _narrow_value(kernel, operand)
    load = None if narrow is None else kernel.operations[narrow]
    return load if isinstance(load, Load) and load.mask is None and is_direct(load) else None
