"""Loops of contractions with few rows: tiles of rows and columns, whose sums stay in registers.

Where row reductions follow, the sums of all columns that they reduce are stored in a block first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from fxwrap.loop_ir import (
    MAX_COLUMN_BLOCK,
    ORDERED_REDUCTIONS,
    Atom,
    Axis,
    ContractionForm,
    Index,
    IndexLike,
    IndirectIndex,
    Kernel,
    Load,
    ProductSum,
    Reduce,
    Store,
    as_index,
    count_points,
    find_contraction,
    linearize_index,
)
from fxwrap.printers.cpp.loop_plan import MIN_PARALLEL_WORK, LoopPlan
from fxwrap.printers.cpp.loops import LoopPrinter, loop_head
from fxwrap.printers.cpp.operations import CPP_TYPES, print_size
from fxwrap.printers.cpp.statements import CppSourceWriter, EmittedValues
from fxwrap.symbolic import Size, product

MAX_TILE_ROWS = 16
"""The largest number of rows of a tile, which reads its columns from memory once."""

SYMBOLIC_TILE_ROWS = 4
"""The rows of a tile where their number is symbolic."""

MAX_PANEL_ELEMENTS = 1 << 22
"""The largest number of elements of a row operand, which is computed into memory before the columns are read."""

PANEL_PADDING = 16
"""Elements between the rows of a panel: rows of a power of two bytes would compete for the same lines of a cache."""

WIDEST_VECTOR_BYTES = 64
"""The bytes of AVX-512's registers."""

MAX_COLUMN_LOOP_ELEMENTS = 1 << 18
"""The largest matrix with contiguous rows that loops over its columns read fast: longer rows are on many pages."""


@dataclass(frozen=True)
class ContractionPlan:
    """The loops of a contraction: tiles along `row_axis`, if there are rows, and `column_axis`; vectors along k."""

    contraction: ContractionForm
    row_axis: Axis | None
    column_axis: Axis
    vector_axis: Axis

    @property
    def tile_rows(self) -> tuple[int, int]:
        """The rows of a tile, and those of the tiles of the rest."""
        size = 1 if self.row_axis is None else self.row_axis.size
        if not isinstance(size, int):
            return SYMBOLIC_TILE_ROWS, 1
        rows = math.ceil(size / math.ceil(size / MAX_TILE_ROWS)) if size else 1
        return rows, size % rows or 1


def plan_contraction(kernel: Kernel) -> ContractionPlan | None:
    """Returns the plan of a kernel that is a contraction with contiguous columns; None for any other kernel."""
    contraction = find_contraction(kernel)
    if contraction is None or 0 in [axis.size for axis in (*kernel.axes, *kernel.reduced)]:
        return None
    operands = [item.column_operand for item in contraction.sums]
    summed = contraction.summed
    vectors = [axis for axis in summed if all(_is_contiguous(contraction, operand, axis) for operand in operands)]
    panel = product([contraction.row_count, count_points([*summed, *contraction.batch])])
    if not vectors or (isinstance(panel, int) and panel > MAX_PANEL_ELEMENTS) or not _has_row_loops(contraction):
        return None
    rows = sorted(contraction.rows, key=lambda axis: axis.size if isinstance(axis.size, int) else math.inf)
    return ContractionPlan(contraction, rows[-1] if rows else None, contraction.columns[-1], vectors[-1])


def _has_row_loops(contraction: ContractionForm) -> bool:
    """Whether a block has all columns that row reductions reduce, and these reductions have one value as a result."""
    count = contraction.reduced_column_count
    kinds = {_reduction(contraction.kernel, position).kind for position in contraction.row_reductions}
    return isinstance(count, int) and count <= MAX_COLUMN_BLOCK and kinds.isdisjoint(ORDERED_REDUCTIONS)


def _reduction(kernel: Kernel, position: int) -> Reduce:
    operation = kernel.operations[position]
    assert isinstance(operation, Reduce)
    return operation


def is_small_row_product(kernel: Kernel) -> bool:
    """Whether a kernel multiplies one row by small matrices with contiguous rows, which column loops read fast."""
    form = find_contraction(kernel)
    if form is None or form.rows or form.row_reductions:
        return False
    elements = product([count_points(form.columns), kernel.reduced_count])
    if not isinstance(elements, int) or not 0 < elements <= MAX_COLUMN_LOOP_ELEMENTS:
        return False
    operands = [item.column_operand for item in form.sums]
    return all(_is_contiguous(form, operand, form.columns[-1]) for operand in operands)


def _is_contiguous(contraction: ContractionForm, operand: int, axis: Axis) -> bool:
    loads = [contraction.kernel.operations[at] for at in contraction.prologue(operand)]
    depends = any(isinstance(item, Load) and axis in item.index.axes() for item in loads)
    return depends and contraction.is_contiguous(operand, axis)


def is_direct(load: Load) -> bool:
    """Whether no other value selects the element."""
    return not any(isinstance(atom, IndirectIndex) for atom in load.index.atoms())


class ContractionPrinter(LoopPrinter):
    """A contraction: each parallel iteration computes a tile of columns for all rows.

    Row operands are computed once, into panels. An element of a column is loaded once for all rows of a tile.
    """

    def __init__(self, plan: LoopPlan, tiles: ContractionPlan, writer: CppSourceWriter, origin_comments: bool) -> None:
        super().__init__(plan, writer, origin_comments)
        self.tiles = tiles
        self.contraction = tiles.contraction
        self.panels: dict[int, tuple[str, Index]] = {}
        self.outer_reduced = [axis for axis in tiles.contraction.summed if axis is not tiles.vector_axis]

    def print(self) -> None:
        """Writes the panels and the loops over tiles."""
        contraction, reduced = self.contraction, self.contraction.reduced_columns
        self.print_row_operands()
        rows, _ = self.tiles.tile_rows
        self.writer.line(f"constexpr int group = group_rows({rows}), width = {self.columns_of_tile}(group);")
        outer = [axis for axis in (*contraction.batch, *contraction.columns) if axis is not self.tiles.column_axis]
        if not reduced:
            self.print_columns(outer, self.parallel())
            return
        blocks = [loop_head(axis) for axis in outer if axis not in reduced]
        with self.writer.nest(blocks, self.parallel()):
            for item in contraction.sums:
                kind = CPP_TYPES[self.statements.dtype(item.reduction)]
                size = print_size(product([contraction.row_count, contraction.reduced_column_count]))
                self.writer.line(f"PartialResults<{kind}> {self.block(item)}({size});")
            pragma = "" if blocks else self.parallel()
            self.print_columns([axis for axis in outer if axis in reduced], pragma)
            with self.writer.nest([loop_head(axis) for axis in contraction.rows], pragma):
                self.print_row()

    def print_columns(self, outer: Sequence[Axis], pragma: str) -> None:
        """Writes the loops over tiles of columns, within loops over other axes."""
        columns = self.tiles.column_axis
        count = f"({print_size(columns.size)} + width - 1) / width"
        heads = [*[loop_head(axis) for axis in outer], f"for (int64_t tile = 0; tile < {count}; ++tile)"]
        with self.writer.nest(heads, pragma):
            self.print_column_tile()

    columns_of_tile = "tile_columns"
    """The function of `contractions.h` that returns the columns of a tile."""

    def print_row_operands(self) -> None:
        """Writes the panels of row operands that are not read from memory as they are."""
        for operand in dict.fromkeys(item.row_operand for item in self.contraction.sums):
            self.panels[operand] = self.direct_rows(operand) or self.write_panel(operand)

    def print_column_tile(self) -> None:
        """Writes the computation of a tile of columns, or of each of the last ones."""
        columns = self.tiles.column_axis
        with self.writer.block(f"const auto run = [&](auto columns, int64_t {columns.name}_0)", "};"):
            self.print_rows()
        self.writer.line("const int64_t first = tile * width;")
        self.writer.line(f"if (first + width <= {print_size(columns.size)}) run(Constant<width>{{}}, first);")
        with self.writer.nest([f"else for (int64_t j = first; j < {print_size(columns.size)}; ++j)"]):
            self.writer.line("run(Constant<1>{}, j);")

    def print_rows(self) -> None:
        """Writes the loops over rows, in tiles along one axis."""
        others = [axis for axis in self.contraction.rows if axis is not self.tiles.row_axis]
        with self.writer.nest([loop_head(axis) for axis in others]):
            self.print_row_tiles()

    def print_row_tiles(self) -> None:
        """Writes the loop over tiles of rows, or the only row."""
        axis, (rows, rest) = self.tiles.row_axis, self.tiles.tile_rows
        if axis is None:
            self.writer.line("constexpr Constant<1> rows;")
            self.print_tile()
            return
        head = f"for_tiles<{rows}, {rest}>({print_size(axis.size)}, [&](auto rows, int64_t {axis.name}_0)"
        with self.writer.block(head, "});"):
            self.print_tile()

    def print_tile(self) -> None:
        """Writes the sums of a tile, and the loops over its elements that store the results, or the sums in blocks."""
        names = {item.reduction: f"{self.statements.name(item.reduction)}_tile" for item in self.contraction.sums}
        for item in self.contraction.sums:
            self.print_sum(item, names[item.reduction])
        row, column = self.tiles.row_axis, self.tiles.column_axis
        heads = ["for (int i = 0; i < rows; ++i)", f"for (int j = 0; j < {self.columns_in_tile}; ++j)"]
        with self.writer.nest(heads):
            if row is not None:
                self.writer.line(f"const int64_t {row.name} = {row.name}_0 + i;")
            self.writer.line(f"const int64_t {column.name} = {column.name}_0 + j;")
            known: EmittedValues = {position: f"{name}.sum[i][j]" for position, name in names.items()}
            if self.contraction.row_reductions:
                for item in self.contraction.sums:
                    self.writer.line(f"{self.block_element(item)} = {known[item.reduction]};")
                return
            self.write_device_asserts(self.device_asserts, known)
            self.write_stores(self.kernel.stores, known)

    # --- row reductions ---------------------------------------------------------------------------------------------

    def block(self, item: ProductSum) -> str:
        """Returns the name of the block that stores a sum for all rows and reduced columns."""
        return f"{self.statements.name(item.reduction)}_block"

    def block_element(self, item: ProductSum) -> str:
        """Returns the element of a sum's block at the current row and column."""
        axes = (*self.contraction.rows, *self.contraction.reduced_columns)
        index = linearize_index(axes, [axis.size for axis in axes])
        return f"{self.block(item)}[{self.statements.index({})(index)}]"

    def print_row(self) -> None:
        """Writes the reductions of a row, each stage of them a loop over its columns, and the stores."""
        known: EmittedValues = {}
        stages = self.kernel.stages
        for stage in sorted({stages[position] for position in self.contraction.row_reductions}):
            self.print_row_stage([item for item in self.contraction.row_reductions if stages[item] == stage], known)
        columns = frozenset(self.contraction.reduced_columns)
        stores = [(n, item) for n, item in enumerate(self.kernel.operations) if isinstance(item, Store)]
        varying = [item for n, item in stores if not columns.isdisjoint(self.kernel.value_axes[n])]
        inner = [item for item in self.device_asserts if not columns.isdisjoint(self.kernel.value_axes[item])]
        if varying or inner:
            with self.column_loops():
                local = {**known, **self.sums_of_column()}
                self.write_device_asserts(inner, local)
                self.write_stores(varying, local)
        self.write_device_asserts([item for item in self.device_asserts if item not in inner], known)
        self.write_stores([item for _, item in stores if item not in varying], known)

    def print_row_stage(self, reductions: Sequence[int], known: EmittedValues) -> None:
        """Writes a loop over the columns of a row that computes reductions."""
        operations = {position: _reduction(self.kernel, position) for position in reductions}
        names = {position: f"{self.statements.name(position)}_row" for position in reductions}
        for position, operation in operations.items():
            kind = self.statements.type(position)
            self.writer.line(f"{kind} {names[position]} = {self.identity_element(operation)};")
        with self.column_loops():
            local = {**known, **self.sums_of_column()}
            self.statements.write([operation.operands[0] for operation in operations.values()], local)
            for position, operation in operations.items():
                value = f"combine::{operation.kind}({names[position]}, {local[operation.operands[0]]})"
                self.writer.line(f"{names[position]} = {value};{self.statements.comment(operation)}")
        known.update(names)

    def column_loops(self) -> AbstractContextManager[None]:
        """Opens the loops over the columns that row reductions reduce."""
        return self.writer.nest([loop_head(axis) for axis in self.contraction.reduced_columns])

    def sums_of_column(self) -> EmittedValues:
        """Returns the texts of the sums at the current row and column."""
        return {item.reduction: self.block_element(item) for item in self.contraction.sums}

    # --- products ---------------------------------------------------------------------------------------------------

    columns_in_tile = "columns"
    """The number of columns of a tile that exist."""

    def print_sum(self, item: ProductSum, tile: str) -> None:
        """Writes the tile of a sum, and the loops that add its products."""
        kind = CPP_TYPES[self.statements.dtype(item.reduction)]
        self.writer.line(f"ProductTile<{kind}, rows, columns, group> {tile};")
        with self.writer.nest([loop_head(axis) for axis in self.outer_reduced]):
            self.print_products(item, tile)
        self.writer.line(f"{tile}.finish();")

    def print_products(self, item: ProductSum, tile: str) -> None:
        """Writes the call that adds the products along the vectorised axis."""
        tiles, vector = self.tiles, self.tiles.vector_axis
        panel, index = self.panels[item.row_operand]
        start: dict[Atom, IndexLike] = {vector: 0}
        stride: Index | None = as_index(0)
        if tiles.row_axis is not None:
            stride = index.stride(tiles.row_axis)
            start[tiles.row_axis] = Axis(f"{tiles.row_axis.name}_0", tiles.row_axis.size)
        assert stride is not None, "panels and direct rows have strides"
        text = self.statements.index({})
        first = text(index.substitute(start))
        column = tiles.column_axis.name
        operand = item.column_operand
        head = (
            f"{tile}.template add<{self.vectors(operand)}>({print_size(vector.size)}, {panel} + {first},"
            f" {text(stride)}, [&](int j, int64_t {vector.name})"
        )
        with self.writer.block(head, "}, [&](int j, int64_t " + f"{vector.name}) {{"):
            self.writer.line(f"const int64_t {column} = {column}_0 + j;")
            known: EmittedValues = {}
            self.statements.write([operand], known)
            self.writer.line(f"return {known[operand]};")
        self.writer.depth += 1
        self.print_prefetches(operand)
        self.writer.depth -= 1
        self.writer.line("});" + self.statements.comment(self.kernel.operations[item.reduction]))

    def print_prefetches(self, operand: int) -> None:
        """Writes the prefetches of a column's elements that are read later, where no other value selects them."""
        column, vector = self.tiles.column_axis, self.tiles.vector_axis
        following = Axis(f"{column.name}_next", column.size)
        self.writer.line(f"const int64_t {following.name} = {column.name}_0 + j;")
        text = self.statements.index({})
        for at in self.contraction.prologue(operand):
            load = self.kernel.operations[at]
            if isinstance(load, Load) and load.index.stride(vector) == as_index(1) and is_direct(load):
                index = text(load.index.substitute({column: following}))
                self.writer.line(f"prefetch_line({load.buffer} + {index});")

    def vectors(self, operand: int) -> int:
        """Returns the number of vectors of a sum that the narrowest vector of a column's elements widens to.

        A short axis has fewer: the elements after its last step are added one by one.
        """
        loads = [self.kernel.operations[at] for at in self.contraction.prologue(operand)]
        narrowest = min([item.dtype.itemsize for item in loads if isinstance(item, Load)])
        width, size = self.statements.dtype(operand).itemsize, self.tiles.vector_axis.size
        vectors = max(width // narrowest, 1)
        while vectors > 1 and isinstance(size, int) and size * width < vectors * WIDEST_VECTOR_BYTES:
            vectors //= 2
        return vectors

    # --- row operands -----------------------------------------------------------------------------------------------

    def direct_rows(self, operand: int) -> tuple[str, Index] | None:
        """Returns the buffer and index of a row operand that is contiguous in memory, in the dtype of the sums."""
        load = self.kernel.operations[operand]
        if (
            not isinstance(load, Load)
            or load.mask is not None
            or load.index.stride(self.tiles.vector_axis) != as_index(1)
            or not is_direct(load)
        ):
            return None
        if self.tiles.row_axis is not None and load.index.stride(self.tiles.row_axis) is None:
            return None
        return load.buffer, load.index

    def write_panel(self, operand: int) -> tuple[str, Index]:
        """Writes the loops that compute a row operand into a panel; returns its name, and the index of an element."""
        name, kind = f"{self.statements.name(operand)}_panel", self.statements.type(operand)
        axes = [axis for axis in (*self.contraction.batch, *self.contraction.rows) if axis in self.dependences(operand)]
        space = [*axes, *self.outer_reduced, self.tiles.vector_axis]
        sizes: list[Size] = [*[axis.size for axis in space[:-1]], space[-1].size + PANEL_PADDING]
        self.writer.line(f"PartialResults<{kind}> {name}({print_size(product(sizes))});")
        index = linearize_index(space, sizes)
        heads = [loop_head(axis) for axis in space[:-1]]
        count = count_points(space)
        parallel = heads and (not isinstance(count, int) or count >= MIN_PARALLEL_WORK)
        pragma = "#pragma omp parallel for COLLAPSE schedule(static)" if parallel else ""
        with self.writer.nest(heads, pragma), self.writer.nest([loop_head(space[-1])], "#pragma omp simd"):
            known: EmittedValues = {}
            self.statements.write([operand], known)
            self.writer.line(f"{name}[{self.statements.index({})(index)}] = {known[operand]};")
        return f"{name}.at", index

    def dependences(self, operand: int) -> frozenset[Axis]:
        """Returns the axes that an operand depends on."""
        return self.kernel.value_axes[operand]
