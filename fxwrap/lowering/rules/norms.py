"""Layer norm, group norm, RMS norm and weight norm, each with its backward."""

from __future__ import annotations

from typing import Any

import torch

from fxwrap.loop_ir import Scalar
from fxwrap.lowering.definitions import Definition, Indices, Reader, pointwise
from fxwrap.lowering.rules.normalization import (
    Gradients,
    Space,
    group_space,
    layer_space,
    moments,
    normalised,
    reciprocal_deviation,
    row_value,
    statistic,
)
from fxwrap.lowering.rules.registry import Call, Result
from fxwrap.lowering.rules.rows import combine, kernel_rule, row_result, rows_of


@kernel_rule("aten.native_layer_norm.default")
def _layer_norm(
    call: Call, x: Definition, normalized: Any, weight: Definition | None, bias: Definition | None, epsilon: float
) -> Result:
    return _forward(call, layer_space(x.sizes, len(normalized)), x, weight, bias, epsilon)


@kernel_rule("aten.native_group_norm.default")
def _group_norm(
    call: Call,
    x: Definition,
    weight: Definition | None,
    bias: Definition | None,
    samples: Any,
    channels: Any,
    places: Any,
    groups: int,
    epsilon: float,
) -> Result:
    return _forward(call, group_space(x.sizes, groups), x, weight, bias, epsilon)


def _forward(
    call: Call, space: Space, x: Definition, weight: Definition | None, bias: Definition | None, epsilon: float
) -> Result:
    result, mean_fake, deviation_fake = call.fake
    mean, squares = moments(call, space, x)
    deviation = reciprocal_deviation(call, space, squares, epsilon)
    mean_at, deviation_at = row_value(mean, mean.dtype, space), row_value(deviation, mean.dtype, space)
    return (
        normalised(call, result, space, x, mean_at, deviation_at, weight, bias),
        statistic(call, mean_fake, mean_at, len(space.rows)),
        statistic(call, deviation_fake, deviation_at, len(space.rows)),
    )


@kernel_rule("aten.native_layer_norm_backward.default")
def _layer_norm_backward(
    call: Call,
    grad: Definition,
    x: Definition,
    normalized: Any,
    mean: Definition,
    deviation: Definition,
    weight: Definition | None,
    bias: Definition | None,
    mask: Any,
) -> Result:
    return _backward(call, layer_space(x.sizes, len(normalized)), grad, x, mean, deviation, weight, mask)


@kernel_rule("aten.native_group_norm_backward.default")
def _group_norm_backward(
    call: Call,
    grad: Definition,
    x: Definition,
    mean: Definition,
    deviation: Definition,
    weight: Definition | None,
    samples: Any,
    channels: Any,
    places: Any,
    groups: int,
    mask: Any,
) -> Result:
    return _backward(call, group_space(x.sizes, groups), grad, x, mean, deviation, weight, mask)


def _backward(
    call: Call,
    space: Space,
    grad: Definition,
    x: Definition,
    mean: Definition | None,
    deviation: Definition,
    weight: Definition | None,
    mask: Any,
) -> Result:
    """Returns the gradients of input, weight and bias that the mask asks for, as many as it has flags."""
    computes = x.compute_dtype
    mean_at = None if mean is None else row_value(mean, computes, space)
    gradients = Gradients(call, space, grad, x, mean_at, row_value(deviation, computes, space), weight)
    makers = (gradients.of_input, gradients.of_weight, gradients.of_bias)
    return tuple([
        make(fake) if wanted and fake is not None else None
        for make, fake, wanted in zip(makers, call.fake, mask, strict=False)
    ])  # fmt: skip


# --- RMS norm -----------------------------------------------------------------------------------------------------


@kernel_rule("aten._fused_rms_norm.default")
def _rms_norm(call: Call, x: Definition, normalized: Any, weight: Definition | None, epsilon: float | None) -> Result:
    space, computes = layer_space(x.sizes, len(normalized)), x.compute_dtype
    rows = rows_of(x, range(len(x.sizes) - len(normalized), len(x.sizes)))
    (total,) = combine(call, "sum", rows, computes, _square(x, space))
    added = torch.finfo(computes).eps if epsilon is None else epsilon

    def root(reader: Reader, row: Indices) -> Scalar:
        return (reader.load(total, row) / reader.number(space.count, computes) + added).rsqrt()

    deviation = row_value(pointwise(space.rows, computes, call.device, root), computes, space)
    result, deviation_fake = call.fake
    return (
        normalised(call, result, space, x, None, deviation, weight),
        statistic(call, deviation_fake, deviation, len(space.rows)),
    )


def _square(x: Definition, space: Space) -> Any:
    def body(reader: Reader, row: Indices, place: Indices) -> Scalar:
        value = reader.load(x, space.in_row(row, place))
        return value * value

    return body


@kernel_rule("aten._fused_rms_norm_backward.default")
def _rms_norm_backward(
    call: Call,
    grad: Definition,
    x: Definition,
    normalized: Any,
    deviation: Definition,
    weight: Definition | None,
    mask: Any,
) -> Result:
    space = layer_space(x.sizes, len(normalized))
    return _backward(call, space, grad, x, None, deviation, weight, (mask[0], mask[1] and weight is not None))


# --- weight norm --------------------------------------------------------------------------------------------------


@kernel_rule("aten._weight_norm_interface.default")
def _weight_norm(call: Call, v: Definition, g: Definition, dim: int = 0) -> Result:
    """Returns v * g / norm and the norm, taken over all dimensions but one."""
    rank, computes = len(v.sizes), v.compute_dtype
    rows = rows_of(v, [place for place in range(rank) if place != dim % rank])

    def square(reader: Reader, kept: Indices, reduced: Indices) -> Scalar:
        value = reader.load(v, rows.joined(kept, reduced))
        return value * value

    (total,) = combine(call, "sum", rows, computes, square)
    result, norm_fake = call.fake

    def body(reader: Reader, indices: Indices) -> Scalar:
        scale = reader.load(g, _only(indices, dim)).to(computes) / reader.load(total, rows.row(indices)).sqrt()
        return reader.load(v, indices) * scale

    scaled = pointwise(call.sizes_of(result), result.dtype, call.device, body)
    return scaled, row_result(call, norm_fake, rows, lambda reader, row: reader.load(total, row).sqrt())


@kernel_rule("aten._weight_norm_interface_backward.default")
def _weight_norm_backward(
    call: Call, grad: Definition, v: Definition, g: Definition, norms: Definition, dim: int
) -> Result:
    rank, computes = len(v.sizes), v.compute_dtype
    rows = rows_of(v, [place for place in range(rank) if place != dim % rank])

    def product(reader: Reader, kept: Indices, reduced: Indices) -> Scalar:
        at = rows.joined(kept, reduced)
        return reader.load(grad, at).to(computes) * reader.load(v, at)

    (total,) = combine(call, "sum", rows, computes, product)
    v_fake, g_fake = call.fake

    def of_v(reader: Reader, indices: Indices) -> Scalar:
        one = _only(indices, dim)
        norm = reader.load(norms, one).to(computes)
        along = reader.load(v, indices) * (reader.load(total, rows.row(indices)) / (norm * norm))
        scale = reader.load(g, one).to(computes) / norm
        return (reader.load(grad, indices).to(computes) - along) * scale

    def of_g(reader: Reader, indices: Indices) -> Scalar:
        norm = reader.load(norms, indices).to(computes)
        return reader.load(total, rows.row(indices)) / norm

    return (
        pointwise(call.sizes_of(v_fake), v_fake.dtype, call.device, of_v),
        pointwise(call.sizes_of(g_fake), g_fake.dtype, call.device, of_g),
    )


def _only(indices: Indices, dim: int) -> Indices:
    """Returns the indices with all but one dimension's at 0, as in a tensor that has size 1 in the others."""
    return [index if place == dim % len(indices) else 0 for place, index in enumerate(indices)]
