"""Softmax variants and their backward: two statistics of each row, and a formula for each element."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from fxwrap.loop_ir import IndexLike, Scalar, compute_dtype
from fxwrap.lowering.fusion.definitions import Definition, ElementReader, Indices, Reduced, pointwise
from fxwrap.lowering.rules.indexing_common import checked_indirect_index
from fxwrap.lowering.rules.picked_columns import PickedColumns, pick_columns
from fxwrap.lowering.rules.reductions import (
    ReductionShape,
    build_reduction,
    outer_result,
    reduced_result,
    reduction_shape,
    sum_rows,
)
from fxwrap.lowering.rules.registry import (
    Declined,
    LoweringResult,
    OperatorCall,
    check_dtype,
    check_equal_dtypes,
    check_index_dtype,
    lowering_rule,
)
from fxwrap.symbolic import Size


def _statistics(call: OperatorCall, rows: ReductionShape, x: Definition, dtype: torch.dtype) -> tuple[Reduced, ...]:
    """Returns each row's maximum m, and its sum of exp(x - m)."""
    return build_reduction(call, "softmax", rows, dtype, x)


@lowering_rule("aten._softmax.default", "aten._log_softmax.default", dtypes="float")
def _softmax(call: OperatorCall, x: Definition, dim: int) -> LoweringResult:
    rows = reduction_shape(x, dim)
    largest, total = _statistics(call, rows, x, x.dtype)

    def body(reader: ElementReader, indices: Indices) -> Scalar:
        row = rows.outer_indices(indices)
        shifted = reader.load(x, indices) - reader.load(largest, row)
        if call.operator == "_log_softmax":
            return shifted - reader.load(total, row).log()
        return shifted.exp() / reader.load(total, row)

    return call.define(body)


@lowering_rule("aten._safe_softmax.default", dtypes="float")
def _safe_softmax(call: OperatorCall, x: Definition, dim: int) -> LoweringResult:
    """Fully masked rows, of -inf alone, become zeros."""
    rows = reduction_shape(x, dim)
    largest, total = _statistics(call, rows, x, call.dtype)
    computes = compute_dtype(call.dtype)

    def body(reader: ElementReader, indices: Indices) -> Scalar:
        row = rows.outer_indices(indices)
        maximum = reader.load(largest, row)
        share = (reader.load(x, indices).to(computes) - maximum).exp() / reader.load(total, row)
        return maximum.equals(-math.inf).where(0.0, share)

    return call.define(body)


@lowering_rule("aten._masked_softmax.default")
def _masked_softmax(
    call: OperatorCall, x: Definition, mask: Definition, dim: int | None, mask_type: int | None
) -> LoweringResult:
    """Elements whose mask is true are excluded; fully masked rows become NaN."""
    rows = reduction_shape(x, -1 if dim is None else dim)
    rank = len(x.sizes)
    mask_dims: tuple[int, ...] = tuple(range(rank))
    if len(mask.sizes) < rank:  # a mask of query and key positions, or of batch and key positions
        mask_dims = (rank - 2, rank - 1) if mask_type == 0 else (0, rank - 1)

    def masked(reader: ElementReader, indices: Indices) -> Scalar:
        dropped = reader.load(mask, [indices[dim] for dim in mask_dims])
        return dropped.where(-math.inf, reader.load(x, indices))

    largest, total = build_reduction(call, "softmax", rows, x.compute_dtype, masked)

    def body(reader: ElementReader, indices: Indices) -> Scalar:
        row = rows.outer_indices(indices)
        return (masked(reader, indices) - reader.load(largest, row)).exp() / reader.load(total, row)

    return call.define(body)


def _check_result_dtype(call: OperatorCall, grad: Definition) -> None:
    if call.device.type == "cpu" and call.dtype is not grad.dtype:
        raise Declined(f"eager mode has no {call.operator} from {grad.dtype} to {call.dtype} on a CPU")


@lowering_rule("aten._softmax_backward_data.default", dtypes="equal float")
def _softmax_backward(call: OperatorCall, grad: Definition, output: Definition, dim: int) -> LoweringResult:
    _check_result_dtype(call, grad)
    rows = reduction_shape(output, dim)
    computes = grad.compute_dtype

    total = sum_rows(
        call, rows, computes, lambda reader, at: reader.load(grad, at) * reader.load(output, at).to(computes)
    )

    def body(reader: ElementReader, indices: Indices) -> Scalar:
        difference = reader.load(grad, indices) - reader.load(total, rows.outer_indices(indices))
        return difference * reader.load(output, indices).to(computes)

    return call.define(body)


@lowering_rule("aten._masked_softmax_backward.default")
def _masked_softmax_backward(
    call: OperatorCall, grad: Definition, output: Definition, mask: Definition, dim: int | None
) -> LoweringResult:
    rows = reduction_shape(output, -1 if dim is None else dim)

    def product(reader: ElementReader, indices: Indices) -> Scalar:
        return reader.load(mask, indices).where(0.0, reader.load(grad, indices) * reader.load(output, indices))

    total = sum_rows(call, rows, grad.dtype, product)

    def body(reader: ElementReader, indices: Indices) -> Scalar:
        difference = reader.load(grad, indices) - reader.load(total, rows.outer_indices(indices))
        return reader.load(mask, indices).where(0.0, difference * reader.load(output, indices))

    return call.define(body)


@lowering_rule("aten._log_softmax_backward_data.default", dtypes="equal float")
def _log_softmax_backward(call: OperatorCall, grad: Definition, output: Definition, dim: int) -> LoweringResult:
    _check_result_dtype(call, grad)
    rows = reduction_shape(output, dim)
    computes = grad.compute_dtype
    total = sum_rows(call, rows, computes, grad)

    def body(reader: ElementReader, indices: Indices) -> Scalar:
        share = reader.load(output, indices).to(computes).exp()
        return reader.load(grad, indices) - share * reader.load(total, rows.outer_indices(indices))

    return call.define(body)


@lowering_rule("aten.logsumexp.default")
def _logsumexp(call: OperatorCall, x: Definition, dims: list[int]) -> LoweringResult:
    rows = reduction_shape(x, dims)
    largest, total = _statistics(call, rows, x, call.dtype)

    def body(reader: ElementReader, row: Indices) -> Scalar:
        maximum = reader.load(largest, row)  # where it is inf, the sum is NaN
        return maximum.equals(math.inf).where(maximum, reader.load(total, row).log() + maximum)

    return outer_result(call, call.result, rows, body)


_NONE, _MEAN = 0, 1
_NOTHING_PICKED = PickedColumns({})


@dataclass(frozen=True)
class NllLossOperands:
    """The operands of a loss over classes: `scores` with a dimension of classes, `target` with the class of each row.

    Rows have the sizes of the scores without the classes. `weight` holds one number for each class; None means 1.
    """

    call: OperatorCall
    scores: Definition
    target: Definition
    weight: Definition | None
    ignore_index: int

    @cached_property
    def picked(self) -> PickedColumns:
        """The sums in place of elements of matmuls that scores are computed from."""
        return pick_columns(self.call, self.scores, self.target_class)

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
                at = self._indices(operand, row, index)
                picked = self.picked if operand is self.scores else _NOTHING_PICKED
                value = picked.load(reader, operand, at, row).to(dtype)
        return counted.where(value, 0.0)

    def _indices(self, operand: Definition, row: Indices, index: IndexLike) -> Indices:
        if len(operand.sizes) < len(self.scores.sizes) or not row:
            return (index,)
        return (*row[: self.dim], index, *row[self.dim :])


def _check_loss_dtypes(scores: Definition, target: Definition, *others: Definition | None) -> None:
    check_dtype(scores.dtype, "float")
    check_equal_dtypes(scores, *others)
    check_index_dtype(target, accepted=(torch.int64, torch.uint8))


@lowering_rule("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
def _forward(
    call: OperatorCall,
    scores: Definition,
    target: Definition,
    weight: Definition | None,
    reduction: int,
    ignore_index: int,
) -> LoweringResult:
    _check_loss_dtypes(scores, target, weight)
    operands = NllLossOperands(call, scores, target, weight, ignore_index)
    rows, computes = operands.rows, compute_dtype(scores.dtype)
    loss_fake, weight_fake = call.results

    def loss(reader: ElementReader, row: Indices) -> Scalar:
        value = -operands.load_at_target(reader, row, scores, computes)
        return value if weight is None else value * operands.load_at_target(reader, row, weight, computes)

    if reduction == _NONE and rows.sizes:
        zero = pointwise((), weight_fake.dtype, call.device, lambda reader, _: reader.number(0.0, computes))
        return call.define(loss, loss_fake), zero
    losses = pointwise(rows.sizes, computes, call.device, loss)
    total = sum_rows(call, rows, computes, losses)
    counted = sum_rows(call, rows, computes, lambda reader, row: operands.load_at_target(reader, row, weight, computes))
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
    _check_loss_dtypes(scores, target, weight, grad, total_weight)
    operands = NllLossOperands(call, scores, target, weight, ignore_index)
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
