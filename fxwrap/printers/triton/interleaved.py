"""Interleaved accesses as one access of a wide block, whose vectors are split or joined in registers.

A load or store with a stride otherwise is an instruction for each element. Positions are as aligned as their masks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property

from fxwrap.loop_ir import Axis, InterleavedAccess, Load, Store
from fxwrap.printers.triton.accesses import has_vectors, joined_accesses
from fxwrap.printers.triton.row_loads import RowLoadPrinter
from fxwrap.printers.triton.tiling import Dimension
from fxwrap.symbolic import Size, product

MAX_VECTOR_ELEMENTS = 16
"""The most elements of a vector that a thread accesses at once."""


class InterleavedPrinter(RowLoadPrinter):
    """Prints a kernel whose accesses may be interleaved along the tile's last dimension."""

    wide_names: dict[int, dict[Axis, str]]
    """By the number of accesses that are one, the names of the dimension's axes at each element of a wide block."""
    wide_masks: dict[int, str]

    @cached_property
    def joined(self) -> dict[int, InterleavedAccess]:
        """Returns the accesses that are printed as one, by each of their positions."""
        last = self._last
        accesses = [] if last is None else joined_accesses(self.kernel, last.axes[-1])
        return {position: item for item in accesses for position in item.positions}

    @property
    def _counts(self) -> list[int]:
        """The numbers of accesses that are printed as one."""
        return sorted({item.count for item in self.joined.values()})

    @property
    def _last(self) -> Dimension | None:
        return self.tile.dimensions[-1] if self.tile.dimensions else None

    def _extents(self) -> list[Size]:
        last = self._last
        wide = [] if last is None else [product((last.size, count)) for count in self._counts]
        return [*super()._extents(), *wide]

    def _positions(self, dimension: Dimension, text: str) -> str:
        return self._aligned(dimension, text, 1)

    def _aligned(self, dimension: Dimension, text: str, count: int) -> str:
        """Returns the positions of a block with the alignment of the end of the dimension, or `count` for no vectors.

        Triton chooses the elements of a thread by the alignment of addresses alone. Where a mask may change between
        them, it accesses them one by one, far from those of the next thread.
        """
        size = dimension.size
        if dimension.name != "x" or self.kernel.reduced or self.parameters.is_combined:
            return text
        alignment = MAX_VECTOR_ELEMENTS
        if not has_vectors(self.kernel, dimension.axes, self.joined):
            alignment = count
        elif dimension.masked and isinstance(size, int):
            alignment = math.gcd(size * count, MAX_VECTOR_ELEMENTS)
        alignments = [1] * (len(self.tile.dimensions) - 1) + [alignment]
        return text if alignment == MAX_VECTOR_ELEMENTS else f"tl.multiple_of({text}, {alignments})"

    def _emit_block_offsets(self, dimension: Dimension, start: str) -> None:
        super()._emit_block_offsets(dimension, start)
        if dimension is self._last:
            self.wide_names, self.wide_masks = {}, {}
            for count in self._counts:
                self._emit_wide_offsets(dimension, start, count)

    def _emit_wide_offsets(self, dimension: Dimension, start: str, count: int) -> None:
        """Prints the positions along the axes of `count` elements for each position of a block."""
        number = self.tile.dimensions.index(dimension)
        axes = (*dimension.axes[:-1], _wide_axis(dimension, count))
        first = f"{count} * ({start}) + " if start else ""
        text = f"{first}{self._lanes(dimension, count)}{self.tile.broadcast_subscript(number)}"
        flat, self.wide_names[count] = self._emit_axes(axes, self._aligned(dimension, text, count), "wide")
        if dimension.masked:
            self.wide_masks[count] = self.names.create_name(f"{flat}_mask")
            size = self.index_printer.size_operand(dimension.size)
            self.line(f"{self.wide_masks[count]} = {flat} < {count} * {size}")

    def _loop(self, positions: tuple[int, ...], last_use: frozenset[int]) -> None:
        for position in set(positions) & set(self.joined):
            self.text.pop(position, None)  # the elements that an earlier loop has loaded
        super()._loop(positions, last_use)

    def _load(self, position: int, operation: Load, looped: bool, last_use: bool) -> None:
        access = self.joined.get(position)
        if access is None:
            super()._load(position, operation, looped, last_use)
            return
        if position in self.text:
            return
        arguments = self._wide_arguments(operation, access)
        policy = self._load_policy(position, operation, looped, last_use)
        if policy:
            arguments.append(f'eviction_policy="{policy}"')
        span = self.varying_dimensions[position]
        block = f"tl.load({', '.join(arguments)})"
        names = [self._name(at, operation.buffer) for at in access.positions]
        shape = [*self._blocks(span), *["2"] * (access.count.bit_length() - 1)]
        self._split(f"tl.reshape({block}, {_shape(shape)})", names, operation.origin)
        self.text |= dict(zip(access.positions, names, strict=True))

    def _split(self, block: str, names: Sequence[str], origin: str) -> None:
        """Prints the names of the elements of the last dimensions of a block, each of which has two."""
        if len(names) == 2:
            self.line(f"{', '.join(names)} = tl.split({block})", origin)
            return
        halves = [self.names.create_name("half") for _ in range(2)]
        self.line(f"{', '.join(halves)} = tl.split({block})", origin)
        for number, half in enumerate(halves):
            self._split(half, names[number::2], origin)

    def _store(self, position: int, operation: Store, looped: bool) -> None:
        access = self.joined.get(position)
        if access is None:
            super()._store(position, operation, looped)
        elif position == max(access.positions):
            span = self._index_dimensions(operation.index)
            values = [self._block_value(at, span) for at in access.positions]
            address, *mask = self._wide_arguments(operation, access)
            joined = f"tl.reshape({_join(values)}, {_shape(self._blocks(span, len(values)))})"
            arguments = [address, joined, *mask, *self._store_policy(position, looped)]
            self.line(f"tl.store({', '.join(arguments)})", operation.origin)

    def _block_value(self, position: int, span: frozenset[int]) -> str:
        """Returns the value of a store as a block along dimensions."""
        operation = self.kernel.operations[position]
        assert isinstance(operation, Store), "a store has a value"
        value = self._value(operation.value)
        if self.varying_dimensions[operation.value] >= span:
            return value
        return f"tl.broadcast_to({value}, {_shape(self._blocks(span))})"

    def _wide_arguments(self, operation: Load | Store, access: InterleavedAccess) -> list[str]:
        """Returns the address of a wide block, and its mask if it has one."""
        count, number = access.count, len(self.tile.dimensions) - 1
        first = self.kernel.operations[access.positions[0]]
        assert isinstance(first, Load | Store), "accesses are loads and stores"
        wide = _wide_axis(self.tile.dimensions[number], count)
        printer = self._indices_at(self.wide_names[count])
        address = f"{self.pointers[operation.buffer]} + {printer(first.index.substitute({access.axis: 0}) + wide)}"
        rows = self._mask(self._index_dimensions(first.index) - {number}, None)
        masks = [mask for mask in (rows, self.wide_masks.get(count, "")) if mask]
        return [address, *([f"mask={' & '.join(masks)}"] if masks else [])]

    def _blocks(self, span: Iterable[int], count: int = 1) -> list[str]:
        """Returns the sizes of a block along dimensions, the last one `count` times as wide."""
        sizes = [item.block_constant if n in span else "1" for n, item in enumerate(self.tile.dimensions)]
        return sizes if count == 1 else [*sizes[:-1], f"{count} * {sizes[-1]}"]


def _wide_axis(dimension: Dimension, count: int) -> Axis:
    inner = dimension.axes[-1]
    return Axis(f"{inner.name}_wide", product((inner.size, count)))


def _shape(sizes: Sequence[str]) -> str:
    return f"({sizes[0]},)" if len(sizes) == 1 else f"({', '.join(sizes)})"


def _join(values: Sequence[str]) -> str:
    """Returns the text of a block whose last dimensions, of two elements each, number the values."""
    if len(values) == 2:
        return f"tl.join({', '.join(values)})"
    return f"tl.join({_join(values[::2])}, {_join(values[1::2])})"
