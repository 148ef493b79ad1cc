"""Loads of one element for each row of a block, as vectors of one dimension.

Triton lets the threads of such a load, if it has an element for each of them, go along rows. Values that it is combined
with would get that layout, too: whole blocks exchanged through shared memory, and sums of columns across all threads.
A vector's layout does not spread: only its elements are exchanged.
"""

from __future__ import annotations

from functools import cached_property

from fxwrap.devices import WARP_LANES
from fxwrap.loop_ir import Axis, IndirectIndex, Load
from fxwrap.printers.triton.accesses import MIN_TILE_SIDE
from fxwrap.printers.triton.tile_printer import TilePrinter
from fxwrap.printers.triton.tiling import Dimension


class RowLoadPrinter(TilePrinter):
    """Prints a kernel whose loads may vary along one dimension of its tile only, which is not the last one."""

    vector_names: dict[int, dict[Axis, str]]
    """By the number of a dimension, the names of its axes at the positions of a vector."""
    vector_masks: dict[int, str]

    @cached_property
    def row_loads(self) -> dict[int, int]:
        """Returns the dimension of each load that is printed as a vector, by its position."""
        loads: dict[int, int] = {}
        for position, operation in enumerate(self.kernel.operations):
            span = self.varying_dimensions[position]
            if isinstance(operation, Load) and operation.mask is None and len(span) == 1:
                number, is_direct = (
                    min(span),
                    not any(isinstance(item, IndirectIndex) for item in operation.index.atoms()),
                )
                if is_direct and self._is_spread(number):
                    loads[position] = number
        return loads

    def _is_spread(self, number: int) -> bool:
        """Whether a block along a dimension has an element for each thread, and rows of many along the last one.

        Threads have short rows by themselves, or nearly: then they go along rows anyway.
        """
        *_, last = self.tile.dimensions
        block = self.tile.dimensions[number]
        return (
            block is not last
            and block.block >= WARP_LANES * self.configuration.num_warps
            and last.block >= MIN_TILE_SIDE
        )

    def _emit_program_offsets(self) -> None:
        self.vector_names, self.vector_masks = {}, {}
        super()._emit_program_offsets()

    def _emit_block_offsets(self, dimension: Dimension, start: str) -> None:
        super()._emit_block_offsets(dimension, start)
        number = self.tile.dimensions.index(dimension)
        if number in self.row_loads.values():
            lanes = self._lanes(dimension)
            text = f"{start} + {lanes}" if start else lanes
            flat, self.vector_names[number] = self._emit_axes(dimension.axes, text, "rows")
            if self._is_masked(dimension):
                self.vector_masks[number] = self.names.create_name(f"{flat}_mask")
                self.line(f"{self.vector_masks[number]} = {flat} < {self.index_printer.size_operand(dimension.size)}")

    def _load(self, position: int, operation: Load, looped: bool, last_use: bool) -> None:
        number = self.row_loads.get(position)
        if number is None:
            super()._load(position, operation, looped, last_use)
            return
        printer = self._indices_at(self.vector_names[number])
        arguments = [f"{self.pointers[operation.buffer]} + {printer(operation.index)}"]
        if number in self.vector_masks:
            arguments.append(f"mask={self.vector_masks[number]}")
        policy = self._load_policy(position, operation, looped, last_use)
        if policy:
            arguments.append(f'eviction_policy="{policy}"')
        text = f"tl.load({', '.join(arguments)}){self.tile.broadcast_subscript(number)}"
        self._assign(position, operation, operation.buffer, text)
