"""Loops of kernels whose vectorised axis is parallel: reductions and scans of columns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

import torch

from fxwrap.loop_ir import (
    OPERATIONS,
    Atom,
    Axis,
    Compute,
    Constant,
    IndexLike,
    IndexValue,
    Load,
    Reduce,
    Store,
    as_index,
)
from fxwrap.printers.cpp.axis_tables import choose_tables
from fxwrap.printers.cpp.half_blocks import MIN_HALF_LANES, HalfBlocks, HalfBlockWriter, find_half_blocks, padded
from fxwrap.printers.cpp.loop_plan import COLUMN_BLOCK, MAX_LANE_ELEMENTS, VECTOR_LANES, is_transposed, split_reduction
from fxwrap.printers.cpp.loops import LoopRange, loop_head
from fxwrap.printers.cpp.operations import CPP_TYPES, parenthesize, print_size
from fxwrap.printers.cpp.scans import ScanPrinterBase
from fxwrap.printers.cpp.statements import EmittedValues
from fxwrap.symbolic import Size

ELEMENTS_TOGETHER = 4
"""Elements of a column that are combined before its accumulator is."""

COLUMN_BUFFER_MIN_COST = 10
"""Smallest cost in instructions of a column's value that is stored instead of being recomputed."""

COLUMN_BUFFER_BYTES = 65536
"""Largest size of the values of a block of columns, a part of the L2 cache, on the stack of a thread."""

MAX_TOGETHER_COST = 128
"""The most instructions for these elements together: their code is repeated."""

TILE_BYTES = 64
"""Bytes of the rows of tiles of accesses across columns, a line of the cache."""

_BETTER: Final[Mapping[str, str]] = {"cummax": "NotLess", "cummin": "NotGreater"}


class ColumnPrinter(ScanPrinterBase):
    """A kernel whose vectorised axis is parallel. `block` columns are reduced together, each in its lane."""

    def print(self) -> None:
        """Writes the loops."""
        vector_axis = self.vector_axis
        size, start = print_size(vector_axis.size), f"{vector_axis.name}_0"
        is_fixed = isinstance(vector_axis.size, int)
        self.block = self.choose_block()
        self.tile_rows: dict[Store, str] = {}
        self.buffers = self.select_column_buffers()
        self.tables = choose_tables(self.plan)
        tables = self.print_tables()
        heads = [loop_head(axis) for axis in self.kernel.axes if axis is not vector_axis]
        heads.append(f"for (int64_t {start} = 0; {start} < {size}; {start} += {self.block})")
        self.lane_count = str(self.block) if is_fixed and vector_axis.size % self.block == 0 else "lanes"
        with self.writer.nest(heads, "" if self.plan.splits_reduction else self.parallel()), self.column_block():
            known = {**self.load_columns(), **tables}
            for position in sorted(self.buffers - self.result_buffers.keys()):
                size = f"{self.column_length()}][{self.block}"
                self.writer.line(
                    f"alignas(64) {self.statements.type(position)} {self.statements.name(position)}_column[{size}];"
                )
            self.print_stages(known)
            self.store_columns()
            if len(self.varying_asserts()) < len(self.device_asserts):
                with self.columns():
                    self.print_invariant_asserts(dict(known))
            if self.final_stores():
                self.write_final_stores(known)

    def write_final_stores(self, known: EmittedValues) -> None:
        """Writes the stores of results."""
        with self.columns():
            self.write_stores(self.final_stores(), dict(known))

    def column_length(self) -> int:
        """Returns the number of elements of a column's buffer."""
        count = self.kernel.reduced_count
        assert isinstance(count, int)
        return count

    @contextmanager
    def column_block(self) -> Iterator[None]:
        """Declares the number of a block's columns, of which the last block may have fewer."""
        if self.lane_count == "lanes":
            count = f"{print_size(self.vector_axis.size)} - {self.vector_axis.name}_0"
            self.writer.line(f"const int lanes = int(fxwrap::min<int64_t>({self.block}, {count}));")
        yield

    def choose_block(self) -> int:
        """Returns the number of columns that are reduced together."""
        size, whole_vectors = self.vector_axis.size, math.lcm(self.plan.group, VECTOR_LANES)
        unit = whole_vectors if whole_vectors <= COLUMN_BLOCK else self.plan.group
        largest = COLUMN_BLOCK // unit * unit
        return max(min(largest, size) if isinstance(size, int) else largest, 1)

    def select_column_buffers(self) -> set[int]:
        """Returns the costly values that one stage stores for later ones. Blocks have fewer columns for their sake."""
        count = self.kernel.reduced_count
        if self.kernel.scans or self.plan.serial:
            return set()
        if not isinstance(count, int) or self.plan.splits_reduction:
            return self.hold_in_results()
        chosen = self.values_of_several_stages(
            lambda item, others: self.plan.cost(item, others) >= COLUMN_BUFFER_MIN_COST
        )
        width = count * sum(self.statements.dtype(position).itemsize for position in chosen)
        block = self.fitting_block(COLUMN_BUFFER_BYTES // width) if width else 0
        if not block:
            return self.hold_in_results() if width else set()
        self.block = block
        return chosen

    def hold_in_results(self) -> set[int]:
        """Lets the memory of results hold values of several stages; returns them."""
        self.result_buffers = self.select_result_buffers()
        return set(self.result_buffers)

    def fitting_block(self, columns: int) -> int:
        """Returns the number of columns of a block of at most so many, 0 if whole vectors have more."""
        unit = math.lcm(self.plan.group, VECTOR_LANES)
        return self.block if self.block <= columns else columns // unit * unit

    def load_columns(self) -> EmittedValues:
        """Writes what precedes the passes over a block of columns; returns the texts of the values that it loads."""
        return {}

    def store(self, store: Store, known: EmittedValues) -> None:
        """Writes the store of an element of a column, into a tile where the store has one."""
        if store in self.tile_rows:
            element = f"{self.tile_rows[store]}[lane]"
            self.writer.line(f"{element} = {known[store.value]};{self.statements.comment(store)}")
            return
        self.statements.store(store, known)

    def is_across(self, access: Load | Store) -> bool:
        """Whether an access is contiguous along columns, so that tiles of it are transposed."""
        axis, lane = self.kernel.reduced[-1], self.vector_axis
        stored = [item.buffer for item in self.kernel.stores].count(access.buffer)
        read = [item.buffer for item in self.kernel.operations if isinstance(item, Load)].count(access.buffer)
        if access.mask is not None or self.plan.serial or (stored + read > 1 if isinstance(access, Store) else stored):
            return False
        is_long = all(not isinstance(item.size, int) or item.size >= VECTOR_LANES for item in (axis, lane))
        return is_long and is_transposed(access.index, axis, lane)

    def block_stores(self, stores: Sequence[Store]) -> Sequence[Store]:
        """Returns the stores whose elements go to memory in the order of the loops: tiles are transposed first."""
        return [store for store in stores if not self.is_across(store)]

    def store_columns(self) -> None:
        """Writes what follows the passes over a block of columns."""

    @contextmanager
    def columns(self) -> Iterator[None]:
        """Opens the vectorised loop over the block's columns."""
        name = self.vector_axis.name
        with self.writer.nest([f"for (int lane = 0; lane < {self.lane_count}; ++lane)"], self.simd()):
            self.writer.line(f"const int64_t {name} = {name}_0 + lane;")
            yield

    def print_stage(self, reductions: list[int], stores: list[Store], known: EmittedValues) -> None:
        """Writes one pass over the columns."""
        targets = self.targets(reductions, stores)
        if not targets:
            return
        self.hoist_column_invariants(targets, known)
        scans = self.initialize_scans(targets, known)
        is_parallel = self.plan.splits_reduction and not scans
        if is_parallel or self.is_long(reductions, 1):
            self.print_parts(reductions, stores, known, self.parallel() if is_parallel else "")
        else:
            self.declare_lanes(reductions, self.block)
            self.reduce_columns(reductions, stores, known, [LoopRange(axis) for axis in self.kernel.reduced])
        for position in self.new_buffers(targets, known):
            known[position] = self.buffered(position)
        for position in reductions:
            if self.plan.group > 1:
                name, combine = self.statements.name(position), self.combine(position)
                self.writer.line(f"{name}_lanes.combine_groups<{self.plan.group}>({combine});")
            known[position] = self.result(position)

    def new_buffers(self, targets: Sequence[int], known: EmittedValues) -> list[int]:
        """Returns the values that a pass stores for later ones."""
        return sorted((self.buffers - known.keys()) & self.kernel.backward_slice(targets, known))

    def buffered(self, position: int) -> str:
        """Returns an element of a value's buffer."""
        if position in self.result_buffers:
            return self.result_element(position)
        return f"{self.statements.name(position)}_column[{self.position_text()}][lane]"

    def write_elements(self, targets: Sequence[int], known: EmittedValues, named: Iterable[int] = ()) -> None:
        """Writes the statements of targets for an element of a column, and the stores for later passes."""
        new = self.new_buffers(targets, known)
        self.statements.write([*targets, *new], known, named=[*named, *new])
        for position in new:
            self.writer.line(f"{self.buffered(position)} = {known[position]};")

    def hoist_column_invariants(self, targets: Sequence[int], known: EmittedValues) -> None:
        """Writes the operations that do not vary: scalars as constants, values of columns as arrays with lanes."""
        frontier = self.invariants(targets, known)
        needed = sorted(self.kernel.backward_slice(frontier, known))
        scalars = {position for position in needed if self.is_scalar(position)}
        outermost = sorted(scalars & frontier | self.frontier(needed, scalars))
        self.statements.write(outermost, known, named=outermost)
        columns = [position for position in sorted(frontier) if position not in known and self.is_buffered(position)]
        if not columns:
            return
        names = {position: f"{self.statements.name(position)}_lanes" for position in columns}
        for position, name in names.items():
            self.writer.line(f"{self.statements.type(position)} {name}[{self.block}];")
        with self.columns():
            inner = dict(known)
            self.statements.write(columns, inner, named=columns)
            for position, name in names.items():
                self.writer.line(f"{name}[lane] = {inner[position]};")
        known.update({position: f"{name}[lane]" for position, name in names.items()})

    def is_scalar(self, position: int) -> bool:
        """Whether a value is the same in all columns of a block."""
        needed = sorted(self.kernel.backward_slice([position]))
        on_reduction = any(isinstance(self.kernel.operations[item], Reduce) for item in needed)
        return self.vector_axis not in self.kernel.value_axes[position] and not on_reduction

    def is_buffered(self, position: int) -> bool:
        """Whether a column's value costs more to compute than to load."""
        return not isinstance(self.statements.kernel.operations[position], Constant | IndexValue)

    def result(self, position: int) -> str:
        """Returns the text of a column's complete result."""
        text = f"{self.statements.name(position)}_lanes[lane]"
        return f"{text} != 0" if self.statements.dtype(position) is torch.bool else text

    def reduce_columns(
        self, reductions: Sequence[int], stores: Sequence[Store], known: EmittedValues, ranges: Sequence[LoopRange]
    ) -> None:
        """Writes the loops over elements of columns, several at a time where that makes sums shorter."""
        *outer, whole = ranges
        with (
            self.writer.nest([item.head() for item in outer]),
            self.tiles(reductions, stores, known, whole) as (inner, tiled),
        ):
            known = {**known, **tiled}
            together = self.elements_together(reductions, stores, known, inner.axis.size)
            if together == 1:
                with self.writer.nest([inner.head()]):
                    self.column_body(reductions, stores, known)
                return
            name, size = inner.axis.name, inner.axis.size
            rest = size % together if isinstance(size, int) and not inner.end else None
            with self.writer.block(""):
                self.writer.line(f"int64_t {name}_0 = {inner.start};")
                with self.writer.nest([f"for (; {name}_0 + {together} <= {inner.stop()}; {name}_0 += {together})"]):
                    self.combine_elements(reductions, known, name, together)
                if rest is None:
                    with self.writer.nest([loop_head(inner.axis, f"{name}_0", inner.stop())]):
                        self.column_body(reductions, stores, known)
                elif rest:
                    self.combine_elements(reductions, known, name, rest)

    @contextmanager
    def tiles(
        self, reductions: Sequence[int], stores: Sequence[Store], known: EmittedValues, whole: LoopRange
    ) -> Iterator[tuple[LoopRange, EmittedValues]]:
        """Opens a loop over blocks of the elements of columns, with tiles of the accesses that are across columns.

        Yields the range of a block, and the texts of the elements of the loads. Without such accesses, there is none.
        """
        needed = self.kernel.backward_slice(self.targets(reductions, stores), known)
        items = {position: self.kernel.operations[position] for position in sorted(needed - known.keys())}
        loads = {at: item for at, item in items.items() if isinstance(item, Load) and self.is_across(item)}
        rows = [store for store in stores if self.is_across(store) and store not in self.tile_rows]
        if not loads and not rows:
            yield whole, {}
            return
        axis, first = whole.axis, f"{whole.axis.name}_1"
        dtypes = [*[load.dtype for load in loads.values()], *[self.statements.dtype(store.value) for store in rows]]
        length = max(TILE_BYTES // min([dtype.itemsize for dtype in dtypes]), VECTOR_LANES)
        head = f"for (int64_t {first} = {whole.start}; {first} < {whole.stop()}; {first} += {length})"
        with self.writer.nest([head]):
            self.writer.line(f"const int height = int(fxwrap::min<int64_t>({length}, {whole.stop()} - {first}));")
            start: dict[Atom, IndexLike] = {axis: Axis(first, axis.size)}
            line = f"[{axis.name} - {first}]"
            tiled: EmittedValues = {}
            for position, load in loads.items():
                tiled |= self.load_tile(position, load, start, length, line)
            for store in rows:
                kind, tile = self.statements.type(store.value), f"{store.buffer}_tile"
                self.writer.line(f"alignas(64) {kind} {tile}[{length}][{self.block}];")
                self.tile_rows[store] = f"{tile}{line}"
            yield LoopRange(axis, first, f"{first} + height"), tiled
            for store in rows:
                del self.tile_rows[store]
                arguments = f"&{store.buffer}_tile[0][0], {self.block}, {self.lane_count}, height"
                self.writer.line(f"transpose({arguments}, {', '.join(self.lines(store, start))});")

    def load_tile(
        self, position: int, load: Load, start: Mapping[Atom, IndexLike], length: int, line: str
    ) -> EmittedValues:
        """Writes a tile of so many elements of columns, and its load; returns the text of its elements in a `line`.

        Elements of float16 that are only cast to float32 are converted here.
        """
        tile, casts = f"{self.statements.name(position)}_tile", self.kernel.users[position]
        self.writer.line(f"alignas(64) {CPP_TYPES[load.dtype]} {tile}[{length}][{self.block}];")
        arguments = f"{', '.join(self.lines(load, start))}, height, {self.lane_count}, &{tile}[0][0], {self.block}"
        self.writer.line(f"transpose({arguments});{self.statements.comment(load)}")
        operations = [self.kernel.operations[user] for user in casts]
        if load.dtype is not torch.float16 or not all(
            isinstance(item, Compute) and item.name == "cast" and item.dtype is torch.float32 for item in operations
        ):
            return {position: self.statements.element(f"{tile}{line}[lane]", load.dtype)}
        self.writer.line(f"alignas(64) float {tile}_wide[{length}][{padded(self.block)}];")
        widened = f"widen({tile}[line], {self.lane_count}, {tile}_wide[line]);"
        self.writer.line(f"for (int line = 0; line < height; ++line) {widened}")
        return dict.fromkeys(casts, f"{tile}_wide{line}[lane]")

    def lines(self, access: Load | Store, start: Mapping[Atom, IndexLike]) -> tuple[str, str]:
        """Returns the texts of the address of a block's first column in memory, and of the distance of columns."""
        lane, index = self.vector_axis, self.statements.index({})
        first = access.index.substitute({**start, lane: as_index(Axis(f"{lane.name}_0", lane.size))})
        stride = access.index.stride(lane)
        assert stride is not None
        return f"{access.buffer} + {index(first)}", index(stride)

    def elements_together(
        self, reductions: Sequence[int], stores: Sequence[Store], known: EmittedValues, size: Size
    ) -> int:
        """Returns the number of elements of a column that are combined before an accumulator is.

        An accumulator then combines a fourth of the terms, which makes its sum more exact, and is loaded and stored a
        fourth as often.
        """
        targets = self.targets(reductions, stores)
        if stores or self.plan.serial or any(self.is_arg_reduction(item) for item in reductions):
            return 1
        if self.needed_scans(targets, known) or self.work(targets, known) * ELEMENTS_TOGETHER > MAX_TOGETHER_COST:
            return 1
        return max(size, 1) if isinstance(size, int) and size < 2 * ELEMENTS_TOGETHER else ELEMENTS_TOGETHER

    def work(self, targets: Sequence[int], known: EmittedValues) -> int:
        """Returns the estimated number of instructions for an element of a column."""
        used = [self.statements.kernel.operations[item] for item in self.kernel.backward_slice(targets, known)]
        return sum([OPERATIONS[item.name].cost if isinstance(item, Compute) else 1 for item in used])

    def combine_elements(self, reductions: Sequence[int], known: EmittedValues, name: str, together: int) -> None:
        """Writes the vectorised loop over a block's columns for some adjacent elements, from `name`_0 on."""
        halves = self.half_writer(self.targets(reductions, []), [], known)
        with self.half_block(halves):
            rows = halves.widen_rows(known, self.block, name, together)
            with self.columns():
                terms = {item: [f"{self.statements.name(item)}_{k}" for k in range(together)] for item in reductions}
                for item, names in terms.items():
                    self.writer.line(f"{self.value_type(item)} {', '.join(names)};")
                for k in range(together):
                    with self.writer.block(""):
                        self.writer.line(f"const int64_t {name} = {name}_0 + {k};")
                        inner = {**known, **rows[k]}
                        self.write_elements(self.targets(reductions, []), inner)
                        for item in reductions:
                            self.writer.line(f"{terms[item][k]} = {inner[self.reduction(item).operands[0]]};")
                for item in reductions:
                    value = {self.reduction(item).operands[0]: self.pairwise(item, terms[item])}
                    self.accumulate_lane(item, value, f"{self.statements.name(item)}_lanes")

    def pairwise(self, position: int, terms: Sequence[str]) -> str:
        """Returns the combination of a reduction's terms, of halves of them first."""
        if len(terms) == 1:
            return terms[0]
        middle = (len(terms) + 1) // 2
        first, second = self.pairwise(position, terms[:middle]), self.pairwise(position, terms[middle:])
        if self.reduction(position).kind == "sum":
            return f"{parenthesize(first)} + {parenthesize(second)}"
        return f"{self.combine(position)}({first}, {second})"

    def column_body(self, reductions: Sequence[int], stores: Sequence[Store], known: EmittedValues) -> None:
        """Writes the vectorised loop over a block's columns for one element of the reduced axes."""
        inner = dict(known)
        halves = self.half_writer(self.targets(reductions, stores), stores, known)
        with self.half_block(halves):
            halves.widen(inner, self.block)
            halves.declare_stores(self.block)
            with self.columns():
                element = dict(inner)
                values = [halves.blocks.stored(store) for store in stores]
                targets = halves.blocks.targets(self.targets(reductions, stores), stores)
                self.load_held(values if len(values) > 1 else [], element)
                self.write_elements(targets, element, values if len(values) > 1 else ())
                for position in reductions:
                    self.accumulate_lane(position, element, f"{self.statements.name(position)}_lanes")
                for store in stores:
                    if store in halves.blocks.stores:
                        halves.store(store, element)
                    else:
                        self.store(store, element)
            halves.narrow(inner)

    def half_writer(self, targets: Sequence[int], stores: Sequence[Store], known: EmittedValues) -> HalfBlockWriter:
        """Returns the writer of the conversions of a block of columns."""
        lane, blocks = self.vector_axis, HalfBlocks()
        if not self.in_order and self.block >= MIN_HALF_LANES:
            stored = [*self.block_stores(stores), *[store for store in stores if store in self.tile_rows]]
            blocks = find_half_blocks(self.statements.kernel, lane, targets, stored, known, [*self.tile_rows])
        first = f"{lane.name}_0"
        return HalfBlockWriter(self.statements, blocks, lane, first, self.lane_count, tile_rows=self.tile_rows)

    def half_block(self, halves: HalfBlockWriter) -> AbstractContextManager[None]:
        """Opens a block for the conversions of columns, if there are some."""
        return self.writer.block("") if halves.blocks else nullcontext()

    def running(self, position: int) -> str:
        """Returns the running value of a column."""
        return f"{self.statements.name(position)}_running[lane]"

    def initialize_running_value(self, position: int, kind: str, name: str, start: str) -> str:
        """Returns the statement that initialises the running values of a block's columns.

        Elements and their positions are in arrays of their own, so that loops are vectorised.
        """
        lanes = f"Lanes<{kind}, {self.block}>"
        operation = self.scan_at(position)
        if better := _BETTER.get(operation.kind):
            value = CPP_TYPES[self.statements.dtype(operation.operands[0])]
            lanes, start = f"IndexedLanes<{value}, {self.block}, int64_t, {better}>", f"{start}.value"
        return f"{name} = {lanes}({start});" if position in self.initialized else f"{lanes} {name}({start});"

    def indexed_step(self, position: int, value: str) -> str:
        """Returns the step of a column's scan."""
        return f"{self.statements.name(position)}_running.update(lane, {value}, {self.position_text()})"

    def print_parts(self, reductions: list[int], stores: list[Store], known: EmittedValues, pragma: str) -> None:
        """Writes a pass over long columns in parts of fixed size."""
        split = split_reduction(self.kernel.reduced, MAX_LANE_ELEMENTS)
        ranges = [LoopRange(split.axis, "start", "start + count"), *[LoopRange(axis) for axis in split.inner]]
        with self.parts(reductions, self.block, split, pragma):
            self.reduce_columns(reductions, stores, known, ranges)
