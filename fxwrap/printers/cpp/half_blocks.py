"""Blocks of float16 elements that are converted together.

Processors convert vectors of such elements in one instruction, which compilers do not use in loops over elements:
they convert them one by one, or by a dozen instructions for integers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fxwrap.loop_ir import Atom, Axis, Compute, Index, IndexLike, IndirectIndex, Kernel, Load, Store, as_index
from fxwrap.printers.cpp.loop_plan import VECTOR_LANES
from fxwrap.printers.cpp.statements import EmittedValues, StatementPrinter

HALF_BLOCK = 64
"""Elements that are converted together: few enough to stay in the nearest cache, or in registers."""

MIN_HALF_LANES = 4
"""The least number of elements along a loop for which blocks are converted: those of the shortest vector."""


@dataclass(frozen=True)
class HalfBlocks:
    """The accesses of a vectorised loop that go through blocks of float32.

    Fields:
        loads: the position of each load, by that of its cast to float32.
        stores: the position of the float32 value, by the store of its cast.
    """

    loads: Mapping[int, int] = field(default_factory=dict)
    stores: Mapping[Store, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.loads or self.stores)

    def targets(self, targets: Sequence[int], stores: Sequence[Store]) -> list[int]:
        """Returns the targets of a loop with these stores, float32 values instead of casts that it does not store."""
        wide = {store.value: value for store, value in self.stores.items()}
        others = [store.value for store in stores if store not in self.stores and store.value in wide]
        return [*[wide.get(target, target) for target in targets], *others]

    def stored(self, store: Store) -> int:
        """Returns the position of the value that the loop writes for a store."""
        return self.stores.get(store, store.value)


def find_half_blocks(
    kernel: Kernel,
    lane: Axis,
    targets: Sequence[int],
    stores: Sequence[Store],
    known: Collection[int],
    tiled: Collection[int | Store] = (),
) -> HalfBlocks:
    """Returns the accesses of a loop along `lane` to adjacent float16 elements that are cast from or to float32.

    Elements of `tiled` loads, by position, and of `tiled` stores are adjacent in tiles.
    """
    if isinstance(lane.size, int) and lane.size < MIN_HALF_LANES:
        return HalfBlocks()
    loads: dict[int, int] = {}
    for position in sorted(kernel.backward_slice(targets, known)):
        item = kernel.operations[position]
        if isinstance(item, Compute) and item.name == "cast" and item.dtype is torch.float32:
            (source,) = item.operands
            load = kernel.operations[source]
            if isinstance(load, Load) and load.dtype is torch.float16 and load.mask is None and source not in known:
                if source in tiled or _is_adjacent(load.index, lane, known):
                    loads[position] = source
    narrowed: dict[Store, int] = {}
    for store in stores:
        value = kernel.operations[store.value]
        is_adjacent = store in tiled or _is_adjacent(store.index, lane, known)
        if store.mode == "set" and store.mask is None and is_adjacent:
            if isinstance(value, Compute) and value.name == "cast" and value.dtype is torch.float16:
                if _is_float32(kernel, value.operands[0]) and store.value not in known:
                    narrowed[store] = value.operands[0]
    return HalfBlocks(loads, narrowed)


def _is_float32(kernel: Kernel, position: int) -> bool:
    return getattr(kernel.operations[position], "dtype", None) is torch.float32


def _is_adjacent(index: Index, lane: Axis, known: Collection[int]) -> bool:
    """Whether an index is contiguous along the lanes, and what it depends on is known before the loop."""
    stride = index.stride(lane)
    if stride is None or stride.constant != 1:
        return False
    return all(atom.operation in known for atom in index.atoms() if isinstance(atom, IndirectIndex))


def padded(size: int) -> int:
    """Returns the number of elements of whole vectors that a block of so many fills."""
    return -(-size // VECTOR_LANES) * VECTOR_LANES


class HalfBlockWriter:
    """Writes the conversions of a loop's blocks, which begin at `first` along `lane` and have `count` elements."""

    def __init__(
        self,
        statements: StatementPrinter,
        blocks: HalfBlocks,
        lane: Axis,
        first: str,
        count: str,
        tiles: Mapping[int, str] | None = None,
        tile_rows: Mapping[Store, str] | None = None,
    ) -> None:
        """`tiles` has the text of the first element of each load that is in a tile, `tile_rows` those of stores."""
        self.statements = statements
        self.tiles, self.tile_rows = tiles or {}, tile_rows or {}
        self.blocks = blocks
        self.at: dict[Atom, IndexLike] = {lane: as_index(Axis(first, lane.size))}
        self.count = count

    def widen(self, known: EmittedValues, size: int) -> None:
        """Writes the loads of blocks of so many elements, which become known values."""
        for cast, source in self.blocks.loads.items():
            load = self._load(source)
            index = self.statements.index(known)(load.index.substitute(self.at))
            known[cast] = self._widen(source, self.tiles.get(source) or f"{load.buffer} + {index}", size, "wide")

    def widen_rows(self, known: EmittedValues, size: int, axis: str, count: int) -> list[EmittedValues]:
        """Writes the loads of blocks at so many places along another axis; returns the elements of each place."""
        rows: list[EmittedValues] = [{} for _ in range(count)]
        for cast, source in self.blocks.loads.items():
            index = self._load(source).index.substitute(self.at)
            moving = [item for item in index.axes() if item.name == axis]
            for k, row in enumerate(rows if moving else rows[:1]):
                place: dict[Atom, IndexLike] = {item: as_index(Axis(f"{axis}_0", item.size)) + k for item in moving}
                text = self.statements.index(known)(index.substitute(place))
                row[cast] = self._widen(source, f"{self._load(source).buffer} + {text}", size, f"wide_{k}")
            if not moving:
                for row in rows[1:]:
                    row[cast] = rows[0][cast]
        return rows

    def _load(self, source: int) -> Load:
        load = self.statements.kernel.operations[source]
        assert isinstance(load, Load)
        return load

    def _widen(self, source: int, address: str, size: int, suffix: str) -> str:
        load, name = self._load(source), f"{self.statements.name(source)}_{suffix}"
        self.statements.writer.line(f"alignas(64) float {name}[{padded(size)}];")
        comment = self.statements.comment(load)
        self.statements.writer.line(f"widen({address}, {self.count}, {name});{comment}")
        return f"{name}[lane]"

    def declare_stores(self, size: int) -> None:
        """Declares the blocks of stores."""
        for store in self.blocks.stores:
            self.statements.writer.line(f"alignas(64) float {self.block(store)}[{padded(size)}];")

    def block(self, store: Store) -> str:
        """Returns the name of the block of a store."""
        return f"{store.buffer}_{list(self.blocks.stores).index(store)}_stored"

    def store(self, store: Store, known: EmittedValues) -> None:
        """Writes the store of an element into its block."""
        value = known[self.blocks.stores[store]]
        self.statements.writer.line(f"{self.block(store)}[lane] = {value};{self.statements.comment(store)}")

    def narrow(self, known: EmittedValues) -> None:
        """Writes the stores of blocks."""
        for store in self.blocks.stores:
            index = self.statements.index(known)(store.index.substitute(self.at))
            target = self.tile_rows.get(store) or f"{store.buffer} + {index}"
            self.statements.writer.line(f"narrow({self.block(store)}, {self.count}, {target});")
