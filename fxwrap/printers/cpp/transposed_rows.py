"""Reductions of rows with transposed results, as a softmax over channels from one layout to another, or operands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxwrap.loop_ir import Atom, Axis, IndexLike, Load, Store, operation_dtype
from fxwrap.printers.cpp.loop_plan import STREAMED_BYTES, LoopPlan, is_transposed
from fxwrap.printers.cpp.loops import loop_head
from fxwrap.printers.cpp.rows import RowPrinter
from fxwrap.printers.cpp.statements import CppSourceWriter, EmittedValues

TILE_ROWS = 16
"""Rows that are stored together: a line of the cache of float32, as many as `transpose_16` of `kernel.h` transposes."""

MAX_TILE_BYTES = 65536
"""Largest size of the tiles of a kernel in bytes, a part of the L2 cache."""


def find_transposed_axis(plan: LoopPlan) -> Axis | None:
    """Returns the parallel axis along which all stores of row elements are contiguous, if that of rows is strided."""
    kernel, lane = plan.kernel, plan.vector_axis
    length = _row_length(plan)
    if lane is None or length is None:
        return None
    stores = _row_stores(plan)
    width = sum(operation_dtype(kernel.operations[store.value]).itemsize for store in stores)
    if not stores or any(store.mask is not None for store in stores):
        return None
    if width * length * TILE_ROWS > MAX_TILE_BYTES or len({store.buffer for store in stores}) < len(stores):
        return None
    long = [axis for axis in kernel.axes if isinstance(axis.size, int) and axis.size >= TILE_ROWS]
    return next((axis for axis in long if all(is_transposed(store.index, axis, lane) for store in stores)), None)


def _row_length(plan: LoopPlan) -> int | None:
    """Returns the number of elements of the rows that a kernel reduces, None if tiles of them are of no use."""
    lane = plan.vector_axis
    if lane is None or plan.kernel.reduced != (lane,) or plan.kernel.scans or plan.serial or plan.splits_reduction:
        return None
    return lane.size if isinstance(lane.size, int) and lane.size >= TILE_ROWS else None


def _row_stores(plan: LoopPlan) -> list[Store]:
    operations = enumerate(plan.kernel.operations)
    return [item for position, item in operations if isinstance(item, Store) and plan.kernel.varying[position]]


class TransposedRowPrinter(RowPrinter):
    """A kernel of rows that stores tiles of several rows, so that it writes whole cache lines."""

    def __init__(self, plan: LoopPlan, across: Axis, writer: CppSourceWriter, origin_comments: bool) -> None:
        super().__init__(plan, writer, origin_comments)
        self.across = across

    def print(self) -> None:
        """Writes the loops."""
        across, first, size = self.across, f"{self.across.name}_0", self.across.size
        heads = [loop_head(axis) for axis in self.kernel.axes if axis != across]
        heads.append(f"for (int64_t {first} = 0; {first} < {size}; {first} += {TILE_ROWS})")
        with self.writer.nest(heads, self.parallel()):
            self.writer.line(f"const int64_t end = fxwrap::min<int64_t>({first} + {TILE_ROWS}, {size});")
            for store in _row_stores(self.plan):
                kind = self.statements.type(store.value)
                self.writer.line(f"alignas(64) {kind} {self.tile(store)}[{TILE_ROWS}][{self.vector_axis.size}];")
            with self.writer.nest([loop_head(across, first, "end")]):
                self.print_row()
            for store in _row_stores(self.plan):
                self.store_tile(store)

    def tile(self, store: Store) -> str:
        """Returns the name of the tile of a store."""
        return f"{store.buffer}_tile"

    def block_stores(self, stores: Sequence[Store]) -> Sequence[Store]:
        """Returns no stores: tiles are transposed first."""
        return ()

    def store(self, store: Store, known: EmittedValues) -> None:
        """Writes the store of an element of the row into its tile."""
        element = f"{self.tile(store)}[{self.across.name} - {self.across.name}_0][{self.vector_axis.name}]"
        self.writer.line(f"{element} = {known[store.value]};{self.statements.comment(store)}")

    def store_tile(self, store: Store) -> None:
        """Writes the loops that transpose a tile and store it."""
        across, lane = self.across, self.vector_axis
        start, rows = f"{lane.name}_0", f"end - {across.name}_0"
        with self.writer.nest([f"for (int64_t {start} = 0; {start} < {lane.size}; {start} += 16)"]):
            self.writer.line(f"const int height = int(fxwrap::min<int64_t>(16, {lane.size} - {start}));")
            self.writer.line(f"alignas(64) {self.statements.type(store.value)} block[16][16];")
            self.writer.line(
                f"transpose(&{self.tile(store)}[0][{start}], {lane.size}, height, int({rows}), &block[0][0], 16);"
            )
            with (
                self.writer.nest([loop_head(lane, start, f"{start} + height")]),
                self.writer.nest([loop_head(across, f"{across.name}_0", "end")], self.simd()),
            ):
                value = f"block[{lane.name} - {start}][{across.name} - {across.name}_0]"
                self.statements.store(store, {store.value: value})


@dataclass(frozen=True)
class RowLoads:
    """Loads of a kernel of rows that are contiguous along the parallel axis `across`, in tiles of so many rows."""

    across: Axis
    loads: tuple[int, ...]
    rows: int


def find_transposed_loads(plan: LoopPlan) -> RowLoads | None:
    """Returns the loads of a kernel of rows that tiles of several rows make contiguous; None if there are none."""
    kernel, lane = plan.kernel, plan.vector_axis
    length = _row_length(plan)
    if lane is None or length is None:
        return None
    items = [(at, item) for at, item in enumerate(kernel.operations) if isinstance(item, Load) and item.mask is None]
    for across in kernel.axes:
        loads = [(at, item) for at, item in items if is_transposed(item.index, across, lane)]
        if not loads or not isinstance(across.size, int):
            continue
        width = sum(item.dtype.itemsize for _, item in loads)
        rows = STREAMED_BYTES // min(item.dtype.itemsize for _, item in loads)
        while rows > TILE_ROWS and (rows > across.size or rows * length * width > MAX_TILE_BYTES):
            rows //= 2
        if TILE_ROWS <= rows <= across.size and rows * length * width <= MAX_TILE_BYTES:
            return RowLoads(across, tuple([at for at, _ in loads]), rows)
    return None


def find_columns(plan: LoopPlan) -> Axis | None:
    """Returns the parallel axis along which half of the accesses to rows that no tile holds are contiguous, or None.

    As columns, such rows have tiles of the other accesses.
    """
    kernel, lane = plan.kernel, plan.vector_axis
    if lane is None or kernel.reduced != (lane,) or kernel.scans or plan.serial:
        return None
    long = [axis for axis in (*kernel.axes, lane) if not isinstance(axis.size, int) or axis.size >= TILE_ROWS]
    for axis in long if lane in long else ():
        accesses = [item for item in kernel.accesses if {axis, lane} <= item.index.axes()]
        across = [item for item in accesses if item.mask is None and is_transposed(item.index, axis, lane)]
        if across and 2 * len(across) >= len(accesses):
            return axis
    return None


class TransposedLoadPrinter(RowPrinter):
    """A kernel of rows that loads tiles of several rows, so that it reads whole cache lines."""

    def __init__(self, plan: LoopPlan, tiles: RowLoads, writer: CppSourceWriter, origin_comments: bool) -> None:
        super().__init__(plan, writer, origin_comments)
        self.across, self.tiles = tiles.across, tiles
        rows = f"[{self.across.name} - {self.across.name}_1]"
        self.tile_rows = {position: f"{self.statements.name(position)}_tile{rows}" for position in tiles.loads}

    def print(self) -> None:
        """Writes the loops. The last tile begins where whole ones fit."""
        across, first, rows = self.across, f"{self.across.name}_0", self.tiles.rows
        heads = [loop_head(axis) for axis in self.kernel.axes if axis != across]
        heads.append(f"for (int64_t {first} = 0; {first} < {across.size}; {first} += {rows})")
        with self.writer.nest(heads, self.parallel()):
            self.writer.line(f"const int64_t end = fxwrap::min<int64_t>({first} + {rows}, {across.size});")
            self.writer.line(f"const int64_t {across.name}_1 = fxwrap::min<int64_t>({first}, {across.size} - {rows});")
            starts: dict[Atom, IndexLike] = {across: Axis(f"{across.name}_1", across.size), self.vector_axis: 0}
            shape = str(rows), str(self.vector_axis.size)
            for position in self.tiles.loads:
                self.write_tile_load(position, starts, shape, shape)
            with self.writer.nest([loop_head(across, first, "end")]):
                self.print_row()
