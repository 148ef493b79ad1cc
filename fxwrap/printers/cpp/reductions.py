"""Loops of kernels that reduce along the vectorised axis."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from fxwrap.loop_ir import Axis, Compute, Kernel, Load, Reduce, Scan, Store, operation_dtype
from fxwrap.printers.cpp.half_blocks import MIN_HALF_LANES, HalfBlocks, HalfBlockWriter, find_half_blocks
from fxwrap.printers.cpp.loop_plan import (
    LANES,
    MAX_LANE_ELEMENTS,
    ROW_BUFFER_MAX_ELEMENTS,
    ROW_BUFFER_MIN_COST,
    STREAMED_BYTES,
    VECTOR_LANES,
    ReductionParts,
    split_reduction,
)
from fxwrap.printers.cpp.loops import LoopPrinter, loop_head
from fxwrap.printers.cpp.operations import CPP_TYPES, parenthesize, print_size
from fxwrap.printers.cpp.statements import EmittedValues
from fxwrap.symbolic import Size, product


def compared_width(kernel: Kernel, position: int) -> int:
    """Returns the width in bytes of the widest numbers that a truth value compares, 1 for one that is loaded."""
    item, width = kernel.operations[position], 1
    if isinstance(item, Compute):
        for operand in item.operands:
            dtype = operation_dtype(kernel.operations[operand])
            is_truth = dtype is torch.bool
            width = max(width, compared_width(kernel, operand) if is_truth else dtype.itemsize)
    return width


class ReductionPrinter(LoopPrinter):
    """Base of the printers of kernels with reductions: stages, each one pass over the reduced axes."""

    overlaps = False
    """Whether the last block of a row overlaps the one before it."""

    def stage_sinks(self) -> list[tuple[list[int], list[Store]]]:
        """Returns for each stage its reductions and varying stores.

        All varying stores are in the last stage, before which assertions can be checked: the stores may overwrite what
        these read.
        """
        stages, reductions = self.kernel.stages, self.kernel.reductions
        varying = {item: store for item, store in self.positions_of_stores().items() if self.kernel.varying[item]}
        last = max([stages[item] for item in (*varying, *reductions, *self.varying_asserts())], default=0)
        return [
            ([item for item in reductions if stages[item] == stage], list(varying.values()) if stage == last else [])
            for stage in range(last + 1)
        ]

    def positions_of_stores(self) -> dict[int, Store]:
        """Returns the stores by position."""
        return {position: item for position, item in enumerate(self.kernel.operations) if isinstance(item, Store)}

    def final_stores(self) -> list[Store]:
        """Returns the stores of results that do not vary."""
        return [store for item, store in self.positions_of_stores().items() if not self.kernel.varying[item]]

    def values_of_several_stages(self, is_buffered: Callable[[int, set[int]], bool]) -> set[int]:
        """Returns the varying values that one stage computes for later ones, too, and that are worth a buffer.

        `is_buffered` returns whether a value is, beside those that are chosen already.
        """
        chosen: set[int] = set()
        computed: set[int] = set()
        for reductions, stores in self.stage_sinks():
            stack, seen = self.targets(reductions, stores), set(chosen)
            while stack:
                position = stack.pop()
                if position in seen or not self.kernel.varying[position]:
                    continue
                seen.add(position)
                if position in computed and is_buffered(position, chosen):
                    chosen.add(position)
                    continue
                stack.extend(self.operands_of(position))
            computed |= seen
        return chosen

    def targets(self, reductions: Sequence[int], stores: Sequence[Store]) -> list[int]:
        """Returns the positions whose values a stage needs."""
        chosen = [item for item, store in self.positions_of_stores().items() if any(store is other for other in stores)]
        return [operand for item in (*reductions, *chosen) for operand in self.operands_of(item)]

    def invariants(self, targets: Sequence[int], known: EmittedValues) -> set[int]:
        """Returns the operations that do not vary among the targets and the operands of those that vary."""
        needed = sorted(self.kernel.backward_slice(targets, known))
        fixed = {item for item in needed if not self.kernel.varying[item]}
        return fixed.intersection(targets) | self.frontier(needed, fixed)

    def hoist_invariants(self, targets: Sequence[int], known: EmittedValues) -> None:
        """Writes the operations that do not vary before the loop of the targets."""
        positions = sorted(self.invariants(targets, known))
        self.statements.write(positions, known, named=positions)

    def varying_asserts(self) -> list[int]:
        """Returns the positions of assertions about elements of the reduced axes."""
        return [item for item in self.device_asserts if self.kernel.varying[item]]

    def print_stages(self, known: EmittedValues) -> None:
        """Writes the passes over the reduced axes: of assertions immediately before the last one, which stores."""
        *earlier, last = self.stage_sinks()
        for reductions, stores in earlier:
            self.print_stage(reductions, stores, known)
        if self.device_asserts:
            self.print_varying_asserts(known)
        self.print_stage(*last, known)

    @abstractmethod
    def print_stage(self, reductions: list[int], stores: list[Store], known: EmittedValues) -> None:
        """Writes one pass over the reduced axes, if anything needs it."""

    def print_varying_asserts(self, known: EmittedValues) -> None:
        """Writes a pass over the reduced axes that checks the assertions about their elements."""
        positions = self.varying_asserts()
        of_lanes = [position for position in positions if self.depends_on_lane(position)]
        others = [position for position in positions if position not in of_lanes]
        for chosen, lanes in ((others, nullcontext()), (of_lanes, self.columns())):
            if chosen:
                with lanes, self.writer.nest([loop_head(axis) for axis in self.kernel.reduced]):
                    self.write_device_asserts(chosen, dict(known))

    def depends_on_lane(self, position: int) -> bool:
        """Whether an operation's value may differ between lanes, each of which has reductions and scans of its own."""
        used = [self.kernel.operations[item] for item in self.kernel.backward_slice([position])]
        is_shared = not any(isinstance(item, Reduce | Scan) for item in used)
        return not is_shared or self.plan.vector_axis in self.kernel.value_axes[position]

    def columns(self) -> AbstractContextManager[None]:
        """Opens the loop over the vectorised axis, if that is parallel."""
        return nullcontext()

    def print_invariant_asserts(self, known: EmittedValues) -> None:
        """Writes the checks of the other assertions. Adds their values to `known`."""
        self.write_device_asserts([item for item in self.device_asserts if not self.kernel.varying[item]], known)

    def reduction(self, position: int) -> Reduce:
        """Returns the reduction at a position."""
        operation = self.kernel.operations[position]
        assert isinstance(operation, Reduce)
        return operation

    def is_arg_reduction(self, position: int) -> bool:
        """Whether a reduction returns an element and its position."""
        return self.reduction(position).kind.startswith("arg")

    def value_type(self, position: int) -> str:
        """Returns the C++ type of a reduction's operand."""
        return CPP_TYPES[self.statements.dtype(self.reduction(position).operands[0])]

    def result_type(self, position: int) -> str:
        """Returns the C++ type of a reduction's complete accumulator."""
        value = self.value_type(position)
        return f"IndexedValue<{value}>" if self.is_arg_reduction(position) else value

    def lanes_type(self, position: int, lanes: int) -> str:
        """Returns the C++ type of a reduction's accumulators, one a lane."""
        value = self.value_type(position)
        if self.reduction(position).kind in ("any", "all"):
            value = f"uint{8 * compared_width(self.kernel, self.reduction(position).operands[0])}_t"
        if not self.is_arg_reduction(position):
            return f"Lanes<{value}, {lanes}>"
        count = self.kernel.reduced_count
        index_type = "int32_t" if isinstance(count, int) and count < 2**31 else "int64_t"
        better = "Greater" if self.reduction(position).kind == "argmax" else "Less"
        return f"IndexedLanes<{value}, {lanes}, {index_type}, {better}>"

    def combine(self, position: int) -> str:
        """Returns the function that combines partial results."""
        return f"combine::{self.reduction(position).kind}"

    def finish(self, position: int, text: str, known: EmittedValues) -> None:
        """Writes a reduction's complete result as a constant."""
        known[position] = self.statements.declare(position, text, self.result_type(position))

    def position_text(self) -> str:
        """Returns the row-major position in the reduced axes."""
        text = ""
        for axis in self.kernel.reduced:
            text = f"({text}) * {print_size(axis.size)} + {axis.name}" if text else axis.name
        return text

    def accumulate_lane(self, position: int, known: EmittedValues, lanes: str) -> None:
        """Writes the step of a reduction in the array `lanes`, which has a lane for parts of a row or for a column."""
        operation = self.reduction(position)
        value, comment = known[operation.operands[0]], self.statements.comment(operation)
        if self.overlaps and operation.kind in ("sum", "prod"):
            value = f"is_new ? {parenthesize(value)} : {self.identity_element(operation)}"
        if self.is_arg_reduction(position):
            self.writer.line(f"{lanes}.update(lane, {value}, {self.position_text()});{comment}")
        elif operation.kind == "sum":
            self.writer.line(f"{lanes}[lane] += {value};{comment}")
        else:
            self.writer.line(f"{lanes}[lane] = {self.combine(position)}({lanes}[lane], {value});{comment}")

    def declare_lanes(self, reductions: Sequence[int], lanes: int) -> None:
        """Declares the accumulators of reductions."""
        for position in reductions:
            kind, name = self.lanes_type(position, lanes), self.statements.name(position)
            self.writer.line(f"{kind} {name}_lanes({self.identity_element(self.reduction(position))});")

    def is_long(self, reductions: Sequence[int], lanes: int) -> bool:
        """Whether reductions into so many accumulators are split: for the accuracy of sums, or to run in parallel."""
        count = self.kernel.reduced_count
        is_rounded = any(
            self.reduction(item).kind == "sum" and self.reduction(item).dtype.is_floating_point for item in reductions
        )
        is_long = not isinstance(count, int) or count > 2 * MAX_LANE_ELEMENTS * lanes
        return self.plan.splits_reduction or (is_rounded and is_long)

    @contextmanager
    def parts(self, reductions: Sequence[int], lanes: int, split: ReductionParts, pragma: str) -> Iterator[None]:
        """Opens a loop over parts, whose accumulators are combined after it."""
        axis, length, names = split.axis, split.length, [self.statements.name(position) for position in reductions]
        suffix = f"{reductions[0]}" if reductions else "last"
        parts, blocks = f"parts_{suffix}", f"blocks_{suffix}" if split.outer else f"parts_{suffix}"
        self.writer.line(f"const int64_t {blocks} = ({print_size(axis.size)} + {length - 1}) / {length};")
        if split.outer:
            sizes = " * ".join([f"({print_size(item.size)})" for item in split.outer])
            self.writer.line(f"const int64_t {parts} = {sizes} * {blocks};")
        types = [self.lanes_type(position, lanes) for position in reductions]
        for name, kind in zip(names, types, strict=True):
            self.writer.line(f"PartialResults<{kind}> {name}_parts({parts});")
        with self.writer.nest([f"for (int64_t part = 0; part < {parts}; ++part)"], pragma):
            self.declare_outer_indices(split.outer, blocks)
            block = f"part % {blocks}" if split.outer else "part"
            self.writer.line(f"const int64_t start = {block} * {length};")
            self.writer.line(f"const int64_t count = fxwrap::min<int64_t>({length}, {print_size(axis.size)} - start);")
            self.declare_lanes(reductions, lanes)
            yield
            for name in names:
                self.writer.line(f"{name}_parts[part] = {name}_lanes;")
        for position, name, kind in zip(reductions, names, types, strict=True):
            identity_element = f"{kind}({self.identity_element(self.reduction(position))})"
            combined = f"{name}_parts.combined({parts}, {identity_element}, Lanewise{{{self.combine(position)}}})"
            self.writer.line(f"{kind} {name}_lanes = {combined};")

    def declare_outer_indices(self, outer: Sequence[Axis], blocks: str) -> None:
        """Declares the indices of a part, of which each has so many blocks."""
        if outer:
            self.writer.line(f"int64_t outer = part / {blocks};")
        for axis in reversed(outer):
            size = print_size(axis.size)
            self.writer.line(f"const int64_t {axis.name} = outer % ({size});")
            self.writer.line(f"outer /= {size};")

    def part_heads(self, split: ReductionParts, inner: Sequence[Axis]) -> list[str]:
        """Returns the heads of the loops over a part's elements, those over `inner` axes innermost."""
        return [loop_head(split.axis, "start", "start + count"), *[loop_head(item) for item in inner]]


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
        for position in sorted(self.row_buffers):
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

    def select_row_buffers(self) -> set[int]:
        """Returns the values that one stage stores for later ones."""
        count = self.kernel.reduced_count
        if not isinstance(count, int) or count > ROW_BUFFER_MAX_ELEMENTS or self.plan.splits_reduction:
            return set()

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

    def block_stores(self, stores: Sequence[Store]) -> Sequence[Store]:
        """Returns the stores whose elements go to memory in the order of the row."""
        return stores

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
        row, name = self.row_place(), self.statements.name
        blocks = HalfBlocks() if halves is None else halves.blocks
        for position in self.filled_row_buffers:
            known[position] = f"{name(position)}_row[{row}]"
        targets = blocks.targets(self.targets(reductions, stores), stores)
        before = [position for position in known if position not in blocks.loads]
        new = sorted((self.row_buffers - self.filled_row_buffers) & self.kernel.backward_slice(targets, before))
        values = [blocks.stored(store) for store in stores]
        self.statements.write([*targets, *new], known, named=[*new, *(values if len(values) > 1 else ())])
        for position in new:
            self.writer.line(f"{name(position)}_row[{row}] = {known[position]};")
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
