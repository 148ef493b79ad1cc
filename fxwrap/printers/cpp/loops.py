"""Base of the printers of loops, and the loops of pointwise kernels."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from fxwrap.loop_ir import (
    Atom,
    Axis,
    DeviceAssert,
    IndexLike,
    Kernel,
    Load,
    Reduce,
    Scan,
    Segment,
    Store,
    operands,
    specialise,
    split_loop,
)
from fxwrap.printers.cpp.axis_tables import AxisTable, choose_tables
from fxwrap.printers.cpp.half_blocks import HALF_BLOCK, MIN_HALF_LANES, HalfBlocks, HalfBlockWriter, find_half_blocks
from fxwrap.printers.cpp.loop_plan import MIN_PARALLEL_WORK, LoopPlan
from fxwrap.printers.cpp.operations import CPP_TYPES, parenthesize, print_size
from fxwrap.printers.cpp.segments import find_cases
from fxwrap.printers.cpp.statements import CppSourceWriter, EmittedValues, StatementPrinter

MIN_PARALLEL_SEGMENT = 8192
"""Smallest number of elements of a segment of a loop that threads share."""

_IDENTITIES = {"sum": "0", "prod": "1", "any": "false", "all": "true"}


def loop_head(axis: Axis, start: str = "0", end: str = "") -> str:
    """Returns the head of the loop over an axis, or over a part of it."""
    return f"for (int64_t {axis.name} = {start}; {axis.name} < {end or print_size(axis.size)}; ++{axis.name})"


@dataclass(frozen=True)
class LoopRange:
    """The part of an axis that a loop goes through, as texts; all of it by default."""

    axis: Axis
    start: str = "0"
    end: str = ""

    def stop(self) -> str:
        """Returns the end of the loop."""
        return self.end or print_size(self.axis.size)

    def head(self) -> str:
        """Returns the head of the loop."""
        return loop_head(self.axis, self.start, self.end)


class LoopPrinter(ABC):
    """Base of the printers of kernels."""

    def __init__(self, plan: LoopPlan, writer: CppSourceWriter, origin_comments: bool) -> None:
        self.plan = plan
        self.kernel: Kernel = plan.kernel
        self.writer = writer
        gathers = plan.gather_loads | plan.far_loads
        self.statements = StatementPrinter(self.kernel, writer, origin_comments, gather_loads=gathers)
        operations = enumerate(self.kernel.operations)
        self.device_asserts = {position: item for position, item in operations if isinstance(item, DeviceAssert)}
        self.clause = " reduction(|:failed)" if self.device_asserts else ""
        self.in_order = plan.serial
        self.tables: Sequence[AxisTable] = ()

    @property
    def vector_axis(self) -> Axis:
        """The vectorised axis of a kernel that has one."""
        assert self.plan.vector_axis is not None
        return self.plan.vector_axis

    def print_kernel(self, function: str) -> None:
        """Writes the body: the loops, and the failure of the launch where an assertion is violated.

        `function` is the name of the kernel's function, which errors show: it lists the operators.
        """
        if self.device_asserts:
            self.writer.line("int64_t failed = 0;")
        if self.statements.has_indices_from_bools():
            self.writer.line("const int64_t zero = opaque_zero();")
        self.print()
        for bit, item in enumerate(self.device_asserts.values()):
            message = json.dumps(f"{item.printed_message}, in kernel {function}")
            self.writer.line(f"if (failed & {1 << bit}) fxwrap_{item.error}_error({message});")

    def write_device_asserts(self, positions: Collection[int], known: EmittedValues) -> None:
        """Writes the checks of assertions."""
        self.statements.write([used for position in positions for used in self.operands_of(position)], known)
        for bit, position in enumerate(self.device_asserts):
            operation = self.statements.kernel.operations[position]
            if position in positions and isinstance(operation, DeviceAssert):
                self.statements.write_device_assert(operation, bit, known)

    @abstractmethod
    def print(self) -> None:
        """Writes the kernel's loops."""

    def operands_of(self, position: int) -> tuple[int, ...]:
        """Returns the positions of an operation's operands."""
        return operands(self.statements.kernel.operations[position])

    def frontier(self, computed: Iterable[int], fixed: Collection[int]) -> set[int]:
        """Returns the `fixed` operands of the other operations among `computed`."""
        return {used for item in computed if item not in fixed for used in self.operands_of(item) if used in fixed}

    def print_tables(self) -> EmittedValues:
        """Writes the tables of values that do not depend on all axes; returns the texts of their elements."""
        known: EmittedValues = {}
        for axes in dict.fromkeys([table.axes for table in self.tables]):
            tables = [table for table in self.tables if table.axes == axes]
            for table in tables:
                name = f"{self.statements.name(table.position)}_table"
                self.writer.line(f"{CPP_TYPES[table.dtype]} {name}{''.join([f'[{axis.size}]' for axis in axes])};")
                known[table.position] = name + "".join([f"[{axis.name}]" for axis in axes])
            values: EmittedValues = {}
            with (
                self.writer.nest([loop_head(axis) for axis in axes[:-1]]),
                self.writer.nest([loop_head(axes[-1])], "#pragma omp simd"),
            ):
                self.statements.write([table.position for table in tables], values)
                for table in tables:
                    value = _converted(values[table.position], self.statements.dtype(table.position), table.dtype)
                    self.writer.line(f"{known[table.position]} = {value};")
        for table in self.tables:
            dtype = self.statements.dtype(table.position)
            known[table.position] = _converted(known[table.position], table.dtype, dtype)
        return known

    # --- loops ------------------------------------------------------------------------------------------------------

    def is_parallel(self) -> bool:
        """Whether threads may share the outer axes."""
        return not self.in_order

    def parallel(self, simd: str = "") -> str:
        """Returns the pragma of a parallel loop, or nothing if the work is too small or must run in order."""
        work = self.plan.work
        if not self.is_parallel() or (isinstance(work, int) and work < MIN_PARALLEL_WORK):
            return f"#pragma omp{simd}{self.clause}" if simd and not self.in_order else ""
        condition = "" if isinstance(work, int) else f" if (parallel : {print_size(work)} >= {MIN_PARALLEL_WORK})"
        return f"#pragma omp parallel for{simd} COLLAPSE schedule(static){self.private()}{self.clause}{condition}"

    def private(self) -> str:
        """Returns the clause that gives threads copies of the pointers to tensors, or nothing where that is no matter.

        Lambdas (of reductions, and of blocks of float16) refer to pointers, which threads would share in memory. A
        store of bytes may change any memory in C++, so that the compiler would load a shared pointer again after it,
        and vectorise no loop that does.
        """
        buffers = (*self.kernel.inputs, *self.kernel.outputs)
        has_bytes = any(buffer.dtype in (torch.int8, torch.uint8) for buffer in self.kernel.outputs)
        has_lambdas = self.kernel.reductions or any(buffer.dtype is torch.float16 for buffer in buffers)
        if not has_bytes or not has_lambdas:
            return ""
        return f" firstprivate({', '.join([buffer.name for buffer in buffers])})"

    def simd(self, with_asserts: bool = True) -> str:
        """Returns the pragma of the vectorised loop. One that combines violations of assertions has more to set up."""
        return "" if self.in_order else f"#pragma omp simd{self.clause if with_asserts else ''}"

    def write_stores(
        self, stores: Sequence[Store], known: EmittedValues, halves: HalfBlockWriter | None = None
    ) -> None:
        """Writes the statements of stores, then the stores, into blocks of `halves` where it has them."""
        blocks = HalfBlocks() if halves is None else halves.blocks
        values = [blocks.stored(store) for store in stores]
        targets = blocks.targets([item for store in stores for item in operands(store)], stores)
        self.statements.write(targets, known, named=values if len(stores) > 1 else ())
        for store in stores:
            if halves is not None and store in blocks.stores:
                halves.store(store, known)
            else:
                self.statements.store(store, known)

    def write_store_loop(
        self, stores: Sequence[Store], known: EmittedValues, start: str, end: str, pragma: str = ""
    ) -> None:
        """Writes the vectorised loop of stores along a part of the axis; `pragma` is that of a parallel loop."""
        lane, kernel, known = self.vector_axis, self.statements.kernel, dict(known)
        blocks = HalfBlocks()
        is_short = end.isdigit() and start.isdigit() and int(end) - int(start) < MIN_HALF_LANES
        if not self.in_order and not is_short:
            targets = [item for store in stores for item in operands(store)]
            blocks = find_half_blocks(kernel, lane, targets, stores, known)
        if not blocks and start == "0" and not end and not pragma and self.plan.overlapping_width:
            self.write_overlapping_loop(stores, known)
            return
        if not blocks:
            with self.writer.nest([loop_head(lane, start, end)], pragma or self.simd(with_asserts=False)):
                self.write_stores(stores, known)
            return
        first, end = f"{lane.name}_0", end or print_size(lane.size)
        length = int(end) - int(start) if start.isdigit() and end.isdigit() else None
        if length is not None and length <= HALF_BLOCK and not pragma:
            with self.writer.block(""):
                self.writer.line(f"const int64_t {first} = {start};")
                self.write_half_block(HalfBlockWriter(self.statements, blocks, lane, first, str(length)), stores, known)
            return
        head = f"for (int64_t {first} = {start}; {first} < {end}; {first} += {HALF_BLOCK})"
        call = f"for_lane_block<{HALF_BLOCK}>({end} - {first}, [&](auto lanes)"
        outer = pragma.replace(" simd", "") if "parallel" in pragma else ""
        with self.writer.nest([head], outer), self.writer.block(call, "});"):
            self.write_half_block(HalfBlockWriter(self.statements, blocks, lane, first, "lanes"), stores, known)

    def write_tile_load(
        self, position: int, starts: Mapping[Atom, IndexLike], shape: tuple[str, str], lengths: tuple[str, str]
    ) -> str:
        """Writes a tile, and its load from `starts` in lines along the vectorised axis; returns its name."""
        load, tile = self.kernel.operations[position], f"{self.statements.name(position)}_tile"
        stride = load.index.stride(self.vector_axis) if isinstance(load, Load) else None
        assert isinstance(load, Load) and stride is not None, "lines of a strided load are transposed"
        index = self.statements.index({})
        self.writer.line(f"alignas(64) {CPP_TYPES[load.dtype]} {tile}[{shape[0]}][{shape[1]}];")
        source = f"{load.buffer} + {index(load.index.substitute(starts))}, {index(stride)}"
        target = f"{lengths[0]}, {lengths[1]}, &{tile}[0][0], {shape[1]}"
        self.writer.line(f"transpose({source}, {target});{self.statements.comment(load)}")
        return tile

    def write_half_block(self, halves: HalfBlockWriter, stores: Sequence[Store], known: EmittedValues) -> None:
        """Writes the loop over a block's elements between their conversions."""
        lane = self.vector_axis
        halves.widen(known, HALF_BLOCK)
        halves.declare_stores(HALF_BLOCK)
        with self.writer.nest([f"for (int lane = 0; lane < {halves.count}; ++lane)"], self.simd(with_asserts=False)):
            self.writer.line(f"const int64_t {lane.name} = {lane.name}_0 + lane;")
            self.write_stores(stores, dict(known), halves)
        halves.narrow(known)

    def write_overlapping_loop(self, stores: Sequence[Store], known: EmittedValues) -> None:
        """Writes loops over whole vectors of a short row, of which the last one overlaps the one before it."""
        lane, first, width = self.vector_axis, f"{self.vector_axis.name}_0", self.plan.overlapping_width
        head = f"for (int64_t {first} = 0; {first} < {print_size(lane.size)}; {first} += {width})"
        with self.writer.nest([head]):
            last = f"{print_size(lane.size)} - {width}"
            self.writer.line(f"const int64_t start = fxwrap::min<int64_t>({first}, {last});")
            with self.writer.nest([f"for (int lane = 0; lane < {width}; ++lane)"], self.simd(with_asserts=False)):
                self.writer.line(f"const int64_t {lane.name} = start + lane;")
                self.write_stores(stores, known)

    def identity_element(self, operation: Reduce | Scan) -> str:
        """Returns the initial value of a reduction."""
        type_name = CPP_TYPES[self.statements.dtype(operation.operands[0])]
        if operation.kind in _IDENTITIES:
            return f"{type_name}({_IDENTITIES[operation.kind]})"
        return f"Limits<{type_name}>::{'lowest' if 'max' in operation.kind else 'highest'}"


class PointwisePrinter(LoopPrinter):
    """A kernel without reduced axes: loops around one vectorised loop."""

    def print(self) -> None:
        """Writes the loops."""
        self.tables = choose_tables(self.plan)
        self.statements.lane = self.plan.vector_axis
        stores, known = self.kernel.stores, self.print_tables()
        if self.plan.vector_axis is None:
            self.write_device_asserts(self.device_asserts, known)
            self.write_stores(stores, known)
            return
        vector_axis, heads = self.vector_axis, [loop_head(axis) for axis in self.outer_axes()]
        inner = [item for item in self.device_asserts if vector_axis in self.kernel.value_axes[item]]
        if self.plan.transposed_loads[1]:
            self.print_tiles(known)
        elif not heads:
            self.print_flat(known)
        else:
            with self.writer.nest(heads, self.parallel()):
                cases = {} if inner else find_cases(self.kernel, self.outer_axes(), vector_axis)
                if not cases:
                    self.hoist(known)
                self.write_device_asserts([item for item in self.device_asserts if item not in inner], known)
                if cases:
                    self.print_cases(cases, known)
                elif inner:
                    with self.writer.nest([loop_head(vector_axis)], self.simd()):
                        self.write_device_asserts(inner, known)
                        self.write_stores(stores, known)
                else:
                    self.print_segments(known)

    def print_flat(self, known: EmittedValues) -> None:
        """Writes the loops of a kernel of one axis, in segments where conditions on it change."""
        lane, kernel = self.vector_axis, self.kernel
        if self.device_asserts:
            with self.writer.nest([loop_head(lane)], self.parallel(" simd")):
                self.write_device_asserts(self.device_asserts, known)
                self.write_stores(kernel.stores, known)
            return
        segments = split_loop(kernel, lane, wraps=True)
        if not segments:
            self.write_store_loop(kernel.stores, known, "0", "", self.parallel(" simd"))
        for segment in segments:
            self.statements.kernel = specialise(kernel, lane, segment)
            pragma = self.parallel(" simd") if segment.end - segment.start >= MIN_PARALLEL_SEGMENT else ""
            if stores := self.statements.kernel.stores:
                self.write_store_loop(stores, known, str(segment.start), str(segment.end), pragma)
        self.statements.kernel = kernel

    def outer_axes(self) -> list[Axis]:
        """Returns the axes of the loops around the vectorised one."""
        return [axis for axis in self.kernel.axes if axis is not self.vector_axis]

    def print_cases(self, cases: Mapping[Axis, Sequence[Segment]], known: EmittedValues) -> None:
        """Writes the vectorised loop for each case of other axes, in which their conditions are constant."""
        if not cases:
            known = dict(known)
            self.hoist(known)
            self.print_segments(known)
            return
        (axis, segments), *rest = cases.items()
        kernel = self.statements.kernel
        for segment in segments:
            is_last = segment.end == axis.size
            lower = f"{segment.start} <= {axis.name} && " if len(segments) == 1 and segment.start else ""
            head = "else" if is_last and segment is not segments[0] else f"if ({lower}{axis.name} < {segment.end})"
            with self.writer.block(head if segment is segments[0] or is_last else f"else {head}"):
                self.statements.kernel = specialise(kernel, axis, segment)
                self.print_cases(dict(rest), known)
        self.statements.kernel = kernel
        if len(segments) == 1:
            with self.writer.block("else"):
                self.print_cases(dict(rest), known)

    def print_segments(self, known: EmittedValues) -> None:
        """Writes the vectorised loop, in segments where conditions on its axis change."""
        kernel, lane = self.statements.kernel, self.vector_axis
        segments = split_loop(kernel, lane, wraps=True)
        if not segments:
            self.write_store_loop(kernel.stores, known, "0", "")
        for segment in segments:
            self.statements.kernel = specialise(kernel, lane, segment)
            if stores := self.statements.kernel.stores:
                self.write_store_loop(stores, known, str(segment.start), str(segment.end))
        self.statements.kernel = kernel

    def print_tiles(self, known: EmittedValues) -> None:
        """Writes loops over square tiles, so that loads along another axis than the stores read whole cache lines.

        Tiles are loaded whole: the last one begins where that is possible, and stores only what is new in it.
        """
        (axis, loads), vector_axis = self.plan.transposed_loads, self.vector_axis
        assert axis is not None
        heads = [loop_head(item) for item in self.outer_axes() if item is not axis]
        for item in (axis, vector_axis):
            start = f"{item.name}_0"
            heads.append(f"for (int64_t {start} = 0; {start} < {print_size(item.size)}; {start} += tile)")
        width = max(self.statements.dtype(position).itemsize for position in loads)
        self.writer.line(f"constexpr int tile = tile_size({self.plan.max_tile_size}, {width});")
        lengths = [self.tile_length(axis, "height"), self.tile_length(vector_axis, "width")]
        with self.writer.nest(heads, self.parallel()):
            starts = [self.tile_start(item, length) for item, length in zip((axis, vector_axis), lengths, strict=True)]
            for position in loads:
                known[position] = self.load_tile(position, axis, *lengths)
            with self.writer.nest([f"for (int line = {starts[0]}; line < {lengths[0]}; ++line)"]):
                self.writer.line(f"const int64_t {axis.name} = {axis.name}_1 + line;")
                self.print_tile_line(starts[1], lengths[1], known)

    def print_tile_line(self, start: str, end: str, known: EmittedValues) -> None:
        """Writes the loop over a line of tiles, whose float16 elements are converted in blocks of a line."""
        lane, stores = self.vector_axis, self.kernel.stores
        targets = [item for store in stores for item in operands(store)]
        tiled = self.plan.transposed_loads[1]
        blocks = HalfBlocks()
        if not self.in_order and not self.device_asserts:
            others = {position: text for position, text in known.items() if position not in tiled}
            blocks = find_half_blocks(self.kernel, lane, targets, stores, others, tiled)
        if not blocks:
            with self.writer.nest([f"for (int lane = {start}; lane < {end}; ++lane)"], self.simd()):
                self.writer.line(f"const int64_t {lane.name} = {lane.name}_1 + lane;")
                self.write_device_asserts(self.device_asserts, known)
                self.write_stores(stores, known)
            return
        first, count = f"{lane.name}_2", end if start == "0" else f"{end} - {start}"
        addresses = {position: f"{self.statements.name(position)}_tile[line] + {start}" for position in tiled}
        halves = HalfBlockWriter(self.statements, blocks, lane, first, count, addresses)
        self.writer.line(f"const int64_t {first} = {lane.name}_1 + {start};")
        inner = dict(known)
        for position in tiled:
            element = f"{self.statements.name(position)}_tile[line][lane + {start}]"
            inner[position] = self.statements.element(element, self.statements.dtype(position))
        halves.widen(inner, self.plan.max_tile_size)
        halves.declare_stores(self.plan.max_tile_size)
        with self.writer.nest([f"for (int lane = 0; lane < {count}; ++lane)"], self.simd()):
            self.writer.line(f"const int64_t {lane.name} = {first} + lane;")
            self.write_stores(stores, inner, halves)
        halves.narrow(inner)

    def tile_length(self, axis: Axis, name: str) -> str:
        """Declares the length of tiles along an axis, a constant where its size is one; returns its text."""
        size = print_size(axis.size)
        if isinstance(axis.size, int) and axis.size >= self.plan.max_tile_size:
            return "tile"
        kind = "constexpr" if isinstance(axis.size, int) else "const"
        self.writer.line(f"{kind} int {name} = int(fxwrap::min<int64_t>(tile, {size}));")
        return name

    def tile_start(self, axis: Axis, length: str) -> str:
        """Declares where a tile is loaded from; returns the text of its first new element."""
        size, name = print_size(axis.size), axis.name
        self.writer.line(f"const int64_t {name}_1 = fxwrap::min<int64_t>({name}_0, {size} - {length});")
        if isinstance(axis.size, int) and axis.size % self.plan.max_tile_size == 0:
            return "0"
        self.writer.line(f"const int {name}_new = {parenthesize(size)} % {length} == 0 ? 0 : int({name}_0 - {name}_1);")
        return f"{name}_new"

    def load_tile(self, position: int, axis: Axis, height: str, width: str) -> str:
        """Writes the load of a tile; returns the text of its element."""
        starts: dict[Atom, IndexLike] = {item: Axis(f"{item.name}_1", item.size) for item in (axis, self.vector_axis)}
        tile = self.write_tile_load(position, starts, ("tile", "tile"), (height, width))
        return self.statements.element(f"{tile}[line][lane]", self.statements.dtype(position))

    def hoist(self, known: EmittedValues) -> None:
        """Writes the operands of the vectorised loop that do not depend on its axis."""
        hoisted = self.lane_invariants(known)
        conditions = [position for position in hoisted if self.statements.dtype(position) is torch.bool]
        self.statements.write(hoisted, known, named=conditions)

    def lane_invariants(self, known: EmittedValues) -> list[int]:
        """Returns the operands of the vectorised loop that do not depend on its axis; makes tables of them known."""
        kernel = self.statements.kernel
        ends = [position for position, item in enumerate(kernel.operations) if isinstance(item, Store | DeviceAssert)]
        needed = kernel.backward_slice(ends, known)
        used = {operand for item in needed for operand in self.operands_of(item)}
        for table in self.tables:
            if self.vector_axis not in table.axes and table.position in used:
                known[table.position] = self.statements.declare(table.position, known[table.position])
        fixed = {item for item in needed if self.vector_axis not in self.kernel.value_axes[item]}
        return sorted(self.frontier(needed, fixed))


def _converted(text: str, dtype: torch.dtype, result: torch.dtype) -> str:
    return text if dtype is result else f"{CPP_TYPES[result]}({text})"
