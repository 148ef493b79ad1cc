"""Operands of contractions that tensor descriptors describe: a GPU loads a block of a matrix by one instruction (TMA).

A kernel makes its descriptors itself, so that a launch has the same arguments with and without them. Addresses of
matrices, of their rows and of blocks are multiples of 16 bytes: launches copy a tensor at another address.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fxwrap.loop_ir import Atom, Index, IndexLike, Kernel, Load
from fxwrap.printers.triton.accesses import row_step
from fxwrap.printers.triton.kernel_text import BodyParameters, parenthesize
from fxwrap.printers.triton.shared_elements import ContractionLoadPrinter
from fxwrap.printers.triton.tiling import Dimension, TiledConfiguration

_ALIGNMENT = 16
"""The bytes that the addresses of matrices, of their rows and of blocks are multiples of."""


@dataclass(frozen=True)
class DescribedMatrix:
    """The elements of a load along two dimensions of a tile.

    Fields: `base` is the index of the first element; rows are along `rows`, `stride` elements from each other, whose
    elements along `columns` are contiguous.
    """

    base: Index
    rows: Dimension
    columns: Dimension
    stride: int


def find_matrix(load: Load, dimensions: Sequence[Dimension]) -> DescribedMatrix | None:
    """Returns the matrix that a load reads along two dimensions of a tile; None if no descriptor describes it."""
    if load.mask is not None or len(dimensions) != 2:
        return None
    steps = [step.constant if (step := row_step(load.index, item.axes)) else None for item in dimensions]
    if 1 not in steps:
        return None
    rows, columns = (1, 0) if steps[0] == 1 else (0, 1)
    stride = steps[rows]
    if stride is None or stride <= 0:
        return None
    first: dict[Atom, IndexLike] = dict.fromkeys([axis for item in dimensions for axis in item.axes], 0)
    base = load.index.substitute(first)
    offsets = (stride, dimensions[columns].block, *[coefficient for _, coefficient in base.terms])
    if any(offset * load.dtype.itemsize % _ALIGNMENT for offset in offsets):
        return None
    return DescribedMatrix(base, dimensions[rows], dimensions[columns], stride)


class DescriptorPrinter(ContractionLoadPrinter):
    """Prints a contraction that may load operands through tensor descriptors, by their positions in the kernel."""

    def __init__(
        self, kernel: Kernel, configuration: TiledConfiguration, limits: Mapping[str, int], parameters: BodyParameters
    ) -> None:
        super().__init__(kernel, configuration, limits, parameters)
        self.descriptors: dict[int, tuple[DescribedMatrix, str]] = {}
        self.starts: dict[str, str] = {}

    def _emit_descriptors(self, prologue: Iterable[int]) -> None:
        """Prints the descriptors of the matrices that are loaded for one operand along the current dimensions."""
        for position in sorted(prologue):
            load = self.kernel.operations[position]
            matrix = find_matrix(load, self.tile.dimensions) if isinstance(load, Load) else None
            if matrix is None or self._index_dimensions(matrix.base) or position in self.runs:
                continue
            if not self._is_aligned(matrix.columns):
                continue
            assert isinstance(load, Load), "a matrix is loaded"
            name = self.names.create_name("descriptor")
            address = self._address(load.buffer, matrix.base, frozenset(), frozenset())
            rows, columns = [self.index_printer.size_operand(item.size) for item in (matrix.rows, matrix.columns)]
            blocks = f"[{matrix.rows.block_constant}, {matrix.columns.block_constant}]"
            shape, strides = f"[{rows}, {columns}]", f"[{matrix.stride}, 1]"
            text = f"{name} = tl.make_tensor_descriptor({address}, {shape}, {strides}, {blocks})"
            self.line(text, load.origin)
            self.descriptors[position] = matrix, name

    def _is_aligned(self, _dimension: Dimension) -> bool:
        """Whether blocks along a dimension begin at multiples of their size."""
        return True

    def _load(self, position: int, operation: Load, looped: bool, last_use: bool) -> None:
        descriptor = self.descriptors.get(position)
        if descriptor is None:
            super()._load(position, operation, looped, last_use)
            return
        matrix, name = descriptor
        row, column = [parenthesize(self.starts[item.name]) for item in (matrix.rows, matrix.columns)]
        if self.use_int64:
            row, column = f"{row}.to(tl.int32)", f"{column}.to(tl.int32)"
        transposed = "" if self.tile.dimensions[0] is matrix.rows else ".T"
        text = f"{name}.load([{row}, {column}]){transposed}"
        self._assign(position, operation, operation.buffer, text)

    def _emit_block_offsets(self, dimension: Dimension, start: str) -> None:
        super()._emit_block_offsets(dimension, start)
        self.starts[dimension.name] = start
