"""Expansion of `out_dtype`, an operator whose operands are cast so that its result is computed in a wider dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from fxwrap.fx_passes.effects import operator_label
from fxwrap.fx_passes.graph_copy import GraphCopy
from fxwrap.fx_passes.prepared_graph import PreparedGraph
from fxwrap.torch_compat import PROMOTION_KINDS, HigherOrderOperator, elementwise_dtypes

_aten = torch.ops.aten


def expand_out_dtype(graph: PreparedGraph) -> PreparedGraph:
    """Returns a graph in which `out_dtype` is casts, the operator, and a cast of its result, as in eager mode."""
    calls = [node for node in graph.nodes if _is_out_dtype(node)]
    if not calls:
        return graph
    copy = GraphCopy(graph)
    for node in calls:
        copy.substitute(node, _expand(copy, node), "fused")
    return copy.finish()


def _is_out_dtype(node: Node) -> bool:
    return isinstance(node.target, HigherOrderOperator) and operator_label(node.target) == "out_dtype"


def _expand(copy: GraphCopy, node: Node) -> Node:
    before, name = copy.node_map[node], node.name
    target: Any
    dtype: Any
    target, dtype, *arguments = before.args
    tensors = [item for item in before.all_input_nodes if isinstance(copy.fakes[item], torch.Tensor)]
    fakes = [copy.fakes[item] for item in tensors]
    if target is _aten.mm.default and dtype == torch.int32 and all(fake.dtype == torch.int8 for fake in fakes):
        return copy.call(before, _aten._int_mm.default, arguments, name)
    result = torch.empty(1, dtype=dtype, device="meta")
    promoted, _ = elementwise_dtypes(*fakes, result, type_promotion_kind=PROMOTION_KINDS["DEFAULT"])

    def cast(item: Node, dtype: torch.dtype) -> Node:
        if not isinstance(copy.fakes[item], torch.Tensor) or copy.fakes[item].dtype == dtype:
            return item
        return copy.call(before, _aten._to_copy.default, (item,), name, {"dtype": dtype})

    operands: Any = map_arg(arguments, lambda item: cast(item, promoted))
    return cast(copy.call(before, target, operands, name), dtype)
