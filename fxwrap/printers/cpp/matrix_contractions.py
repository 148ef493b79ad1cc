"""Contractions of bfloat16 matrices, which processors with matrix instructions multiply in tiles of their own."""

from __future__ import annotations

import torch

from fxwrap.loop_ir import Atom, Axis, Compute, Index, IndexLike, Kernel, Load, ProductSum, as_index
from fxwrap.printers.cpp.contractions import ContractionPlan, ContractionPrinter, is_direct
from fxwrap.printers.cpp.operations import print_size


class MatrixContractionPrinter(ContractionPrinter):
    """A contraction whose operands are bfloat16 matrices in memory, as `is_matrix_contraction` says.

    `contractions.h` chooses: matrix instructions, or the loops of other contractions.
    """

    columns_of_tile = "matrix_columns"
    columns_in_tile = "limit"

    def print_row_operands(self) -> None:
        """Writes the rows in the form in which tiles multiply them."""
        axis, (rows, _) = self.tiles.row_axis, self.tiles.tile_rows
        for operand in dict.fromkeys(item.row_operand for item in self.contraction.sums):
            load, name = self.load(operand), f"{self.statements.name(operand)}_rows"
            stride = as_index(0) if axis is None else load.index.stride(axis)
            assert stride is not None, "rows have strides"
            text = self.statements.index({})
            size = "1" if axis is None else print_size(axis.size)
            count = print_size(self.tiles.vector_axis.size)
            first = text(self.first(load, {} if axis is None else {axis: 0}))
            self.writer.line(
                f"const MatrixRows<{rows}> {name}({load.buffer} + {first}, {text(stride)}, {size}, {count});"
            )
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
        load = self.load(item.column_operand)
        stride = load.index.stride(column)
        assert stride is not None, "columns have strides"
        text = self.statements.index({})
        first = text(self.first(load, {column: Axis(f"{column.name}_0", column.size)}))
        start = "0" if row is None else f"{row.name}_0"
        name, _ = self.panels[item.row_operand]
        comment = self.statements.comment(self.kernel.operations[item.reduction])
        arguments = f"{name}, {start}, {load.buffer} + {first}, {text(stride)}, limit"
        self.writer.line(f"const MatrixTile<rows, columns, group> {tile}({arguments});{comment}")

    def load(self, operand: int) -> Load:
        """Returns the load that an operand widens."""
        load = _widened(self.kernel, operand)
        assert load is not None, "operands of matrix contractions are in memory"
        return load

    def first(self, load: Load, start: dict[Atom, IndexLike]) -> Index:
        """Returns the index of the first term of a row or column."""
        return load.index.substitute({**start, self.tiles.vector_axis: 0})


def is_matrix_contraction(plan: ContractionPlan) -> bool:
    """Whether all operands of the sums are bfloat16 matrices in memory: rows of a constant number, with strides."""
    contraction, row, vector = plan.contraction, plan.row_axis, plan.vector_axis
    if contraction.batch or len(contraction.rows) > 1 or contraction.kernel.reduced != (vector,):
        return False
    if row is not None and not isinstance(row.size, int):
        return False
    for item in contraction.sums:
        for operand, axis in ((item.row_operand, row), (item.column_operand, plan.column_axis)):
            load = _widened(contraction.kernel, operand)
            if load is None or load.index.stride(vector) != as_index(1) or not is_direct(load):
                return False
            if axis is not None and load.index.stride(axis) is None:
                return False
    return True


def _widened(kernel: Kernel, operand: int) -> Load | None:
    """Returns the load of a bfloat16 element that an operand widens, or None."""
    operation = kernel.operations[operand]
    if not isinstance(operation, Compute) or operation.name != "cast" or operation.dtype is not torch.float32:
        return None
    load = kernel.operations[operation.operands[0]]
    return load if isinstance(load, Load) and load.dtype is torch.bfloat16 and load.mask is None else None
