"""In-place calls on tensors that the graph computes become calls with results, as functionalisation makes them.

AOTAutograd and `torch.export` functionalise graphs. In one of plain `make_fx`, an in-place operator is a call that no
kernel computes, and its result matches no pattern of another pass.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from fxwrap.fx_passes.graph_copy import GraphCopy, can_propagate_fake, fake_call, same_layout, storages_of
from fxwrap.fx_passes.prepared_graph import FxPassContext, NodeValues, PreparedGraph
from fxwrap.fx_passes.storage_aliases import nodes_by_storage
from fxwrap.torch_compat import OpOverload, functional_of_in_place
from fxwrap.wrapper_ir.operators import operator_name


def replace_in_place_calls(graph: PreparedGraph, context: FxPassContext) -> PreparedGraph:
    """Returns a graph in which in-place operators on single elements return their results, where nothing else sees it.

    They mutate an intermediate of the graph, and later reads of its memory go through their results. An operator whose
    functional form does not fuse, or has another dtype or other strides, stays, and so do those of `preserve_ops` and
    `lowerings`.
    """
    targets = {node: target for node in graph.nodes if (target := _functional(node, context)) is not None}
    if not targets:
        return graph
    copy, fakes = GraphCopy(graph), graph.fakes
    positions = {node: position for position, node in enumerate(graph.nodes)}
    on_storage = nodes_by_storage(graph.nodes, fakes)
    for node, target in targets.items():
        aliases = [alias for storage in storages_of(fakes[node]) for alias in on_storage[storage]]
        if _is_private(node, aliases, positions, fakes):
            arguments: Any
            arguments, keywords = map_arg((node.args, node.kwargs), fakes.__getitem__)
            result = fake_call(target, arguments, keywords)
            if result.dtype == fakes[node].dtype and same_layout(result, fakes[node]):
                copy.retarget(node, target, result)
    return copy.finish()


def _functional(node: Node, context: FxPassContext) -> OpOverload | None:
    """Returns the functional overload of an in-place call that computes elements from elements."""
    if not isinstance(node.target, OpOverload):
        return None
    name = operator_name(node.target)
    target = functional_of_in_place(name)
    if target is None or str(target) not in context.fused_operators or name in context.extern_operators:
        return None
    is_random = torch.Tag.nondeterministic_seeded in target.tags
    return target if torch.Tag.pointwise in target.tags and not is_random else None


def _is_private(node: Node, aliases: Sequence[Node], positions: Mapping[Node, int], fakes: NodeValues) -> bool:
    """Whether the graph computes the memory that a call overwrites, and reads it afterwards through its result only."""
    derived = {node}
    for alias in aliases:
        if alias.op != "call_function" or not can_propagate_fake(alias):
            return False
        if not derived.isdisjoint(alias.all_input_nodes):
            derived.add(alias)
    storages = storages_of(fakes[node])
    return not any(
        positions[user] > positions[node] and not _reads_another(user, storages, fakes)
        for alias in aliases if alias not in derived for user in alias.users
    )  # fmt: skip


def _reads_another(user: Node, storages: set[int], fakes: NodeValues) -> bool:
    """Whether a node reads another tensor of a tuple."""
    return user.target is operator.getitem and storages.isdisjoint(storages_of(fakes.get(user)))
