"""Fake results of pointwise calls in another layout, without torch's Python implementations of the operators."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from fxwrap.fx_passes.graph_copy import expressions_of, fresh_like, is_dense, items_of
from fxwrap.fx_passes.prepared_graph import NodeValues
from fxwrap.torch_compat import FakeTensor, OpOverload, symbol_bounds, without_guards

_NORMALIZATIONS = frozenset({
    "aten._native_batch_norm_legit_functional.default", "aten._native_batch_norm_legit_no_training.default",
    "aten.native_batch_norm_backward.default",
})  # fmt: skip
"""Pointwise operators but for statistics, vectors of a channel each."""

_UNTAGGED = frozenset({
    "aten._to_copy.default", "aten.hardsigmoid_backward.default", "aten.hardswish.default",
    "aten.hardswish_backward.default", "aten.hardtanh_backward.default", "aten.leaky_relu.default",
    "aten.leaky_relu_backward.default",
})  # fmt: skip
"""Pointwise operators that torch 2.11 does not tag as such."""

_CONTIGUOUS = frozenset({"aten.masked_fill.Scalar", "aten.mvlgamma.default", "aten.native_dropout_backward.default"})
"""Pointwise operators whose fake results are contiguous in some layouts of their operands."""


def pointwise_results(node: Node, fakes: NodeValues, like: object) -> Any:
    """Returns the fake result of a pointwise call or batch norm whose operands all have one dense layout; else None.

    `like` is the result for operands of the same sizes and dtypes in another layout. Torch computes the strides of a
    result from those of all operands, by a Python implementation of the operator, which takes milliseconds. They are
    the strides of the operands if these are equal and leave no choice: no dimension of size 1 or 0 and no gap.
    """
    items = items_of(like)
    is_norm = str(node.target) in _NORMALIZATIONS
    if not (is_norm or (len(items) == 1 and _is_pointwise(node))):
        return None
    tensors = [fakes[operand] for operand in node.all_input_nodes]
    if not all(isinstance(item, FakeTensor) and item.layout is torch.strided for item in (*tensors, *items)):
        return None
    shapes = {id(item): expressions_of(item.shape) for item in (*tensors, *items)}
    shape = shapes[id(items[0])]
    whole = [item for item in tensors if shapes[id(item)] == shape]
    if not whole or not decides_strides(whole[0]):
        return None
    if len({tuple(expressions_of(item.stride())) for item in whole}) != 1:
        return None
    if any(shapes[id(item)] != shape and item.ndim > (1 if is_norm else 0) for item in tensors):
        return None
    mode, strides = items[0].fake_mode, whole[0].stride()
    with without_guards(mode):
        results = [fresh_like(mode, item, strides if shapes[id(item)] == shape else None) for item in items]
    return tuple(results) if isinstance(like, tuple) else results[0]


def decides_strides(fake: FakeTensor) -> bool:
    """Whether the strides of a first operand leave no choice for those of a result of the same sizes."""
    return fake.ndim > 0 and all(_least(size) >= 2 for size in fake.shape) and is_dense(fake)


def _least(size: int | torch.SymInt) -> float:
    """Returns the lower bound of a size. Installs no guard."""
    least = symbol_bounds(size)[0] if isinstance(size, torch.SymInt) else size
    return 0 if least is None else least


def _is_pointwise(node: Node) -> bool:
    """Whether each element of a call's result is computed from those of its operands, in no memory format named."""
    if not isinstance(node.target, OpOverload) or node.kwargs.get("memory_format") is not None:
        return False
    if str(node.target) in _CONTIGUOUS:
        return False
    return torch.Tag.pointwise in node.target.tags or str(node.target) in _UNTAGGED
