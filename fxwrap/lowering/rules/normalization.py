"""The shared forward and backward of normalizations.

Layer, group, batch and RMS norm differ in which elements share a mean and a deviation, and which share parameters. A
`NormalizationSpace` describes that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from fxwrap.loop_ir import Scalar, as_index
from fxwrap.lowering.fusion.definitions import (
    Definition,
    ElementReader,
    Indices,
    Pointwise,
    Reduced,
    pointwise,
    reduction,
)
from fxwrap.lowering.rules.registry import ElementBody, OperatorCall
from fxwrap.symbolic import Size, floor_divide, product


@dataclass(frozen=True)
class NormalizationSpace:
    """How the elements of an operand are grouped.

    Elements with one mean form a row: `rows` are the sizes of the rows' index space, and `row_sizes` those within a
    row. `row` maps an element's indices to its row, and `indices_in_row` maps a row and the indices within it to the
    element's indices. Elements with one weight form a column, likewise. `weight_per_row`: each row has one weight.
    `channels_per_row`: the numbers of channels and of elements of a channel in a row, where a row has several channels,
    whose indices are the first two dimensions' (group norm).
    """

    sizes: tuple[Size, ...]
    rows: tuple[Size, ...]
    row_sizes: tuple[Size, ...]
    row: Callable[[Indices], Indices]
    indices_in_row: Callable[[Indices, Indices], Indices]
    columns: tuple[Size, ...]
    column_sizes: tuple[Size, ...]
    column: Callable[[Indices], Indices]
    indices_in_column: Callable[[Indices, Indices], Indices]
    weight_per_row: bool = False
    channels_per_row: tuple[Size, Size] | None = None

    @property
    def count(self) -> Size:
        """The number of elements of a row."""
        return product(self.row_sizes)


def layer_norm_space(sizes: tuple[Size, ...], normalized_rank: int) -> NormalizationSpace:
    """Returns the space of layer norm: the last dimensions are a row, and each element of a row is a column."""
    first = len(sizes) - normalized_rank
    outer, inner = sizes[:first], sizes[first:]
    return NormalizationSpace(
        sizes,
        rows=outer,
        row_sizes=inner,
        row=lambda at: at[:first],
        indices_in_row=lambda row, within: [*row, *within],
        columns=inner,
        column_sizes=outer or (1,),
        column=lambda at: at[first:],
        indices_in_column=lambda column, within: [*(within if outer else ()), *column],
    )


def group_norm_space(sizes: tuple[Size, ...], groups: int) -> NormalizationSpace:
    """Returns the space of group norm: adjacent channels of a sample are a row, a channel is a column."""
    channels = floor_divide(sizes[1], groups)
    return NormalizationSpace(
        sizes,
        rows=(sizes[0], groups),
        row_sizes=(channels, *sizes[2:]),
        row=lambda at: [at[0], as_index(at[1]) // channels],
        indices_in_row=lambda row, within: [row[0], as_index(row[1]) * channels + within[0], *within[1:]],
        columns=(sizes[1],),
        column_sizes=(sizes[0], *sizes[2:]),
        column=lambda at: [at[1]],
        indices_in_column=lambda column, within: [within[0], column[0], *within[1:]],
        channels_per_row=(channels, product(sizes[2:])),
    )


def batch_norm_space(sizes: tuple[Size, ...]) -> NormalizationSpace:
    """Returns the space of batch norm: a channel is a row and a column."""
    channel, others = (sizes[1],), (sizes[0], *sizes[2:])

    def element(channel: Indices, within: Indices) -> Indices:
        return [within[0], channel[0], *within[1:]]

    def channel_of(indices: Indices) -> Indices:
        return [indices[1]]

    return NormalizationSpace(
        sizes, channel, others, channel_of, element, channel, others, channel_of, element, weight_per_row=True
    )


RowStatistic = ElementBody
"""Computes a statistic of a row, given the row's indices, in the compute dtype."""


def load_row_statistic(definition: Definition, dtype: torch.dtype, space: NormalizationSpace) -> RowStatistic:
    """Returns the elements of a tensor of row statistics, whose sizes are the rows' and perhaps trailing ones."""
    ones = len(definition.sizes) - len(space.rows)
    return lambda reader, row: reader.load(definition, [*row, *[0] * ones]).to(dtype)


def moments(call: OperatorCall, space: NormalizationSpace, x: Definition) -> tuple[Reduced, Reduced]:
    """Returns the mean of each row, and the sum of squared differences from it."""
    computes = x.compute_dtype
    mean, squares = reduction(
        "welford", space.rows, space.row_sizes, call.device, computes,
        lambda reader, row, within: reader.load(x, space.indices_in_row(row, within)), (computes, computes),
    )  # fmt: skip
    return mean, squares


def reciprocal_std(call: OperatorCall, space: NormalizationSpace, squares: Definition, epsilon: float) -> Pointwise:
    """Returns 1 / sqrt(squares / count + epsilon) of each row, given a sum of squares."""
    computes = squares.dtype

    def body(reader: ElementReader, row: Indices) -> Scalar:
        return (reader.load(squares, row) / reader.number(space.count, computes) + epsilon).rsqrt()

    return pointwise(space.rows, computes, call.device, body)


def normalize(
    call: OperatorCall,
    fake: torch.Tensor,
    space: NormalizationSpace,
    x: Definition,
    mean: RowStatistic | None,
    rstd: RowStatistic,
    weight: Definition | None,
    bias: Definition | None = None,
) -> Pointwise:
    """Returns (x - mean) * rstd * weight + bias; `rstd` is a reciprocal, and None leaves a term out."""
    computes = x.compute_dtype

    def body(reader: ElementReader, indices: Indices) -> Scalar:
        row, column = space.row(indices), space.column(indices)
        value = reader.load(x, indices)
        value = (value if mean is None else value - mean(reader, row)) * rstd(reader, row)
        if weight is not None:
            value = value * reader.load(weight, column).to(computes)
        return value if bias is None else value + reader.load(bias, column).to(computes)

    return call.define(body, fake)


def statistic_result(call: OperatorCall, fake: torch.Tensor, value: RowStatistic, rank: int) -> Pointwise:
    """Returns statistics of rows with `rank` dimensions as a result, which may have trailing sizes of 1."""
    return call.define(lambda reader, indices: value(reader, indices[:rank]), fake)


@dataclass(frozen=True)
class NormalizationBackward:
    """The backward of a normalization with known statistics.

    With n = (x - mean) * rstd and g = grad * weight, the gradient of x is (g - mean(g) - n * mean(g * n)) * rstd,
    where means are taken over a row. With `sums_channels`, the sums over rows and columns are those of sums over the
    channels of each sample, so that elements are read once for both.
    """

    call: OperatorCall
    space: NormalizationSpace
    grad: Definition
    x: Definition
    mean: RowStatistic | None
    rstd: RowStatistic
    weight: Definition | None
    sums_channels: bool = False

    def gradients(self, mask: Sequence[bool], training: bool = True) -> tuple[Definition | None, ...]:
        """Returns the gradients of input, weight and bias that the mask requests, as many as it has flags."""
        makers = (
            self.input_gradient if training else self.eval_input_gradient,
            self.weight_gradient,
            self.bias_gradient,
        )
        return tuple([
            make(fake) if wanted and fake is not None else None
            for make, fake, wanted in zip(makers, self.call.results, mask, strict=False)
        ])  # fmt: skip

    @property
    def _dtype(self) -> torch.dtype:
        return self.x.compute_dtype

    def _normalized(self, reader: ElementReader, indices: Indices) -> Scalar:
        row, value = self.space.row(indices), reader.load(self.x, indices)
        return (value if self.mean is None else value - self.mean(reader, row)) * self.rstd(reader, row)

    def _grad(self, reader: ElementReader, indices: Indices) -> Scalar:
        return reader.load(self.grad, indices).to(self._dtype)

    def _weight(self, reader: ElementReader, indices: Indices) -> Scalar | None:
        if self.weight is None:
            return None
        return reader.load(self.weight, self.space.column(indices)).to(self._dtype)

    def _inner_grad(self, reader: ElementReader, indices: Indices) -> Scalar:
        """The gradient before the weight; a weight per row is applied after the sums."""
        grad, weight = self._grad(reader, indices), self._weight(reader, indices)
        return grad if weight is None or self.space.weight_per_row else grad * weight

    def eval_input_gradient(self, fake: torch.Tensor) -> Pointwise:
        """Returns the gradient of x where the statistics do not depend on x."""

        def body(reader: ElementReader, indices: Indices) -> Scalar:
            grad, weight = self._grad(reader, indices), self._weight(reader, indices)
            scaled = grad * self.rstd(reader, self.space.row(indices))
            return scaled if weight is None else scaled * weight

        return self.call.define(body, fake)

    def input_gradient(self, fake: torch.Tensor) -> Pointwise:
        """Returns the gradient of x."""
        space, dtype = self.space, self._dtype
        total, dot = self._grad_sum if self.mean is not None else None, self._grad_dot_normalized

        def body(reader: ElementReader, indices: Indices) -> Scalar:
            row, count = space.row(indices), reader.number(space.count, dtype)
            value = self._inner_grad(reader, indices)
            if total is not None:
                value = value - reader.load(total, row) / count
            value = value - self._normalized(reader, indices) * (reader.load(dot, row) / count)
            value = value * self.rstd(reader, row)
            weight = self._weight(reader, indices) if space.weight_per_row else None
            return value if weight is None else value * weight

        return self.call.define(body, fake)

    @cached_property
    def _grad_sum(self) -> Reduced:
        if self.sums_channels:
            return self._sum_over_channels_of_rows(self._channel_grad_sum)
        return self._sum_over_rows(self._inner_grad)

    @cached_property
    def _grad_dot_normalized(self) -> Reduced:
        if self.sums_channels:
            return self._sum_over_channels_of_rows(self._channel_dot)
        return self._sum_over_rows(lambda reader, at: self._inner_grad(reader, at) * self._normalized(reader, at))

    @cached_property
    def _channel_grad_sum(self) -> Reduced:
        return self._sum_over_channels(self._grad)

    @cached_property
    def _channel_dot(self) -> Reduced:
        return self._sum_over_channels(lambda reader, at: self._grad(reader, at) * self._normalized(reader, at))

    def weight_gradient(self, fake: torch.Tensor) -> Reduced:
        """Returns the gradient of the weight: the sum over each column."""
        if self.space.weight_per_row:
            return self._row_sum_as_result(self._grad_dot_normalized, fake)
        if self.sums_channels:
            return self._sum_over_samples(fake, self._channel_dot)
        return self._sum_over_columns(fake, lambda reader, at: self._grad(reader, at) * self._normalized(reader, at))

    def bias_gradient(self, fake: torch.Tensor) -> Reduced:
        """Returns the gradient of the bias: the sum over each column."""
        if self.space.weight_per_row:
            return self._row_sum_as_result(self._grad_sum, fake)
        if self.sums_channels:
            return self._sum_over_samples(fake, self._channel_grad_sum)
        return self._sum_over_columns(fake, self._grad)

    def _row_sum_as_result(self, total: Reduced, fake: torch.Tensor) -> Reduced:
        return Reduced(total.sizes, fake.dtype, self.call.device, total.source)

    def _sum_over_rows(self, value: ElementBody) -> Reduced:
        space, dtype = self.space, self._dtype
        (total,) = reduction(
            "sum", space.rows, space.row_sizes, self.call.device, dtype,
            lambda reader, row, within: value(reader, space.indices_in_row(row, within)), (dtype,),
        )  # fmt: skip
        return total

    def _sum_over_columns(self, fake: torch.Tensor, value: ElementBody) -> Reduced:
        space = self.space
        (total,) = reduction(
            "sum", space.columns, space.column_sizes, self.call.device, self._dtype,
            lambda reader, column, within: value(reader, space.indices_in_column(column, within)), (fake.dtype,),
        )  # fmt: skip
        return total

    # Sums over the channels of each sample, and their sums over rows and columns.

    def _sum_over_channels(self, value: ElementBody) -> Reduced:
        sizes = self.space.sizes
        (total,) = reduction(
            "sum", sizes[:2], sizes[2:], self.call.device, self._dtype,
            lambda reader, channel, within: value(reader, [*channel, *within]), (self._dtype,),
        )  # fmt: skip
        return total

    def _sum_over_channels_of_rows(self, sums: Reduced) -> Reduced:
        space = self.space

        def weighted(reader: ElementReader, row: Indices, within: Indices) -> Scalar:
            indices = space.indices_in_row(row, [within[0], *[0] * (len(space.sizes) - 2)])
            value, weight = reader.load(sums, indices[:2]), self._weight(reader, indices)
            return value if weight is None else value * weight

        (total,) = reduction(
            "sum", space.rows, space.row_sizes[:1], self.call.device, self._dtype, weighted, (self._dtype,)
        )
        return total

    def _sum_over_samples(self, fake: torch.Tensor, sums: Reduced) -> Reduced:
        (total,) = reduction(
            "sum", self.space.columns, self.space.sizes[:1], self.call.device, self._dtype,
            lambda reader, column, within: reader.load(sums, [within[0], column[0]]), (fake.dtype,),
        )  # fmt: skip
        return total
