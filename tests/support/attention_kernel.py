"""Attention as a kernel of the loop IR, for tests of the loop IR and of its printers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch

from fxwrap.loop_ir import Axis, Buffer, Kernel, KernelBuilder, Scalar, as_index, linearize_index

F32 = torch.float32

Mask: TypeAlias = Callable[[KernelBuilder, Axis, Axis], Scalar]
"""Returns whether a row and a key of a kernel are visible."""


def attention_kernel(
    heads: int = 2, rows: int = 20, keys: int = 35, width: int = 5, columns: int = 3, dtype: torch.dtype = F32,
    cap: float = 0.0, mask: Mask | None = None, masked: float = -math.inf, offset: int = 0,
    power: int = 1,
) -> Kernel:  # fmt: skip
    """Returns causal attention with a linear bias, which stores the output and the log-sum-exp of each row.

    For the bias, rows are at the positions from `offset` on; it is a power of the distance.

    With a cap, the scores are cap * tanh((score / 2 + bias) / cap). `mask` is another mask, of the kernel, row and key,
    which may load from `position`, int64 of each row; other scores are `masked`.
    """
    body = KernelBuilder()
    head, row, column = Axis("p0", heads), Axis("p1", rows), Axis("p2", columns)
    inner, key = Axis("r0", width), Axis("r1", keys)
    computes = torch.float64 if dtype is torch.float64 else F32
    query = body.load("query", linearize_index((head, row, inner), (heads, rows, width)), dtype).to(computes)
    other = body.load("key", linearize_index((head, key, inner), (heads, keys, width)), dtype).to(computes)
    (score,) = body.reduce("sum", query * other, [inner])
    at = body.index(row) + offset if offset else body.index(row)
    bias = body.load("slopes", as_index(head), computes) * (body.index(key) - at).to(computes)
    for _ in range(1, power):
        bias = bias * (body.index(key) - at).to(computes)
    biased = ((score * 0.5 + bias) / cap).tanh() * cap if cap else score + bias
    visible = body.index(row) >= body.index(key) - 2 if mask is None else mask(body, row, key)
    scores = visible.where(biased, masked)
    (largest,) = body.reduce("max", scores, [key])
    shift = largest.equals(-math.inf).where(0.0, largest)
    weights = (scores - shift).exp()
    (total,) = body.reduce("sum", weights, [key])
    value = body.load("value", linearize_index((head, key, column), (heads, keys, columns)), dtype).to(computes)
    (weighted,) = body.reduce("sum", weights * value, [key])
    body.store("out", linearize_index((head, row, column), (heads, rows, columns)), (weighted / total).to(dtype))
    body.store("logsumexp", linearize_index((head, row), (heads, rows)), total.log() + shift)
    inputs = [
        Buffer("query", dtype, heads * rows * width), Buffer("key", dtype, heads * keys * width),
        Buffer("slopes", computes, heads), Buffer("value", dtype, heads * keys * columns),
        *([] if mask is None else [Buffer("position", torch.int64, rows)]),
    ]  # fmt: skip
    outputs = [Buffer("out", dtype, heads * rows * columns), Buffer("logsumexp", computes, heads * rows)]
    return body.finish([head, row, column], [inner, key], inputs, outputs)


def gradient_kernel(
    groups: int = 2, queries: int = 35, keys: int = 20, width: int = 5, columns: int = 3, dtype: torch.dtype = F32,
    slope: float = 0.0,
) -> Kernel:  # fmt: skip
    """Returns the gradients of the keys and values of causal attention, whose rows are keys.

    It streams the query heads of a group and their queries; the log-sum-exp and the terms of each query are inputs.
    Scores have a linear bias if there is a `slope`.
    """
    body = KernelBuilder()
    head, row, column, value_column = Axis("p0", 2), Axis("p1", keys), Axis("p2", width), Axis("p3", columns)
    inner, value_inner, group, query = Axis("r0", width), Axis("r1", columns), Axis("r2", groups), Axis("r3", queries)
    computes = torch.float64 if dtype is torch.float64 else F32
    sizes = {"query": (2, groups, queries, width), "key": (2, keys, width), "value": (2, keys, columns),
             "grad_out": (2, groups, queries, columns), "logsumexp": (2, groups, queries),
             "terms": (2, groups, queries)}  # fmt: skip

    def load(name: str, *axes: Axis) -> Scalar:
        stored = computes if name in ("logsumexp", "terms") else dtype
        return body.load(name, linearize_index(axes, sizes[name]), stored).to(computes)

    (score,) = body.reduce("sum", load("key", head, row, inner) * load("query", head, group, query, inner), [inner])
    mask = body.index(query) >= body.index(row) - 2
    score = score * 0.25
    if slope:
        score = score + (body.index(row) - body.index(query)).to(computes) * slope
    weights = mask.where((score - load("logsumexp", head, group, query)).exp(), 0.0)
    grad_out = load("grad_out", head, group, query, value_inner)
    (grad_weights,) = body.reduce("sum", load("value", head, row, value_inner) * grad_out, [value_inner])
    grad_scores = weights * (grad_weights - load("terms", head, group, query))
    (grad_key,) = body.reduce("sum", grad_scores * load("query", head, group, query, column), [group, query])
    (grad_value,) = body.reduce("sum", weights * load("grad_out", head, group, query, value_column), [group, query])
    (total,) = body.reduce("sum", weights, [group, query])
    body.store("grad_key", linearize_index((head, row, column), sizes["key"]), grad_key.to(dtype))
    body.store("grad_value", linearize_index((head, row, value_column), sizes["value"]), grad_value.to(dtype))
    body.store("total", linearize_index((head, row), (2, keys)), total)
    inputs = [
        Buffer(name, computes if name in ("logsumexp", "terms") else dtype, math.prod(size))
        for name, size in sizes.items()
    ]
    outputs = [Buffer("grad_key", dtype, 2 * keys * width), Buffer("grad_value", dtype, 2 * keys * columns),
               Buffer("total", computes, 2 * keys)]  # fmt: skip
    return body.finish([head, row, column, value_column], [inner, value_inner, group, query], inputs, outputs)


def update_kernel(rows: int = 20, keys: int = 35, width: int = 5, dtype: torch.dtype = F32) -> Kernel:
    """Returns a kernel of sums over scores: it adds numbers of scores to tables by distance, key and head.

    It stores a weighted sum of each row and column, too; additions happen once for all columns.
    """
    body = KernelBuilder()
    head, row, column, inner, key = (
        Axis("p0", 2),
        Axis("p1", rows),
        Axis("p2", width),
        Axis("r0", width),
        Axis("r1", keys),
    )
    at_row, at_key = linearize_index((head, row, inner), (2, rows, width)), (head, key, inner)
    (score,) = body.reduce(
        "sum", body.load("query", at_row, dtype) * body.load("key", linearize_index(at_key, (2, keys, width)), dtype),
        [inner],
    )  # fmt: skip
    mask = body.index(row) >= body.index(key) - 2
    weights = mask.where(score.tanh(), 0.0)
    other = body.load("key", linearize_index((head, key, column), (2, keys, width)), dtype)
    (weighted,) = body.reduce("sum", weights * other, [key])
    (total,) = body.reduce("sum", weights * 2.0, [key])  # a sum of weights: no column varies along it
    body.store("out", linearize_index((head, row, column), (2, rows, width)), weighted)
    first = body.index(column).equals(0)
    distance = body.indirect_index(body.index(row) - body.index(key) + keys, rows + keys)
    body.store("by_distance", distance, weights, mask & first, "add")
    body.store(
        "by_key", as_index(key), weights, mask & first & (body.index(key) < body.index(as_index(keys - 3))), "add"
    )
    body.store("by_head", as_index(head), total, first, "add")
    body.store("by_row", as_index(row), total, first, "add")
    inputs = [Buffer("query", dtype, 2 * rows * width), Buffer("key", dtype, 2 * keys * width)]
    outputs = [
        Buffer(name, dtype, extent)
        for name, extent in {
            "out": 2 * rows * width, "by_distance": rows + keys, "by_key": keys, "by_head": 2, "by_row": rows
        }.items()
    ]  # fmt: skip
    return body.finish([head, row, column], [inner, key], inputs, outputs)
