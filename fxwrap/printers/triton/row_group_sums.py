"""Contractions of one row that sum groups of quantised weights, as Triton kernels without dots.

A program goes through a few columns, whose weights it reads from memory straight into registers: lanes have blocks of
groups and of the elements of these. Elements of the row are loaded and converted once for all columns of a program.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from fxwrap.loop_ir import (
    GroupSum,
    IndirectIndex,
    Kernel,
    Load,
    find_contraction,
    find_grouped_sums,
    operands,
    operation_dtype,
    row_precision,
    split_sums,
    sum_groups,
)
from fxwrap.printers.triton.fragment_sums import FragmentSumPrinter
from fxwrap.printers.triton.group_sums import GroupSumPrinter
from fxwrap.printers.triton.kernel_text import BodyParameters, TritonKernelText
from fxwrap.printers.triton.operations import TRITON_DTYPES
from fxwrap.printers.triton.tiling import FragmentConfiguration, GroupSumConfiguration, RowGroupSumConfiguration

_BIASED_FLOATS = " ".join([f"prmt.b32 ${byte}, $4, 0x43, 0x4{byte}55;" for byte in range(4)])
"""Instructions that put a byte n into the bits of a float32 of 128, which are then those of 128 + n."""


def print_grouped_sums(
    kernel: Kernel, configuration: GroupSumConfiguration, limits: Mapping[str, int], parameters: BodyParameters
) -> TritonKernelText:
    """Prints a contraction as the sums of its groups, with their coefficients, or else of parts of its sums."""
    contraction = find_contraction(kernel)
    grouped = None
    if contraction is not None:
        biased = not (isinstance(configuration, FragmentConfiguration) and configuration.raw_digits)
        grouped = sum_groups(contraction, biased) or split_sums(contraction, configuration.r_block)
    row_dtype = None if contraction is None else row_precision(contraction, contraction.sums[0])
    assert contraction is not None and grouped is not None and row_dtype is not None, "a configuration with groups"
    form = find_grouped_sums(grouped, contraction)
    if isinstance(configuration, FragmentConfiguration):
        return FragmentSumPrinter(grouped, configuration, limits, parameters, form, row_dtype).print()
    printer = RowGroupSumPrinter if isinstance(configuration, RowGroupSumConfiguration) else GroupSumPrinter
    return printer(grouped, configuration, limits, parameters, form, row_dtype).print()


class RowGroupSumPrinter(GroupSumPrinter):
    """Prints a kernel of `sum_groups` that has one row.

    Operands are blocks of (p, r), of which p are groups, totals blocks of (p, y), of which y are the program's columns.
    """

    configuration: RowGroupSumConfiguration
    result_block = "py"

    def _emit_program_offsets(self) -> None:
        """Prints the first column of the program, and the numbers of its columns."""
        assert not self.whole.outer and not self.masks, "configurations have whole blocks of columns alone"
        self.cast_symbols()
        self._enter(self.result_block)
        self.first = self._stable_name("first")
        cast = ".to(tl.int64)" if self.use_int64 else ""
        block = self._dimension("y").block_constant
        self.line(f"{self.first} = {self.parameters.program}{cast} * {block}")
        self.lanes = self._stable_name("lanes")
        self.line(f"{self.lanes} = tl.arange(0, {block})[None, :]")

    def _emit_looped(self) -> None:
        kernel, (p, y, r) = self.kernel, [self._dimension(name) for name in "pyr"]
        sums = {item.reduction: item for item in self.form.sums}
        terms = [term for item in self.form.sums for term in item.terms]
        rows, columns = [row for row, _ in terms], [column for _, column in terms if column is not None]
        loaded = kernel.backward_slice([*rows, *[self._loaded_number(column) for column in columns]])
        products = {at for item in self.form.sums for at in self._summed_slice(item)} - loaded - sums.keys()
        inside = (self._loop_slice() - products - self.fused - {*self.form.totals}) | loaded
        varying = kernel.varying_along((*self.form.groups, *self.contraction.summed))
        for position in sorted(inside):
            if not varying[position] and not self._has_columns(position):
                self._operation(position, looped=True)
        for position in self.form.totals:
            (name,) = self._result_names(position)
            dtype = TRITON_DTYPES[operation_dtype(kernel.operations[position])]
            self.line(f"{name} = tl.zeros(({p.block_constant}, {y.block_constant}), {dtype})")
        start, count = self._stable_name("start"), self.index_printer.size(p.size)
        with self.nested(f"for {start} in tl.range(0, {count}, {p.block_constant}, num_stages=LOOP_STAGES):"):
            self._enter("pr")
            self.side = "pr"
            self.index_printer = self._indices_at({axis: self._stable_name(axis.name) for axis in r.axes})
            self._emit_block_offsets(p, start)
            self._emit_block_offsets(r, "")
            self._emit_step(sorted(inside), varying, sums)
        self.side = self.origin = ""
        for position in self.form.totals:
            (name,) = self.results[position]
            self.line(f"{name} = tl.sum({name}, 0, keep_dims=True)")
        self._emit_epilogue(inside | products | {*self.form.totals} | self.fused, varying)

    def _emit_step(self, inside: Sequence[int], varying: tuple[bool, ...], sums: dict[int, GroupSum]) -> None:
        """Prints a step: the row, and loads and sums of one column after another, or all loads before these.

        Loads that come first are under way together; other ones wait for memory one after another, in fewer registers.
        """
        loads = self._early_loads(inside) if self.configuration.loads_first else []
        of_row = [position for position in inside if varying[position] and not self._has_columns(position)]
        of_column = [position for position in inside if self._has_columns(position)]
        names = self._emit_loads([position for position in of_row if position in loads])
        names_by_column: dict[int, dict[int, str]] = {}
        for number in range(self.configuration.y_block if loads else 0):
            self._emit_column(f"{self.first} + {number}")
            names_by_column[number] = self._emit_loads([position for position in of_column if position in loads])
        self._emit_inside([position for position in of_row if position not in names], sums)
        for number in range(self.configuration.y_block):
            self._emit_column(f"{self.first} + {number}")
            names = names_by_column.get(number, {})
            self.text |= names
            self._emit_inside([position for position in of_column if position not in names], sums)
            selected = f"{self.lanes} == {number}"
            for position in self.form.totals:
                (name,) = self.results[position]
                self.line(f"{name} = tl.where({selected}, {self._added(position, name)}, {name})")

    def _early_loads(self, positions: Collection[int]) -> list[int]:
        """Returns the loads of elements at indices that no other operation computes."""
        return [
            position for position in sorted(positions)
            if isinstance(item := self.kernel.operations[position], Load) and item.mask is None
            and not any(isinstance(atom, IndirectIndex) for atom in item.index.atoms())
        ]  # fmt: skip

    def _emit_loads(self, positions: Sequence[int]) -> dict[int, str]:
        """Prints loads; returns the names of elements that need no split."""
        names: dict[int, str] = {}
        for position in positions:
            operation = self.kernel.operations[position]
            assert isinstance(operation, Load), "loads alone"
            pair = self._pair(position, operation) if self.is_summed[position] else None
            if pair is None:
                self.results.pop(position, None)
                self._operation(position, looped=True)
                names[position] = self._name(position, operation.buffer)
                if self.text[position] != names[position]:
                    self.line(f"{names[position]} = {self.text[position]}")
                    self.text[position] = names[position]
            elif position == min(pair):
                self.contiguous[pair] = self._load_contiguous(pair, operation)
        return names

    def _emit_epilogue(self, done: Collection[int], varying: tuple[bool, ...]) -> None:
        """Prints the operations after the loop, and those of a column that these use, for all columns."""
        kernel = self.kernel
        self._enter(self.result_block)
        self._emit_block_offsets(self._dimension("y"), self.first)
        rest = [position for position in range(len(kernel.operations)) if position not in done]
        used = kernel.backward_slice(rest)
        again = [at for at in used if at in done and not varying[at] and self._has_columns(at)]
        for position in sorted({*rest, *again} - {*self.form.totals}):
            self._operation(position, looped=True)
        self.tile = self.whole

    def _has_columns(self, position: int) -> bool:
        return not self.kernel.value_axes[position].isdisjoint(self.contraction.columns)

    def _emit_column(self, position: str) -> None:
        """Prints the index of a column along its axes."""
        axes = self.contraction.columns
        flat = self.axis_names[axes[0]] if len(axes) == 1 else self._stable_name("y")
        self.line(f"{flat} = {position}")
        if len(axes) > 1:
            self._unflatten(axes, flat, self.axis_names)

    def _emit_inside(self, positions: Collection[int], sums: dict[int, GroupSum]) -> None:
        """Prints operations of a step in order: loads, operands, sums of groups and what is computed of these."""
        for position in positions:
            if position in sums:
                self._emit_sum(sums[position])
            else:
                self._operation(position, looped=True)

    def _emit_sum(self, item: GroupSum) -> None:
        """Prints the sum of a group's products, or of elements of the row alone."""
        text = ""
        for row, column in item.terms:
            if column is None:
                text = f"{text} + {self._value(row)}" if text else self._value(row)
            elif text:
                text = f"tl.fma({self._value(row)}, {self._number(column)}, {text})"
            else:
                text = f"{self._value(row)} * {self._number(column)}"
        (name,) = self._result_names(item.reduction)
        origin = self.kernel.operations[item.reduction].origin
        self.line(f"{name} = tl.sum({text}, 1, keep_dims=True)", origin)

    def _loaded_number(self, column: int) -> int:
        """Returns the byte whose sum with the bias a column operand is, or the operand itself."""
        source = self._source(column)
        return source if operation_dtype(self.kernel.operations[source]) is torch.uint8 else column

    def _number(self, column: int) -> str:
        """Returns a weight's number, with its bias, in float32."""
        source = self._loaded_number(column)
        if source == column:
            return self._value(column)
        return f'{self.use("biased_floats")}({self._value(source)}, "{_BIASED_FLOATS}")'

    def _added(self, position: int, name: str) -> str:
        """Returns the text of a total with the value of a group."""
        (used,) = operands(self.kernel.operations[position])
        if not self._is_product(used):
            return f"{name} + {self._value(used)}"
        left, right = [self._value(item) for item in operands(self.kernel.operations[used])]
        return f"tl.fma({left}, {right}, {name})"

    def _eviction_policy(self, operation: Load, again: bool, last_use: bool) -> str:
        """Returns the policy of a load: weights are read once."""
        axes = operation.index.axes()
        is_weight = not axes.isdisjoint(self.contraction.columns) and not axes.isdisjoint(self.contraction.summed)
        return "evict_first" if is_weight else ""
