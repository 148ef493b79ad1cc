"""Attention as a kernel of the loop IR, for tests of the loop IR and of its printers."""

from __future__ import annotations

import math

import torch

from fxwrap.loop_ir import Axis, Buffer, Kernel, KernelBuilder, as_index, linearize_index

F32 = torch.float32


def attention_kernel(
    heads: int = 2, rows: int = 20, keys: int = 35, width: int = 5, columns: int = 3, dtype: torch.dtype = F32
) -> Kernel:
    """Returns causal attention with a linear bias, which stores the output and the log-sum-exp of each row."""
    body = KernelBuilder()
    head, row, column = Axis("p0", heads), Axis("p1", rows), Axis("p2", columns)
    inner, key = Axis("r0", width), Axis("r1", keys)
    computes = torch.float64 if dtype is torch.float64 else F32
    query = body.load("query", linearize_index((head, row, inner), (heads, rows, width)), dtype).to(computes)
    other = body.load("key", linearize_index((head, key, inner), (heads, keys, width)), dtype).to(computes)
    (score,) = body.reduce("sum", query * other, [inner])
    bias = body.load("slopes", as_index(head), computes) * (body.index(key) - body.index(row)).to(computes)
    scores = (body.index(row) >= body.index(key) - 2).where(score + bias, -math.inf)
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
    ]  # fmt: skip
    outputs = [Buffer("out", dtype, heads * rows * columns), Buffer("logsumexp", computes, heads * rows)]
    return body.finish([head, row, column], [inner, key], inputs, outputs)
