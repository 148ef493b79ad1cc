"""Negative log likelihood and its backward: an element of each row, at the row's class, and sums over rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fxwrap.loop_ir import IndexLike, Scalar, compute_dtype
from fxwrap.lowering.definitions import Definition, Indices, Reader, pointwise
from fxwrap.lowering.rules.positions import gathered_index
from fxwrap.lowering.rules.registry import Call, Result
from fxwrap.lowering.rules.rows import Rows, combine, kernel_rule, reduced_result, row_result
from fxwrap.symbolic import Size

_NONE, _MEAN = 0, 1


@dataclass(frozen=True)
class Classes:
    """The operands of a loss over classes: `scores` with a dimension of classes, `target` with one class for each row.

    Rows have the sizes of the scores without the classes. `weight`, one number a class, is all ones when absent.
    """

    scores: Definition
    target: Definition
    weight: Definition | None
    ignored: int

    @property
    def dim(self) -> int:
        """The dimension of classes."""
        return 1 if len(self.scores.sizes) > 1 else 0

    @property
    def count(self) -> Size:
        """How many classes there are."""
        return self.scores.sizes[self.dim]

    @property
    def rows(self) -> Rows:
        """All rows, to be reduced."""
        sizes = self.scores.sizes
        others = sizes[: self.dim] + sizes[self.dim + 1 :]
        return Rows(others, tuple(range(len(others))))

    def chosen(self, reader: Reader, row: Indices) -> Scalar:
        """Returns a row's class, int64."""
        place = list(row) if row else [0] * len(self.target.sizes)
        return reader.load(self.target, place).to(torch.int64)

    def at_class(self, reader: Reader, row: Indices, operand: Definition | None, dtype: torch.dtype) -> Scalar:
        """Returns an operand's element at a row's class, 1 without operand; 0 where the class is the ignored one."""
        chosen = self.chosen(reader, row)
        counted = chosen.differs(self.ignored)
        value = reader.number(1.0, dtype)
        if operand is not None:
            with reader.body.masked(counted):
                at = gathered_index(reader, chosen, self.count)
                value = reader.load(operand, self._indices(operand, row, at)).to(dtype)
        return counted.where(value, 0.0)

    def _indices(self, operand: Definition, row: Indices, at: IndexLike) -> Indices:
        if len(operand.sizes) < len(self.scores.sizes) or not row:
            return (at,)
        return (*row[: self.dim], at, *row[self.dim :])


@kernel_rule("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
def _forward(
    call: Call, scores: Definition, target: Definition, weight: Definition | None, reduction: int, ignored: int
) -> Result:
    operands = Classes(scores, target, weight, ignored)
    rows, computes = operands.rows, compute_dtype(scores.dtype)
    loss_fake, weight_fake = call.fake

    def loss(reader: Reader, row: Indices) -> Scalar:
        value = -operands.at_class(reader, row, scores, computes)
        return value if weight is None else value * operands.at_class(reader, row, weight, computes)

    if reduction == _NONE and rows.sizes:
        nothing = pointwise((), weight_fake.dtype, call.device, lambda reader, _: reader.number(0.0, computes))
        return pointwise(call.sizes_of(loss_fake), loss_fake.dtype, call.device, loss), nothing
    losses = pointwise(rows.sizes, computes, call.device, loss)
    (total,) = combine(call, "sum", rows, computes, lambda reader, _, row: reader.load(losses, rows.joined((), row)))
    (counted,) = combine(
        call, "sum", rows, computes,
        lambda reader, _, row: operands.at_class(reader, rows.joined((), row), weight, computes),
    )  # fmt: skip
    weights = reduced_result(call, weight_fake, rows, counted)
    if reduction != _MEAN:
        return reduced_result(call, loss_fake, rows, total), weights
    mean = row_result(call, loss_fake, rows, lambda reader, row: reader.load(total, row) / reader.load(counted, row))
    return mean, weights


@kernel_rule("aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default")
def _backward(
    call: Call,
    grad: Definition,
    scores: Definition,
    target: Definition,
    weight: Definition | None,
    reduction: int,
    ignored: int,
    total_weight: Definition,
) -> Result:
    operands = Classes(scores, target, weight, ignored)
    dim, computes = operands.dim, compute_dtype(call.dtype)

    def body(reader: Reader, indices: Indices) -> Scalar:
        row = [index for place, index in enumerate(indices) if place != dim]
        change = reader.load(grad, row if len(grad.sizes) == len(row) else [0] * len(grad.sizes)).to(computes)
        if reduction == _MEAN:
            change = change / reader.load(total_weight, [0] * len(total_weight.sizes)).to(computes)
        if weight is not None:
            change = change * reader.load(weight, (indices[dim],)).to(computes)
        chosen = operands.chosen(reader, row)
        here = chosen.equals(reader.body.index(indices[dim])) & chosen.differs(ignored)
        return here.where(-change, 0.0)

    return pointwise(call.sizes, call.dtype, call.device, body)
