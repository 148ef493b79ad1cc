"""Contractions that sum groups of quantised weights, with operands that need no shared memory, as Triton kernels.

Tensor cores multiply fragments: parts of a matrix that the lanes of a warp have in registers. Lanes here load the
elements of their own fragments, so that none moves between lanes. What a sum adds has no order: where an element is
along the reduced axes is chosen for contiguous loads, for both operands alike.

Columns of weights are the 16 rows of a fragment, and the rows of the kernel its 8 columns. Fewer rows leave columns to
other groups: in the column of a group, the elements of other groups are zero, or their sums are unused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from fxwrap.loop_ir import Constant, DeviceAssert, GroupSum, Load, Store, operands, operation_dtype
from fxwrap.printers.triton.fragment_blocks import FragmentBlockPrinter
from fxwrap.printers.triton.fragments import FRAGMENT_COLUMNS, FRAGMENT_ROWS, LANES, RUN, FragmentBlock, shape_text
from fxwrap.printers.triton.operations import TRITON_DTYPES


def _masked(line: str, mask: str) -> str:
    """Returns a line that defines a name; if it is a load, one that is done where a mask is true."""
    if " = tl.load(" not in line:
        return line
    assert line.endswith(")"), "values are loaded as they are in memory"
    return line.replace("mask=", f"mask={mask} & ") if "mask=" in line else f"{line[:-1]}, mask={mask})"


def _is_of_rows(item: GroupSum) -> bool:
    """Whether a sum is one of rows alone."""
    of_rows = item.terms[0][1] is None
    assert all((column is None) == of_rows for _, column in item.terms), "a sum of products, or of a row"
    return of_rows


_Part = tuple[FragmentBlock, Collection[int]]
"""A block with the operations that are computed there."""

_Pairs = tuple[tuple[tuple[int, int], str], ...]
"""The operations of two elements of rows that are loaded together, with the name of both."""

_PAIR_BYTES = 4
"""The bytes of two elements of a row."""


@dataclass(frozen=True)
class _Loads:
    """The lines that load what a step needs, the block, operation and name of each value, and the pairs of rows."""

    lines: tuple[str, ...]
    values: tuple[tuple[FragmentBlock, int, str], ...]
    pairs: _Pairs

    @property
    def names(self) -> list[str]:
        """The names of all values."""
        return [*[name for _, _, name in self.values], *[name for _, name in self.pairs]]


class FragmentSumPrinter(FragmentBlockPrinter):
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
        self.varying = kernel.varying_along((*self.form.groups, *self.contraction.summed))
        row = (self.row_block, self._prologue(rows))
        of_columns = (
            (self.column_block, self._prologue(columns)),
            (self.coefficient_block, kernel.backward_slice([at for at in step if at not in self.combined])),
        )
        if self.configuration.loads_ahead:
            self._emit_steps_ahead(row, of_columns, rows, columns)
        else:
            self._emit_steps(row, of_columns, rows, columns)

    def _emit_steps(self, row: _Part, of_columns: Sequence[_Part], rows: list[int], columns: list[int]) -> None:
        """Prints the loop over the groups of a block of columns."""
        p, start = self._dimension("p"), ""
        self._emit_start([*of_columns, row])
        self._emit_zeros()
        is_loop = p.blocks != 1  # without a loop, loads may precede the wait for other launches
        if is_loop:
            start = self._stable_name("start")
            count = self.index_printer.size(p.size)
            self.line(f"for {start} in tl.range(0, {count}, {p.block_constant}, num_stages=LOOP_STAGES):")
        self.depth += is_loop
        self._emit_group_loads([*of_columns, row], start)
        operands_of_rows = self._emit_rows(row, rows)
        self._emit_step(of_columns, operands_of_rows, columns)
        self.depth -= is_loop
        self.origin = ""
        self._emit_results()

    def _emit_steps_ahead(self, row: _Part, of_columns: Sequence[_Part], rows: list[int], columns: list[int]) -> None:
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
        self.line(
            f"for {step} in tl.range(0, {count}, {p.block_constant}, num_stages=LOOP_STAGES, loop_unroll_factor=1):"
        )
        self.depth += 1
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
        self.depth -= 1
        self.origin = ""
        self._emit_results()

    def _emit_pairs(self, row: _Part, start: str) -> _Pairs:
        """Prints the loads of a step's pairs of elements of rows; returns these with their names.

        There are none where they would take more registers than the weights of a step.
        """
        block, positions = row
        if block.rows * RUN * _PAIR_BYTES > self.column_block.rows * self.fragments.lane_bytes:
            return ()
        names: dict[tuple[int, int], str] = {}
        with self._inside(block):
            self._emit_group_positions(block, start)
            for position in sorted(positions):
                operation = self.kernel.operations[position]
                if not isinstance(operation, Load) or not self.varying[position] or not self.is_summed[position]:
                    continue
                pair = self._pair(position, operation)
                if pair is not None and pair not in names:
                    names[pair] = self._load_contiguous(pair, operation)
        return tuple(names.items())

    def _packed_loads(self, of_columns: Sequence[_Part], before: int, pairs: _Pairs) -> _Loads:
        """Prints the bytes of a step's loads as words, which take fewer registers; returns what the lines define."""
        loaded = [
            (block, position, self.texts[block.name][position]) for block, positions in of_columns
            for position in sorted(positions) if position in self.texts[block.name]
            and isinstance(self.kernel.operations[position], Load) and self.varying[position]
        ]  # fmt: skip
        for block, position, name in loaded:
            if self._is_packed(block, position):
                self.line(f"{name} = {self.use('words_of_bytes')}({name})")
        return _Loads(tuple(self.lines[before:]), tuple(loaded), pairs)

    def _is_packed(self, block: FragmentBlock, position: int) -> bool:
        return block is self.column_block and operation_dtype(self.kernel.operations[position]).itemsize == 1

    def _emit_next_loads(self, loads: _Loads, before: Sequence[str], mask: str) -> None:
        """Prints the values of this step, and the loads of the next one after the lines that say where it is.

        `mask` is the name of whether there is one; "" where the lines lead to a step again.
        """
        now = {name: self._stable_name(f"{name}_now") for name in loads.names}
        for name in loads.names:
            self.line(f"{now[name]} = {name}")
        for block, position, name in loads.values:
            self.texts[block.name][position] = now[name]
        self.contiguous |= {pair: now[name] for pair, name in loads.pairs}
        for line in before:
            self.line(line)
        self.lines += [f"    {_masked(line, mask) if mask else line}" for line in loads.lines]
        for block, position, _ in loads.values:
            if self._is_packed(block, position):
                words = self.texts[block.name][position]
                self.texts[block.name][position] = self._stable_name(f"{words}_bytes")
                self.line(f"{self.texts[block.name][position]} = {self.use('bytes_of_words')}({words})")

    def _emit_start(self, parts: Sequence[_Part]) -> None:
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

    def _emit_group_loads(self, parts: Sequence[_Part], start: str) -> None:
        """Prints the positions of a step's groups, and the loads at these."""
        for block, positions in parts:
            with self._inside(block):
                self._emit_group_positions(block, start)
                self._emit_loads([at for at in positions if self.varying[at]])

    def _emit_rows(self, row: _Part, rows: Sequence[int]) -> dict[int, tuple[str, str]]:
        """Prints the operands of rows, and the sums of these alone; returns the names of the operands."""
        block, positions = row
        with self._inside(block):
            self._emit_all(positions)
        with self._inside(block):
            row_operands = {item: self._row_operands(item) for item in rows}
        for item in self.form.sums:
            if _is_of_rows(item):
                self._emit_sum(item, row_operands, {})
        return row_operands

    def _emit_step(
        self, of_columns: Sequence[_Part], row_operands: Mapping[int, tuple[str, str]], columns: Sequence[int]
    ) -> None:
        """Prints what a step computes of the elements that it has loaded."""
        kernel = self.kernel
        for block, positions in of_columns:
            with self._inside(block):
                self._emit_all(positions)
        with self._inside(self.column_block):
            column_operands = {column: self._column_operand(column) for column in columns}
        combined, coefficients = self.combined - self.fused, of_columns[1][1]
        used = {at for position in (*combined, *self.form.totals, *self.fused)
                for at in operands(kernel.operations[position])}  # fmt: skip
        with self._inside(self.coefficient_block):
            texts = {at: self._coefficient(at) for at in sorted(used & set(coefficients))}
        self.text |= texts
        for item in self.form.sums:
            if not _is_of_rows(item):
                self._emit_sum(item, row_operands, column_operands)
        self._emit_all(combined)
        for position in self.form.totals:
            self._add_total(position)

    def _row_operands(self, row: int) -> tuple[str, str]:
        """Prints a row operand of products with weights, and one of products with ones; returns their names.

        Both have the elements of a lane in the same order, that of weights: copies of registers would take longer than
        the products.
        """
        parts, block = self.fragments, self.row_block
        length = parts.repeats * LANES * parts.lane_bytes
        order = ("part", "warp", "repeat", "run", "side", "lane", "element", "x", "joined")
        once = self._stable_name(f"operand{row}")
        whole = (parts.parts * parts.warps, length, FRAGMENT_COLUMNS)
        self.line(f"{once} = {block.permuted(self._block_operand(row), order, whole)}")
        if parts.chunks == 1:
            return once, once
        chunks = self._stable_name(f"chunks{row}")
        shape = (parts.parts, 1, parts.warps, length, FRAGMENT_COLUMNS)
        repeated = (parts.parts, parts.chunks, parts.warps, length, FRAGMENT_COLUMNS)
        self.line(f"{chunks} = tl.broadcast_to(tl.reshape({once}, {shape_text(shape)}), {shape_text(repeated)})")
        self.line(f"{chunks} = tl.reshape({chunks}, {shape_text((prod(repeated[:3]), *repeated[3:]))})")
        return chunks, once

    def _column_operand(self, column: int) -> str:
        """Prints a column operand of products, and returns its name."""
        parts, block = self.fragments, self.column_block
        name = self._stable_name(f"operand{column}")
        text = self._block_operand(column)
        order = ("part", "chunk", "warp", "eight", "y", "repeat", "run", "side", "lane", "element")
        count = parts.parts * parts.chunks * parts.warps
        shape = (count, parts.columns, parts.repeats * LANES * parts.lane_bytes)
        runs = ("run", parts.lane_bytes // RUN), ("element", RUN)
        self.line(f"{name} = {block.permuted(text, order, shape, runs)}")
        return name

    def _block_operand(self, target: int) -> str:
        """Returns the text of an operand of products in the shape of the current block."""
        assert self.block is not None, "operands are values of a block"
        text, dtype = self._operand(target)
        source = self._source(target)
        if dtype is not operation_dtype(self.kernel.operations[source]):
            text = self._converted(source, text, dtype)
        mask = " & ".join(self.masks.values())
        is_filled = self.block is self.row_block or not self.has_finite_columns
        if mask and is_filled and source not in self.zero_filled:
            text = f"tl.where({mask}, {text}, 0.0)"
        return f"tl.broadcast_to({text}, {self.block.shape})"

    def _coefficient(self, position: int) -> str:
        """Prints a coefficient of columns and groups in the form of sums, and returns its name or its text."""
        text = self._value(position)
        if not self.varying_dimensions[position]:
            return self.text[position] if isinstance(self.kernel.operations[position], Constant) else text
        block, parts = self.coefficient_block, self.fragments
        name = self._stable_name(f"value{position}")
        order = ("part", "warp", "eight", "y", "x", "joined", "pair")
        pairs = (*self.sum_shape[:3], FRAGMENT_COLUMNS // 2, 2)
        mask = " & ".join(self.masks.values())
        value = f"tl.broadcast_to({f'tl.where({mask}, {text}, 0.0)' if mask else text}, {block.shape})"
        if parts.joined > 1:
            self.line(f"{name} = {block.permuted(value, order, self.sum_shape)}")
            return name
        self.line(f"{name} = {block.permuted(value, order, (*pairs[:4], 1))}")
        self.line(f"{name} = tl.reshape(tl.broadcast_to({name}, {shape_text(pairs)}), {shape_text(self.sum_shape)})")
        return name

    def _emit_sum(
        self, item: GroupSum, row_operands: Mapping[int, tuple[str, str]], column_operands: Mapping[int, str]
    ) -> None:
        """Prints the dots of a sum of groups, whose fragments have the sums of joined groups each in its columns."""
        parts = self.fragments
        (name,) = self._result_names(item.reduction)
        origin = self.kernel.operations[item.reduction].origin
        accumulator = ""
        of_rows = _is_of_rows(item)
        for row, column in item.terms:
            left = self._ones_text() if column is None else column_operands[column]
            right = row_operands[row][1 if column is None else 0]
            self.line(f"{name} = tl.dot({left}, {right}{accumulator})", origin)
            accumulator = f", {name}"
        if of_rows:
            self.line(
                f"{name} = tl.reshape({name}, {shape_text((*self.sum_shape[:2], 1, FRAGMENT_ROWS, self.sum_shape[3]))})"
            )
            sixteens = (*self.sum_shape[:2], parts.columns // FRAGMENT_ROWS, FRAGMENT_ROWS, self.sum_shape[3])
            self.line(
                f"{name} = tl.reshape(tl.broadcast_to({name}, {shape_text(sixteens)}), {shape_text(self.sum_shape)})"
            )
        elif parts.chunks == 1:
            self.line(f"{name} = tl.reshape({name}, {shape_text(self.sum_shape)})")
        else:
            shape = (parts.parts, parts.chunks, *self.sum_shape[1:])
            chunks = f"tl.arange(0, {parts.chunks})[None, :, None, None, None]"
            columns = f"tl.arange(0, {FRAGMENT_COLUMNS})[None, None, None, None, :]"
            chunk = f"{columns} % {parts.joined} // {parts.side}"
            self.line(f"{name} = tl.where({chunks} == {chunk}, tl.reshape({name}, {shape_text(shape)}), 0.0)")
            self.line(f"{name} = tl.sum({name}, 1)")

    def _ones_text(self) -> str:
        """Returns the text of ones in the layout of weights.

        Triton halves the width of what it joins: a dot with joined half-precision values has the layout of bytes.
        """
        parts, dtype = self.fragments, TRITON_DTYPES[self.row_dtype]
        shape = (parts.parts * parts.warps, FRAGMENT_ROWS, parts.repeats * LANES * parts.lane_bytes)
        half = f"tl.full({shape_text((*shape[:2], shape[2] // 2))}, 1.0, tl.float32).to({dtype})"
        return f"tl.reshape(tl.join({half}, {half}), {shape_text(shape)})"

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
        for position in self.form.totals:
            (name,) = self.results[position]
            rows = (parts.rows,) if "x" in self.result_block else ()
            self.line(f"{name} = tl.sum({name}, 1)")
            if parts.joined > 1:
                shape = (1, parts.columns, *rows, parts.joined)
                self.line(f"{name} = tl.sum(tl.reshape({name}, {shape_text(shape)}), {len(shape) - 1})")
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
