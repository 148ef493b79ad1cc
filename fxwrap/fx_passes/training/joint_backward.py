"""The backward in the joint graph of training: which nodes it has, and results that it computes again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from torch.fx import GraphModule, Node

from fxwrap.fx_passes.effects import name_of
from fxwrap.fx_passes.graph_copy import run_on_fakes
from fxwrap.fx_passes.prepared_graph import Target
from fxwrap.options import Options
from fxwrap.torch_compat import FakeTensor

CHAINED = frozenset({
    "alias", "clone", "convert_element_type", "detach", "expand", "permute", "select", "slice", "squeeze", "t",
    "to_copy", "transpose", "unsafe_view", "unsqueeze", "view",
})  # fmt: skip
"""Views and copies, by name: the backward may read a result through a chain of them."""


def operators_of_options(options: Options) -> set[str]:
    """Returns the overloads that a user keeps, lowers or decomposes, such as "aten.native_dropout.default"."""
    return {*options.preserve_ops, *options.lowerings, *map(str, options.decompositions or ())}


def backward_nodes(joint: GraphModule) -> set[Node]:
    """Returns the nodes that depend on a tangent: an input that is the gradient of an output."""
    backward: set[Node] = set()
    for node in joint.graph.nodes:
        is_tangent = node.op == "placeholder" and "tangents" in str(node.target)
        if is_tangent or not backward.isdisjoint(node.all_input_nodes):
            backward.add(node)
    return backward - {joint.graph.output_node()}


def redirect_backward(
    result: Node, backward: set[Node], compute: Callable[[], Node], reads: Callable[[Node], bool] = lambda _user: True
) -> None:
    """Lets the backward read what `compute` inserts instead of a result, itself or through views and copies.

    `reads` selects users in the backward; others keep the result.
    """

    def selected(chain: tuple[Node, ...]) -> list[Node]:
        return [user for user in chain[-1].users if user in backward and reads(user)]

    users = {chain: selected(chain) for chain in _chains(result, backward)}
    users = {chain: selected for chain, selected in users.items() if selected}
    if not users or not isinstance(result.meta.get("val"), FakeTensor):
        return
    graph = result.graph
    with graph.inserting_before(min(user for selected in users.values() for user in selected)):
        copies = {result: compute()}
        for chain in users:
            for before, node in pairwise(chain):
                if node not in copies:
                    copy = graph.node_copy(node, lambda _, operand=copies[before]: operand)  # type: ignore[misc]
                    copies[node] = with_fake(copy, node)
    for chain, selected_users in users.items():
        for user in selected_users:
            user.replace_input_with(chain[-1], copies[chain[-1]])


def _chains(node: Node, backward: set[Node]) -> Iterator[tuple[Node, ...]]:
    """Yields a node's chains of views and copies in the forward, shorter ones first."""
    yield (node,)
    for user in node.users:
        if user not in backward and name_of(user) in CHAINED and user.all_input_nodes == [node]:
            yield from ((node, *chain) for chain in _chains(user, backward))


def call_like(like: Node, target: Target, *arguments: Any, **keywords: Any) -> Node:
    """Adds a call at the graph's point of insertion, with the metadata of another and a fake value of its own."""
    return with_fake(like.graph.call_function(target, arguments, keywords), like)


def with_fake(node: Node, like: Node) -> Node:
    """Gives a new call the metadata of another, with its own fake value; returns it."""
    fakes = {operand: operand.meta["val"] for operand in node.all_input_nodes}
    node.meta = {**like.meta, "val": run_on_fakes(node, fakes, like.meta["val"])}
    return node


def have_static_sizes(*nodes: Node) -> bool:
    """Whether nodes are tensors of known sizes."""
    fakes = [node.meta.get("val") for node in nodes]
    return all(isinstance(fake, FakeTensor) and all(type(size) is int for size in fake.shape) for fake in fakes)
