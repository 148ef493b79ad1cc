"""Dropout in the joint graph of training: the backward computes its result again from the mask.

torch's partitioner does not recompute random operators. If the backward reads the result of a dropout, as a matmul's
does, it saves that beside the mask, although the gradient of the dropout needs the mask anyway and the operand is saved
or cheap: for attention weights the largest tensors of a layer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxwrap.fx_passes.effects import name_of
from fxwrap.fx_passes.graph_copy import run_on_fakes
from fxwrap.fx_passes.prepared_graph import Target
from fxwrap.options import Options
from fxwrap.torch_compat import FakeTensor

_aten = torch.ops.aten
_DROPOUT = _aten.native_dropout.default
CHAINED = frozenset({
    "alias", "clone", "convert_element_type", "detach", "expand", "permute", "select", "slice", "squeeze", "t",
    "to_copy", "transpose", "unsafe_view", "unsqueeze", "view",
})  # fmt: skip
"""Views and copies, by name: the backward may read a dropout's result through a chain of them."""


def recompute_dropout(joint: GraphModule, options: Options) -> GraphModule:
    """Lets the backward read dropouts through multiplications of their operands by their masks, in place.

    The forward reads the dropouts' own results, and the partitioner decides whether the products are saved or computed
    in the backward. Returns the graph.
    """
    if str(_DROPOUT) in {*options.preserve_ops, *options.lowerings, *map(str, options.decompositions or ())}:
        return joint
    backward = backward_nodes(joint)
    for node in joint.graph.find_nodes(op="call_function", target=_DROPOUT):
        parts = {part.args[1]: part for part in node.users if part.target is operator.getitem}
        if 0 in parts and isinstance(node.args[1], float) and 0 < node.args[1] < 1 and node.args[2] is not False:
            redirect_backward(parts[0], backward, partial(_product, node, parts[0]))
    joint.recompile()
    return joint


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


def _product(dropout: Node, result: Node) -> Node:
    """Returns the dropout's operand times its mask and scale, computed in float32 for half precision."""
    operand, probability = dropout.args[0], dropout.args[1]
    assert isinstance(operand, Node) and isinstance(probability, float)
    dtype = result.meta["val"].dtype

    def call(target: Target, *arguments: Any, **keywords: Any) -> Node:
        return with_fake(dropout.graph.call_function(target, arguments, keywords), result)

    mask = call(operator.getitem, dropout, 1)
    is_half = dtype in (torch.float16, torch.bfloat16)
    product = call(_aten._to_copy.default, operand, dtype=torch.float32) if is_half else operand
    product = call(_aten.mul.Tensor, call(_aten.mul.Tensor, product, mask), 1 / (1 - probability))
    return call(_aten._to_copy.default, product, dtype=dtype) if is_half else product


def with_fake(node: Node, like: Node) -> Node:
    """Gives a new call the metadata of another, with its own fake value; returns it."""
    fakes = {operand: operand.meta["val"] for operand in node.all_input_nodes}
    node.meta = {**like.meta, "val": run_on_fakes(node, fakes, like.meta["val"])}
    return node
