"""Permutations of permutations become one: `einsum` permutes operands to a common order, and matmuls permute back."""

from __future__ import annotations

import torch
from torch.fx import Node

from fxwrap.fx_passes.attention.nodes import permutation
from fxwrap.fx_passes.graph_copy import GraphCopy
from fxwrap.fx_passes.prepared_graph import PreparedGraph


def compose_permutations(graph: PreparedGraph) -> PreparedGraph:
    """Returns a graph in which a tensor that is permuted several times is permuted once, or read as it is."""
    orders: dict[Node, tuple[Node, list[int]]] = {}
    composed: set[Node] = set()
    for node in graph.nodes:
        order = permutation(node, graph.fakes)
        if order is None:
            continue
        source: Node = node.args[0]  # type: ignore[assignment]
        if source in orders:
            source, before = orders[source]
            order = [before[dim] for dim in order]
            composed.add(node)
        orders[node] = source, order
    if not composed:
        return graph
    copy = GraphCopy(graph)
    for node, (source, order) in orders.items():
        if node.users and composed.issuperset(node.users):
            copy.erase(node)
        elif node in composed:
            result = copy.node_map[source]
            if order != sorted(order) or any(user.op == "output" for user in node.users):
                result = copy.call(copy.node_map[node], torch.ops.aten.permute.default, (result, order), node.name)
            copy.substitute(node, result)
    return copy.finish()
