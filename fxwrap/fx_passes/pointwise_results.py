"""Fake results of pointwise calls in another layout, without torch's Python implementations of the operators."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from fxwrap.fx_passes.graph_copy import fresh_like, is_dense, items_of, layout_text
from fxwrap.fx_passes.prepared_graph import NodeValues
from fxwrap.torch_compat import FakeTensor, OpOverload

_aten = torch.ops.aten
_NORMALIZATIONS = frozenset({
    "aten._native_batch_norm_legit_functional.default", "aten._native_batch_norm_legit_no_training.default",
    "aten.native_batch_norm_backward.default",
})  # fmt: skip
"""Pointwise operators but for statistics, vectors of a channel each."""

_CONTIGUOUS = frozenset({"aten.masked_fill.Scalar", "aten.mvlgamma.default", "aten.native_dropout_backward.default"})
"""Pointwise operators whose fake results are contiguous in some layouts of their operands."""


def pointwise_results(node: Node, fakes: NodeValues, like: object) -> Any:
    """Returns the fake result of a pointwise call or batch norm whose operands all have one dense layout; else None.

    `like` is the result for operands of the same sizes and dtypes in another layout. Torch computes the strides of a
    result from those of all operands, by a Python implementation of the operator, which takes milliseconds. They are
    the strides of the operands if these are equal and leave no choice: no dimension of size 1 or 0 and no gap.
    """
    items = items_of(like)
    shape = items[0].shape if isinstance(items[0], FakeTensor) else ()
    is_norm = str(node.target) in _NORMALIZATIONS
    if not (is_norm or (len(items) == 1 and _is_pointwise(node))) or not shape:
        return None
    tensors = [fakes[operand] for operand in node.all_input_nodes]
    if any(layout_text(item) is None for item in (*tensors, *items)):
        return None
    whole = [item for item in tensors if item.shape == shape]
    if len({item.stride() for item in whole}) != 1 or any(size < 2 for size in shape) or not is_dense(whole[0]):
        return None
    if any(item.shape != shape and item.ndim > (1 if is_norm else 0) for item in tensors):
        return None
    mode, strides = items[0].fake_mode, whole[0].stride()
    results = [fresh_like(mode, item, strides if item.shape == shape else None) for item in items]
    return tuple(results) if isinstance(like, tuple) else results[0]


def _is_pointwise(node: Node) -> bool:
    """Whether each element of a call's result is computed from those of its operands, in no memory format named."""
    if not isinstance(node.target, OpOverload) or node.kwargs.get("memory_format") is not None:
        return False
    if str(node.target) in _CONTIGUOUS:
        return False
    return torch.Tag.pointwise in node.target.tags or node.target is _aten._to_copy.default
