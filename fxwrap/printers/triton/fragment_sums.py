"""Contractions that sum groups of quantised weights, with operands that need no shared memory, as Triton kernels.

Tensor cores multiply fragments: parts of a matrix that the lanes of a warp have in registers. Lanes here load the
elements of their own fragments, so that none moves between lanes. What a sum adds has no order: where an element is
along the reduced axes is chosen for contiguous loads, for both operands alike.

Columns of weights are the 16 rows of a fragment, and the rows of the kernel its 8 columns. Fewer rows leave columns to
other groups: in the column of a group, the elements of other groups are zero, or their sums are unused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod

from fxwrap.loop_ir import DeviceAssert, GroupSum, Store, operands, operation_dtype
from fxwrap.printers.triton.fragment_digits import SUM_FACTOR
from fxwrap.printers.triton.fragment_loads import FragmentLoadPrinter, Loads, Part
from fxwrap.printers.triton.fragments import FRAGMENT_COLUMNS, FRAGMENT_ROWS, ROW_LANES, FragmentBlock, shape_text
from fxwrap.printers.triton.operations import TRITON_DTYPES


class FragmentSumPrinter(FragmentLoadPrinter):
    """Prints a kernel of `sum_groups` whose operands are loaded into the registers of tensor cores."""

    def _emit_looped(self) -> None:
        kernel, sums = self.kernel, self.form.sums
        rows = sorted({row for item in sums for row, _ in item.terms})
        columns = sorted({column for item in sums for _, column in item.terms if column is not None})
        inner = {at for item in sums for at in self._summed_slice(item)}
        step = self._loop_slice() - inner - set(self.form.totals) - self.fused
        self.combined = {
            at for at in step | self.fused
            if not kernel.backward_slice([at]).isdisjoint([item.reduction for item in sums])
        }  # fmt: skip
        row = (self.row_block, self._prologue(rows))
        of_columns = (
            *[(block, self._prologue(columns)) for block in self.column_blocks],
            (self.coefficient_block, kernel.backward_slice([at for at in step if at not in self.combined])),
        )
        if self.configuration.programs:
            self._emit_blocks(row, of_columns, rows, columns)
        elif self.configuration.loads_ahead and self.reloads:
            self._emit_reloading_steps(row, of_columns, rows, columns)
        elif self.configuration.loads_ahead:
            self._emit_steps_ahead(row, of_columns, rows, columns)
        else:
            self._emit_steps(row, of_columns, rows, columns)

    def _emit_steps(self, row: Part, of_columns: Sequence[Part], rows: list[int], columns: list[int]) -> None:
        """Prints the loop over the groups of a block of columns."""
        p, start = self._dimension("p"), ""
        self._emit_start([*of_columns, row])
        self._emit_zeros()
        loop: AbstractContextManager[None] = nullcontext()
        if p.blocks != 1:  # without a loop, loads may precede the wait for other launches
            start, count = self._stable_name("start"), self.index_printer.size(p.size)
            head = f"for {start} in tl.range(0, {count}, {p.block_constant}, num_stages=LOOP_STAGES):"
            loop = self.nested(head)
        with loop:
            self._emit_group_loads([*of_columns, row], start)
            operands_of_rows = self._emit_rows(row, rows)
            self._emit_step(of_columns, operands_of_rows, columns)
        self.origin = ""
        self._emit_results()

    def _emit_steps_ahead(self, row: Part, of_columns: Sequence[Part], rows: list[int], columns: list[int]) -> None:
        """Prints the loop over groups, of which each step loads the elements of the next one."""
        self._emit_start([*of_columns, row])
        self._emit_zeros()
        p, start, step = self._dimension("p"), self._stable_name("start"), self._stable_name("step")
        count, more = self.index_printer.size(p.size), self._stable_name("more")
        self.line(f"{start} = 0")
        before = len(self.lines)
        self._emit_group_loads(of_columns, start)
        pairs = self._emit_pairs(row, start)
        loads = self._packed_loads(of_columns, before, pairs)
        with self.nested(
            f"for {step} in tl.range(0, {count}, {p.block_constant}, num_stages=LOOP_STAGES, loop_unroll_factor=1):"
        ):
            if p.masked:
                self._emit_next_loads(loads, [f"{start} = {step} + {p.block_constant}"], "")
            elif pairs:
                next_step = [f"{start} = {step} + {p.block_constant}", f"{more} = {start} < {count}"]
                self._emit_next_loads(loads, next_step, more)
            else:  # weights of many rows: masks of their loads are slower than loads of the last step again
                last = self.index_printer.size(int(p.size) - p.block)
                self._emit_next_loads(loads, [f"{start} = tl.minimum({step} + {p.block_constant}, {last})"], "")
            self.line(f"{start} = {step}")
            for block, _ in of_columns:
                with self._inside(block):
                    self._emit_group_positions(block, start)
            self._emit_group_loads([row], start)
            self._emit_step(of_columns, self._emit_rows(row, rows), columns)
        self.origin = ""
        self._emit_results()

    def _emit_blocks(self, row: Part, of_columns: Sequence[Part], rows: list[int], columns: list[int]) -> None:
        """Prints the loop over blocks of columns, of which each loads the weights of the next one."""
        self._emit_start([row])
        self._emit_group_loads([row], "")
        operands_of_rows = self._emit_rows(row, rows)
        loads = self._emit_first_loads(of_columns, "")
        number, more, here = [self._stable_name(name) for name in ("block", "more", "here")]
        blocks, programs, size = self.whole.num_tiles, self.whole.num_programs, self._dimension("y").block_constant
        with self.nested(
            f"for {number} in tl.range({self.parameters.program}, {blocks}, {programs}, num_stages=LOOP_STAGES, "
            "loop_unroll_factor=1):"
        ):
            self.line(f"{here} = tl.cast({number}, tl.int64) * {size}")
            self.line(f"{self.first} = {here} + {programs} * {size}")
            self.line(f"{more} = {number} + {programs} < {blocks}")
            next_loads: list[list[str]] = []
            if self.reloads:
                next_loads = self._next_loads(loads, more)
            else:
                for item in loads:
                    self._emit_next_loads(item, [], more)
            self.first = here
            self._emit_zeros()
            self._emit_step(of_columns, operands_of_rows, columns, next_loads)
            self.origin = ""
            self._emit_results()

    def _emit_reloading_steps(self, row: Part, of_columns: Sequence[Part], rows: list[int], columns: list[int]) -> None:
        """Prints the loop over groups, of which each step loads the elements of the next one where it has used its own.

        So these take no registers besides those of the step.
        """
        self._emit_start([*of_columns, row])
        self._emit_zeros()
        p, start, step = self._dimension("p"), self._stable_name("start"), self._stable_name("step")
        count, more = self.index_printer.size(p.size), self._stable_name("more")
        self.line(f"{start} = 0")
        loads = self._emit_first_loads(of_columns, start)
        before = len(self.lines)
        names = self._emit_pairs(row, start)
        pairs = Loads(tuple(self.lines[before:]), (), names)
        with self.nested(
            f"for {step} in tl.range(0, {count}, {p.block_constant}, num_stages=LOOP_STAGES, loop_unroll_factor=1):"
        ):
            self.line(f"{start} = {step}")
            self.contiguous |= dict(names)
            self._emit_group_loads([row], start)
            operands_of_rows = self._emit_rows(row, rows)
            self.line(f"{start} = {step} + {p.block_constant}")
            self.line(f"{more} = {start} < {count}")
            mask = "" if p.masked else more
            *weights, coefficients = self._next_loads(loads, mask)
            (of_rows,) = self._next_loads([pairs], mask)
            self._emit_step(of_columns, operands_of_rows, columns, [*weights, [*coefficients, *of_rows]])
        self.origin = ""
        self._emit_results()

    def _emit_start(self, parts: Sequence[Part]) -> None:
        """Prints what is the same in all steps: positions, and values that do not vary along groups."""
        for block, _ in parts:
            with self._inside(block):
                self._emit_fixed_positions(block)
        for block, positions in parts:
            with self._inside(block):
                self._emit_all([position for position in positions if not self.varying[position]])

    def _emit_zeros(self) -> None:
        """Prints the totals, and the loads of what those of one row are combined with: no wait for these is at the end.

        Several rows would need as many registers in the loop.
        """
        if "x" not in self.result_block:
            self._enter(self.result_block)
            self._emit_block_offsets(self._dimension("y"), self.first)
            outer, self.text = self.text, {}
            self._emit_loads(self._after_totals())
            self.result_text, self.text = self.text, outer
        for position in self.form.totals:
            (name,) = self._result_names(position)
            dtype = TRITON_DTYPES[operation_dtype(self.kernel.operations[position])]
            self.line(f"{name} = tl.zeros({shape_text((1, *self.sum_shape[1:]))}, {dtype})")

    def _emit_group_loads(self, parts: Sequence[Part], start: str) -> None:
        """Prints the positions of a step's groups, and the loads at these."""
        for block, positions in parts:
            with self._inside(block):
                self._emit_group_positions(block, start)
                self._emit_loads([at for at in positions if self.varying[at]])

    def _emit_rows(self, row: Part, rows: Sequence[int]) -> dict[int, tuple[str, str]]:
        """Prints the operands of rows, and the sums of these alone; returns the names of the operands."""
        block, positions = row
        with self._inside(block):
            self._emit_all(positions)
        with self._inside(block):
            row_operands = {item: self._row_operands(item) for item in rows}
        for item in self.form.sums:
            if _is_of_rows(item):
                self._emit_row_sum(item, row_operands)
        return row_operands

    def _emit_step(
        self,
        of_columns: Sequence[Part],
        row_operands: Mapping[int, tuple[str, str]],
        columns: Sequence[int],
        next_loads: Sequence[Sequence[str]] = (),
    ) -> None:
        """Prints what a step computes of the elements that it has loaded.

        After the last use of a block, the lines of `next_loads` load the elements of the next step there.
        """
        kernel, lines = self.kernel, [*next_loads, *[[]] * len(of_columns)]
        coefficient_block, coefficients = of_columns[-1]
        products = [item for item in self.form.sums if not _is_of_rows(item)]
        sums = FRAGMENT_ROWS // min(self.fragments.columns, FRAGMENT_ROWS)
        for (block, positions), after in zip(of_columns[:-1], lines, strict=False):
            with self._inside(block):
                self._emit_all(positions)
                column_operands = {column: self._column_operand(column) for column in columns}
            for number in range(0, len(products), sums):
                self._emit_group_sums(products[number : number + sums], row_operands, column_operands, block)
            self.lines += after
        combined = self.combined - self.fused
        used = {at for position in (*combined, *self.form.totals, *self.fused)
                for at in operands(kernel.operations[position])}  # fmt: skip
        with self._inside(coefficient_block):
            self._emit_all(coefficients)
            texts = {at: self._coefficient(at) for at in sorted(used & set(coefficients))}
        self.text |= texts
        self._emit_all(combined)
        for position in self.form.totals:
            self._add_total(position)
        self.lines += lines[len(of_columns) - 1]

    def _emit_row_sum(self, item: GroupSum, row_operands: Mapping[int, tuple[str, str]]) -> None:
        """Prints the dots that sum the elements of rows."""
        (name,), parts = self._result_names(item.reduction), self.fragments
        self._emit_dots(name, item, [(self._ones_text(row), row_operands[row][1]) for row, _ in item.terms])
        shape = (*self.sum_shape[:2], 1, FRAGMENT_ROWS, FRAGMENT_COLUMNS)
        if parts.columns < FRAGMENT_ROWS:
            self._emit_halves((name, self._stable_name("same")), name, self.sum_shape[:2])
            return
        self.line(f"{name} = tl.reshape({name}, {shape_text(shape)})")
        sixteens = (*self.sum_shape[:2], parts.columns // FRAGMENT_ROWS, FRAGMENT_ROWS, self.sum_shape[3])
        self.line(f"{name} = tl.reshape(tl.broadcast_to({name}, {shape_text(sixteens)}), {shape_text(self.sum_shape)})")

    def _emit_group_sums(
        self,
        items: Sequence[GroupSum],
        row_operands: Mapping[int, tuple[str, str]],
        column_operands: Mapping[int, str],
        block: FragmentBlock,
    ) -> None:
        """Prints the dots of sums of groups, whose fragments have the sums of joined groups each in its columns.

        Two sums of 8 columns are those of one fragment. A block of one chunk has the sums of some columns of these.
        """
        parts = self.fragments
        names = [self._result_names(item.reduction)[0] for item in items]
        texts = names if block is self.column_blocks[0] else [self._stable_name(f"{name}_of_chunk") for name in names]
        count = parts.parts * self.chunks * parts.warps
        factors = []
        for terms in zip(*[item.terms for item in items], strict=True):
            left = [column_operands[column] for _, column in terms if column is not None]
            if len(left) > 1:
                shape = shape_text((count, FRAGMENT_ROWS, parts.repeats * ROW_LANES * parts.lane_bytes))
                left = [f"tl.reshape(tl.permute(tl.join({', '.join(left)}), (0, 3, 1, 2)), {shape})"]
            factors.append((left[0], row_operands[terms[0][0]][0]))
        self._emit_dots(texts[0], items[0], factors)
        if len(names) > 1:
            self._emit_halves(texts, texts[0], (count,))
        chunk = f"tl.arange(0, {FRAGMENT_COLUMNS})[None, None, None, :] % {parts.joined} // {parts.side}"
        for name, text in zip(names, texts, strict=True):
            if self.chunks == 1:
                self.line(f"{text} = tl.reshape({text}, {shape_text(self.sum_shape)})")
                if text != name:
                    self.line(f"{name} = tl.where({chunk} == {block.first_group // parts.side}, {text}, {name})")
                continue
            shape = shape_text((parts.parts, parts.chunks, *self.sum_shape[1:]))
            chunks = f"tl.arange(0, {parts.chunks})[None, :, None, None, None]"
            own = chunk.replace("[None", "[None, None", 1)
            self.line(f"{name} = tl.where({chunks} == {own}, tl.reshape({name}, {shape}), 0.0)")
            self.line(f"{name} = tl.sum({name}, 1)")

    def _emit_dots(self, name: str, item: GroupSum, factors: Sequence[tuple[str, str]]) -> None:
        """Prints the sum of the dots of some factors."""
        origin, accumulator = self.kernel.operations[item.reduction].origin, ""
        for left, right in factors:
            self.line(f"{name} = tl.dot({left}, {right}{accumulator})", origin)
            accumulator = f", {name}"

    def _emit_halves(self, names: Sequence[str], whole: str, outer: Sequence[int]) -> None:
        """Prints the split of fragments of 16 columns into two of 8."""
        shape = shape_text((prod(outer), 2, FRAGMENT_ROWS // 2, FRAGMENT_COLUMNS))
        self.line(f"{', '.join(names)} = tl.split(tl.permute(tl.reshape({whole}, {shape}), (0, 2, 3, 1)))")
        if len(outer) > 1:
            half = shape_text((*outer, FRAGMENT_ROWS // 2, FRAGMENT_COLUMNS))
            self.line(f"{names[0]} = tl.reshape({names[0]}, {half})")

    def _add_total(self, position: int) -> None:
        (name,) = self.results[position]
        (used,) = operands(self.kernel.operations[position])
        is_product = used in self.fused
        factors = operands(self.kernel.operations[used]) if is_product else (used,)
        for texts in zip(*[self._parts(item) for item in factors], strict=True):
            self.line(f"{name} = tl.fma({', '.join(texts)}, {name})" if is_product else f"{name} += {texts[0]}")

    def _parts(self, position: int) -> list[str]:
        """Prints what a value of all groups of a step is for those that a warp has one after another."""
        texts, count = [self._value(position)], self.fragments.parts
        while len(texts) < self.fragments.parts:
            count //= 2
            shape = shape_text((2, count, *self.sum_shape[1:]))
            names = [[self.names.create_name("part") for _ in range(2)] for _ in texts]
            for pair, text in zip(names, texts, strict=True):
                self.line(f"{', '.join(pair)} = tl.split(tl.permute(tl.reshape({text}, {shape}), (1, 2, 3, 4, 0)))")
            texts = [name for pair in names for name in pair]
        return texts

    def _emit_results(self) -> None:
        """Prints the sums over warps and joined groups, and the operations after the loop."""
        parts = self.fragments
        names = [self.results[position][0] for position in self.form.totals]
        if parts.parts == 1 and parts.joined == FRAGMENT_COLUMNS:  # lanes first
            own = shape_text((1, parts.columns, parts.warps * FRAGMENT_COLUMNS))
            for name in names:
                self.line(f"{name} = tl.sum(tl.reshape(tl.permute({name}, (0, 2, 1, 3)), {own}), 2)")
        else:
            for name in names:
                self.line(f"{name} = tl.sum({name}, 1)")
                if parts.joined > 1:
                    rows = (parts.rows,) if "x" in self.result_block else ()
                    shape = (1, parts.columns, *rows, parts.joined)
                    self.line(f"{name} = tl.sum(tl.reshape({name}, {shape_text(shape)}), {len(shape) - 1})")
        for name in names if self.digits else ():
            self.line(f"{name} *= {SUM_FACTOR!r}")
        self.text = {position: self.results[position][0] for position in self.form.totals}
        self.text |= self.result_text
        self._enter(self.result_block)
        if "x" in self.result_block:
            self._emit_block_offsets(self._dimension("y"), self.first)
            self._emit_block_offsets(self._dimension("x"), "")
        self._emit_all(self._after_totals())
        self.tile = self.whole

    def _after_totals(self) -> set[int]:
        """Returns the operations after the loop, and what they read besides the totals."""
        operations = enumerate(self.kernel.operations)
        writes = [at for at, operation in operations if isinstance(operation, Store | DeviceAssert)]
        return self.kernel.backward_slice(writes, known=self.form.totals)


def _is_of_rows(item: GroupSum) -> bool:
    """Whether a sum is one of rows alone."""
    of_rows = item.terms[0][1] is None
    assert all((column is None) == of_rows for _, column in item.terms), "a sum of products, or of a row"
    return of_rows
