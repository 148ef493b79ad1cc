"""Contractions that sum groups of quantised weights (`sum_groups`) as Triton kernels.

A step of the loop multiplies the elements of some groups, which are a batch of the dot, and applies the coefficients of
each group to its sums. Warps share out the groups of a step, so that few columns occupy a multiprocessor too. Bytes of
weights are unpacked four at a time, by instructions for whole registers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from fxwrap.loop_ir import (
    NUMBER_BIAS,
    Compute,
    Constant,
    GroupedSums,
    GroupSum,
    Index,
    Kernel,
    Load,
    ProductSum,
    as_index,
    operands,
    operation_dtype,
)
from fxwrap.printers.triton.accesses import row_step
from fxwrap.printers.triton.contraction_queries import has_integer_columns
from fxwrap.printers.triton.contractions import DotPrinter
from fxwrap.printers.triton.kernel_text import BodyParameters, parenthesize
from fxwrap.printers.triton.operations import TRITON_DTYPES
from fxwrap.printers.triton.tiling import Dimension, GroupSumConfiguration

_ONE: Mapping[torch.dtype, int] = {torch.bfloat16: 0x3F80, torch.float16: 0x3C00}
_UPPER: Mapping[torch.dtype, int] = {torch.bfloat16: 0x43, torch.float16: 0x64}
"""By dtype, the bits of 1, and the upper byte of `NUMBER_BIAS`."""

_PAIR = 2
"""The number of weights in a byte, whose elements of the other operand are loaded together."""


class GroupSumPrinter(DotPrinter):
    """Prints a kernel of `sum_groups`: a batch of dots for the groups of each step.

    Operands are blocks of (p, y, r) and (p, r, x), sums blocks of (p, y, x), where p are groups. `row_dtype` is the
    dtype of the products.
    """

    result_block = "pyx"

    def __init__(
        self,
        kernel: Kernel,
        configuration: GroupSumConfiguration,
        limits: Mapping[str, int],
        parameters: BodyParameters,
        form: GroupedSums,
        row_dtype: torch.dtype,
    ) -> None:
        self.form = form
        self.row_dtype = row_dtype
        super().__init__(kernel, configuration, limits, parameters, self.form.contraction)
        self.of_group = kernel.varying_along(self.form.groups)
        self.fused = self._fused_products()
        self.has_finite_columns = has_integer_columns(self.form.contraction)
        self.contiguous: dict[tuple[int, int], str] = {}

    # --- the loop -----------------------------------------------------------------------------------------------------

    def _emit_looped(self) -> None:
        kernel, sums = self.kernel, self.form.sums
        rows = {row for item in sums for row, _ in item.terms}
        columns = {column for item in sums for _, column in item.terms if column is not None}
        targets = (rows, columns) if self._rows_are_first() else (columns, rows)
        prologues = [self._prologue(items) for items in targets]
        inner = {at for item in sums for at in self._summed_slice(item)}
        step = self._loop_slice() - inner - set(self.form.totals) - self.fused
        for position in sorted(set().union(*prologues) | step):
            if not self.is_summed[position] and not self.of_group[position]:
                self._operation(position, looped=True)
        shape = f"({', '.join([item.block_constant for item in self.tile.dimensions])})"
        for position in self.form.totals:
            (name,) = self._result_names(position)
            self.line(f"{name} = tl.zeros({shape}, {TRITON_DTYPES[operation_dtype(kernel.operations[position])]})")
        p, start = self._dimension("p"), self._stable_name("start")
        count = self.index_printer.size(p.size)
        with self.nested(f"for {start} in tl.range(0, {count}, {p.block_constant}, num_stages=LOOP_STAGES):"):
            self._emit_block_offsets(p, start)
            if p.masked:
                self.dimension_masks["p"] = self.masks[self.tile.dimensions.index(p)]
                self.zero_filled |= {item for item in step if self._is_plain_load(item)}
            self._emit_products(targets, prologues)
            self._enter(self.result_block)
            for position in sorted(step):
                if self.of_group[position] and not self.is_summed[position]:
                    self._operation(position, looped=True)
            direct = {self._direct_total(item) for item in self.form.sums}
            for position in self.form.totals:
                if position not in direct:
                    self._add_total(position)
        self.origin = ""
        for position in self.form.totals:
            (name,) = self.results[position]
            self.line(f"{name} = tl.sum({name}, 0, keep_dims=True)")
        done = inner | self._loop_slice()
        for position in range(len(kernel.operations)):
            if position not in done:
                self._operation(position, looped=True)
        self.tile = self.whole

    def _summed_slice(self, item: GroupSum) -> set[int]:
        """Returns the operations of a sum of a group that vary along its elements, and the sum itself."""
        return {item.reduction} | self.kernel.backward_slice(
            operands(self.kernel.operations[item.reduction]), within=self.is_summed
        )

    def _fused_products(self) -> set[int]:
        """Returns the products that fused multiply-adds add to totals and sums of groups, and nothing else uses."""
        used = {operands(self.kernel.operations[position])[0] for position in self.form.totals}
        for position, operation in enumerate(self.kernel.operations):
            if isinstance(operation, Compute) and self.of_group[position] and not self.is_summed[position]:
                used |= {operation.operands[1]} if operation.name in ("add", "sub") else set()
        return {item for item in used if self._is_product(item) and len({*self.kernel.users[item]}) == 1}

    def _is_product(self, position: int) -> bool:
        operation = self.kernel.operations[position]
        return isinstance(operation, Compute) and operation.name == "mul"

    def _loop_slice(self) -> set[int]:
        return self.kernel.backward_slice(self.form.totals)

    def _direct_total(self, item: GroupSum) -> int | None:
        """Returns the total that a sum of a group is added to as it is, so that dots add to it; else None."""
        totals = [at for at in self.form.totals if operands(self.kernel.operations[at]) == (item.reduction,)]
        return totals[0] if totals and len({*self.kernel.users[item.reduction]}) == 1 else None

    def _emit_products(self, targets: tuple[set[int], set[int]], prologues: Sequence[set[int]]) -> None:
        """Prints the operands of a step, and the dots that sum their products."""
        sides = ("pyr", "prx")
        texts: dict[int, str] = {}
        for side, block, prologue in zip(sides, targets, prologues, strict=True):
            texts |= self._emit_operands(side, sorted(block), prologue, "")
        ones = ""
        if any(column is None for item in self.form.sums for _, column in item.terms):
            ones = self._ones(sides[1 if self._rows_are_first() else 0])
        for item in self.form.sums:
            direct = self._direct_total(item)
            (name,) = self._result_names(item.reduction if direct is None else direct)
            origin = self.kernel.operations[item.reduction].origin
            accumulator = "" if direct is None else f", {name}"
            for row, column in item.terms:
                pair = (texts[row], ones if column is None else texts[column])
                left, right = pair if self._rows_are_first() else pair[::-1]
                self.line(f"{name} = tl.dot({left}, {right}{accumulator})", origin)
                accumulator = f", {name}"

    def _emit_operands(self, block: str, targets: Iterable[int], prologue: set[int], start: str) -> dict[int, str]:
        """Names each operand: sums of products and of rows alone share it."""
        texts = super()._emit_operands(block, targets, prologue, start)
        named = {}
        for target, text in texts.items():
            named[target] = self._stable_name(f"operand{target}")
            self.line(f"{named[target]} = {text}")
        return named

    def _add_total(self, position: int) -> None:
        """Prints the addition of a group's value to a total, as a fused multiply-add where it is a product."""
        (name,) = self.results[position]
        (used,) = operands(self.kernel.operations[position])
        if self._is_product(used):
            left, right = [self._value(item) for item in operands(self.kernel.operations[used])]
            self.line(f"{name} = tl.fma({left}, {right}, {name})")
        else:
            self.line(f"{name} += {self._value(used)}")

    def _broadcast_dimensions(self, position: int) -> frozenset[int]:
        """Sums have all dimensions of results, also those that their operands do not vary along."""
        sums = {*self.form.totals, *[item.reduction for item in self.form.sums]}
        if position not in sums:
            return frozenset()
        block = [item.name for item in self.tile.dimensions]
        return frozenset([number for number, name in enumerate(block) if name in "yx"])

    # --- operands -----------------------------------------------------------------------------------------------------

    def _filled_dimensions(self, r: Dimension) -> list[int]:
        """Adds groups, so that sums of those beyond the last are zeros: of rows, whose products with integers are."""
        is_row = ("y" if self._rows_are_first() else "x") in self.side
        is_filled = is_row or not self.has_finite_columns
        groups = [n for n, item in enumerate(self.tile.dimensions) if is_filled and item.name == "p"]
        return [*super()._filled_dimensions(r), *groups]

    def _operand(self, target: int) -> tuple[str, torch.dtype]:
        return self._value(self._source(target)), self.row_dtype

    def _dot_dtype(self, item: ProductSum) -> torch.dtype:
        return self.row_dtype

    def _source(self, operand: int) -> int:
        """Returns the byte that a biased number has the bits of, or what the operand widens."""
        operation = self.kernel.operations[operand]
        if isinstance(operation, Compute) and operation.name == "add":
            number, bias = [self.kernel.operations[item] for item in operation.operands]
            if isinstance(bias, Constant) and bias.value == NUMBER_BIAS[self.row_dtype]:
                if isinstance(number, Compute) and number.name == "cast":
                    (source,) = number.operands
                    if operation_dtype(self.kernel.operations[source]) is torch.uint8:
                        return source
        return super()._source(operand)

    def _converted(self, source: int, text: str, dtype: torch.dtype) -> str:
        if operation_dtype(self.kernel.operations[source]) is not torch.uint8:
            return super()._converted(source, text, dtype)
        upper = f"0x{f'{_UPPER[dtype]:02x}' * 4}"
        assembly = f"prmt.b32 $0, $2, {upper}, 0x4140; prmt.b32 $1, $2, {upper}, 0x4342;"
        arguments = f"{NUMBER_BIAS[dtype]}, {TRITON_DTYPES[dtype]}"
        return f'{self.use("biased_bytes")}({text}, {arguments}, "{assembly}")'

    def _ones(self, side: str) -> str:
        """Returns the name of a block of ones that column operands would have the layout of."""
        codes = [self._source(column) for item in self.form.sums for _, column in item.terms if column is not None]
        of_bytes = [item for item in codes if operation_dtype(self.kernel.operations[item]) is torch.uint8]
        one, name = TRITON_DTYPES[self.row_dtype], self._stable_name(f"ones_{side}")
        if not of_bytes:
            shape = f"({', '.join([self._dimension(item).block_constant for item in side])})"
            return f"tl.full({shape}, 1.0, tl.float32).to({one})"
        word = f"0x{_ONE[self.row_dtype]:04x}{_ONE[self.row_dtype]:04x}"
        assembly = f"mov.b32 $0, {word}; mov.b32 $1, {word};"
        self.line(f'{name} = {self.use("ones_like_bytes")}({self._value(of_bytes[0])}, {one}, "{assembly}")')
        return name

    def _compute(self, position: int, operation: Compute) -> None:
        text = self._packed_text(operation) if self.is_summed[position] else self._fused_text(operation)
        if text:
            self._assign(position, operation, operation.name, text)
        else:
            super()._compute(position, operation)

    def _fused_text(self, operation: Compute) -> str:
        """Returns the addition or subtraction of a product that is not printed by itself; "" for other operations."""
        if operation.name not in ("add", "sub") or operation.operands[1] not in self.fused:
            return ""
        sums, coefficient = operands(self.kernel.operations[operation.operands[1]])
        sign = " * -1.0" if operation.name == "sub" else ""  # a modifier of an operand, which Triton's 0 - x is not
        texts = self._value(sums), f"{parenthesize(self._value(coefficient))}{sign}", self._value(operation.operands[0])
        return f"tl.fma({', '.join(texts)})"

    def _packed_text(self, operation: Compute) -> str:
        """Returns a bit operation of bytes with a constant, four bytes at a time; "" for other operations."""
        if operation.dtype is not torch.uint8 or operation.name not in ("bitwise_and", "bitwise_right_shift"):
            return ""
        value, other = operation.operands
        constant = self.kernel.operations[other]
        if not isinstance(constant, Constant) or not 0 <= constant.value < (8 if "shift" in operation.name else 256):
            return ""
        number, text = int(constant.value), self._value(value)
        if operation.name == "bitwise_and":
            return f'{self.use("masked_bytes")}({text}, {number}, "and.b32 $0, $1, 0x{f"{number:02x}" * 4};")'
        mask = f"0x{f'{255 >> number:02x}' * 4}"
        assembly = f"{{ .reg .b32 t; shr.u32 t, $1, {number}; and.b32 $0, t, {mask}; }}"
        return f'{self.use("shifted_bytes")}({text}, {number}, "{assembly}")'

    # --- loads --------------------------------------------------------------------------------------------------------

    def _load(self, position: int, operation: Load, looped: bool, last_use: bool) -> None:
        pair = self._pair(position, operation) if self.is_summed[position] and self.side else None
        if pair is None:
            super()._load(position, operation, looped, last_use)
        elif position == min(pair):
            self._load_pair(pair, operation)

    def _pair(self, position: int, operation: Load) -> tuple[int, int] | None:
        """Returns the loads of two elements beside each other, for each of consecutive elements of a group."""
        axes = self._dimension("r").axes
        if operation.mask is not None or row_step(operation.index, axes) != as_index(_PAIR):
            return None
        for other, item in enumerate(self.kernel.operations):
            if isinstance(item, Load) and (item.buffer, item.mask) == (operation.buffer, None):
                distance = (item.index - operation.index).constant
                if distance in (1, -1) and self._is_first(operation.index if distance == 1 else item.index):
                    return (position, other) if distance == 1 else (other, position)
        return None

    def _is_first(self, index: Index) -> bool:
        """Whether an index is even for each element of a group, so that it has one neighbour in the pairs."""
        offset = index.substitute(dict.fromkeys(index.axes(), 0)).constant
        return offset is not None and offset % _PAIR == 0

    def _load_pair(self, pair: tuple[int, int], operation: Load) -> None:
        """Prints one load of contiguous elements, and splits these into pairs."""
        self._split_pair(pair, self.contiguous.get(pair) or self._load_contiguous(pair, operation))

    def _load_contiguous(self, pair: tuple[int, int], operation: Load) -> str:
        """Prints one load of contiguous elements; returns their name."""
        r = self.tile.reduced
        assert r is not None, "elements of groups are along reduced axes"
        dimension, first = self.tile.dimensions[r], self.kernel.operations[pair[0]]
        assert isinstance(first, Load), "pairs are loads"
        own = self._index_dimensions(first.index)
        base = self.index_printer(first.index.substitute(dict.fromkeys(dimension.axes, 0)))
        lanes = f"tl.arange(0, {_PAIR} * {dimension.block_constant}){self.tile.broadcast_subscript(r)}"
        mask = self._mask(own - {r}, None)
        arguments = [f"{self.pointers[first.buffer]} + {base} + {lanes}"]
        arguments += [f"mask={mask}", "other=0.0"] if mask else []
        policy = self._eviction_policy(operation, False, False)
        if policy:
            arguments.append(f'eviction_policy="{policy}"')
        wide = self.names.create_name(first.buffer)
        self.line(f"{wide} = tl.load({', '.join(arguments)})", first.origin)
        return wide

    def _split_pair(self, pair: tuple[int, int], wide: str) -> None:
        """Prints the split of contiguous elements into pairs."""
        r = self.tile.reduced
        first = self.kernel.operations[pair[0]]
        assert r is not None and isinstance(first, Load), "elements of groups are along reduced axes"
        own = self._index_dimensions(first.index)
        sizes = [item.block_constant if number in own else "1" for number, item in enumerate(self.tile.dimensions)]
        shape = [*sizes[: r + 1], str(_PAIR), *sizes[r + 1 :]]
        order = [number for number in range(len(shape)) if number != r + 1] + [r + 1]
        names = [self._name(position, first.buffer) for position in pair]
        text = f"tl.reshape({wide}, ({', '.join(shape)}))"
        self.line(f"{', '.join(names)} = tl.split(tl.permute({text}, ({', '.join(map(str, order))})))")
        for position, name in zip(pair, names, strict=True):
            self.text[position] = name
