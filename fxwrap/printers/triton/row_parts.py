"""Kernels that reduce rows and accumulate columns: a program has whole rows of its part, a few at once, in a loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fxwrap.loop_ir import DeviceAssert, Index, Reduce, Scan, Store, find_rows_and_columns
from fxwrap.printers.triton.reductions import accumulate, identity, reduce_expression
from fxwrap.printers.triton.tile_printer import TilePrinter
from fxwrap.printers.triton.tiling import Dimension, RowPartConfiguration


class RowPartPrinter(TilePrinter):
    """Prints a loop over the rows of a part. Reductions of rows are inside of it, those of columns around it.

    Where a tile has chunks of rows in a dimension of their own, Triton gives whole rows to a warp, which reduces them
    without waiting for others. It would share out each row among all warps if this was one dimension.
    """

    configuration: RowPartConfiguration

    def _has_loop(self) -> bool:
        return True

    def _position_of(self, name: str) -> int | None:
        return next((number for number, item in enumerate(self.tile.dimensions) if item.name == name), None)

    def _analyze_dimensions(self) -> None:
        super()._analyze_dimensions()
        for position, varying in self.varying_dimensions.items():
            self.varying_dimensions[position] = self._with_chunks(varying)

    def _index_dimensions(self, index: Index) -> frozenset[int]:
        return self._with_chunks(super()._index_dimensions(index))

    def _with_chunks(self, dimensions: frozenset[int]) -> frozenset[int]:
        """Returns dimensions with that of chunks if that of their elements is among them."""
        chunks = self._position_of("chunk")
        return dimensions if chunks is None or self._row_dimension not in dimensions else dimensions | {chunks}

    def _positions(self, dimension: Dimension, text: str) -> str:
        chunks = self._position_of("chunk")
        if chunks is None or dimension.name != "r":
            return super()._positions(dimension, text)
        number = f"tl.arange(0, {self.tile.dimensions[chunks].block_constant}){self.tile.broadcast_subscript(chunks)}"
        return f"{number} * {dimension.block_constant} + {text}"

    def _is_masked(self, dimension: Dimension) -> bool:
        if dimension.name == "r":
            dimension = replace(dimension, block=self.configuration.r_block)  # all chunks
        return super()._is_masked(dimension)

    def _emit_persistent(self) -> None:
        form, number = find_rows_and_columns(self.kernel), self._position_of("row")
        assert form is not None and number is not None, "the configuration is one of rows and columns"
        after = self.kernel.forward_slice(form.column_reductions)
        varying = self.kernel.forward_slice((*form.row_reductions, *form.column_reductions))
        # The values that are the same for all rows are loaded and brought to their threads before the loop.
        before = [
            position
            for position in self.schedule.straight_line
            if position not in varying and number not in self.varying_dimensions[position]
            and not isinstance(self.kernel.operations[position], Store | DeviceAssert)
        ]  # fmt: skip
        for position in before:
            self._operation(position, looped=False)
        loop = [position for position in self.schedule.straight_line if position not in before]
        self._emit_loop([item for item in loop if item not in after or item in form.column_reductions], number)
        for position in loop:
            if position in after and position not in form.column_reductions:
                self._operation(position, looped=False)

    def _emit_loop(self, positions: Sequence[int], number: int) -> None:
        """Prints the loop over rows, with the statements of reductions of columns around it."""
        dimension = self.tile.dimensions[number]
        with self._loop_over(dimension) as (before, after):
            for position in positions:
                operation = self.kernel.operations[position]
                if not isinstance(operation, Reduce) or not self._reduces(operation, dimension):
                    self._operation(position, looped=False)
                    continue
                value, dtype = self._tile_value(operation.operands[0]), self.dtype_of(operation.operands[0])
                sums = accumulate(operation, value, dtype, self._result_names(position), self._context(number))
                before += sums.before
                after += sums.after
                for line in sums.inside:
                    self.line(line, operation.origin)

    def _reduces(self, operation: Reduce, dimension: Dimension) -> bool:
        return set(self.kernel.reduced_by(operation)) <= set(dimension.axes)

    def _combine(self, position: int, operation: Reduce | Scan) -> None:
        chunks = self._position_of("chunk")
        if chunks is None:
            super()._combine(position, operation)
            return
        (value, dtype), row, names = self._row_value(operation), self._row(), self._result_names(position)
        masked = row.masked(value, identity(operation.kind, dtype))
        in_chunks = reduce_expression(operation.kind, masked, dtype, replace(row, axis=chunks))
        self.line(f"{names[0]} = {reduce_expression(operation.kind, in_chunks, dtype, row)}", operation.origin)

    def _tile_value(self, position: int) -> str:
        """Returns a value in each element of the tile."""
        value = self._value(position)
        if len(self.varying_dimensions[position]) < len(self.tile.dimensions):
            value = f"tl.broadcast_to({value}, {self.tile.shape})"
        return value
