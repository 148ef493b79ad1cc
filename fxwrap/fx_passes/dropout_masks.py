"""Dropout on CPUs: its mask is drawn alone, and its result is computed by operators that fuse.

torch's operator draws the mask, multiplies by it, and multiplies by the scale: two passes over data that kernels
around it read and write anyway.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from fxwrap.fx_passes.graph_copy import GraphCopy, is_contiguous
from fxwrap.fx_passes.prepared_graph import FxPassContext, PreparedGraph
from fxwrap.torch_compat import FakeTensor

_aten = torch.ops.aten
_DROPOUT = _aten.native_dropout.default


def draw_dropout_masks(graph: PreparedGraph, context: FxPassContext) -> PreparedGraph:
    """Returns a graph in which dropout on CPUs is a product of its operand, a mask of eager's numbers and the scale."""
    if str(_DROPOUT) in context.extern_operators:
        return graph
    calls = [node for node in graph.nodes if node.target is _DROPOUT and _is_drawn(node, graph)]
    if not calls:
        return graph
    copy = GraphCopy(graph)
    for node in calls:
        _replace(copy, node)
    return copy.finish()


def _is_drawn(node: Node, graph: PreparedGraph) -> bool:
    """Whether a dropout on a CPU drops some elements; `bernoulli` returns contiguous masks only."""
    probability, mask = node.args[1], graph.fakes[node][1]
    return (
        mask.device.type == "cpu"
        and isinstance(probability, float)
        and 0 < probability < 1
        and node.args[2] is not False
        and is_contiguous(mask)
        and all(user.target is operator.getitem for user in node.users)
    )


def _replace(copy: GraphCopy, node: Node) -> None:
    before, name = copy.node_map[node], node.name
    source: Node = before.args[0]  # type: ignore[assignment]
    probability: float = node.args[1]  # type: ignore[assignment]
    mask = drawn_mask(copy, before, copy.fakes[before][1], 1.0 - probability, name)
    for user in node.users:
        result = mask
        if user.args[1] == 0:
            product = copy.call(before, _aten.mul.Tensor, (source, mask), name)
            result = copy.call(before, _aten.mul.Tensor, (product, 1.0 / (1.0 - probability)), name)
        copy.substitute(user, result, "fused")
    copy.erase(node)


def drawn_mask(copy: GraphCopy, before: Node, like: FakeTensor, probability: float, name: str) -> Node:
    """Returns a mask that is true with a probability, as `native_dropout` on CPUs draws a contiguous one."""
    keywords = {"dtype": torch.bool, "device": like.device}
    sizes = copy.size_arguments(before, like.shape)
    unused = copy.call(before, _aten.empty.memory_format, (sizes,), name, keywords)
    return copy.call(before, _aten.bernoulli.p, (unused, probability), name)
