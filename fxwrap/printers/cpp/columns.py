"""Loops of kernels that reduce or scan across the vectorised axis: blocks of columns, one lane a column."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fxwrap.loop_ir import Constant, IndexValue, Reduce, Store
from fxwrap.printers.cpp.loop_plan import COLUMN_BLOCK, MAX_LANE_ELEMENTS, split_axis
from fxwrap.printers.cpp.loops import loop_head
from fxwrap.printers.cpp.operations import print_size
from fxwrap.printers.cpp.scans import ScanPrinterBase
from fxwrap.printers.cpp.statements import EmittedValues
from fxwrap.symbolic import product


class ColumnPrinter(ScanPrinterBase):
    """A kernel whose vectorised axis is parallel. `block` columns are reduced together, each in its lane."""

    def print(self) -> None:
        """Writes the loops."""
        vector_axis = self.vector_axis
        size, start = print_size(vector_axis.size), f"{vector_axis.name}_0"
        is_fixed = isinstance(vector_axis.size, int)
        self.block = max(min(COLUMN_BLOCK, vector_axis.size) if isinstance(vector_axis.size, int) else COLUMN_BLOCK, 1)
        heads = [loop_head(axis) for axis in self.kernel.axes if axis is not vector_axis]
        heads.append(f"for (int64_t {start} = 0; {start} < {size}; {start} += {self.block})")
        with self.nest(heads, "" if self.plan.splits_reduction else self.parallel()):
            self.lane_count = str(self.block) if is_fixed and vector_axis.size % self.block == 0 else "lanes"
            if self.lane_count == "lanes":
                self.writer.line(f"const int lanes = int(fxwrap::min<int64_t>({self.block}, {size} - {start}));")
            known: EmittedValues = {}
            for reductions, stores in self.stage_sinks():
                self.print_stage(reductions, stores, known)
            if self.device_asserts:
                self.initialize_assert_scans(known)
                with self.columns():
                    self.print_device_asserts(dict(known))
            if self.final_stores():
                with self.columns():
                    self.write_stores(self.final_stores(), dict(known))

    @contextmanager
    def columns(self) -> Iterator[None]:
        """Opens the vectorised loop over the block's columns."""
        name = self.vector_axis.name
        with self.nest([f"for (int lane = 0; lane < {self.lane_count}; ++lane)"], self.simd()):
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
        if is_parallel or (reductions and self.is_long(1)):
            self.print_parts(reductions, stores, known, self.parallel() if is_parallel else "")
        else:
            self.declare_lanes(reductions, self.block)
            with self.nest([loop_head(axis) for axis in self.kernel.reduced]):
                self.column_body(reductions, stores, known)
        for position in reductions:
            known[position] = self.result(position)

    def hoist_column_invariants(self, targets: Sequence[int], known: EmittedValues) -> None:
        """Writes the operations that do not vary: scalars as constants, values of columns as arrays with lanes."""
        frontier = self.invariants(targets, known)
        needed = self.statements.backward_slice(frontier, known)
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
        needed = self.statements.backward_slice([position], {})
        on_reduction = any(isinstance(self.kernel.operations[item], Reduce) for item in needed)
        return self.vector_axis not in self.plan.dependent_axes[position] and not on_reduction

    def is_buffered(self, position: int) -> bool:
        """Whether a column's value costs more to compute than to load."""
        return not isinstance(self.statements.kernel.operations[position], Constant | IndexValue)

    def result(self, position: int) -> str:
        """Returns the text of a column's complete result."""
        name = f"{self.statements.name(position)}_lanes"
        return f"int64_t({name}.position[lane])" if self.is_arg_reduction(position) else f"{name}[lane]"

    def column_body(self, reductions: Sequence[int], stores: Sequence[Store], known: EmittedValues) -> None:
        """Writes the vectorised loop over a block's columns for one element of the reduced axes."""
        inner = dict(known)
        with self.columns():
            values = [store.value for store in stores]
            self.statements.write(self.targets(reductions, stores), inner, named=values if len(values) > 1 else ())
            for position in reductions:
                self.accumulate_lane(position, inner, f"{self.statements.name(position)}_lanes")
            for store in stores:
                self.statements.store(store, inner)

    def running(self, position: int) -> str:
        """Returns the running value of a column."""
        return f"{self.statements.name(position)}_running[lane]"

    def initialize_running_value(self, kind: str, name: str, start: str, *, reinitialize: bool) -> str:
        """Returns the statement that initialises the running values of a block's columns."""
        lanes = f"Lanes<{kind}, {self.block}>"
        return f"{name} = {lanes}({start});" if reinitialize else f"{lanes} {name}({start});"

    def print_parts(self, reductions: list[int], stores: list[Store], known: EmittedValues, pragma: str) -> None:
        """Writes a pass over long columns in parts of fixed size."""
        axis = split_axis(self.kernel.reduced)
        others = product([item.size for item in self.kernel.reduced if item is not axis])
        length = max(1, MAX_LANE_ELEMENTS // others) if isinstance(others, int) else 1
        with self.parts(reductions, self.block, length, pragma):
            heads = [
                loop_head(item, "start", "start + count") if item is axis else loop_head(item)
                for item in self.kernel.reduced
            ]
            with self.nest(heads):
                self.column_body(reductions, stores, known)
