"""Editing of a traced step's graph."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch.fx import GraphModule, Node

from fxwrap.fx_passes.effects import storage_of
from fxwrap.torch_compat import OpOverload, rename_node
from fxwrap.wrapper_ir.operators import operator_schema


def erase_profiler_ranges(graph_module: GraphModule) -> None:
    """Removes the profiler's ranges that optimizers open around a step."""
    for node in reversed(list(graph_module.graph.nodes)):
        if node.op == "call_function" and getattr(node.target, "namespace", "") == "profiler":
            graph_module.graph.erase_node(node)
    graph_module.recompile()


def write_early(graph_module: GraphModule) -> None:
    """Moves each write of an input, with the operators that compute its new value, to the last node that they need.

    So an update follows the gradient that it reads, which is freed there, as new values are early. An update that needs
    the result of a collective stays behind the backward: it would end the time in which the collective can be in
    flight; only its write moves. So does that of a vector, whose small gradient is a sum that fuses with others.
    Readers of the old content are before the write.
    """
    graph = graph_module.graph
    order = {node: (position, 0) for position, node in enumerate(graph.nodes)}
    moved = 0
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        target, value = node.args[0], node.args[1]
        if node.users or target.op != "placeholder":
            continue
        update = _update(value)
        others = {*_readers(target, node), *[item for member in update for item in member.all_input_nodes]} - update
        last = max([*others, target], key=order.__getitem__)
        if not update or last.target is _WAIT or value.meta["val"].ndim < 2:
            update, last = set(), max([*_readers(target, node), value, target], key=order.__getitem__)
        if last.op == "placeholder":
            continue
        later = [item for item in update if order[item][0] > order[last][0]]
        for member in [*sorted(later, key=order.__getitem__), node]:
            moved += 1
            order[member] = (order[last][0], moved)
    _reorder(graph_module, order)


_WAIT = torch.ops._c10d_functional.wait_tensor.default


def _update(value: Node) -> set[Node]:
    """Returns the operators on single elements and on numbers that compute a new value, with the views between them."""
    update, pending = set[Node](), [value]
    while pending:
        node = pending.pop()
        if node not in update and node.op == "call_function" and _is_elementwise(node):
            update.add(node)
            pending += node.all_input_nodes
    return update


_SAME_ELEMENTS = frozenset({
    torch.ops.aten.detach.default, torch.ops.aten.alias.default,  # as torch 2.15 writes it
    torch.ops.aten._local_scalar_dense.default,  # reads a counter of the optimizer
})  # fmt: skip


def _is_elementwise(node: Node) -> bool:
    if node.target in _SAME_ELEMENTS:
        return True
    if not isinstance(node.target, OpOverload):
        return isinstance(node.meta.get("val"), int | float | torch.SymInt | torch.SymFloat)
    return torch.Tag.pointwise in node.target.tags and operator_schema(node.target).is_pure


def _reorder(graph_module: GraphModule, order: Mapping[Node, tuple[int, int]]) -> None:
    """Puts the nodes of a graph in an order."""
    first, *others = sorted(graph_module.graph.nodes, key=order.__getitem__)
    for node in others:
        first.append(node)
        first = node
    graph_module.recompile()


def _readers(target: Node, write: Node) -> set[Node]:
    """Returns the nodes that read an input or a view of it, apart from its write."""
    readers, pending = set(), [target]
    storage = storage_of(target)
    while pending:
        for user in pending.pop().users:
            if user is not write and user not in readers:
                readers.add(user)
                if storage is None or storage_of(user) == storage:
                    pending.append(user)
    return readers


def rename_inputs(graph_module: GraphModule, names: Sequence[str]) -> None:
    """Names the inputs of a graph, as far as the names are valid in code."""
    for node, name in zip(graph_module.graph.find_nodes(op="placeholder"), names, strict=True):
        rename_node(node, re.sub(r"\W+", "_", name))
    graph_module.recompile()
