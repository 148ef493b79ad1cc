"""The tile of a program of a Triton kernel: offsets along its dimensions, masks, and names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace

from fxwrap.loop_ir import Axis, Kernel, Reduce, Scan, as_index, indices, operands
from fxwrap.printers.triton.kernel_text import BodyParameters, TritonIndexPrinter, parenthesize
from fxwrap.printers.triton.kernel_writer import KernelWriter
from fxwrap.printers.triton.tiling import Dimension, Tile, TiledConfiguration
from fxwrap.symbolic import Size


class TileOffsetPrinter(KernelWriter, ABC):
    """Prints the offsets of a program and of its blocks; subclasses print what it computes."""

    def __init__(
        self, kernel: Kernel, configuration: TiledConfiguration, limits: Mapping[str, int], parameters: BodyParameters
    ) -> None:
        self.configuration = configuration
        self.parameters = parameters
        self.tile: Tile = configuration.tile(kernel)
        super().__init__(kernel, limits, parameters.comments)
        names = {axis: self.names.create_name(axis.name) for axis in (*kernel.axes, *kernel.reduced)}
        self.index_printer = TritonIndexPrinter(names, self._indirect_index, self.helpers, parameters.integer)
        self.masks: dict[int, str] = {}
        self.stable_names: dict[str, str] = {}
        self.varying_dimensions: dict[int, frozenset[int]] = {}
        self.dimension_of = {axis: n for n, item in enumerate(self.tile.dimensions) for axis in item.axes}
        self.positions: dict[str, str] = {}
        self.row_lanes = self.row_start = ""

    def _extents(self) -> list[Size]:
        return [*super()._extents(), *[item.size for item in self.tile.dimensions], self.tile.num_programs]

    @property
    def axis_names(self) -> Mapping[Axis, str]:
        """The names of the positions along axes."""
        return self.index_printer.names

    def _indices_at(self, names: Mapping[Axis, str]) -> TritonIndexPrinter:
        """Returns the printer of indices at other positions along some axes."""
        return replace(self.index_printer, names={**self.axis_names, **names})

    @abstractmethod
    def _indirect_index(self, position: int) -> str:
        """Returns the text of an index that an operation computes."""

    def _analyze_dimensions(self) -> None:
        """Computes for each operation the dimensions of the tile that its value varies along."""
        for position, operation in enumerate(self.kernel.operations):
            varying = frozenset[int]().union(*[self.varying_dimensions[used] for used in operands(operation)])
            for index in indices(operation):
                varying |= {self.dimension_of[axis] for axis in index.axes() if axis in self.dimension_of}
            if isinstance(operation, Reduce):
                varying -= {self.dimension_of.get(axis) for axis in self.kernel.reduced_by(operation)}
            elif isinstance(operation, Scan) and self.tile.reduced is not None:
                varying |= {self.tile.reduced}
            self.varying_dimensions[position] = varying | self._broadcast_dimensions(position)

    def _broadcast_dimensions(self, position: int) -> frozenset[int]:
        """Returns the dimensions that the printed value of an operation has although it does not vary along them."""
        return frozenset()

    def _emit_program_offsets(self) -> None:
        """Prints the program's offsets along the axes."""
        self.cast_symbols()
        parts: list[Dimension | Axis] = [*self.tile.parallel, *reversed(self.tile.outer)]
        rest = f"{self.parameters.program}{'.to(tl.int64)' if self.use_int64 else ''}"
        if len(parts) > 1:
            program = self.names.create_name("program")
            self.line(f"{program} = {rest}")
            rest = program
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            blocks = part.blocks if isinstance(part, Dimension) else part.size
            offset = rest if last else f"{rest} % {self.index_printer.size_operand(blocks)}"
            if isinstance(part, Axis):
                self.line(f"{self.axis_names[part]} = {offset}")
            else:
                self._emit_block_offsets(part, f"{offset if last else parenthesize(offset)} * {part.block_constant}")
            if not last:
                self.line(f"{rest} = {rest} // {self.index_printer.size_operand(blocks)}")
        r = self.tile.reduced
        if r is not None and not self.configuration.looped:
            self._emit_block_offsets(self.tile.dimensions[r], "")

    def _emit_block_offsets(self, dimension: Dimension, start: str) -> None:
        """Prints the positions of a block along a dimension, its axes, and its mask."""
        number = self.tile.dimensions.index(dimension)
        single = len(dimension.axes) == 1
        flat = self.axis_names[dimension.axes[0]] if single else self._stable_name(dimension.name)
        lanes = f"{self._lanes(dimension)}{self.tile.broadcast_subscript(number)}"
        self.line(f"{flat} = {self._positions(dimension, f'{start} + {lanes}' if start else lanes)}")
        if not single:
            self._unflatten(dimension.axes, flat, self.axis_names)
        if self._is_masked(dimension):
            self.masks[number] = self._stable_name(f"{flat}_mask")
            self.line(f"{self.masks[number]} = {flat} < {self.index_printer.size_operand(dimension.size)}")
        self.positions[dimension.name] = flat
        if dimension.name == "r":
            self.row_lanes, self.row_start = lanes, start

    def _lanes(self, dimension: Dimension, count: int = 1) -> str:
        """Returns the text of the numbers below a block's size times a count, as a vector."""
        cast = ".to(tl.int64)" if self.use_int64 else ""
        return f"tl.arange(0, {f'{count} * ' if count > 1 else ''}{dimension.block_constant}){cast}"

    def _emit_axes(self, axes: tuple[Axis, ...], text: str, wanted: str) -> tuple[str, dict[Axis, str]]:
        """Prints positions on all axes of a dimension; returns their name, and the names of those along each axis."""
        names = {axis: self.names.create_name(axis.name) for axis in axes}
        flat = names[axes[-1]] if len(axes) == 1 else self.names.create_name(wanted)
        self.line(f"{flat} = {text}")
        if len(axes) > 1:
            self._unflatten(axes, flat, names)
        return flat, names

    def _positions(self, dimension: Dimension, text: str) -> str:
        """Returns the text of the positions of a block; subclasses add what the compiler may assume of them."""
        return text

    def _is_masked(self, dimension: Dimension) -> bool:
        """Whether positions of a block may be beyond the end of its dimension."""
        return dimension.masked

    def _stable_name(self, wanted: str) -> str:
        """Returns a name that is the same in every loop."""
        if wanted not in self.stable_names:
            self.stable_names[wanted] = self.names.create_name(wanted)
        return self.stable_names[wanted]

    def _unflatten(self, axes: tuple[Axis, ...], flat: str, names: Mapping[Axis, str]) -> None:
        """Prints the positions along axes of the positions along all of them."""
        step = as_index(1)
        for axis in reversed(axes):
            divided = flat if step.constant == 1 else f"{flat} // {parenthesize(self.index_printer(step))}"
            first = axis == axes[0]
            text = divided if first else f"{divided} % {self.index_printer.size_operand(axis.size)}"
            self.line(f"{names[axis]} = {text}")
            step = step * as_index(axis.size)

    def _is_row(self, dimension: Dimension) -> bool:
        """Whether reductions and scans combine elements along a dimension."""
        return dimension.name == "r"

    @property
    def _row_dimension(self) -> int | None:
        """The position of the dimension of the tile along which reductions and scans combine elements."""
        return next((number for number, item in enumerate(self.tile.dimensions) if self._is_row(item)), None)
