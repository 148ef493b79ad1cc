"""Negative log likelihood and its backward: the element at each row's class, and sums over rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fxwrap.loop_ir import IndexLike, Scalar, compute_dtype
from fxwrap.lowering.fusion.definitions import Definition, ElementReader, Indices, pointwise
from fxwrap.lowering.rules.indexing_common import checked_indirect_index
from fxwrap.lowering.rules.reduction_common import ReductionShape, build_reduction, outer_result, reduced_result
from fxwrap.lowering.rules.registry import LoweringResult, OperatorCall, lowering_rule
from fxwrap.symbolic import Size

_NONE, _MEAN = 0, 1


@dataclass(frozen=True)
class NllLossOperands:
    """The operands of a loss over classes: `scores` with a dimension of classes, `target` with the class of each row.

    Rows have the sizes of the scores without the classes. `weight` holds one number for each class; None means 1.
    """

    scores: Definition
    target: Definition
    weight: Definition | None
    ignore_index: int

    @property
    def dim(self) -> int:
        """The dimension of classes."""
        return 1 if len(self.scores.sizes) > 1 else 0

    @property
    def count(self) -> Size:
        """The number of classes."""
        return self.scores.sizes[self.dim]

    @property
    def rows(self) -> ReductionShape:
        """All rows, to be reduced."""
        sizes = self.scores.sizes
        others = sizes[: self.dim] + sizes[self.dim + 1 :]
        return ReductionShape(others, tuple(range(len(others))))

    def target_class(self, reader: ElementReader, row: Indices) -> Scalar:
        """Returns a row's class, int64."""
        indices = list(row) if row else [0] * len(self.target.sizes)
        return reader.load(self.target, indices).to(torch.int64)

    def load_at_target(
        self, reader: ElementReader, row: Indices, operand: Definition | None, dtype: torch.dtype
    ) -> Scalar:
        """Returns an operand's element at a row's class, 1 without an operand, 0 for the ignored class."""
        target_class = self.target_class(reader, row)
        counted = target_class.differs(self.ignore_index)
        value = reader.number(1.0, dtype)
        if operand is not None:
            with reader.body.masked(counted):
                index = checked_indirect_index(reader, target_class, self.count)
                value = reader.load(operand, self._indices(operand, row, index)).to(dtype)
        return counted.where(value, 0.0)

    def _indices(self, operand: Definition, row: Indices, index: IndexLike) -> Indices:
        if len(operand.sizes) < len(self.scores.sizes) or not row:
            return (index,)
        return (*row[: self.dim], index, *row[self.dim :])


@lowering_rule("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
def _forward(
    call: OperatorCall,
    scores: Definition,
    target: Definition,
    weight: Definition | None,
    reduction: int,
    ignore_index: int,
) -> LoweringResult:
    operands = NllLossOperands(scores, target, weight, ignore_index)
    rows, computes = operands.rows, compute_dtype(scores.dtype)
    loss_fake, weight_fake = call.results

    def loss(reader: ElementReader, row: Indices) -> Scalar:
        value = -operands.load_at_target(reader, row, scores, computes)
        return value if weight is None else value * operands.load_at_target(reader, row, weight, computes)

    if reduction == _NONE and rows.sizes:
        zero = pointwise((), weight_fake.dtype, call.device, lambda reader, _: reader.number(0.0, computes))
        return call.define(loss, loss_fake), zero
    losses = pointwise(rows.sizes, computes, call.device, loss)
    (total,) = build_reduction(
        call, "sum", rows, computes, lambda reader, _, row: reader.load(losses, rows.operand_indices((), row))
    )
    (counted,) = build_reduction(
        call, "sum", rows, computes,
        lambda reader, _, row: operands.load_at_target(reader, rows.operand_indices((), row), weight, computes),
    )  # fmt: skip
    weights = reduced_result(call, weight_fake, rows, counted)
    if reduction != _MEAN:
        return reduced_result(call, loss_fake, rows, total), weights
    mean = outer_result(call, loss_fake, rows, lambda reader, row: reader.load(total, row) / reader.load(counted, row))
    return mean, weights


@lowering_rule("aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default")
def _backward(
    call: OperatorCall,
    grad: Definition,
    scores: Definition,
    target: Definition,
    weight: Definition | None,
    reduction: int,
    ignore_index: int,
    total_weight: Definition,
) -> LoweringResult:
    operands = NllLossOperands(scores, target, weight, ignore_index)
    class_dim, computes = operands.dim, compute_dtype(call.dtype)

    def body(reader: ElementReader, indices: Indices) -> Scalar:
        row = [index for dim, index in enumerate(indices) if dim != class_dim]
        value = reader.load(grad, row if len(grad.sizes) == len(row) else [0] * len(grad.sizes)).to(computes)
        if reduction == _MEAN:
            value = value / reader.load(total_weight, [0] * len(total_weight.sizes)).to(computes)
        if weight is not None:
            value = value * reader.load(weight, (indices[class_dim],)).to(computes)
        target_class = operands.target_class(reader, row)
        is_target = target_class.equals(reader.body.index(indices[class_dim])) & target_class.differs(ignore_index)
        return is_target.where(-value, 0.0)

    return call.define(body)
