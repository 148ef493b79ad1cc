"""Base of the printers of kernels with reductions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from fxwrap.loop_ir import Axis, Reduce, Scan, Store
from fxwrap.printers.cpp.half_blocks import HalfBlocks, HalfBlockWriter
from fxwrap.printers.cpp.loop_plan import MAX_LANE_ELEMENTS, ReductionParts
from fxwrap.printers.cpp.loops import LoopPrinter, loop_head
from fxwrap.printers.cpp.operations import CPP_TYPES, compared_width, parenthesize, print_size
from fxwrap.printers.cpp.result_buffers import ResultBuffers
from fxwrap.printers.cpp.statements import EmittedValues


class ReductionPrinter(LoopPrinter):
    """Base of the printers of kernels with reductions: stages, each one pass over the reduced axes."""

    overlaps = False
    """Whether the last block of a row overlaps the one before it."""

    result_buffers: Mapping[int, Store] = {}
    """Values that a result's memory holds for later stages, with the store of the result."""

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

    def select_result_buffers(self) -> dict[int, Store]:
        """Returns values that one stage stores in the memory of results for later ones, with the results' stores."""
        results = ResultBuffers(self.plan, self.block_stores(self.kernel.stores))
        self.values_of_several_stages(results.hold)
        return results.stores

    def result_element(self, position: int) -> str:
        """Returns the element of a result that holds a value."""
        store = self.result_buffers[position]
        return f"{store.buffer}[{self.statements.index({})(store.index)}]"

    def load_held(self, positions: Sequence[int], known: EmittedValues) -> None:
        """Writes constants for values that results' memory holds, before stores of an iteration overwrite them."""
        for position in positions:
            if position in self.result_buffers and known.get(position) == self.result_element(position):
                known[position] = self.statements.declare(position, known[position])

    def write_stores(
        self, stores: Sequence[Store], known: EmittedValues, halves: HalfBlockWriter | None = None
    ) -> None:
        """Writes the statements of stores, then the stores; what results hold is loaded before."""
        blocks = HalfBlocks() if halves is None else halves.blocks
        self.load_held([blocks.stored(store) for store in stores] if len(stores) > 1 else [], known)
        super().write_stores(stores, known, halves)

    def block_stores(self, stores: Sequence[Store]) -> Sequence[Store]:
        """Returns the stores whose elements go to memory in the order of the loops."""
        return stores

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
