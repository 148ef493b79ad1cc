"""Softmax variants and their backward: two statistics of each row, and a formula for each element."""

from __future__ import annotations

import math

import torch

from fxwrap.loop_ir import Scalar, compute_dtype
from fxwrap.lowering.fusion.definitions import Definition, ElementReader, Indices, Reduced
from fxwrap.lowering.rules.reduction_common import ReductionShape, build_reduction, outer_result, reduction_shape
from fxwrap.lowering.rules.registry import LoweringResult, OperatorCall, lowering_rule


def _statistics(call: OperatorCall, rows: ReductionShape, x: Definition, dtype: torch.dtype) -> tuple[Reduced, ...]:
    """Returns each row's maximum m, and its sum of exp(x - m)."""
    return build_reduction(call, "softmax", rows, dtype, rows.load_element(x))


@lowering_rule("aten._softmax.default", "aten._log_softmax.default")
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


@lowering_rule("aten._safe_softmax.default")
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

    largest, total = build_reduction(
        call, "softmax", rows, x.compute_dtype,
        lambda reader, row, reduced: masked(reader, rows.operand_indices(row, reduced)),
    )  # fmt: skip

    def body(reader: ElementReader, indices: Indices) -> Scalar:
        row = rows.outer_indices(indices)
        return (masked(reader, indices) - reader.load(largest, row)).exp() / reader.load(total, row)

    return call.define(body)


@lowering_rule("aten._softmax_backward_data.default")
def _softmax_backward(call: OperatorCall, grad: Definition, output: Definition, dim: int) -> LoweringResult:
    rows = reduction_shape(output, dim)
    computes = grad.compute_dtype

    def product(reader: ElementReader, row: Indices, reduced: Indices) -> Scalar:
        indices = rows.operand_indices(row, reduced)
        return reader.load(grad, indices) * reader.load(output, indices).to(computes)

    (total,) = build_reduction(call, "sum", rows, computes, product)

    def body(reader: ElementReader, indices: Indices) -> Scalar:
        difference = reader.load(grad, indices) - reader.load(total, rows.outer_indices(indices))
        return difference * reader.load(output, indices).to(computes)

    return call.define(body)


@lowering_rule("aten._masked_softmax_backward.default")
def _masked_softmax_backward(
    call: OperatorCall, grad: Definition, output: Definition, mask: Definition, dim: int | None
) -> LoweringResult:
    rows = reduction_shape(output, -1 if dim is None else dim)

    def product(reader: ElementReader, row: Indices, reduced: Indices) -> Scalar:
        indices = rows.operand_indices(row, reduced)
        return reader.load(mask, indices).where(0.0, reader.load(grad, indices) * reader.load(output, indices))

    (total,) = build_reduction(call, "sum", rows, grad.dtype, product)

    def body(reader: ElementReader, indices: Indices) -> Scalar:
        difference = reader.load(grad, indices) - reader.load(total, rows.outer_indices(indices))
        return reader.load(mask, indices).where(0.0, difference * reader.load(output, indices))

    return call.define(body)


@lowering_rule("aten._log_softmax_backward_data.default")
def _log_softmax_backward(call: OperatorCall, grad: Definition, output: Definition, dim: int) -> LoweringResult:
    rows = reduction_shape(output, dim)
    computes = grad.compute_dtype
    (total,) = build_reduction(call, "sum", rows, computes, rows.load_element(grad))

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
