"""Operands of fragments as Triton code: the elements of lanes, in the order in which tensor cores expect them."""

from __future__ import annotations

from math import prod

from fxwrap.loop_ir import Constant, operation_dtype
from fxwrap.printers.triton.fragment_blocks import FragmentBlockPrinter
from fxwrap.printers.triton.fragment_digits import DIGITS
from fxwrap.printers.triton.fragments import FRAGMENT_COLUMNS, FRAGMENT_ROWS, ROW_LANES, RUN, shape_text
from fxwrap.printers.triton.operations import TRITON_DTYPES


class FragmentOperandPrinter(FragmentBlockPrinter):
    """Prints the operands of the dots of fragments, and the coefficients of their sums."""

    def _row_operands(self, row: int) -> tuple[str, str]:
        """Prints a row operand of products with weights, and one of products with ones; returns their names.

        Both have the elements of a lane in the same order, that of weights: copies of registers would take longer than
        the products.
        """
        parts, block = self.fragments, self.row_block
        length = parts.repeats * ROW_LANES * parts.lane_bytes
        text = self._block_operand(row)
        elements: tuple[tuple[str, int], ...] = (("element", RUN),)
        if row in self.digits:
            digit, elements = self.digits[row], (("half", RUN // 2), ("odd", 2))
            text = f'{self.use("scaled_row")}({text}, {2.0**digit.row_exponent!r}, "{digit.row_assembly}")'
        swapped = [name for name, _ in reversed(elements)]  # of four elements the second and the third, as in `DIGITS`
        order = ("part", "warp", "repeat", "run", "side", "lane", *swapped, "x", "joined")
        once = self._stable_name(f"operand{row}")
        whole = (parts.parts * parts.warps, length, FRAGMENT_COLUMNS)
        self.line(f"{once} = {block.permuted(text, order, whole, elements)}")
        if self.chunks == 1:
            return once, once
        chunks = self._stable_name(f"chunks{row}")
        shape = (parts.parts, 1, parts.warps, length, FRAGMENT_COLUMNS)
        repeated = (parts.parts, parts.chunks, parts.warps, length, FRAGMENT_COLUMNS)
        self.line(f"{chunks} = tl.broadcast_to(tl.reshape({once}, {shape_text(shape)}), {shape_text(repeated)})")
        self.line(f"{chunks} = tl.reshape({chunks}, {shape_text((prod(repeated[:3]), *repeated[3:]))})")
        return chunks, once

    def _column_operand(self, column: int) -> str:
        """Prints a column operand of products, and returns its name."""
        parts, block = self.fragments, self.block
        assert block is not None, "operands are values of a block"
        name = self._stable_name(f"operand{column}")
        text = self._block_operand(column)
        order = ("part", "chunk", "warp", "eight", "y", "repeat", "run", "side", "lane", "element")
        count = parts.parts * self.chunks * parts.warps
        shape = (count, parts.columns, parts.repeats * ROW_LANES * parts.lane_bytes)
        runs = ("run", parts.lane_bytes // RUN), ("element", RUN)
        self.line(f"{name} = {block.permuted(text, order, shape, runs)}")
        return name

    def _block_operand(self, target: int) -> str:
        """Returns the text of an operand of products in the shape of the current block."""
        assert self.block is not None, "operands are values of a block"
        text, dtype = self._operand(target)
        source = self._source(target)
        if self.block in self.column_blocks and target in self.digits:
            text = self._digit(target)
        elif dtype is not operation_dtype(self.kernel.operations[source]):
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

    def _source(self, operand: int) -> int:
        """Returns the byte that a digit is of."""
        is_digit = operand in self.digits and operand in [item.column_operand for item in self.contraction.sums]
        return self.digits[operand].byte if is_digit else super()._source(operand)

    def _digit(self, column: int) -> str:
        """Prints the digits of a byte unless they are printed; returns the name of one of them."""
        digit = self.digits[column]
        key = self.side, digit.byte
        if key not in self.digit_names:
            names = self._stable_name(f"low{digit.byte}"), self._stable_name(f"high{digit.byte}")
            self.line(f'{", ".join(names)} = {self.use("raw_digits")}({self._value(digit.byte)}, "{DIGITS}")')
            self.digit_names[key] = names
        return self.digit_names[key][digit.is_high]

    def _ones_text(self, row: int) -> str:
        """Returns the text of ones in the layout of weights: those of the digits that a row is multiplied by.

        Triton halves the width of what it joins: a dot with joined half-precision values has the layout of bytes.
        """
        parts, dtype = self.fragments, TRITON_DTYPES[self.row_dtype]
        shape = (parts.parts * parts.warps, FRAGMENT_ROWS, parts.repeats * ROW_LANES * parts.lane_bytes)
        half = f"tl.full({shape_text((*shape[:2], shape[2] // 2))}, 1.0, tl.float32).to({dtype})"
        if row in self.digits:
            bits = f"tl.full({shape_text((*shape[:2], shape[2] // 2))}, {self.digits[row].unit}, tl.int16)"
            half = f"{bits}.to(tl.bfloat16, bitcast=True)"
        return f"tl.reshape(tl.join({half}, {half}), {shape_text(shape)})"
