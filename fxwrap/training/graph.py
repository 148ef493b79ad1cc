"""Editing of a traced step's graph."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

from fxwrap.torch_compat import rename_node, storage_identity


def erase_profiler_ranges(graph_module: GraphModule) -> None:
    """Removes the profiler's ranges that optimizers open around a step."""
    for node in reversed(list(graph_module.graph.nodes)):
        if node.op == "call_function" and getattr(node.target, "namespace", "") == "profiler":
            graph_module.graph.erase_node(node)
    graph_module.recompile()


def write_early(graph_module: GraphModule) -> None:
    """Moves each write of an input to the last reader of its old content, so that new values die early."""
    graph = graph_module.graph
    order = {node: position for position, node in enumerate(graph.nodes)}
    for node in list(graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)):
        target, value = node.args[0], node.args[1]
        if node.users or target.op != "placeholder":
            continue
        readers = _readers(target, node)
        last = max([*readers, value, target], key=order.__getitem__)
        if last.op == "placeholder":
            continue
        last.append(node)
        order[node] = order[last]
    graph_module.recompile()


def _readers(target: Node, write: Node) -> set[Node]:
    """Returns the nodes that read an input or a view of it, apart from its write."""
    readers, pending = set(), [target]
    storage = _storage(target)
    while pending:
        for user in pending.pop().users:
            if user is not write and user not in readers:
                readers.add(user)
                if storage is None or _storage(user) == storage:
                    pending.append(user)
    return readers


def _storage(node: Node) -> object:
    value = node.meta.get("val")
    return storage_identity(value) if isinstance(value, torch.Tensor) else None


def rename_inputs(graph_module: GraphModule, names: Sequence[str]) -> None:
    """Names the inputs of a graph, as far as the names are valid in code."""
    for node, name in zip(graph_module.graph.find_nodes(op="placeholder"), names, strict=True):
        rename_node(node, re.sub(r"\W+", "_", name))
    graph_module.recompile()
