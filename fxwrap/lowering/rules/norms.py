"""Layer norm, group norm, RMS norm and weight norm, each with its backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fxwrap.loop_ir import Scalar
from fxwrap.lowering.fusion.definitions import Definition, ElementReader, Indices
from fxwrap.lowering.rules.normalization import (
    NormalizationBackward,
    NormalizationSpace,
    group_norm_space,
    layer_norm_space,
    load_row_statistic,
    moments,
    normalize,
    reciprocal_std,
    statistic_result,
)
from fxwrap.lowering.rules.reduction_common import build_reduction, outer_result, reduction_shape
from fxwrap.lowering.rules.registry import LoweringResult, OperatorCall, lowering_rule
from fxwrap.symbolic import Size


def _space(call: OperatorCall, x: Definition) -> NormalizationSpace:
    arguments = call.bind()
    if "group" in arguments:
        return group_norm_space(x.sizes, arguments["group"])
    return layer_norm_space(x.sizes, len(arguments["normalized_shape"]))


@lowering_rule("aten.native_layer_norm.default", "aten.native_group_norm.default")
def _forward(call: OperatorCall, x: Definition, *_: object) -> LoweringResult:
    arguments, space = call.bind(), _space(call, x)
    result, mean_fake, rstd_fake = call.results
    mean, squares = moments(call, space, x)
    rstd = reciprocal_std(call, space, squares, arguments["eps"])
    mean_at, rstd_at = load_row_statistic(mean, mean.dtype, space), load_row_statistic(rstd, mean.dtype, space)
    return (
        normalize(call, result, space, x, mean_at, rstd_at, arguments["weight"], arguments["bias"]),
        statistic_result(call, mean_fake, mean_at, len(space.rows)),
        statistic_result(call, rstd_fake, rstd_at, len(space.rows)),
    )


@lowering_rule(
    "aten.native_layer_norm_backward.default", "aten.native_group_norm_backward.default",
    "aten._fused_rms_norm_backward.default",
)  # fmt: skip
def _backward(call: OperatorCall, grad: Definition, x: Definition, *_: object) -> LoweringResult:
    arguments, space, computes = call.bind(), _space(call, x), x.compute_dtype
    mean, weight, mask = arguments.get("mean"), arguments["weight"], arguments["output_mask"]
    mean_at = None if mean is None else load_row_statistic(mean, computes, space)
    rstd_at = load_row_statistic(arguments["rstd"], computes, space)
    if call.operator == "_fused_rms_norm_backward":
        mask = (mask[0], mask[1] and weight is not None)
    return NormalizationBackward(call, space, grad, x, mean_at, rstd_at, weight).gradients(mask)


@lowering_rule("aten._fused_rms_norm.default")
def _rms_norm(
    call: OperatorCall, x: Definition, normalized: Sequence[Size], weight: Definition | None, epsilon: float | None
) -> LoweringResult:
    space, computes = _space(call, x), x.compute_dtype
    rows = reduction_shape(x, range(len(x.sizes) - len(normalized), len(x.sizes)))

    def square(reader: ElementReader, row: Indices, within: Indices) -> Scalar:
        value = reader.load(x, space.indices_in_row(row, within))
        return value * value

    (total,) = build_reduction(call, "sum", rows, computes, square)
    root = reciprocal_std(call, space, total, torch.finfo(computes).eps if epsilon is None else epsilon)
    rstd = load_row_statistic(root, computes, space)
    result, rstd_fake = call.results
    return (
        normalize(call, result, space, x, None, rstd, weight),
        statistic_result(call, rstd_fake, rstd, len(space.rows)),
    )


# --- weight norm -----------------------------------------------------------------------------------------------------


@lowering_rule("aten._weight_norm_interface.default")
def _weight_norm(call: OperatorCall, v: Definition, g: Definition, dim: int) -> LoweringResult:
    """Returns v * g / norm and the norm over all dimensions but one."""
    rank, computes = len(v.sizes), v.compute_dtype
    rows = reduction_shape(v, [other for other in range(rank) if other != dim % rank])

    def square(reader: ElementReader, row: Indices, reduced: Indices) -> Scalar:
        value = reader.load(v, rows.operand_indices(row, reduced))
        return value * value

    (total,) = build_reduction(call, "sum", rows, computes, square)
    result, norm_fake = call.results

    def body(reader: ElementReader, indices: Indices) -> Scalar:
        numerator = reader.load(g, _indices_of_dim(indices, dim)).to(computes)
        scale = numerator / reader.load(total, rows.outer_indices(indices)).sqrt()
        return reader.load(v, indices) * scale

    norm = outer_result(call, norm_fake, rows, lambda reader, row: reader.load(total, row).sqrt())
    return call.define(body, result), norm


@lowering_rule("aten._weight_norm_interface_backward.default")
def _weight_norm_backward(
    call: OperatorCall, grad: Definition, v: Definition, g: Definition, norms: Definition, dim: int
) -> LoweringResult:
    rank, computes = len(v.sizes), v.compute_dtype
    rows = reduction_shape(v, [other for other in range(rank) if other != dim % rank])

    def product(reader: ElementReader, row: Indices, reduced: Indices) -> Scalar:
        indices = rows.operand_indices(row, reduced)
        return reader.load(grad, indices).to(computes) * reader.load(v, indices)

    (total,) = build_reduction(call, "sum", rows, computes, product)
    v_fake, g_fake = call.results

    def of_v(reader: ElementReader, indices: Indices) -> Scalar:
        row = _indices_of_dim(indices, dim)
        norm = reader.load(norms, row).to(computes)
        projection = reader.load(v, indices) * (reader.load(total, rows.outer_indices(indices)) / (norm * norm))
        scale = reader.load(g, row).to(computes) / norm
        return (reader.load(grad, indices).to(computes) - projection) * scale

    def of_g(reader: ElementReader, indices: Indices) -> Scalar:
        norm = reader.load(norms, indices).to(computes)
        return reader.load(total, rows.outer_indices(indices)) / norm

    return call.define(of_v, v_fake), call.define(of_g, g_fake)


def _indices_of_dim(indices: Indices, dim: int) -> Indices:
    """Returns the indices with 0 in all dimensions but one, for a tensor of size 1 in the others."""
    return [index if other == dim % len(indices) else 0 for other, index in enumerate(indices)]
