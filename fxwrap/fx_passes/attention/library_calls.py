"""Calls of a library's attention: their arguments and biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from fxwrap.fx_passes.attention.elements import FREE_VIEWS, filled_value
from fxwrap.fx_passes.effects import name_of
from fxwrap.fx_passes.graph_copy import GraphCopy
from fxwrap.fx_passes.prepared_graph import NodeValues
from fxwrap.torch_compat import FakeTensor, arguments_by_name

_aten = torch.ops.aten

_LIBRARY_CALLS = frozenset({
    _aten._scaled_dot_product_cudnn_attention.default, _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention.default, _aten._scaled_dot_product_flash_attention_for_cpu.default,
})  # fmt: skip


_HIDDEN = -65504.0
"""The score that torch adds for False of a boolean mask of cuDNN's attention, before a version in which it is infinite.

Rows whose keys are all hidden then attend to all of them, which is torch's issue 177842. In float16, it may be the
lowest number, by which a model masks.
"""


def library_arguments(node: Node) -> dict[str, Any] | None:
    """Returns the arguments of a library's attention by parameter name; None for other nodes."""
    return arguments_by_name(node) if node.target in _LIBRARY_CALLS else None


def bias_of(arguments: Mapping[str, Any]) -> Node | None:
    """Returns the tensor that is added to the scores, if there is one."""
    bias: Node | None = arguments.get("attn_bias", arguments.get("attn_mask"))
    return bias


def hidden_number(node: Node, fakes: NodeValues) -> Node | None:
    """Returns the constant by which torch's conversion of a boolean mask hides keys from a call; None for others."""
    item = bias_of(library_arguments(node) or {})
    if node.target is not _aten._scaled_dot_product_cudnn_attention.default or item is None:
        return None
    while name_of(item) in FREE_VIEWS and isinstance(item.args[0], Node):
        item = item.args[0]
    if item.target is not _aten.where.self or fakes[item].dtype is not torch.bfloat16:
        return None
    numbers = {filled_value(part): part for part in item.args[1:] if isinstance(part, Node)}
    return numbers[_HIDDEN] if numbers.keys() == {0, _HIDDEN} else None


def is_readable(bias: FakeTensor, query: FakeTensor) -> bool:
    """Whether scores can be read from a bias: numbers on the same device."""
    return bias.dtype.is_floating_point and 2 <= bias.ndim <= 4 and bias.device == query.device


def without_broadcasts(copy: GraphCopy, before: Node, bias: Node, name: str) -> Node:
    """Returns a bias with one element along the dimensions whose stride is 0."""
    fake = copy.fakes[bias]
    for dim in range(fake.ndim):
        if fake.stride(dim) == 0 and fake.shape[dim] != 1:
            bias = copy.call(before, _aten.slice.Tensor, (bias, dim, 0, 1), name)
    return bias
