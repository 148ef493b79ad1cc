"""Indices in the joint graph of training that are computed from positions alone: the backward computes its own.

The gradient of an interpolation adds values at the indices at which it read. torch's partitioner saves these for the
backward, where nothing is known about them. Computed there, they tell which positions have the values of an element.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from fxwrap.fx_passes.effects import is_movable
from fxwrap.fx_passes.training.joint_backward import have_static_sizes, with_fake

_aten = torch.ops.aten

_MAX_NODES = 32
"""Longer computations of indices are not repeated."""


def compute_known_indices(joint: GraphModule) -> GraphModule:
    """Copies what computes the indices of a sum from no input, in place, for the sum alone; returns the graph.

    torch's partitioner may compute elements at indices again, `index`, but not those of interpolations,
    `_unsafe_index`. It should, unless they are several corners, whose kernel takes longer than to load its result.
    """
    for node in joint.graph.find_nodes(op="call_function", target=_aten._unsafe_index.Tensor):
        if sum(user.target is node.target for user in node.args[0].users) == 1:
            node.target = _aten.index.Tensor
    for target in (_aten._unsafe_index_put.default, _aten.index_put.default):
        for node in joint.graph.find_nodes(op="call_function", target=target):
            if len(node.args) > 3 and node.args[3]:
                _copy_indices(node)
    return joint


def _copy_indices(node: Node) -> None:
    """Gives a sum copies of its indices, if nothing but positions and numbers is in them."""
    indices: list[Node] = [item for item in node.args[1] if isinstance(item, Node)]  # type: ignore[union-attr]
    sources = _sources(indices)
    if not sources:
        return
    copies: dict[Node, Node] = {}
    with node.graph.inserting_before(node):
        for source in sources:
            copies[source] = with_fake(node.graph.node_copy(source, copies.__getitem__), source)
    node.args = (node.args[0], [copies.get(item, item) for item in node.args[1]], *node.args[2:])  # type: ignore[union-attr, arg-type]


def _sources(indices: list[Node]) -> list[Node]:
    """Returns the calls that compute tensors, in order; none if they read an input, or are many."""
    seen, pending = set[Node](), [*indices]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        if not have_static_sizes(node) or node.op != "call_function" or not is_movable(node) or len(seen) == _MAX_NODES:
            return []
        seen.add(node)
        pending += node.all_input_nodes
    return sorted(seen)
