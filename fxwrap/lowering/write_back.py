"""The graph of an exported program as that of a function: what it overwrites is copied there, it has no tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxwrap.torch_compat import OpOverload, storage_identity
from fxwrap.wrapper_ir.operators import operator_facts


def without_tokens(graph_module: GraphModule, taken: Collection[str], given: Collection[int]) -> list[int]:
    """Changes a graph to one that neither takes nor gives the tokens which order effects.

    `taken` are the names of placeholders, `given` the positions of outputs. Returns the positions of the outputs left.
    """
    graph = graph_module.graph
    (output,) = graph.find_nodes(op="output")
    for node in graph.find_nodes(op="placeholder"):
        if node.name in taken:
            for user in list(node.users):
                user.args = tuple([None if item is node else item for item in user.args])
            graph.erase_node(node)
    items: list[Any] = list(output.args[0])
    left = [position for position in range(len(items)) if position not in given]
    output.args = (tuple([items[position] for position in left]),)
    graph_module.recompile()
    return left


def write_back(graph_module: GraphModule, mutations: Mapping[int, str], constants: Mapping[str, torch.Tensor]) -> None:
    """Changes a graph whose outputs overwrite placeholders to one that copies them there, and gives back the others.

    Args:
        graph_module: the graph, which is changed.
        mutations: the names of the placeholders, by the position of the output that overwrites each.
        constants: the tensors that placeholders stand for, by name, where they are known: two may be in one memory.

    All are overwritten at once: what shows memory that an earlier copy writes is copied before all of them. An output
    that also overwrites a placeholder is that placeholder, as it is in the module that torch makes of the program.
    """
    if not mutations:
        return
    graph = graph_module.graph
    (output,) = graph.find_nodes(op="output")
    placeholders = {node.name: node for node in graph.find_nodes(op="placeholder")}
    memory: dict[Node, Any] = {node: _memory(node, constants) for node in placeholders.values()}
    items: list[Any] = list(output.args[0])
    written: set[Any] = set()
    copies: list[tuple[Node, Node]] = []
    for position, name in mutations.items():
        target, value = placeholders[name], items[position]
        if value is target:
            continue
        shown = memory.get(_shown(value))
        if shown is not None and (shown in written or shown == memory[target]):
            value = _insert(output, torch.ops.aten.clone.default, (value,), _contiguous(value.meta.get("val")))
        copies.append((target, value))
        written.add(memory[target])
    ends: dict[Any, Node] = {}
    for target, value in copies:
        ends.setdefault(value, _insert(output, torch.ops.aten.copy_.default, (target, value), target.meta.get("val")))
    given = [item for position, item in enumerate(items) if position not in mutations]
    output.args = (tuple([ends.get(item, item) for item in given]),)
    graph_module.recompile()


def _memory(placeholder: Node, constants: Mapping[str, torch.Tensor]) -> Any:
    """Returns what is equal for placeholders in one memory, as far as that is known."""
    payload = constants.get(placeholder.name)
    return placeholder if payload is None else storage_identity(payload)


def _shown(node: Node) -> Node:
    """Returns the node whose memory a node shows, by the schemas of what is between them."""
    while isinstance(node.target, OpOverload):
        aliased = operator_facts(node.target).aliased
        base = node.args[aliased] if aliased is not None and aliased < len(node.args) else None
        if not isinstance(base, Node):
            break
        node = base
    return node


def _insert(output: Node, target: OpOverload, arguments: tuple[Node, ...], fake: Any) -> Node:
    """Puts a call before the end of a graph; it is from where its last operand is from."""
    is_clone = target is torch.ops.aten.clone.default
    keywords: dict[str, Any] = {"memory_format": torch.contiguous_format} if is_clone else {}
    with output.graph.inserting_before(output):
        made: Node = output.graph.call_function(target, arguments, keywords)
    made.meta = dict(arguments[-1].meta)
    made.meta["val"] = fake
    return made


def _contiguous(fake: Any) -> Any:
    """Returns the fake tensor of a contiguous copy."""
    with fake.fake_mode:
        return fake.new_empty(fake.shape)
