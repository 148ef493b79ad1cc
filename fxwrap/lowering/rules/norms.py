"""Normalisations and their backward."""

from __future__ import annotations

from typing import Any

import torch

from fxwrap.loop_ir import Scalar, compute_dtype
from fxwrap.lowering.definitions import Definition, Indices, Reader, pointwise, reduction
from fxwrap.lowering.rules.registry import Call, Result, rule
from fxwrap.symbolic import product


@rule("aten.native_layer_norm.default")
def _layer_norm(
    call: Call, x: Definition, normalized: Any, weight: Definition | None, bias: Definition | None, epsilon: float
) -> Result:
    first = len(x.sizes) - len(normalized)
    outer, inner = x.sizes[:first], x.sizes[first:]
    computes = compute_dtype(x.dtype)
    mean, squares = reduction(
        "welford", outer, inner, call.device, computes, lambda reader, kept, reduced: reader.load(x, [*kept, *reduced]),
        (computes, computes),
    )  # fmt: skip
    count = product(inner)

    def reciprocal(reader: Reader, row: Indices) -> Scalar:
        variance = reader.load(squares, row) / reader.number(count, computes)
        return (variance + epsilon).rsqrt()

    deviation = pointwise(outer, computes, call.device, reciprocal)

    def normal(reader: Reader, indices: Indices) -> Scalar:
        row, column = indices[:first], indices[first:]
        value = (reader.load(x, indices) - reader.load(mean, row)) * reader.load(deviation, row)
        if weight is not None:
            value = value * reader.load(weight, column).to(computes)
        return value if bias is None else value + reader.load(bias, column).to(computes)

    def statistic(source: Definition, fake: torch.Tensor) -> Definition:
        sizes = call.sizes_of(fake)
        return pointwise(sizes, fake.dtype, call.device, lambda reader, indices: reader.load(source, indices[:first]))

    result, mean_fake, deviation_fake = call.fake
    normalised = pointwise(call.sizes_of(result), result.dtype, call.device, normal)
    return normalised, statistic(mean, mean_fake), statistic(deviation, deviation_fake)
