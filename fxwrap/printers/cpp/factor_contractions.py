"""Contractions of numbers that half precision represents: rows of half precision, and weights of few bits.

Processors multiply pairs of bfloat16 in one instruction (`factors.h`; others multiply floats). Scales and zero points
of groups of weights are applied to the sums of groups (`sum_groups`), and digits of a byte are terms of a sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fxwrap.loop_ir import (
    HALF_PRECISION,
    NUMBER_BIAS,
    Axis,
    Compute,
    Constant,
    Kernel,
    Load,
    ProductSum,
    Reduce,
    find_grouped_sums,
    is_exact,
    operation_dtype,
    row_precision,
    sum_groups,
)
from fxwrap.printers.cpp.contractions import WIDEST_VECTOR_BYTES, ContractionPlan, ContractionPrinter
from fxwrap.printers.cpp.loop_plan import LoopPlan
from fxwrap.printers.cpp.operations import CPP_TYPES, print_size
from fxwrap.printers.cpp.statements import CppSourceWriter, EmittedValues
from fxwrap.symbolic import Size

_FACTORS = 32
"""Elements of the widest vectors of bfloat16, of which a step has a multiple."""


@dataclass(frozen=True)
class FactorSum:
    """A sum of products of terms, pairs of a row and a column operand.

    With groups, `products` is the position of the sum of a group, and `row_sums` are those of sums of its row operands.
    """

    terms: tuple[tuple[int, int], ...]
    products: int = -1
    row_sums: tuple[int, ...] = ()

    @property
    def rows(self) -> tuple[int, ...]:
        """The row operands."""
        return tuple([row for row, _ in self.terms])


@dataclass(frozen=True)
class FactorPlan:
    """A contraction whose operands are numbers that `dtype` represents, with each sum by the position of its result.

    The vectorised axis of `tiles` has the elements of a group, if there are groups.
    """

    tiles: ContractionPlan
    dtype: torch.dtype
    sums: dict[int, FactorSum]
    group: Axis | None = None

    @property
    def kernel(self) -> Kernel:
        """The kernel that computes the sums as the plan says."""
        return self.tiles.contraction.kernel

    @property
    def step(self) -> int:
        """The elements of a group that are multiplied at a time: a cache line of the narrowest operand of columns.

        Groups of fewer have shorter steps, as long as the terms of one fill vectors.
        """
        contraction, size = self.tiles.contraction, self.tiles.vector_axis.size
        columns = [column for item in self.sums.values() for _, column in item.terms]
        loads = [self.kernel.operations[at] for column in columns for at in contraction.prologue(column)]
        narrowest = min([item.dtype.itemsize for item in loads if isinstance(item, Load)])
        terms = min([len(item.terms) for item in self.sums.values()])
        step = max(WIDEST_VECTOR_BYTES // narrowest, _FACTORS)
        while isinstance(size, int) and step > size and step // 2 * terms % _FACTORS == 0:
            step //= 2
        return step


def plan_factors(tiles: ContractionPlan) -> FactorPlan | None:
    """Returns the plan of a contraction of one row or more axes of constant sizes, or None."""
    contraction = tiles.contraction
    dtypes = {row_precision(contraction, item) for item in contraction.sums}
    dtype = next(iter(dtypes))
    if contraction.batch or len(contraction.rows) > 1 or len(dtypes) > 1 or dtype not in HALF_PRECISION:
        return None
    return _plan_groups(tiles, dtype) or _plan_exact(tiles, dtype)


def _plan_groups(tiles: ContractionPlan, dtype: torch.dtype) -> FactorPlan | None:
    """Returns the plan of a contraction with coefficients of groups, if they are along one axis."""
    kernel = sum_groups(tiles.contraction, biased=dtype is torch.bfloat16)
    if kernel is None:
        return None
    form = find_grouped_sums(kernel, tiles.contraction)
    if len(form.groups) != 1 or len(form.contraction.summed) != 1:
        return None
    sums: dict[int, FactorSum] = {}
    for total in form.totals:
        used = kernel.backward_slice([total])
        inner = [item for item in form.sums if item.reduction in used]
        products = [item for item in inner if any(column is not None for _, column in item.terms)]
        if len(products) != 1:
            return None
        terms = tuple([(row, column) for row, column in products[0].terms if column is not None])
        row_sums = tuple([item.reduction for item in inner if item is not products[0]])
        sums[total] = FactorSum(terms, products[0].reduction, row_sums)
    (axis,) = form.contraction.summed
    items = tuple([ProductSum(total, *item.terms[0]) for total, item in sums.items()])
    contraction = replace(form.contraction, sums=items)
    if not all(contraction.is_contiguous(column, axis) for item in sums.values() for _, column in item.terms):
        return None
    return FactorPlan(replace(tiles, contraction=contraction, vector_axis=axis), dtype, sums, form.groups[0])


def _plan_exact(tiles: ContractionPlan, dtype: torch.dtype) -> FactorPlan | None:
    """Returns the plan of a contraction of several bfloat16 rows with narrower numbers, which pairs are faster for."""
    contraction, count = tiles.contraction, tiles.contraction.row_count
    if dtype is not torch.bfloat16 or contraction.kernel.reduced != (tiles.vector_axis,) or count == 1:
        return None
    if not all(is_exact(contraction.kernel, item.column_operand, dtype) for item in contraction.sums):
        return None
    sums = {item.reduction: FactorSum(((item.row_operand, item.column_operand),)) for item in contraction.sums}
    return FactorPlan(tiles, dtype, sums)


class FactorContractionPrinter(ContractionPrinter):
    """A contraction whose rows are factors in memory, and whose columns become factors once for all rows of a tile."""

    def __init__(self, plan: LoopPlan, factors: FactorPlan, writer: CppSourceWriter, origin_comments: bool) -> None:
        super().__init__(replace(plan, kernel=factors.kernel), factors.tiles, writer, origin_comments)
        self.factors = factors
        self.rows: dict[tuple[int, ...], str] = {}
        if factors.group is not None:
            self.columns_of_tile = "grouped_columns"

    def print_row_operands(self) -> None:
        """Writes the factors of rows."""
        axis, vector, group = self.tiles.row_axis, self.tiles.vector_axis, self.factors.group
        row, kind = "i" if axis is None else axis.name, CPP_TYPES[self.factors.dtype]
        count: Size = 1 if axis is None else axis.size
        size, length = [
            print_size(item) for item in (count, vector.size if group is None else group.size * vector.size)
        ]
        for item in self.factors.sums.values():
            if item.rows in self.rows:
                continue
            name = f"{self.statements.name(item.rows[0])}_rows"
            self.rows[item.rows] = name
            rows, rest = self.tiles.tile_rows
            rows_type = f"FactorRows<{kind}, {rows}, {rest}, {self.steps(item)}>"
            head = f"const {rows_type} {name}({size}, {length}, [&](int64_t {row}, {self.element()}, auto factors)"
            with self.writer.block(head, "});"):
                self.write_element()
                known: EmittedValues = {}
                values = [self.narrow(operand) for operand in item.rows]
                self.statements.write(values, known)
                for term, (operand, value) in enumerate(zip(item.rows, values, strict=True)):
                    text = known[value] if value != operand else f"to<{kind}>({known[value]})"
                    self.writer.line(f"factors[{term}] = {text};")

    def steps(self, item: FactorSum) -> str:
        """Returns the elements of a group, the terms of each, and the elements of a step, as arguments of templates."""
        length = "FACTOR_PART" if self.factors.group is None else print_size(self.tiles.vector_axis.size)
        return f"{length}, {len(item.terms)}, {self.factors.step}"

    def element(self) -> str:
        """Returns the parameters of a lambda that name an element: those of its group and of its place there."""
        if self.factors.group is None:
            return "int64_t part, int64_t place"
        return f"int64_t {self.factors.group.name}, int64_t {self.tiles.vector_axis.name}"

    def write_element(self) -> None:
        """Writes the index of an element where a lambda has that of a part and a place."""
        if self.factors.group is None:
            self.writer.line(f"const int64_t {self.tiles.vector_axis.name} = part * FACTOR_PART + place;")

    def narrow(self, operand: int) -> int:
        """Returns the position of the number that an operand widens, if that has the dtype of rows; or its own."""
        operation = self.kernel.operations[operand]
        if isinstance(operation, Compute) and operation.name == "cast":
            (source,) = operation.operands
            if operation_dtype(self.kernel.operations[source]) is self.factors.dtype:
                return source
        return operand

    def print_sum(self, item: ProductSum, tile: str) -> None:
        """Writes the tile of a sum."""
        plan, row, column = self.factors, self.tiles.row_axis, self.tiles.column_axis
        factor_sum = plan.sums[item.reduction]
        first = "0" if row is None else f"{row.name}_0"
        kind = f"FactorTile<{CPP_TYPES[plan.dtype]}, rows, columns, group, {self.steps(factor_sum)}>"
        head = f"const {kind} {tile}({self.rows[factor_sum.rows]}, {first}, [&](int j, {self.element()}, auto factors)"
        declaration = f"const int64_t {column.name} = {column.name}_0 + j;"
        with self.writer.block(head, f"}}, [&](int j, {self.element()}) {{"):
            self.writer.line(declaration)
            self.write_element()
            known: EmittedValues = {}
            numbers = [self.number(operand) for _, operand in factor_sum.terms]
            self.statements.write([source for source, _ in numbers], known)
            for term, (source, is_biased) in enumerate(numbers):
                text = f"plus_128({known[source]})" if is_biased else known[source]
                self.writer.line(f"factors[{term}] = {text};")
        self.writer.depth += 1
        self.write_element()
        self.print_prefetches(factor_sum.terms[0][1])
        self.writer.depth -= 1
        comment = self.statements.comment(self.kernel.operations[item.reduction])
        if plan.group is None:
            self.writer.line("});" + comment)
            return
        self.writer.line(f"}}, [&](int j, int64_t {plan.group.name}, float& weights, float& offset) {{")
        self.writer.depth += 1
        self.writer.line(declaration)
        self.print_coefficients(item.reduction, factor_sum)
        self.writer.depth -= 1
        self.writer.line("});" + comment)

    def print_coefficients(self, total: int, item: FactorSum) -> None:
        """Writes what the sums of a group are multiplied by: of products (`weights`), and of row operands (`offset`).

        Groups' values are linear in both, so they are the values of a sum of one where the other is zero.
        """
        operation = self.kernel.operations[total]
        assert isinstance(operation, Reduce)
        (value,) = operation.operands
        for name, products, row_sums in (("weights", "1.0f", "0.0f"), ("offset", "0.0f", "1.0f")):
            with self.writer.block(""):
                known: EmittedValues = {item.products: products, **dict.fromkeys(item.row_sums, row_sums)}
                self.statements.write([value], known)
                self.writer.line(f"{name} = {known[value]};")

    def number(self, operand: int) -> tuple[int, bool]:
        """Returns the position of the number that a column operand widens, and whether 128 is added to it."""
        operation = self.kernel.operations[operand]
        assert isinstance(operation, Compute)
        if operation.name == "cast":
            return operation.operands[0], False
        widened, bias = [self.kernel.operations[at] for at in operation.operands]
        assert isinstance(widened, Compute) and isinstance(bias, Constant), "natural numbers have a bias"
        assert bias.value == NUMBER_BIAS[self.factors.dtype], "the bits of which are those of the sum"
        return widened.operands[0], True
