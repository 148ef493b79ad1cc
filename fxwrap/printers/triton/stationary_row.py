"""Contractions of one row that sum groups of quantised weights, as Triton kernels whose programs keep the row.

The groups of the row are the columns of a dot's operand: in each of these, elements of other groups are zero. So one
dot has the sums of several groups, each once, where the column of a row alone would fill one of eight. Programs prepare
that operand once, and go through blocks of columns of weights.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fxwrap.loop_ir import Load, as_index, operands, operation_dtype
from fxwrap.printers.triton.group_sums import PAIR, GroupSumPrinter
from fxwrap.printers.triton.kernel_text import TritonIndexPrinter, parenthesize
from fxwrap.printers.triton.operations import TRITON_DTYPES
from fxwrap.printers.triton.schedule import Dimension, Tile, backward_slice
from fxwrap.symbolic import Size

_FEW_BLOCKS = 4
"""The blocks of a program up to which preparing the row takes longer than loading it again."""


class StationaryRowPrinter(GroupSumPrinter):
    """Prints a kernel of `sum_groups` that has one row, with chunks of groups.

    Weights are blocks of (p, y, r), the operand of the row (p, r, x), values of groups (p, y, x): p are chunks, x the
    groups of a chunk, and r all elements of these.
    """

    fuses_multiply_adds = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        p, y, r, x = [self._dimension(name) for name in "pyrx"]
        self.whole = Tile((p, y, Dimension("r", (*x.axes, *r.axes), r.block), x), self.whole.outer)
        self.tile = self.whole

    def _num_programs(self) -> Size:
        return min(int(self._dimension("y").blocks), self.configuration.programs)

    def _rows_are_first(self) -> bool:
        return False

    def _emit_program_offsets(self) -> None:
        if self.use_int64:
            self._emit_int64_symbols()
        self.program = self._stable_name("program")
        self._line(f"{self.program} = {self.parameters.program}{'.to(tl.int64)' if self.use_int64 else ''}")

    def _emit_looped(self) -> None:
        kernel, sums = self.kernel, self.form.sums
        rows = sorted({row for item in sums for row, _ in item.terms})
        columns = sorted({column for item in sums for _, column in item.terms if column is not None})
        step = self._loop_slice() - {at for item in sums for at in self._summed_slice(item)} - self.fused
        of_row, of_columns = backward_slice(kernel, rows), self._prologue(columns)
        self._enter("pyx")
        for position in sorted(of_columns):
            self._emit_prefetches(position)
        for position in sorted({*of_row, *of_columns, *step} - {*self.form.totals}):
            if not self._varies(position):
                self._operation(position, looped=True)
        texts = self._emit_row(rows, {at for at in of_row if self._varies(at)})
        y, tile = self._dimension("y"), self._stable_name("tile")
        blocks, programs = [self.index_printer.size(item) for item in (y.blocks, self._num_programs())]
        self._line(f"for {tile} in tl.range({self.program}, {blocks}, {programs}, num_stages=LOOP_STAGES):")
        self.depth += 1
        self._enter("pyx")
        for name, start in (("p", ""), ("y", f"{tile} * {y.block_constant}"), ("x", "")):
            self._emit_block_offsets(self._dimension(name), start)
        names = self.axis_names
        varying = {at for at in of_columns if self._varies(at)}
        texts |= self._emit_operands("pyr", columns, varying, "")
        self._name_axes(names)
        self._enter("pyx")
        for item in sums:
            (name,) = self._result_names(item.reduction)
            origin, accumulator = kernel.operations[item.reduction].origin, ""
            for row, column in item.terms:
                if column is not None:
                    self._line(f"{name} = tl.dot({texts[column]}, {texts[row]}{accumulator})", origin)
                    accumulator = f", {name}"
        done = {*of_row, *of_columns, *step, *self.fused, *self.form.totals}
        done |= {at for item in sums for at in self._summed_slice(item)}
        for position in sorted(step - {*self.form.totals} - of_row - of_columns):
            if self._varies(position):
                self._operation(position, looped=True)
        for position in self.form.totals:
            (name,), (used,) = self._result_names(position), operands(kernel.operations[position])
            text = self._product(used) if used in self.fused else self._value(used)
            text = f"tl.sum(tl.sum({text}, 2, keep_dims=True), 0, keep_dims=True)"
            self._line(f"{name} = {text}", kernel.operations[position].origin)
        for position in range(len(kernel.operations)):
            if position not in done:
                self._operation(position, looped=True)
        self.depth -= 1
        self.tile = self.whole

    def _emit_prefetches(self, position: int) -> None:
        """Prints the prefetches of a load for a program's first blocks, as many as the loop's first loads, if these are
        contiguous: while the program waits for the row and prepares it, memory is not idle.
        """
        load, count = self.kernel.operations[position], as_index(1)
        if not isinstance(load, Load):
            return
        y, r = self._dimension("y"), self._dimension("r")
        for axis in reversed((*y.axes, *self._dimension("p").axes, *r.axes)):
            if load.index.stride(axis) != count:
                return
            count = count * as_index(axis.size)
        first = load.index.substitute(dict.fromkeys(load.index.axes(), 0))
        size = int(self._dimension("p").size) * r.block
        programs, last = self._num_programs(), int(y.blocks) - 1
        for step in range(max(self.configuration.num_stages - 1, 1)):
            block = self.program
            if step:
                later, end = [self.index_printer.size(item) for item in (step * int(programs), last)]
                block = f"tl.minimum({self.program} + {later}, {end})"
            start = [] if first.constant == 0 else [self.index_printer(first)]
            address = " + ".join([self.pointers[load.buffer], *start, f"{block} * {y.block * size}"])
            self._line(f"{self._use('prefetch_bytes')}({address}, {y.block * size * load.dtype.itemsize})")

    def _varies(self, position: int) -> bool:
        """Whether an operation's value varies along any axis."""
        return bool(self.kernel.value_axes[position])

    def _name_axes(self, names: dict[Any, str]) -> None:
        self.axis_names = names
        self.index_printer = TritonIndexPrinter(names, self._indirect_index, self.helpers, self.parameters.integer)

    def _emit_row(self, rows: Collection[int], positions: Collection[int]) -> dict[int, str]:
        """Prints the operands of the row and its sums; returns the operands' names."""
        p, r = [self._dimension(name) for name in "pr"]
        before = dict(self.axis_names)
        self._enter("pr")
        self.side = "pr"
        self._name_axes({**before, **{axis: self._stable_name(axis.name) for axis in (*p.axes, *r.axes)}})
        self._emit_block_offsets(p, "")
        self._emit_block_offsets(r, "")
        for position in sorted(positions):
            self._operation(position, looped=True)
        sizes = {item: self._dimension(item).block_constant for item in "prx"}
        dtype, named = TRITON_DTYPES[self.row_dtype], {}
        for row in rows:
            source = self._source(row)
            text = self._value(source)
            if operation_dtype(self.kernel.operations[source]) is not self.row_dtype:
                text = f"{parenthesize(text)}.to({dtype})"
            if len(self.varying_dimensions[source]) < len(self.tile.dimensions):
                text = f"tl.broadcast_to({text}, ({sizes['p']}, {sizes['r']}))"
            named[row] = self._stable_name(f"row{row}")
            self._line(f"{named[row]} = {self._interleaved(text, 'pr') if self.digits else text}")
        for item in self.form.sums:
            if all(column is None for _, column in item.terms):
                (name,) = self._result_names(item.reduction)
                text = " + ".join([f"{named[row]}.to(tl.float32)" for row, _ in item.terms])
                shape = f"({sizes['p']}, {sizes['x']}, {sizes['r']} // {sizes['x']})"
                text = f"tl.sum(tl.reshape({text}, {shape}), 2)"
                self._line(f"{name} = tl.reshape({text}, ({sizes['p']}, 1, {sizes['x']}))")
        has_few_blocks = int(self._dimension("y").blocks) <= _FEW_BLOCKS * int(self._num_programs())
        texts = self._emit_masked_loads(rows) if has_few_blocks else {}
        rest = [row for row in rows if row not in texts]
        if rest:
            own = self._stable_name("own")
            lanes = f"(tl.arange(0, {sizes['r']}) // ({sizes['r']} // {sizes['x']}))[None, :, None]"
            self._line(f"{own} = {lanes} == tl.arange(0, {sizes['x']})[None, None, :]")
        for row in rest:
            texts[row] = self._stable_name(f"operand{row}")
            self._line(f"{texts[row]} = tl.where({own}, tl.expand_dims({named[row]}, 2), 0.0).to({dtype})")
        self.side = ""
        self._name_axes(before)
        return texts

    def _emit_masked_loads(self, rows: Collection[int]) -> dict[int, str]:
        """Prints operands that are pairs of elements in memory as loads of zeros outside of each group.

        No element is selected after it is loaded, and vectors of elements reach shared memory, from where each step
        loads them. Selected ones stay in registers, which pays off for many steps.
        """
        p, r, x = [self._dimension(name) for name in "prx"]
        pairs: dict[tuple[int, int], dict[int, int]] = {}
        for row in rows:
            source = self._source(row)
            load = self.kernel.operations[source]
            pair = self._pair(source, load) if isinstance(load, Load) and load.dtype is self.row_dtype else None
            if pair is not None:
                pairs.setdefault(pair, {})[source] = row
        wide = f"{PAIR} * {r.block_constant}"
        shape = f"({p.block_constant}, {x.block_constant}, {wide})"
        names: dict[int, str] = {}
        for pair, row_of in pairs.items():
            load = self.kernel.operations[pair[0]]
            assert isinstance(load, Load), "pairs are loads"
            chunk = f"tl.arange(0, {p.block_constant})[:, None, None]"
            known = {**self.axis_names, **dict.fromkeys(r.axes, "0"), **dict.fromkeys(p.axes, chunk)}
            printer = TritonIndexPrinter(known, self._indirect_index, self.helpers, self.parameters.integer)
            start = printer(load.index.substitute(dict.fromkeys(r.axes, 0)))
            own, elements = self.names.create_name("own"), self.names.create_name(load.buffer)
            lanes, groups = f"tl.arange(0, {wide})", f"tl.arange(0, {x.block_constant})[None, :, None]"
            self._line(f"{own} = ({lanes} // ({wide} // {x.block_constant}))[None, None, :] == {groups}")
            address = f"{self.pointers[load.buffer]} + tl.broadcast_to({start} + {lanes}[None, None, :], {shape})"
            self._line(f"{elements} = tl.load({address}, mask=tl.broadcast_to({own}, {shape}), other=0.0)")
            if self.digits:
                parts = f"({p.block_constant}, {x.block_constant}, {r.block_constant} // 4, 2, 2, {PAIR})"
                self._line(f"{elements} = tl.permute(tl.reshape({elements}, {parts}), (0, 1, 2, 4, 3, 5))")
            parts = f"({p.block_constant}, {x.block_constant}, {r.block_constant}, {PAIR})"
            halves = [self.names.create_name(load.buffer) for _ in pair]
            self._line(f"{', '.join(halves)} = tl.split(tl.reshape({elements}, {parts}))")
            for source, half in zip(pair, halves, strict=True):
                if source in row_of:
                    names[row_of[source]] = self._stable_name(f"operand{row_of[source]}")
                    self._line(f"{names[row_of[source]]} = tl.permute({half}, (0, 2, 1))")
        return names

    def _product(self, position: int) -> str:
        left, right = [self._value(item) for item in operands(self.kernel.operations[position])]
        return f"{left} * {right}"

    def _broadcast_dimensions(self, position: int) -> frozenset[int]:
        """Sums of groups have all dimensions, totals that of columns."""
        block = [item.name for item in self.tile.dimensions]
        if position in self.form.totals:
            return frozenset([block.index("y")] if "y" in block else [])
        is_sum = any(item.reduction == position for item in self.form.sums)
        return frozenset(range(len(block))) if is_sum else frozenset()
