"""Contractions as Triton kernels: each program computes a tile of rows and columns with `tl.dot`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from fxwrap.loop_ir import (
    FLOAT8,
    HALF_PRECISION,
    Axis,
    Compute,
    ContractionForm,
    IndirectIndex,
    Kernel,
    Load,
    ProductSum,
    Reduce,
    find_contraction,
    find_grouped_contraction,
    group_dependent,
    is_exact,
    operation_dtype,
    widened_dtype,
)
from fxwrap.printers.triton.descriptors import DescriptorPrinter
from fxwrap.printers.triton.kernel_text import BodyParameters, parenthesize
from fxwrap.printers.triton.operations import TRITON_DTYPES
from fxwrap.printers.triton.tiling import Dimension, DotConfiguration, GroupSumConfiguration, Tile

_DOT_FLOAT8 = {torch.float8_e4m3fn: "dot_float8_e4m3fn", torch.float8_e5m2: "dot_float8_e5m2"}
"""The helper that converts codes of each float8 dtype of tensor cores to an operand of a dot."""

_IMPRECISE_PRODUCTS = 128
"""The number of float8 products that tensor cores add with fewer bits than float32 has."""


class DotPrinter(DescriptorPrinter):
    """Prints a contraction whose tile has the dimensions y and x, one of them of rows and one of columns.

    Operands are blocks of (y, r) and (r, x), results blocks of (y, x). The current one of these three determines the
    dimensions of the values that are printed. Row reductions combine the results of a block, which has all columns that
    they reduce.
    """

    configuration: DotConfiguration | GroupSumConfiguration
    result_block = "yx"
    """The dimensions of results."""

    def __init__(
        self,
        kernel: Kernel,
        configuration: DotConfiguration | GroupSumConfiguration,
        limits: Mapping[str, int],
        parameters: BodyParameters,
        contraction: ContractionForm | None = None,
    ) -> None:
        super().__init__(kernel, configuration, limits, parameters)
        contraction = contraction or find_grouped_contraction(kernel) or find_contraction(kernel)
        assert contraction is not None, "only contractions have configurations with dot"
        self.contraction: ContractionForm = contraction
        self.band = configuration.band if isinstance(configuration, DotConfiguration) else 0
        self.is_summed = kernel.varying_along(contraction.summed)
        self.float8_operands = self._find_float8_operands()
        self.whole = self.tile
        self.side = ""
        self.zero_filled = frozenset([item for item in self._sources() if self._is_plain_load(item)])
        self.dimension_masks: dict[str, str] = {}

    def _emit_program_offsets(self) -> None:
        """Prints the positions of the tile along y and x, and of the program along the other axes."""
        self.cast_symbols()
        y, x = [self._dimension(name) for name in "yx"]
        program = self.names.create_name("program")
        self.line(f"{program} = {self.parameters.program}{'.to(tl.int64)' if self.use_int64 else ''}")
        self._enter(self.result_block)
        blocks = {item: self.index_printer.size_operand(item.blocks) for item in (y, x)}
        parts = self.whole.outer if self.band and self._has_parts() else ()
        if self.whole.outer and not parts:
            program = self._emit_outer_axes(program, f"({blocks[y]} * {blocks[x]})")
        for item, offset in self._block_numbers(program, y, x, blocks, parts).items():
            self._emit_block_offsets(item, self._block_start(item, offset))
        self.dimension_masks = {self.tile.dimensions[number].name: name for number, name in self.masks.items()}

    def _block_start(self, dimension: Dimension, number: str) -> str:
        """Returns the text of the first position of the block of a number."""
        return f"{parenthesize(number)} * {dimension.block_constant}"

    def _has_parts(self) -> bool:
        """Whether the axes with one element a program are columns."""
        return {*self.whole.outer} <= {*self.contraction.columns}

    def _emit_outer_axes(self, program: str, tiles: str) -> str:
        """Prints the positions along the axes with one element a program, and returns the number of its tile."""
        tile, rest = self.names.create_name("tile"), self.names.create_name("rest")
        self.line(f"{tile} = {program} % {tiles}")
        self.line(f"{rest} = {program} // {tiles}")
        *inner, last = reversed(self.whole.outer)
        for axis in inner:
            size = self.index_printer.size_operand(axis.size)
            self.line(f"{self.axis_names[axis]} = {rest} % {size}")
            self.line(f"{rest} = {rest} // {size}")
        self.line(f"{self.axis_names[last]} = {rest}")
        return tile

    def _block_numbers(
        self, program: str, y: Dimension, x: Dimension, blocks: Mapping[Dimension, str], parts: Sequence[Axis]
    ) -> dict[Dimension, str]:
        """Returns the numbers of a program's blocks.

        Programs go through a band of rows for each block of columns, and of each of the `parts` of these.
        """
        band = self.band
        if not band:
            return {y: f"{program} % {blocks[y]}", x: f"{program} // {blocks[y]}"}
        rows, columns = (y, x) if self._rows_are_first() else (x, y)
        first, height, within = [self.names.create_name(name) for name in ("band", "height", "within")]
        count = " * ".join([blocks[columns], *[self.index_printer.size_operand(axis.size) for axis in parts]])
        self.line(f"{first} = {program} // ({band} * {count}) * {band}")
        self.line(f"{height} = tl.minimum({blocks[rows]} - {first}, {band})")
        self.line(f"{within} = {program} % ({band} * {count})")
        column = f"{within} // {height}"
        if parts:
            column = self._emit_outer_axes(parenthesize(column), f"({blocks[columns]})")
        return {rows: f"{first} + {within} % {height}", columns: column}

    def _dimension(self, name: str) -> Dimension:
        return next(item for item in self.whole.dimensions if item.name == name)

    def _enter(self, names: str) -> None:
        """Makes a block of two dimensions the current one."""
        dimensions = tuple([self._dimension(name) for name in names])
        self.tile = Tile(dimensions, self.whole.outer)
        self.dimension_of = {axis: number for number, item in enumerate(dimensions) for axis in item.axes}
        self.masks = {
            number: self.dimension_masks[item.name]
            for number, item in enumerate(dimensions) if item.name in self.dimension_masks
        }  # fmt: skip
        self._analyze_dimensions()

    def _emit_looped(self) -> None:
        kernel, sums = self.kernel, self.contraction.sums
        pairs = [self._left_right(item) for item in sums]
        targets = {left for left, _ in pairs}, {right for _, right in pairs}
        prologues = [self._prologue(operands) for operands in targets]
        of_group = self._of_group(prologues)
        for position in sorted(set().union(*prologues) - of_group):
            if not self.is_summed[position]:
                self._operation(position, looped=True)
        self._emit_zeros()
        if self.contraction.group is None:
            self._emit_sums(targets, prologues, self.index_printer.size(self._dimension("r").size))
        else:
            self._emit_groups(self.contraction.group, targets, prologues, of_group)
        self._enter("yx")
        done = set().union(*prologues) | {item.reduction for item in sums}
        for position in range(len(kernel.operations)):
            if position not in done and not self.is_summed[position]:
                self._operation(position, looped=True)
        self.tile = self.whole

    def _emit_zeros(self) -> None:
        """Prints the sums before their first products."""
        y, x = self._dimension("y"), self._dimension("x")
        for item in self.contraction.sums:
            (name,) = self._result_names(item.reduction)
            dtype = TRITON_DTYPES[operation_dtype(self.kernel.operations[item.reduction])]
            self.line(f"{name} = tl.zeros(({y.block_constant}, {x.block_constant}), {dtype})")

    def _is_row(self, dimension: Dimension) -> bool:
        """Whether row reductions combine results along a dimension: that of all columns that they reduce."""
        return dimension.axes == self.contraction.reduced_columns

    def _of_group(self, prologues: Sequence[set[int]]) -> frozenset[int]:
        """Returns the operations of column operands that depend on the group."""
        group = self.contraction.group
        columns = prologues[1 if self._rows_are_first() else 0]
        return frozenset() if group is None else group_dependent(self.kernel, group.operation) & columns

    def _emit_groups(
        self,
        group: IndirectIndex,
        targets: tuple[set[int], set[int]],
        prologues: list[set[int]],
        of_group: frozenset[int],
    ) -> None:
        """Prints the loop over the groups of a tile's rows, whose sums are selected from those of each group."""
        row_name = "y" if self._rows_are_first() else "x"
        rows = self._value(group.operation)
        number = self.tile.dimensions.index(self._dimension(row_name))
        names = ("first", "last", "number", "group", "members")
        first, last, number_name, one, members = [self._stable_name(name) for name in names]
        integer = "tl.int64" if self.use_int64 else "tl.int32"
        mask = self.masks.get(number)
        bounds = {first: ("min", self.index_printer.size(group.size)), last: ("max", "-1")}
        for name, (kind, other) in bounds.items():
            chosen = rows if mask is None else f"tl.where({mask}, {rows}, {other})"
            self.line(f"{name} = tl.{kind}({chosen}).to({integer})")
        with self.nested(f"for {number_name} in tl.range({first}, {last} + 1):"):
            self.line(f"{one} = tl.cast({number_name}, {integer})")
            self.line(f"{members} = ({rows} == {one}){'' if mask is None else f' & {mask}'}")
            size = self.index_printer.size(self._dimension("r").size)
            steps = self._stable_name("steps")
            self.line(f"{steps} = tl.where(tl.max({members}.to(tl.int32)) > 0, {size}, 0)")
            saved, results = dict(self.dimension_masks), dict(self.results)
            for item in self.contraction.sums:
                self.results[item.reduction] = [self._stable_name(f"{results[item.reduction][0]}_of_group")]
            self._emit_zeros()
            self.dimension_masks[row_name] = members
            self._emit_sums_of_group(one, targets, prologues, of_group, steps)
            self.dimension_masks = saved
            for item in self.contraction.sums:
                (of_one,), (total,) = self.results[item.reduction], results[item.reduction]
                self.line(f"{total} = tl.where({members}, {of_one}, {total})")
                self.results[item.reduction] = [total]

    def _emit_sums_of_group(
        self,
        number: str,
        targets: tuple[set[int], set[int]],
        prologues: list[set[int]],
        of_group: frozenset[int],
        count: str,
    ) -> None:
        """Prints the loop over `count` elements of the reduced axes for rows of the group of a number."""
        group = self.contraction.group
        assert group is not None, "only grouped contractions have groups"
        rows = self._value(group.operation)
        self.text[group.operation] = number
        self._enter("rx" if self._rows_are_first() else "yr")
        for item in sorted(of_group):
            if not self.is_summed[item]:
                self._operation(item, looped=True)
        self._emit_sums(targets, prologues, count)
        self.text[group.operation] = rows

    def _emit_sums(self, targets: tuple[set[int], set[int]], prologues: list[set[int]], count: str) -> None:
        """Prints the loop over `count` elements of the reduced axes, which adds the products of blocks."""
        r, start = self._dimension("r"), self._stable_name("start")
        if isinstance(self.configuration, DotConfiguration) and self.configuration.descriptors:
            for block, prologue in zip(("yr", "rx"), prologues, strict=True):
                self._enter(block)
                self._emit_descriptors(prologue)
        with self.nested(f"for {start} in tl.range(0, {count}, {r.block_constant}, num_stages=LOOP_STAGES):"):
            left = self._emit_operands("yr", targets[0], prologues[0], start)
            right = self._emit_operands("rx", targets[1], prologues[1], start)
            for item in self.contraction.sums:
                (name,) = self._result_names(item.reduction)
                first, second = self._left_right(item)
                text = f"{name} = tl.dot({left[first]}, {right[second]}, {name}{self._dot_options(item)})"
                self.line(text, self.kernel.operations[item.reduction].origin)
        self.origin = ""

    def _emit_operands(self, block: str, targets: Iterable[int], prologue: set[int], start: str) -> dict[int, str]:
        """Prints the operands of one side, and returns the text of each as an operand of the dot."""
        r = self._dimension("r")
        self._enter(block)
        self.side = block
        self.index_printer = self._indices_at({axis: self._stable_name(axis.name) for axis in r.axes})
        self._emit_block_offsets(r, start)
        varying = [position for position in sorted(prologue) if self.is_summed[position]]
        for position in varying:
            self.results.pop(position, None)
            self._operation(position, looped=True)
        shape = f"({', '.join([item.block_constant for item in self.tile.dimensions])})"
        texts = {}
        for target in targets:
            text, dtype = self._operand(target)
            source = self._source(target)
            is_float8 = target in self.float8_operands
            if not is_float8 and dtype is not operation_dtype(self.kernel.operations[source]):
                text = self._converted(source, text, dtype)
            filled = self.varying_dimensions[source] if source in self.zero_filled else ()
            mask = self._mask([number for number in self._filled_dimensions(r) if number not in filled], None)
            if mask:
                text = f"tl.where({mask}, {text}, {'0' if is_float8 else '0.0'})"
            if len(self.varying_dimensions[source]) < len(self.tile.dimensions):
                text = f"tl.broadcast_to({text}, {shape})"
            text = self._use_float8(source, text) if is_float8 else text
            if sum(target in (item.row_operand, item.column_operand) for item in self.contraction.sums) > 1:
                name = self._stable_name(f"operand{target}")
                self.line(f"{name} = {text}")
                text = name
            texts[target] = text
        self.side = ""
        return texts

    def _converted(self, source: int, text: str, dtype: torch.dtype) -> str:
        """Returns the text of an operand's source in the dtype in which it is multiplied."""
        return f"{parenthesize(text)}.to({TRITON_DTYPES[dtype]})"

    def _stable_name(self, wanted: str) -> str:
        return super()._stable_name(f"{wanted}_{self.side}" if self.side else wanted)

    def _operand(self, target: int) -> tuple[str, torch.dtype]:
        """Returns the text of an operand, and the dtype in which it is multiplied."""
        item = next(item for item in self.contraction.sums if target in (item.row_operand, item.column_operand))
        return self._value(self._source(target)), self._dot_dtype(item)

    def _dot_dtype(self, item: ProductSum) -> torch.dtype:
        """Returns the dtype of products: half precision if that is the matmul's, or if both operands are exact in it.

        Two float8 operands of which one is computed are multiplied in half precision, which is exact.
        """
        reduction = self.kernel.operations[item.reduction]
        assert isinstance(reduction, Reduce), "sums are reductions"
        if reduction.operand_precision is not None:
            return reduction.operand_precision
        operands = (item.row_operand, item.column_operand)
        for dtype in {widened_dtype(self.kernel, operand) for operand in operands}.intersection(HALF_PRECISION):
            if all(is_exact(self.kernel, operand, dtype) for operand in operands):
                return dtype
        if None not in (self._float8_source(item.row_operand), self._float8_source(item.column_operand)):
            return torch.float16
        return operation_dtype(self.kernel.operations[item.reduction])

    def _dot_options(self, item: ProductSum) -> str:
        """Returns the keywords of a dot. Tensor cores' sums of float8 are added in float32 after 128 products."""
        if item.row_operand in self.float8_operands and item.column_operand in self.float8_operands:
            return f", max_num_imprecise_acc={min(_IMPRECISE_PRODUCTS, self.configuration.r_block)}"
        return "" if self._dot_dtype(item) in HALF_PRECISION else ', input_precision="ieee"'

    def _source(self, operand: int) -> int:
        """Returns the load that an operand widens, or the operand itself."""
        operation = self.kernel.operations[operand]
        if isinstance(operation, Compute) and operation.name == "cast":
            source = self.kernel.operations[operation.operands[0]]
            is_widened = operation_dtype(source) in HALF_PRECISION or operand in self.float8_operands
            if isinstance(source, Load) and is_widened:
                return operation.operands[0]
        return operand

    def _float8_source(self, operand: int) -> int | None:
        """Returns the float8 value that an operand widens, or None."""
        operation = self.kernel.operations[operand]
        if not isinstance(operation, Compute) or operation.name != "cast":
            return None
        (source,) = operation.operands
        return source if operation_dtype(self.kernel.operations[source]) in FLOAT8 else None

    def _find_float8_operands(self) -> frozenset[int]:
        """Returns the operands that are loaded in a dtype of `_DOT_FLOAT8` and multiplied with such operands only."""
        pairs = [(item.row_operand, item.column_operand) for item in self.contraction.sums]
        others = {operand for pair in pairs if not all(map(self._is_float8_load, pair)) for operand in pair}
        return frozenset([operand for pair in pairs for operand in pair]) - others

    def _is_float8_load(self, operand: int) -> bool:
        source = self._float8_source(operand)
        operation = None if source is None else self.kernel.operations[source]
        return isinstance(operation, Load) and operation.dtype in _DOT_FLOAT8

    def _use_float8(self, source: int, codes: str) -> str:
        """Returns the text of codes as float8."""
        return f"{self.use(_DOT_FLOAT8[operation_dtype(self.kernel.operations[source])])}({codes})"

    def _sources(self) -> list[int]:
        sums = self.contraction.sums
        return [self._source(operand) for item in sums for operand in (item.row_operand, item.column_operand)]

    def _is_plain_load(self, position: int) -> bool:
        operation = self.kernel.operations[position]
        return isinstance(operation, Load) and operation.mask is None

    def _prologue(self, targets: Iterable[int]) -> set[int]:
        return self.kernel.backward_slice([self._source(target) for target in targets])

    def _left_right(self, item: ProductSum) -> tuple[int, int]:
        """Returns the operands that vary along y and along x."""
        pair = (item.row_operand, item.column_operand)
        return pair if self._rows_are_first() else pair[::-1]

    def _rows_are_first(self) -> bool:
        return self._dimension("y").axes == self.contraction.rows

    def _filled_dimensions(self, r: Dimension) -> list[int]:
        """Returns the dimensions of a block outside of which operands are zero."""
        return [self.tile.dimensions.index(r)]

    def _eviction_policy(self, operation: Load, again: bool, last_use: bool) -> str:
        """Returns the policy of a load: elements that one program reads leave the cache first."""
        axes = operation.index.axes()
        if not axes.issuperset(self.whole.outer):
            return ""
        is_streamed = [
            self._dimension(name).blocks == 1 and not axes.isdisjoint(self._dimension(other).axes)
            for name, other in ("xy", "yx")
        ]
        return "evict_first" if any(is_streamed) and not axes.isdisjoint(self.contraction.summed) else ""
