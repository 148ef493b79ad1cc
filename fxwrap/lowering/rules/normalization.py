"""What normalisations share: which elements have a mean and a deviation in common, and which have parameters in common.

Layer, group, batch and RMS norm differ in nothing else, so each has a `Space` here, and one forward and one backward
serve them all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from fxwrap.loop_ir import Scalar, as_index
from fxwrap.lowering.definitions import Definition, Indices, Pointwise, Reader, Reduced, pointwise, reduction
from fxwrap.lowering.rules.registry import Call
from fxwrap.symbolic import Size, floor_divide, product


@dataclass(frozen=True)
class Space:
    """How the elements of an operand are grouped.

    Elements with one mean form a row: `rows` are the sizes of the rows' index space, `row_sizes` those within one;
    `row` gives an element's row, and `in_row` its indices from a row and a place in it. Elements with one weight form
    a column, likewise. `one_weight` says that a row has only one weight.
    """

    sizes: tuple[Size, ...]
    rows: tuple[Size, ...]
    row_sizes: tuple[Size, ...]
    row: Callable[[Indices], Indices]
    in_row: Callable[[Indices, Indices], Indices]
    columns: tuple[Size, ...]
    column_sizes: tuple[Size, ...]
    column: Callable[[Indices], Indices]
    in_column: Callable[[Indices, Indices], Indices]
    one_weight: bool = False

    @property
    def count(self) -> Size:
        """How many elements a row has."""
        return product(self.row_sizes)


def layer_space(sizes: tuple[Size, ...], normalized_rank: int) -> Space:
    """Returns the space of layer norm: the last dimensions are a row, each of its places a column."""
    first = len(sizes) - normalized_rank
    outer, inner = sizes[:first], sizes[first:]
    return Space(
        sizes,
        rows=outer,
        row_sizes=inner,
        row=lambda at: at[:first],
        in_row=lambda row, place: [*row, *place],
        columns=inner,
        column_sizes=outer or (1,),
        column=lambda at: at[first:],
        in_column=lambda column, place: [*(place if outer else ()), *column],
    )


def group_space(sizes: tuple[Size, ...], groups: int) -> Space:
    """Returns the space of group norm: groups of neighbouring channels of a sample are a row, a channel is a column."""
    channels = floor_divide(sizes[1], groups)
    return Space(
        sizes,
        rows=(sizes[0], groups),
        row_sizes=(channels, *sizes[2:]),
        row=lambda at: [at[0], as_index(at[1]) // channels],
        in_row=lambda row, place: [row[0], as_index(row[1]) * channels + place[0], *place[1:]],
        columns=(sizes[1],),
        column_sizes=(sizes[0], *sizes[2:]),
        column=lambda at: [at[1]],
        in_column=lambda column, place: [place[0], column[0], *place[1:]],
    )


def batch_space(sizes: tuple[Size, ...]) -> Space:
    """Returns the space of batch norm: a channel is a row and a column."""
    channel, others = (sizes[1],), (sizes[0], *sizes[2:])

    def joined(channel: Indices, place: Indices) -> Indices:
        return [place[0], channel[0], *place[1:]]

    return Space(
        sizes,
        rows=channel,
        row_sizes=others,
        row=lambda at: [at[1]],
        in_row=joined,
        columns=channel,
        column_sizes=others,
        column=lambda at: [at[1]],
        in_column=joined,
        one_weight=True,
    )


RowValue = Callable[[Reader, Indices], Scalar]
"""What gives a statistic of a row, in the dtype that arithmetic happens in."""


def row_value(definition: Definition, dtype: torch.dtype, space: Space) -> RowValue:
    """Returns the elements of a tensor of row statistics, whose sizes are the rows', then perhaps ones."""
    ones = len(definition.sizes) - len(space.rows)
    return lambda reader, row: reader.load(definition, [*row, *[0] * ones]).to(dtype)


def moments(call: Call, space: Space, x: Definition) -> tuple[Reduced, Reduced]:
    """Returns the mean of each row, and its sum of squared differences from it."""
    computes = x.compute_dtype
    mean, squares = reduction(
        "welford", space.rows, space.row_sizes, call.device, computes,
        lambda reader, row, place: reader.load(x, space.in_row(row, place)), (computes, computes),
    )  # fmt: skip
    return mean, squares


def reciprocal_deviation(call: Call, space: Space, squares: Definition, epsilon: float) -> Pointwise:
    """Returns 1 / sqrt(variance + epsilon) of each row, given its sum of squared differences."""
    computes = squares.dtype

    def body(reader: Reader, row: Indices) -> Scalar:
        return (reader.load(squares, row) / reader.number(space.count, computes) + epsilon).rsqrt()

    return pointwise(space.rows, computes, call.device, body)


def normalised(
    call: Call,
    fake: torch.Tensor,
    space: Space,
    x: Definition,
    mean: RowValue | None,
    deviation: RowValue,
    weight: Definition | None,
    bias: Definition | None = None,
) -> Pointwise:
    """Returns (x - mean) * deviation * weight + bias. `deviation` gives a reciprocal; what is None is left out."""
    computes = x.compute_dtype

    def body(reader: Reader, indices: Indices) -> Scalar:
        row, column = space.row(indices), space.column(indices)
        value = reader.load(x, indices)
        value = (value if mean is None else value - mean(reader, row)) * deviation(reader, row)
        if weight is not None:
            value = value * reader.load(weight, column).to(computes)
        return value if bias is None else value + reader.load(bias, column).to(computes)

    return pointwise(call.sizes_of(fake), fake.dtype, call.device, body)


def statistic(call: Call, fake: torch.Tensor, value: RowValue, rank: int) -> Pointwise:
    """Returns row statistics, of rows with `rank` dimensions, as a result; ones may follow in its sizes."""
    return pointwise(
        call.sizes_of(fake), fake.dtype, call.device, lambda reader, indices: value(reader, indices[:rank])
    )


@dataclass(frozen=True)
class Gradients:
    """The backward of a normalisation whose statistics are known: sums over rows and over columns, and a formula.

    With n = (x - mean) * deviation and g = grad * weight, the gradient of x is
    (g - mean of g - n * mean of g * n) * deviation, where means are taken over a row.
    """

    call: Call
    space: Space
    grad: Definition
    x: Definition
    mean: RowValue | None
    deviation: RowValue
    weight: Definition | None

    @property
    def _dtype(self) -> torch.dtype:
        return self.x.compute_dtype

    def _normal(self, reader: Reader, indices: Indices) -> Scalar:
        row, value = self.space.row(indices), reader.load(self.x, indices)
        return (value if self.mean is None else value - self.mean(reader, row)) * self.deviation(reader, row)

    def _grad(self, reader: Reader, indices: Indices) -> Scalar:
        return reader.load(self.grad, indices).to(self._dtype)

    def _weight(self, reader: Reader, indices: Indices) -> Scalar | None:
        if self.weight is None:
            return None
        return reader.load(self.weight, self.space.column(indices)).to(self._dtype)

    def _inner_grad(self, reader: Reader, indices: Indices) -> Scalar:
        """The gradient before the weight; where a row has one weight, it waits until after the sums."""
        grad, weight = self._grad(reader, indices), self._weight(reader, indices)
        return grad if weight is None or self.space.one_weight else grad * weight

    def _outer_weight(self, reader: Reader, indices: Indices) -> Scalar | None:
        return self._weight(reader, indices) if self.space.one_weight else None

    def of_constant_statistics(self, fake: torch.Tensor) -> Pointwise:
        """Returns the gradient of x where mean and deviation do not depend on it."""

        def body(reader: Reader, indices: Indices) -> Scalar:
            grad, weight = self._grad(reader, indices), self._weight(reader, indices)
            scaled = grad * self.deviation(reader, self.space.row(indices))
            return scaled if weight is None else scaled * weight

        return pointwise(self.call.sizes_of(fake), fake.dtype, self.call.device, body)

    def of_input(self, fake: torch.Tensor) -> Pointwise:
        """Returns the gradient of x."""
        space, dtype = self.space, self._dtype
        total, product = self._total if self.mean is not None else None, self._product

        def body(reader: Reader, indices: Indices) -> Scalar:
            row, count = space.row(indices), reader.number(space.count, dtype)
            value = self._inner_grad(reader, indices)
            if total is not None:
                value = value - reader.load(total, row) / count
            value = value - self._normal(reader, indices) * (reader.load(product, row) / count)
            value = value * self.deviation(reader, row)
            weight = self._outer_weight(reader, indices)
            return value if weight is None else value * weight

        return pointwise(self.call.sizes_of(fake), fake.dtype, self.call.device, body)

    @cached_property
    def _total(self) -> Reduced:
        return self._over_rows(self._inner_grad)

    @cached_property
    def _product(self) -> Reduced:
        return self._over_rows(lambda reader, at: self._inner_grad(reader, at) * self._normal(reader, at))

    def of_weight(self, fake: torch.Tensor) -> Reduced:
        """Returns the gradient of the weight: a sum over each column, which may be a row's sum already."""
        if self.space.one_weight:
            return Reduced(self._product.sizes, fake.dtype, self.call.device, self._product.source)
        return self._over_columns(fake, lambda reader, at: self._grad(reader, at) * self._normal(reader, at))

    def of_bias(self, fake: torch.Tensor) -> Reduced:
        """Returns the gradient of the bias: a sum over each column, which may be a row's sum already."""
        if self.space.one_weight:
            return Reduced(self._total.sizes, fake.dtype, self.call.device, self._total.source)
        return self._over_columns(fake, self._grad)

    def _over_rows(self, value: Callable[[Reader, Indices], Scalar]) -> Reduced:
        space, dtype = self.space, self._dtype
        (total,) = reduction(
            "sum", space.rows, space.row_sizes, self.call.device, dtype,
            lambda reader, row, place: value(reader, space.in_row(row, place)), (dtype,),
        )  # fmt: skip
        return total

    def _over_columns(self, fake: torch.Tensor, value: Callable[[Reader, Indices], Scalar]) -> Reduced:
        space = self.space
        (total,) = reduction(
            "sum", space.columns, space.column_sizes, self.call.device, self._dtype,
            lambda reader, column, place: value(reader, space.in_column(column, place)), (fake.dtype,),
        )  # fmt: skip
        return total
