"""Loops of kernels that reduce or scan across the vectorised axis: a block of columns at a time, one lane a column."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fxwrap.loop_ir import Reduce, Store
from fxwrap.printers.cpp.body import Known
from fxwrap.printers.cpp.index_text import size_text
from fxwrap.printers.cpp.plan import (
    COLUMN_BLOCK,
    COLUMN_PART,
    LONG_COLUMN_PART,
    MOST_COLUMN_PARTS,
    split_axis,
)
from fxwrap.printers.cpp.scans import ScanningPrinter
from fxwrap.printers.cpp.types import CPP_TYPES
from fxwrap.symbolic import product


class ColumnPrinter(ScanningPrinter):
    """A kernel whose vectorised axis is kept. `block` columns are reduced together, each in its lane."""

    def print(self) -> None:
        """Writes the loops."""
        lane = self.plan.lane
        assert lane is not None
        size = size_text(lane.size)
        self.block = min(COLUMN_BLOCK, lane.size) if isinstance(lane.size, int) else COLUMN_BLOCK
        self.block = max(self.block, 1)
        heads = [self.head(axis) for axis in self.kernel.axes if axis is not lane]
        heads.append(f"for (int64_t {lane.name}_0 = 0; {lane.name}_0 < {size}; {lane.name}_0 += {self.block})")
        with self.nest(heads, "" if self.plan.splits else self.parallel()):
            self.lane_count = str(self.block)
            if not isinstance(lane.size, int) or lane.size % self.block:
                self.writer.line(f"const int lanes = int(fxwrap::min<int64_t>({self.block}, {size} - {lane.name}_0));")
                self.lane_count = "lanes"
            known: Known = {}
            for reductions, stores in self.stage_sinks():
                self.print_stage(reductions, stores, known)
            if self.requirements:
                self.begin_requirements(known)
                with self.columns():
                    self.print_requirements(dict(known))
            if self.final_stores():
                with self.columns():
                    self.write_stores(self.final_stores(), dict(known))

    @contextmanager
    def columns(self) -> Iterator[None]:
        """Opens the vectorised loop over the block's columns."""
        lane = self.plan.lane
        assert lane is not None
        with self.nest([f"for (int lane = 0; lane < {self.lane_count}; ++lane)"], self.simd()):
            self.writer.line(f"const int64_t {lane.name} = {lane.name}_0 + lane;")
            yield

    def print_stage(self, reductions: list[int], stores: list[Store], known: Known) -> None:
        """Writes one pass over the columns."""
        targets = self.targets(reductions, stores)
        if not targets:
            return
        self.keep_fixed(targets, known)
        scans = self.begin_scans(targets, known)
        count = self.kernel.reduced_count
        long = not isinstance(count, int) or count > 2 * COLUMN_PART
        if (long or self.plan.splits) and not scans:
            self.print_parts(reductions, stores, known)
            return
        self.declare(reductions)
        with self.nest([self.head(axis) for axis in self.kernel.reduced]):
            self.column_body(reductions, stores, known)
        for place in reductions:
            known[place] = self.result(place, self.statements.name(place))

    def keep_fixed(self, targets: Sequence[int], known: Known) -> None:
        """Writes what a pass needs and does not vary: scalars as constants, columns' values as lanes."""
        needed = self.statements.needed(targets, known)
        fixed = {place for place in needed if not self.plan.varying[place]}
        frontier = {place for place in targets if place in fixed}
        for place in needed:
            if place not in fixed:
                frontier |= {operand for operand in self.statements.operands_of(place) if operand in fixed}
        lane = self.plan.lane
        whole = self.statements.needed(frontier, known)
        scalars = [place for place in whole if self.is_scalar(place)]
        outermost = {
            place
            for place in scalars
            if place in frontier or any(place in self.statements.operands_of(u) for u in whole if not self.is_scalar(u))
        }
        self.statements.write(sorted(outermost), known, keep=sorted(outermost))
        columns = [place for place in sorted(frontier) if place not in known and self.heavy(place)]
        if not columns:
            return
        assert lane is not None
        for place in columns:
            kind, name = self.statements.type(place), self.statements.name(place)
            self.writer.line(f"{kind} {name}_lanes[{self.block}];")
        with self.columns():
            inner = dict(known)
            self.statements.write(columns, inner, keep=columns)
            for place in columns:
                self.writer.line(f"{self.statements.name(place)}_lanes[lane] = {inner[place]};")
        for place in columns:
            known[place] = f"{self.statements.name(place)}_lanes[lane]"

    def is_scalar(self, place: int) -> bool:
        """Whether a value is the same in all columns of a block."""
        on_reduction = any(
            isinstance(self.kernel.operations[item], Reduce) for item in self.statements.needed([place], {})
        )
        return self.plan.lane not in self.plan.depends[place] and not on_reduction

    def heavy(self, place: int) -> bool:
        """Whether a column's value is worth keeping for the whole pass."""
        return self.statements.kernel.operations[place].__class__.__name__ not in ("Constant", "IndexValue")

    def declare(self, reductions: Sequence[int], suffix: str = "") -> None:
        """Declares the accumulators of reductions, one lane a column."""
        for place in reductions:
            operation = self.kernel.operations[place]
            assert isinstance(operation, Reduce)
            self.writer.line(
                f"{self.lanes_type(place)} {self.statements.name(place)}{suffix}({self.start(operation)});"
            )

    def lanes_type(self, place: int) -> str:
        """Returns the type of a block's accumulators."""
        operation = self.kernel.operations[place]
        assert isinstance(operation, Reduce)
        value = CPP_TYPES[self.statements.dtype(operation.operands[0])]
        if not operation.kind.startswith("arg"):
            return f"Lanes<{value}, {self.block}>"
        better = "Larger" if operation.kind == "argmax" else "Smaller"
        count = self.kernel.reduced_count
        position = "int32_t" if isinstance(count, int) and count < 2**31 else "int64_t"
        return f"BestLanes<{value}, {self.block}, {position}, {better}>"

    def result(self, place: int, name: str) -> str:
        """Returns the text of a column's complete result."""
        operation = self.kernel.operations[place]
        assert isinstance(operation, Reduce)
        if operation.kind.startswith("arg"):
            return f"int64_t({name}.position[lane])"
        return f"{name}[lane]"

    def column_body(self, reductions: Sequence[int], stores: Sequence[Store], known: Known, suffix: str = "") -> None:
        """Writes the vectorised loop over a block's columns for one element of the reduced axes."""
        inner = dict(known)
        with self.columns():
            values = [store.value for store in stores]
            self.statements.write(self.targets(reductions, stores), inner, keep=values if len(values) > 1 else ())
            for place in reductions:
                self.fold_lane(place, inner, f"{self.statements.name(place)}{suffix}")
            for store in stores:
                self.statements.store(store, inner)

    def running(self, place: int) -> str:
        """Returns the running value of a column."""
        return f"{self.statements.name(place)}_running[lane]"

    def begin(self, kind: str, name: str, start: str, *, again: bool) -> str:
        """Returns the statement that begins the running values of a block's columns."""
        lanes = f"Lanes<{kind}, {self.block}>"
        return f"{name} = {lanes}({start});" if again else f"{lanes} {name}({start});"

    def print_parts(self, reductions: list[int], stores: list[Store], known: Known) -> None:
        """Writes a pass over long columns in parts of fixed size, whose results are combined in a fixed order."""
        axis = split_axis(self.kernel.reduced)
        others = product([item.size for item in self.kernel.reduced if item is not axis])
        count = self.kernel.reduced_count
        few = isinstance(count, int) and count <= COLUMN_PART * MOST_COLUMN_PARTS
        rows = COLUMN_PART if few else LONG_COLUMN_PART
        length = max(1, rows // others) if isinstance(others, int) else 1
        size, stage = size_text(axis.size), f"{self.kernel.stages[reductions[0]]}" if reductions else "last"
        self.writer.line(f"const int64_t parts_{stage} = ({size} + {length - 1}) / {length};")
        for place in reductions:
            name = self.statements.name(place)
            self.writer.line(f"Parts<{self.lanes_type(place)}> {name}_parts(parts_{stage});")
        pragma = self.parallel() if self.plan.splits else ""
        with self.nest([f"for (int64_t part = 0; part < parts_{stage}; ++part)"], pragma):
            self.writer.line(f"const int64_t start = part * {length};")
            self.writer.line(f"const int64_t end = fxwrap::min<int64_t>(start + {length}, {size});")
            self.declare(reductions, "_lanes")
            heads = [
                f"for (int64_t {item.name} = start; {item.name} < end; ++{item.name})"
                if item is axis
                else self.head(item)
                for item in self.kernel.reduced
            ]
            with self.nest(heads):
                self.column_body(reductions, stores, known, "_lanes")
            for place in reductions:
                name = self.statements.name(place)
                self.writer.line(f"{name}_parts[part] = {name}_lanes;")
        for place in reductions:
            operation = self.kernel.operations[place]
            assert isinstance(operation, Reduce)
            name, kind = self.statements.name(place), self.lanes_type(place)
            combine = f"Lanewise{{{self.combine(place)}}}"
            start = f"{kind}({self.start(operation)})"
            self.writer.line(f"{kind} {name} = {name}_parts.combined(parts_{stage}, {start}, {combine});")
            known[place] = self.result(place, name)
