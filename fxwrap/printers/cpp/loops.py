"""Loops of kernels without reductions, and of kernels that reduce along the vectorised axis."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext

from fxwrap.loop_ir import Axis, Kernel, Load, Reduce, Require, Scan, Store, operands
from fxwrap.printers.cpp.body import Known, Statements, Writer
from fxwrap.printers.cpp.index_text import size_text
from fxwrap.printers.cpp.plan import (
    BUFFER_COST,
    BUFFER_ELEMENTS,
    LANES,
    PARALLEL_WORK,
    PART,
    SCATTER_BLOCK,
    STREAMED_LANES,
    STREAMED_PART,
    Plan,
    split_axis,
)
from fxwrap.printers.cpp.segments import Segment, interior_of, segments_of
from fxwrap.printers.cpp.types import CPP_TYPES
from fxwrap.symbolic import product

_STARTS = {"sum": "0", "prod": "1", "any": "false", "all": "true"}


class LoopPrinter(ABC):
    """What all kernels share. `outer` are the parallel axes around the vectorised loop, and around reductions."""

    def __init__(self, plan: Plan, writer: Writer, origins: bool) -> None:
        self.plan = plan
        self.kernel: Kernel = plan.kernel
        self.writer = writer
        self.statements = Statements(self.kernel, writer, origins, gathered=plan.gathered)
        self.requirements = [
            (place, item) for place, item in enumerate(self.kernel.operations) if isinstance(item, Require)
        ]
        self.clause = " reduction(|:failed)" if self.requirements else ""

    def print_kernel(self) -> None:
        """Writes the whole body: the loops, and the failure of the launch where a requirement was not met."""
        if self.requirements:
            self.writer.line("int64_t failed = 0;")
        self.print()
        for bit, (_, requirement) in enumerate(self.requirements):
            raised = f"fxwrap_{requirement.error}_error({json.dumps(requirement.message)})"
            self.writer.line(f"if (failed & {1 << bit}) {raised};")

    def write_requirements(self, places: Sequence[int], known: Known) -> None:
        """Writes the checks of requirements."""
        self.statements.write([used for place in places for used in self.statements.operands_of(place)], known)
        for bit, (place, requirement) in enumerate(self.requirements):
            if place in places:
                self.statements.require(requirement, bit, known)

    @abstractmethod
    def print(self) -> None:
        """Writes the kernel's loops."""

    # --- loops ------------------------------------------------------------------------------------------------------

    def head(self, axis: Axis, start: str = "0", end: str = "") -> str:
        """Returns the head of the loop over an axis, or over a part of it."""
        return f"for (int64_t {axis.name} = {start}; {axis.name} < {end or size_text(axis.size)}; ++{axis.name})"

    @contextmanager
    def nest(self, heads: Sequence[str], pragma: str = "") -> Iterator[None]:
        """Opens perfectly nested loops, below a pragma that collapses them."""
        if not heads:
            yield
            return
        if pragma:
            clause = f" collapse({len(heads)})" if len(heads) > 1 else ""
            self.writer.line(pragma.replace(" COLLAPSE", clause))
        for head in heads[:-1]:
            self.writer.line(head)
            self.writer.depth += 1
        with self.writer.block(heads[-1]):
            yield
        self.writer.depth -= len(heads) - 1

    def parallel(self, simd: str = "") -> str:
        """Returns the pragma of a parallel loop, or nothing where the work is too small or must run in order."""
        work = self.plan.work
        if self.plan.serial or (isinstance(work, int) and work < PARALLEL_WORK):
            return f"#pragma omp{simd}{self.clause}" if simd and not self.plan.serial else ""
        condition = "" if isinstance(work, int) else f" if (parallel : {size_text(work)} >= {PARALLEL_WORK})"
        return f"#pragma omp parallel for{simd} COLLAPSE schedule(static){self.clause}{condition}"

    def simd(self) -> str:
        """Returns the pragma of the vectorised loop."""
        return "" if self.plan.serial else f"#pragma omp simd{self.clause}"

    def write_stores(self, stores: Sequence[Store], known: Known) -> None:
        """Writes the statements of stores, then the stores."""
        values = [store.value for store in stores]
        targets = [item for store in stores for item in operands(store)]
        self.statements.write(targets, known, keep=values if len(stores) > 1 else ())
        for store in stores:
            self.statements.store(store, known)

    def start(self, operation: Reduce | Scan) -> str:
        """Returns the value a reduction begins with."""
        type_name = CPP_TYPES[self.statements.dtype(operation.operands[0])]
        if operation.kind in _STARTS:
            return f"{type_name}({_STARTS[operation.kind]})"
        return f"Limits<{type_name}>::{'lowest' if 'max' in operation.kind else 'highest'}"


class PointwisePrinter(LoopPrinter):
    """A kernel without reduced axes: loops around one vectorised loop."""

    def print(self) -> None:
        """Writes the loops."""
        lane, stores = self.plan.lane, list(self.kernel.stores)
        checked = [place for place, _ in self.requirements]
        inner = [place for place in checked if lane is not None and lane in self.plan.depends[place]]
        known: Known = {}
        if lane is None:
            self.write_requirements(checked, known)
            self.write_stores(stores, known)
            return
        outer = [axis for axis in self.kernel.axes if axis is not lane]
        if self.plan.serial and self.plan.scatters_apart:
            self.print_scatter(lane, outer, stores)
            return
        if self.plan.tiled[1]:
            self.print_tiles(stores)
            return
        if outer and not inner and segments_of(self.kernel, lane):
            with self.nest([self.head(axis) for axis in outer], self.parallel()):
                self.hoist(known)
                self.write_requirements(checked, known)
                self.print_segments(outer, lane, known)
            return
        if not outer:
            with self.nest([self.head(lane)], self.parallel(" simd")):
                self.write_requirements(checked, known)
                self.write_stores(stores, known)
            return
        with self.nest([self.head(axis) for axis in outer], self.parallel()):
            self.hoist(known)
            self.write_requirements([place for place in checked if place not in inner], known)
            with self.nest([self.head(lane)], self.simd()):
                self.write_requirements(inner, known)
                self.write_stores(stores, known)

    def print_scatter(self, lane: Axis, outer: Sequence[Axis], stores: Sequence[Store]) -> None:
        """Writes loops in which each thread combines a block of columns of all rows, in order: no two meet."""
        assert isinstance(lane.size, int)
        block = SCATTER_BLOCK
        while block < 256 and lane.size >= 16 * block:
            block *= 2
        first, work = f"{lane.name}_0", self.plan.work
        busy = not isinstance(work, int) or work >= PARALLEL_WORK
        pragma = f"#pragma omp parallel for schedule(static){self.clause}" if busy else ""
        with self.nest([f"for (int64_t {first} = 0; {first} < {lane.size}; {first} += {block})"], pragma):
            end = str(block) if lane.size % block == 0 else f"fxwrap::min<int64_t>({block}, {lane.size} - {first})"
            self.writer.line(f"const int64_t end = {first} + {end};")
            with self.nest([self.head(axis) for axis in outer]):
                known: Known = {}
                fixed = [place for place, _ in self.requirements if lane not in self.plan.depends[place]]
                self.hoist(known)
                self.write_requirements(fixed, known)
                with self.nest([self.head(lane, first, "end")], f"#pragma omp simd{self.clause}"):
                    self.write_requirements([place for place, _ in self.requirements if place not in fixed], known)
                    self.write_stores(stores, known)

    def print_segments(self, outer: Sequence[Axis], lane: Axis, known: Known) -> None:
        """Writes the vectorised loop in parts; twice where most iterations of another axis need no masks either."""
        cases = [("", self.kernel)]
        if interior := interior_of(self.kernel, outer, lane):
            axis, inside = interior
            condition = f"{inside.start} <= {axis.name} && {axis.name} < {inside.end}"
            cases = [(f"if ({condition})", inside.kernel), ("else", self.kernel)]
        for head, kernel in cases:
            with self.writer.block(head) if head else nullcontext():
                assert isinstance(lane.size, int)
                for segment in segments_of(kernel, lane) or [Segment(0, lane.size, kernel)]:
                    self.statements.kernel = segment.kernel
                    if segment.kernel.stores:
                        with self.nest([self.head(lane, str(segment.start), str(segment.end))], self.simd()):
                            self.write_stores(segment.kernel.stores, dict(known))
        self.statements.kernel = self.kernel

    def print_tiles(self, stores: list[Store]) -> None:
        """Writes loops over square tiles, so that loads along another axis than the stores read whole cache lines."""
        (axis, loads), lane = self.plan.tiled, self.plan.lane
        assert axis is not None and lane is not None
        heads = [self.head(item) for item in self.kernel.axes if item is not lane and item is not axis]
        for item in (axis, lane):
            start = f"{item.name}_0"
            heads.append(f"for (int64_t {start} = 0; {start} < {size_text(item.size)}; {start} += tile)")
        width = max(self.statements.dtype(place).itemsize for place in loads)
        self.writer.line(f"constexpr int tile = tile_size({self.plan.tile}, {width});")
        known: Known = {}
        with self.nest(heads, self.parallel()):
            ends = []
            for item, name in ((axis, "height"), (lane, "width")):
                size = size_text(item.size)
                whole = isinstance(item.size, int) and item.size % self.plan.tile == 0
                ends.append("tile" if whole else name)
                if not whole:
                    self.writer.line(f"const int {name} = int(fxwrap::min<int64_t>(tile, {size} - {item.name}_0));")
            for place in loads:
                known[place] = self.load_tile(place, axis, lane, *ends)
            rows = self.head(axis, f"{axis.name}_0", f"{axis.name}_0 + {ends[0]}")
            columns = self.head(lane, f"{lane.name}_0", f"{lane.name}_0 + {ends[1]}")
            with self.nest([rows]), self.nest([columns], self.simd()):
                self.write_requirements([place for place, _ in self.requirements], known)
                self.write_stores(stores, known)

    def load_tile(self, place: int, axis: Axis, lane: Axis, height: str, width: str) -> str:
        """Writes the load of a tile; returns the text of its element."""
        load = self.kernel.operations[place]
        assert isinstance(load, Load)
        tile, index = f"{self.statements.name(place)}_tile", self.statements.index({})
        corner = load.index.substitute({item: Axis(f"{item.name}_0", item.size) for item in (axis, lane)})
        stride = load.index.stride(lane)
        assert stride is not None
        self.writer.line(f"alignas(64) {CPP_TYPES[load.dtype]} {tile}[tile][tile];")
        source = f"{load.buffer} + {index(corner)}, {index(stride)}"
        self.writer.line(f"load_transposed({source}, {height}, {width}, {tile});{self.statements.comment(load)}")
        return f"{tile}[{axis.name} - {axis.name}_0][{lane.name} - {lane.name}_0]"

    def hoist(self, known: Known) -> None:
        """Writes what does not depend on the vectorised axis before its loop."""
        used = self.statements.needed([place for place, item in enumerate(self.kernel.operations)], {})
        fixed = {place for place in used if self.plan.lane not in self.plan.depends[place]}
        frontier = {
            operand
            for place in used
            if place not in fixed
            for operand in self.statements.operands_of(place)
            if operand in fixed
        }
        self.statements.write(sorted(frontier), known)


class ReductionPrinter(LoopPrinter):
    """What kernels with reductions share: stages, each one pass over the reduced axes."""

    def stage_sinks(self) -> list[tuple[list[int], list[Store]]]:
        """Returns for each stage its reductions, and the stores that vary: all in the last stage that has any work."""
        stages = self.kernel.stages
        varying = [store for place, store in self.placed_stores() if self.plan.varying[place]]
        placed = [stages[place] for place, _ in self.placed_stores() if self.plan.varying[place]]
        last = max([*placed, *[stages[place] for place in self.kernel.reductions]], default=0)
        return [
            (
                [place for place in self.kernel.reductions if stages[place] == stage],
                varying if stage == last else [],
            )
            for stage in range(last + 1)
        ]

    def placed_stores(self) -> list[tuple[int, Store]]:
        """Returns the stores with their positions."""
        return [(place, item) for place, item in enumerate(self.kernel.operations) if isinstance(item, Store)]

    def final_stores(self) -> list[Store]:
        """Returns the stores of results that do not vary."""
        return [store for place, store in self.placed_stores() if not self.plan.varying[place]]

    def targets(self, reductions: Sequence[int], stores: Sequence[Store]) -> list[int]:
        """Returns the positions whose values a stage needs."""
        found = [operand for place in reductions for operand in self.statements.operands_of(place)]
        chosen = [place for place, store in self.placed_stores() if any(store is item for item in stores)]
        return [*found, *[operand for place in chosen for operand in self.statements.operands_of(place)]]

    def write_fixed(self, targets: Sequence[int], known: Known) -> None:
        """Writes what the targets need and does not vary, before their loop."""
        needed = self.statements.needed(targets, known)
        fixed = {place for place in needed if not self.plan.varying[place]}
        frontier = {place for place in targets if place in fixed}
        for place in needed:
            if place not in fixed:
                frontier |= {operand for operand in self.statements.operands_of(place) if operand in fixed}
        self.statements.write(sorted(frontier), known, keep=sorted(frontier))

    def print_requirements(self, known: Known) -> None:
        """Writes the checks of requirements: in a pass of their own where they vary. Adds to `known` what did not."""
        places = [place for place, _ in self.requirements]
        varying = [place for place in places if self.plan.varying[place]]
        if varying:
            with self.nest([self.head(axis) for axis in self.kernel.reduced]):
                self.write_requirements(varying, dict(known))
        self.write_requirements([place for place in places if place not in varying], known)

    def result_type(self, place: int) -> str:
        """Returns the C++ type of a reduction's accumulator when it is complete."""
        operation = self.kernel.operations[place]
        assert isinstance(operation, Reduce | Scan)
        value = CPP_TYPES[self.statements.dtype(operation.operands[0])]
        return f"Best<{value}>" if operation.kind.startswith("arg") else value

    def combine(self, place: int) -> str:
        """Returns the function that combines partial results."""
        operation = self.kernel.operations[place]
        assert isinstance(operation, Reduce)
        return f"combine::{operation.kind}"

    def start_of(self, place: int) -> str:
        """Returns what the accumulator of a reduction begins with."""
        operation = self.kernel.operations[place]
        assert isinstance(operation, Reduce)
        start = self.start(operation)
        return f"{self.result_type(place)}{{{start}, 0}}" if operation.kind.startswith("arg") else start

    def finish(self, place: int, text: str, known: Known) -> None:
        """Writes a reduction's complete result as a constant."""
        operation = self.kernel.operations[place]
        assert isinstance(operation, Reduce)
        known[place] = self.statements.declare(place, f"{text}.position" if operation.kind.startswith("arg") else text)

    def position_text(self) -> str:
        """Returns the row-major position in the reduced axes."""
        text = ""
        for axis in self.kernel.reduced:
            text = f"({text}) * {size_text(axis.size)} + {axis.name}" if text else axis.name
        return text

    def fold_lane(self, place: int, known: Known, lanes: str) -> None:
        """Writes the step of a reduction in the array of `lanes`: a row's, or a column's each."""
        operation = self.kernel.operations[place]
        assert isinstance(operation, Reduce)
        value = known[operation.operands[0]]
        comment = self.statements.comment(operation)
        if operation.kind.startswith("arg"):
            self.writer.line(f"{lanes}.see(lane, {value}, {self.position_text()});{comment}")
        elif operation.kind == "sum":
            self.writer.line(f"{lanes}[lane] += {value};{comment}")
        else:
            self.writer.line(f"{lanes}[lane] = {self.combine(place)}({lanes}[lane], {value});{comment}")


class RowPrinter(ReductionPrinter):
    """A kernel that reduces along the vectorised axis: each parallel iteration is a row, each stage a pass over it."""

    def print(self) -> None:
        """Writes the loops."""
        pragma = "" if self.plan.splits else self.parallel()
        with ExitStack() as stack:
            if self.kernel.axes:
                stack.enter_context(self.nest([self.head(axis) for axis in self.kernel.axes], pragma))
            known: Known = {}
            self.buffered: set[int] = set()
            self.buffers = self.plan_buffers()
            for place in sorted(self.buffers):
                self.writer.line(
                    f"{self.statements.type(place)} {self.statements.name(place)}_row[{self.kernel.reduced_count}];"
                )
            for reductions, stores in self.stage_sinks():
                self.print_stage(reductions, stores, known)
            self.print_requirements(known)
            if self.final_stores():
                self.write_stores(self.final_stores(), known)

    def plan_buffers(self) -> set[int]:
        """Returns the values to keep from one stage for later ones."""
        count = self.kernel.reduced_count
        if not isinstance(count, int) or count > BUFFER_ELEMENTS or self.plan.splits:
            return set()
        chosen: set[int] = set()
        computed: set[int] = set()
        for reductions, stores in self.stage_sinks():
            targets = self.targets(reductions, stores)
            known: Known = dict.fromkeys(chosen, "")
            stack, seen = list(targets), set(known)
            while stack:
                place = stack.pop()
                if place in seen or not self.plan.varying[place]:
                    continue
                seen.add(place)
                if place in computed and self.plan.cost(place, chosen) >= BUFFER_COST:
                    chosen.add(place)
                    continue
                stack.extend(self.statements.operands_of(place))
            computed |= seen
        return chosen

    def print_stage(self, reductions: list[int], stores: list[Store], known: Known) -> None:
        """Writes one pass over the row."""
        targets = self.targets(reductions, stores)
        if not targets:
            return
        self.write_fixed(targets, known)
        count = self.kernel.reduced_count
        long = not isinstance(count, int) or count > 2 * PART
        if self.plan.splits or (long and reductions):
            self.print_parts(reductions, stores, known)
            return
        self.declare_lanes(reductions)
        reduced, lane = self.kernel.reduced, self.plan.lane
        assert lane is not None
        with self.nest([self.head(axis) for axis in reduced if axis is not lane]):
            self.lane_loop(reductions, stores, dict(known), "0", size_text(lane.size))
        self.buffered |= self.buffers & set(self.statements.needed(targets, known))
        for place in reductions:
            self.finish(place, self.combined(place), known)

    def lanes(self) -> int:
        """Returns the number of accumulators: no more than the row has elements."""
        assert self.plan.lane is not None
        size = self.plan.lane.size
        lanes = STREAMED_LANES if self.plan.splits else LANES
        while isinstance(size, int) and lanes > max(size, 1):
            lanes //= 2
        return lanes

    def declare_lanes(self, reductions: Sequence[int]) -> None:
        """Declares the accumulators of reductions."""
        for place in reductions:
            operation = self.kernel.operations[place]
            assert isinstance(operation, Reduce)
            value = CPP_TYPES[self.statements.dtype(operation.operands[0])]
            kind = f"Lanes<{value}, {self.lanes()}>"
            if operation.kind.startswith("arg"):
                count = self.kernel.reduced_count
                position = "int32_t" if isinstance(count, int) and count < 2**31 else "int64_t"
                better = "Larger" if operation.kind == "argmax" else "Smaller"
                kind = f"BestLanes<{value}, {self.lanes()}, {position}, {better}>"
            self.writer.line(f"{kind} {self.statements.name(place)}_lanes({self.start(operation)});")

    def combined(self, place: int) -> str:
        """Returns the combination of a reduction's lanes."""
        return f"{self.statements.name(place)}_lanes.combined({self.combine(place)})"

    def lane_loop(
        self, reductions: Sequence[int], stores: Sequence[Store], known: Known, start: str, count: str
    ) -> None:
        """Writes the vectorised loop: over `count` elements of the vectorised axis from `start` on."""
        lane = self.plan.lane
        assert lane is not None
        if not reductions:
            limit = count if start == "0" else f"{start} + {count}"
            with self.nest([self.head(lane, start, limit)], self.simd()):
                self.lane_body(reductions, stores, known)
            return
        element = lane.name if start == "0" else "offset"
        with self.writer.block(f"for_lanes<{self.lanes()}>({count}, [&](int64_t {element}, int lane)", "});"):
            if start != "0":
                self.writer.line(f"const int64_t {lane.name} = {start} + offset;")
            self.lane_body(reductions, stores, known)

    def lane_body(self, reductions: Sequence[int], stores: Sequence[Store], known: Known) -> None:
        """Writes what happens for one element: statements, accumulation, row buffers, stores."""
        row = self.position_text()
        for place in self.buffered:
            known[place] = f"{self.statements.name(place)}_row[{row}]"
        targets = self.targets(reductions, stores)
        new = sorted((self.buffers - self.buffered) & set(self.statements.needed(targets, known)))
        values = [store.value for store in stores]
        self.statements.write([*targets, *new], known, keep=[*new, *(values if len(values) > 1 else ())])
        for place in new:
            self.writer.line(f"{self.statements.name(place)}_row[{row}] = {known[place]};")
        for place in reductions:
            self.fold_lane(place, known, f"{self.statements.name(place)}_lanes")
        for store in stores:
            self.statements.store(store, known)

    def print_parts(self, reductions: list[int], stores: list[Store], known: Known) -> None:
        """Writes a pass over a long row in parts of fixed size, whose results are combined in a fixed order."""
        lane, reduced = self.plan.lane, self.kernel.reduced
        assert lane is not None
        axis = split_axis(reduced)
        others = product([item.size for item in reduced if item is not axis])
        part = STREAMED_PART if self.plan.splits else PART
        length = max(1, part // others) if isinstance(others, int) else 1 if axis is not lane else part
        size, stage = size_text(axis.size), f"{self.kernel.stages[reductions[0]]}" if reductions else "last"
        self.writer.line(f"const int64_t parts_{stage} = ({size} + {length - 1}) / {length};")
        for place in reductions:
            name = self.statements.name(place)
            self.writer.line(f"Parts<{self.result_type(place)}> {name}_parts(parts_{stage});")
        pragma = self.parallel() if self.plan.splits else ""
        with self.nest([f"for (int64_t part = 0; part < parts_{stage}; ++part)"], pragma):
            self.writer.line(f"const int64_t start = part * {length};")
            self.writer.line(f"const int64_t count = fxwrap::min<int64_t>({length}, {size} - start);")
            self.declare_lanes(reductions)
            heads = [
                f"for (int64_t {item.name} = start; {item.name} < start + count; ++{item.name})"
                if item is axis
                else self.head(item)
                for item in reduced
                if item is not lane
            ]
            with self.nest(heads):
                bounds = ("start", "count") if axis is lane else ("0", size_text(lane.size))
                self.lane_loop(reductions, stores, dict(known), *bounds)
            for place in reductions:
                self.writer.line(f"{self.statements.name(place)}_parts[part] = {self.combined(place)};")
        for place in reductions:
            arguments = f"parts_{stage}, {self.start_of(place)}, {self.combine(place)}"
            self.finish(place, f"{self.statements.name(place)}_parts.combined({arguments})", known)
