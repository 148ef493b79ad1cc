"""Softmax in its variants and their backward: two row statistics, and a formula on each element."""

from __future__ import annotations

import math
from typing import Any

import torch

from fxwrap.loop_ir import Scalar, compute_dtype
from fxwrap.lowering.definitions import Definition, Indices, Pointwise, Reader, Reduced, pointwise
from fxwrap.lowering.rules.registry import Call, Result
from fxwrap.lowering.rules.rows import Rows, combine, kernel_rule, row_result, rows_of


def _statistics(call: Call, rows: Rows, x: Definition, dtype: torch.dtype) -> tuple[Reduced, ...]:
    """Returns each row's maximum m, and its sum of exp(x - m)."""
    return combine(call, "softmax", rows, dtype, rows.element(x))


@kernel_rule("aten._softmax.default")
def _softmax(call: Call, x: Definition, dim: int, half_to_float: bool) -> Pointwise:
    rows = rows_of(x, dim)
    largest, total = _statistics(call, rows, x, x.dtype)

    def body(reader: Reader, indices: Indices) -> Scalar:
        row = rows.row(indices)
        return (reader.load(x, indices) - reader.load(largest, row)).exp() / reader.load(total, row)

    return pointwise(call.sizes, call.dtype, call.device, body)


@kernel_rule("aten._log_softmax.default")
def _log_softmax(call: Call, x: Definition, dim: int, half_to_float: bool) -> Pointwise:
    rows = rows_of(x, dim)
    largest, total = _statistics(call, rows, x, x.dtype)

    def body(reader: Reader, indices: Indices) -> Scalar:
        row = rows.row(indices)
        return reader.load(x, indices) - reader.load(largest, row) - reader.load(total, row).log()

    return pointwise(call.sizes, call.dtype, call.device, body)


@kernel_rule("aten._safe_softmax.default")
def _safe_softmax(call: Call, x: Definition, dim: int, dtype: Any = None) -> Pointwise:
    """A row of nothing but -inf gives zeros."""
    rows = rows_of(x, dim)
    largest, total = _statistics(call, rows, x, call.dtype)
    computes = compute_dtype(call.dtype)

    def body(reader: Reader, indices: Indices) -> Scalar:
        row = rows.row(indices)
        most = reader.load(largest, row)
        share = (reader.load(x, indices).to(computes) - most).exp() / reader.load(total, row)
        return most.equals(-math.inf).where(0.0, share)

    return pointwise(call.sizes, call.dtype, call.device, body)


@kernel_rule("aten._masked_softmax.default")
def _masked_softmax(call: Call, x: Definition, mask: Definition, dim: Any = None, mask_type: Any = None) -> Result:
    """Where the mask is true an element does not count; rows without any other give NaN."""
    rows = rows_of(x, -1 if dim is None else dim)
    rank, computes = len(x.sizes), x.compute_dtype
    mask_dims: tuple[int, ...] = tuple(range(rank))
    if len(mask.sizes) < rank:  # of query and key positions, or of batch and key positions
        mask_dims = (rank - 2, rank - 1) if mask_type == 0 else (0, rank - 1)

    def kept(reader: Reader, indices: Indices) -> Scalar:
        dropped = reader.load(mask, [indices[place] for place in mask_dims])
        return dropped.where(-math.inf, reader.load(x, indices))

    largest, total = combine(
        call, "softmax", rows, computes, lambda reader, row, reduced: kept(reader, rows.joined(row, reduced))
    )

    def body(reader: Reader, indices: Indices) -> Scalar:
        row = rows.row(indices)
        return (kept(reader, indices) - reader.load(largest, row)).exp() / reader.load(total, row)

    return pointwise(call.sizes, call.dtype, call.device, body)


@kernel_rule("aten._softmax_backward_data.default")
def _softmax_backward(call: Call, grad: Definition, output: Definition, dim: int, input_dtype: Any) -> Pointwise:
    rows = rows_of(output, dim)
    computes = grad.compute_dtype

    def product(reader: Reader, kept: Indices, reduced: Indices) -> Scalar:
        at = rows.joined(kept, reduced)
        return reader.load(grad, at) * reader.load(output, at).to(computes)

    (total,) = combine(call, "sum", rows, computes, product)

    def body(reader: Reader, indices: Indices) -> Scalar:
        change = reader.load(grad, indices) - reader.load(total, rows.row(indices))
        return change * reader.load(output, indices).to(computes)

    return pointwise(call.sizes, call.dtype, call.device, body)


@kernel_rule("aten._masked_softmax_backward.default")
def _masked_softmax_backward(
    call: Call, grad: Definition, output: Definition, mask: Definition, dim: Any = None
) -> Pointwise:
    rows = rows_of(output, -1 if dim is None else dim)

    def product(reader: Reader, kept: Indices, reduced: Indices) -> Scalar:
        at = rows.joined(kept, reduced)
        return reader.load(mask, at).where(0.0, reader.load(grad, at) * reader.load(output, at))

    (total,) = combine(call, "sum", rows, grad.dtype, product)

    def body(reader: Reader, indices: Indices) -> Scalar:
        change = reader.load(grad, indices) - reader.load(total, rows.row(indices))
        return reader.load(mask, indices).where(0.0, change * reader.load(output, indices))

    return pointwise(call.sizes, call.dtype, call.device, body)


@kernel_rule("aten._log_softmax_backward_data.default")
def _log_softmax_backward(call: Call, grad: Definition, output: Definition, dim: int, input_dtype: Any) -> Pointwise:
    rows = rows_of(output, dim)
    computes = grad.compute_dtype
    (total,) = combine(call, "sum", rows, computes, rows.element(grad))

    def body(reader: Reader, indices: Indices) -> Scalar:
        share = reader.load(output, indices).to(computes).exp()
        return reader.load(grad, indices) - share * reader.load(total, rows.row(indices))

    return pointwise(call.sizes, call.dtype, call.device, body)


@kernel_rule("aten.logsumexp.default")
def _logsumexp(call: Call, x: Definition, dims: Any, keepdim: bool = False) -> Result:
    rows = rows_of(x, dims)
    largest, total = _statistics(call, rows, x, call.dtype)

    def body(reader: Reader, row: Indices) -> Scalar:
        most = reader.load(largest, row)  # where it is inf, the sum is NaN
        return most.equals(math.inf).where(most, reader.load(total, row).log() + most)

    return row_result(call, call.fake, rows, body)
