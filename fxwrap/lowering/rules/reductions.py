"""Reductions, softmax and scans."""

from __future__ import annotations

from typing import Any

from fxwrap.loop_ir import Scalar, compute_dtype
from fxwrap.lowering.definitions import (
    Definition,
    Indices,
    Pointwise,
    Reader,
    joined_indices,
    pointwise,
    reduction,
)
from fxwrap.lowering.rules.registry import Call, rule


@rule("aten._softmax.default")
def _softmax(call: Call, x: Definition, dim: int, half_to_float: bool) -> Pointwise:
    rank = len(x.sizes)
    dims = (dim % rank,) if rank else ()
    kept = [size for position, size in enumerate(x.sizes) if position not in dims]
    computes = compute_dtype(x.dtype)

    def element(reader: Reader, kept: Indices, reduced: Indices) -> Scalar:
        return reader.load(x, joined_indices(rank, dims, kept, reduced))

    reduced = [x.sizes[position] for position in dims]
    largest, total = reduction("softmax", kept, reduced, call.device, computes, element, (computes, computes))

    def body(reader: Reader, indices: Indices) -> Scalar:
        row: Any = [index for position, index in enumerate(indices) if position not in dims]
        return (reader.load(x, indices) - reader.load(largest, row)).exp() / reader.load(total, row)

    return pointwise(call.sizes, call.dtype, call.device, body)
