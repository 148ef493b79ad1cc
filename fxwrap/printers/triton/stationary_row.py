"""Contractions of one row that sum groups of quantised weights, as Triton kernels whose programs keep the row.

The groups of the row are the columns of a dot's operand: in each of these, elements of other groups are zero. So one
dot has the sums of several groups, each once, where the column of a row alone would fill one of eight. Programs prepare
that operand once, and go through blocks of columns of weights.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fxwrap.loop_ir import operands, operation_dtype
from fxwrap.printers.triton.group_sums import GroupSumPrinter
from fxwrap.printers.triton.kernel_text import TritonIndexPrinter, parenthesize
from fxwrap.printers.triton.operations import TRITON_DTYPES
from fxwrap.printers.triton.schedule import Dimension, Tile
from fxwrap.symbolic import Size


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
        of_row, of_columns = kernel.backward_slice(rows), self._prologue(columns)
        self._enter("pyx")
        for position in sorted({*of_row, *of_columns, *step} - {*self.form.totals}):
            if not self._varies(position):
                self._operation(position, looped=True)
        texts = self._emit_row(rows, {at for at in of_row if self._varies(at)})
        y, tile = self._dimension("y"), self._stable_name("tile")
        blocks, programs = self.index_printer.size(y.blocks), self._num_programs()
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
        own = self._stable_name("own")
        lanes = f"(tl.arange(0, {sizes['r']}) // ({sizes['r']} // {sizes['x']}))[None, :, None]"
        self._line(f"{own} = {lanes} == tl.arange(0, {sizes['x']})[None, None, :]")
        texts = {row: self._stable_name(f"operand{row}") for row in rows}
        for row, name in texts.items():
            self._line(f"{name} = tl.where({own}, tl.expand_dims({named[row]}, 2), 0.0).to({dtype})")
        self.side = ""
        self._name_axes(before)
        return texts

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
