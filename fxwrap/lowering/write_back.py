"""Writes at computed places that end in an input: functionalised graphs compute them on copies, and copy the last back.

`index_put(x, ...)` followed by `copy_(x, ...)` is `index_put_(x, ...)` again, where nothing can tell the two apart: the
update of a cache then costs what is written, and no copies of the cache.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from fxwrap.lowering.effects import has_effect
from fxwrap.lowering.operators import IN_PLACE_FORMS, operator_facts, operator_name
from fxwrap.torch_compat import OpOverload, operator_overload, storage_identity


def with_writes_in_place(graph_module: GraphModule, kept: Collection[str] = ()) -> GraphModule:
    """Returns a graph whose writes at computed places are in place where they end in an input, or the graph itself.

    `kept` are overloads, "aten.index_put.default", that stay as they are. The graph given is not changed.
    """
    copies = [node for node in graph_module.graph.nodes if node.target is torch.ops.aten.copy_.default]
    candidates = [found for node in copies if (found := _chain(node, kept)) is not None]
    if not candidates:
        return graph_module
    position = {node: number for number, node in enumerate(graph_module.graph.nodes)}
    chains = [chain for chain in candidates if _is_in_place(chain, position)]
    return GraphModule(graph_module, _rewritten(graph_module.graph, chains)) if chains else graph_module


@dataclass(frozen=True)
class _Chain:
    """Calls that each write at computed places into a copy of the one before, the first into a copy of `base`, and the
    copy of the last into the base."""

    base: Node
    writes: tuple[Node, ...]
    copy: Node


def _chain(copy: Node, kept: Collection[str]) -> _Chain | None:
    """Returns the chain that ends in a copy into an input, or None."""
    if len(copy.args) != 2 or copy.kwargs:
        return None
    base, last = copy.args
    writes: list[Node] = []
    while isinstance(last, Node) and last is not base:
        name = operator_name(last.target) if isinstance(last.target, OpOverload) else ""
        if name not in IN_PLACE_FORMS or name in kept or not last.args or (writes and len(last.users) != 1):
            return None
        writes.insert(0, last)
        last = last.args[0]
    if not writes or not isinstance(base, Node) or base.op != "placeholder":
        return None
    return _Chain(base, tuple(writes), copy)


def _is_in_place(chain: _Chain, position: Mapping[Node, int]) -> bool:
    """Whether nothing can tell that the writes are in place: who reads the base's memory, who writes it, layouts."""
    first, last = position[chain.writes[0]], chain.writes[-1]
    shown = set().union(*[_in_memory_of(node) for node in position if _on_storage_of(chain.base, node)])
    result = _in_memory_of(last)
    if not all(_same_layout(chain.base, write) for write in chain.writes):
        return False
    for write in chain.writes:
        if any(operand in shown for operand in _operands(write)):
            return False
    for user in _users(shown):
        own = user in (chain.writes[0], chain.copy)
        if not own and (has_effect(user) or first < position[user] < position[chain.copy]):
            return False
    return not any(user.op == "output" or (has_effect(user) and user is not chain.copy) for user in _users(result))


def _in_memory_of(node: Node) -> set[Node]:
    """Returns the nodes whose results may be in the memory of a node's, itself included."""
    found, pending = {node}, [node]
    while pending:
        for user in pending.pop().users:
            if user not in found and _may_show_operands(user):
                found.add(user)
                pending.append(user)
    return found


def _on_storage_of(base: Node, node: Node) -> bool:
    """Whether a node is an input in the memory of another, itself included."""
    if node.op != "placeholder":
        return False
    own, other = base.meta.get("val"), node.meta.get("val")
    if not isinstance(own, torch.Tensor) or not isinstance(other, torch.Tensor):
        return node is base
    return storage_identity(own) == storage_identity(other)


def _may_show_operands(node: Node) -> bool:
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, OpOverload):
        return False
    facts = operator_facts(node.target)
    exact = node.target.namespace in ("aten", "prims")
    return facts.aliased is not None or facts.replacement is not None or bool(facts.written) or not exact


def _users(nodes: Collection[Node]) -> Iterator[Node]:
    for node in nodes:
        yield from node.users


def _operands(write: Node) -> Sequence[Node]:
    """Returns the nodes that a call is given besides what it writes into a copy of."""
    found: list[Node] = []
    torch.fx.map_arg((write.args[1:], write.kwargs), found.append)
    return found


def _same_layout(base: Node, write: Node) -> bool:
    """Whether a result has the sizes and layout of the base, which has no two elements in one place."""
    before, after = base.meta.get("val"), write.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    strides = before.stride()
    overlaps = any(type(stride) is int and stride == 0 for stride in strides)
    alike = str((before.shape, strides)) == str((after.shape, after.stride()))  # without guards on symbols
    return alike and not overlaps


def _rewritten(graph: Graph, chains: Sequence[_Chain]) -> Graph:
    base_of = {write: chain.base for chain in chains for write in chain.writes}
    copies = {chain.copy: chain.writes[-1] for chain in chains}
    made, found = Graph(), dict[Node, Node]()
    for node in graph.nodes:
        if node in copies:
            found[node] = found[copies[node]]
        elif node in base_of:
            target = operator_overload(IN_PLACE_FORMS[operator_name(node.target)])
            found[node] = made.node_copy(node, found.__getitem__)
            found[node].target = target
            found[node].args = (found[base_of[node]], *found[node].args[1:])
        else:
            found[node] = made.node_copy(node, found.__getitem__)
    return made
