"""Loops of kernels that reduce along the vectorised axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fxwrap.loop_ir import Compute, Load, Store
from fxwrap.printers.cpp.half_blocks import MIN_HALF_LANES, HalfBlocks, HalfBlockWriter, find_half_blocks
from fxwrap.printers.cpp.loop_plan import (
    LANES,
    MAX_LANE_ELEMENTS,
    ROW_BUFFER_MAX_ELEMENTS,
    ROW_BUFFER_MIN_COST,
    STREAMED_BYTES,
    VECTOR_LANES,
    split_reduction,
)
from fxwrap.printers.cpp.loops import loop_head
from fxwrap.printers.cpp.operations import print_size
from fxwrap.printers.cpp.reductions import ReductionPrinter
from fxwrap.printers.cpp.statements import EmittedValues
from fxwrap.symbolic import Size, product


class RowPrinter(ReductionPrinter):
    """A kernel that reduces along the vectorised axis: each parallel iteration is a row, each stage a pass over it."""

    tile_rows: Mapping[int, str] = {}
    """The text of the row that a load has in a tile, by its position."""

    def print(self) -> None:
        """Writes the loops."""
        pragma = "" if self.plan.splits_reduction else self.parallel()
        with self.writer.nest([loop_head(axis) for axis in self.kernel.axes], pragma):
            self.print_row()

    def print_row(self) -> None:
        """Writes the passes over one row."""
        self.statements.lane = self.vector_axis
        element = self.statements.element
        known: EmittedValues = {
            position: element(f"{row}[{self.vector_axis.name}]", self.statements.dtype(position))
            for position, row in self.tile_rows.items()
        }
        self.filled_row_buffers: set[int] = set()
        self.overlaps = self.can_overlap()
        self.row_buffers = self.select_row_buffers()
        if self.overlaps and self.overwrites_operands():
            self.overlaps = False
            self.row_buffers = self.select_row_buffers()
        for position in sorted(self.row_buffers - self.result_buffers.keys()):
            kind, name = self.statements.type(position), self.statements.name(position)
            self.writer.line(f"{kind} {name}_row[{product([*self.row_sizes()])}];")
        self.print_stages(known)
        self.print_invariant_asserts(known)
        if self.final_stores():
            self.write_stores(self.final_stores(), known)

    def can_overlap(self) -> bool:
        """Whether rows are a few whole vectors and a rest."""
        size, width = self.vector_axis.size, self.block_width()
        if not isinstance(size, int) or size < width or size % width == 0 or self.kernel.scans:
            return False
        return (
            not self.in_order
            and not self.plan.splits_reduction
            and not self.is_long(self.kernel.reductions, self.lanes())
        )

    def block_width(self) -> int:
        """Returns the number of lanes that fill a vector of the narrowest elements: loops have vectors of these."""
        narrowest = min([buffer.dtype.itemsize for buffer in (*self.kernel.inputs, *self.kernel.outputs)])
        return max(VECTOR_LANES, min(self.lanes(), VECTOR_LANES * 4 // narrowest))

    def overwrites_operands(self) -> bool:
        """Whether the pass that stores reads elements of its results, which it could not do again in a later block."""
        reductions, stores = self.stage_sinks()[-1]
        known = {*self.row_buffers, *self.kernel.reductions}
        read = self.kernel.backward_slice(self.targets(reductions, stores), known) if stores else set[int]()
        return any(self.is_overwritten(item) and self.kernel.varying[item] for item in read)

    def is_overwritten(self, position: int) -> bool:
        """Whether an operation loads from a result of the kernel, or casts such an element."""
        operation = self.kernel.operations[position]
        if isinstance(operation, Compute) and operation.name == "cast":
            operation = self.kernel.operations[operation.operands[0]]
        return isinstance(operation, Load) and operation.buffer in {buffer.name for buffer in self.kernel.outputs}

    def row_sizes(self) -> list[Size]:
        """Returns the sizes of the reduced axes in row buffers, where overlapping blocks have places of their own."""
        return [
            -(-axis.size // self.block_width()) * self.block_width()
            if self.overlaps and axis is self.vector_axis and isinstance(axis.size, int)
            else axis.size
            for axis in self.kernel.reduced
        ]

    def row_place(self) -> str:
        """Returns the position of an element in row buffers."""
        text = ""
        for axis, size in zip(self.kernel.reduced, self.row_sizes(), strict=True):
            name = "place" if self.overlaps and axis is self.vector_axis else axis.name
            text = f"({text}) * {print_size(size)} + {name}" if text else name
        return text

    def row_element(self, position: int) -> str:
        """Returns an element of a value's buffer."""
        if position in self.result_buffers:
            return self.result_element(position)
        return f"{self.statements.name(position)}_row[{self.row_place()}]"

    def select_row_buffers(self) -> set[int]:
        """Returns the values that one stage stores for later ones."""
        count = self.kernel.reduced_count
        if not isinstance(count, int) or count > ROW_BUFFER_MAX_ELEMENTS or self.plan.splits_reduction:
            self.result_buffers = {} if self.overlaps else self.select_result_buffers()
            return set(self.result_buffers)

        def is_buffered(position: int, chosen: set[int]) -> bool:
            is_costly = self.plan.cost(position, chosen) >= ROW_BUFFER_MIN_COST
            return is_costly or (self.overlaps and self.is_overwritten(position))

        return self.values_of_several_stages(is_buffered)

    def print_stage(self, reductions: list[int], stores: list[Store], known: EmittedValues) -> None:
        """Writes one pass over the row."""
        targets = self.targets(reductions, stores)
        if not targets:
            return
        self.hoist_invariants(targets, known)
        if self.plan.splits_reduction or self.is_long(reductions, self.lanes()):
            self.print_parts(reductions, stores, known)
        else:
            self.declare_lanes(reductions, self.lanes())
            with self.writer.nest([loop_head(axis) for axis in self.kernel.reduced if axis is not self.vector_axis]):
                self.lane_loop(reductions, stores, dict(known), "0", print_size(self.vector_axis.size))
        self.filled_row_buffers |= self.row_buffers & self.kernel.backward_slice(targets, known)
        for position in reductions:
            self.finish(position, self.combined(position), known)

    def lanes(self) -> int:
        """Returns the number of accumulators, at most the number of the row's elements."""
        size = self.vector_axis.size
        lanes = self.streamed_lanes() if self.plan.splits_reduction else LANES
        while isinstance(size, int) and lanes > max(size, 1):
            lanes //= 2
        return lanes

    def streamed_lanes(self) -> int:
        """Returns the number of accumulators that the widest loads fill a line of the cache for, at least 16."""
        loads = [item.dtype.itemsize for item in self.kernel.operations if isinstance(item, Load)]
        return STREAMED_BYTES // min(max(loads, default=4), 4)

    def combined(self, position: int) -> str:
        """Returns the combination of a reduction's lanes."""
        return f"{self.statements.name(position)}_lanes.combined({self.combine(position)})"

    def lane_loop(
        self, reductions: Sequence[int], stores: Sequence[Store], known: EmittedValues, start: str, count: str
    ) -> None:
        """Writes the vectorised loop over `count` elements of the vectorised axis from `start` on."""
        vector_axis = self.vector_axis
        blocks = self.half_blocks(reductions, stores, known)
        if blocks:
            self.half_loop(reductions, stores, known, start, count, blocks)
            return
        if self.overlaps:
            arguments = f"int64_t {vector_axis.name}, int lane, int64_t place, bool is_new"
            loop = f"for_overlapping_lanes<{self.lanes()}, {self.block_width()}>"
            with self.writer.block(f"{loop}({count}, [&]({arguments})", "});"):
                self.lane_body(reductions, stores, known)
            return
        if not reductions:
            limit = count if start == "0" else f"{start} + {count}"
            with self.writer.nest([loop_head(vector_axis, start, limit)], self.simd()):
                self.lane_body(reductions, stores, known)
            return
        element, loop = vector_axis.name if start == "0" else "offset", "for_lanes" + "_in_order" * self.in_order
        with self.writer.block(f"{loop}<{self.lanes()}>({count}, [&](int64_t {element}, int lane)", "});"):
            if start != "0":
                self.writer.line(f"const int64_t {vector_axis.name} = {start} + offset;")
            self.lane_body(reductions, stores, known)

    def half_blocks(self, reductions: Sequence[int], stores: Sequence[Store], known: EmittedValues) -> HalfBlocks:
        """Returns the accesses of a pass that are converted in blocks, none in loops in order."""
        if self.in_order or self.lanes() < MIN_HALF_LANES:
            return HalfBlocks()
        row_values = dict.fromkeys(self.filled_row_buffers, "")
        new = self.row_buffers - self.filled_row_buffers
        targets = [*self.targets(reductions, stores), *new]
        values = {**{item: text for item, text in known.items() if item not in self.tile_rows}, **row_values}
        stored = self.block_stores(stores)
        return find_half_blocks(self.kernel, self.vector_axis, targets, stored, values, self.tile_rows)

    def half_loop(
        self,
        reductions: Sequence[int],
        stores: Sequence[Store],
        known: EmittedValues,
        start: str,
        count: str,
        blocks: HalfBlocks,
    ) -> None:
        """Writes the loop over blocks of float16 elements: their conversions, and the vectorised loop of a block."""
        lane, lanes = self.vector_axis, self.lanes()
        tiles = {position: f"{row} + first" for position, row in self.tile_rows.items()}
        halves = HalfBlockWriter(self.statements, blocks, lane, "first", "lanes", tiles)
        loop, arguments = f"for_blocks<{lanes}>", "int64_t offset, auto lanes"
        if self.overlaps:
            loop = f"for_overlapping_blocks<{lanes}, {self.block_width()}>"
            arguments += ", int64_t first_place, int repeated"
        with self.writer.block(f"{loop}({count}, [&]({arguments})", "});"):
            self.writer.line(f"const int64_t first = {'offset' if start == '0' else f'{start} + offset'};")
            halves.widen(known, lanes)
            halves.declare_stores(lanes)
            with self.writer.nest(["for (int lane = 0; lane < lanes; ++lane)"], "#pragma omp simd"):
                self.writer.line(f"const int64_t {lane.name} = first + lane;")
                if self.overlaps:
                    self.writer.line("const int64_t place = first_place + lane;")
                    self.writer.line("const bool is_new = lane >= repeated;")
                self.lane_body(reductions, stores, dict(known), halves)
            halves.narrow(known)

    def lane_body(
        self,
        reductions: Sequence[int],
        stores: Sequence[Store],
        known: EmittedValues,
        halves: HalfBlockWriter | None = None,
    ) -> None:
        """Writes the iteration for one element: statements, row buffers, accumulation, stores."""
        name = self.statements.name
        blocks = HalfBlocks() if halves is None else halves.blocks
        for position in self.filled_row_buffers:
            known[position] = self.row_element(position)
        targets = blocks.targets(self.targets(reductions, stores), stores)
        before = [position for position in known if position not in blocks.loads]
        new = sorted((self.row_buffers - self.filled_row_buffers) & self.kernel.backward_slice(targets, before))
        values = [blocks.stored(store) for store in stores]
        self.statements.write([*targets, *new], known, named=[*new, *(values if len(values) > 1 else ())])
        for position in new:
            self.writer.line(f"{self.row_element(position)} = {known[position]};")
        for position in reductions:
            self.accumulate_lane(position, known, f"{name(position)}_lanes")
        for store in stores:
            if halves is not None and store in blocks.stores:
                halves.store(store, known)
            else:
                self.store(store, known)

    def store(self, store: Store, known: EmittedValues) -> None:
        """Writes the store of an element of the row."""
        self.statements.store(store, known)

    def print_parts(self, reductions: list[int], stores: list[Store], known: EmittedValues) -> None:
        """Writes a pass over a long row in parts of fixed size."""
        vector_axis = self.vector_axis
        loops = [*[item for item in self.kernel.reduced if item is not vector_axis], vector_axis]
        split = split_reduction(loops, MAX_LANE_ELEMENTS * self.lanes())
        with self.parts(reductions, self.lanes(), split, self.parallel() if self.plan.splits_reduction else ""):
            if split.axis is vector_axis:
                self.lane_loop(reductions, stores, dict(known), "start", "count")
                return
            with self.writer.nest(self.part_heads(split, split.inner[:-1])):
                self.lane_loop(reductions, stores, dict(known), "0", print_size(vector_axis.size))
