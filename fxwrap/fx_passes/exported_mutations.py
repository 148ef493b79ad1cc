"""Conversion of exported programs to functions with mutations: copies into placeholders, and no effect tokens."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxwrap.torch_compat import FakeTensor, OpOverload, storage_identity
from fxwrap.wrapper_ir.operators import operator_schema

_aten = torch.ops.aten


def remove_tokens(
    graph_module: GraphModule, token_inputs: Collection[str], token_outputs: Collection[int]
) -> list[int]:
    """Removes effect tokens from a graph's placeholders and outputs, in place.

    `token_inputs` are names of placeholders, `token_outputs` positions of outputs. Returns the positions of the
    remaining outputs.
    """
    graph = graph_module.graph
    output = graph.output_node()
    for node in graph.find_nodes(op="placeholder"):
        if node.name in token_inputs:
            for user in list(node.users):
                user.args = tuple([None if item is node else item for item in user.args])
            graph.erase_node(node)
    items: Any = output.args[0]
    remaining = [position for position in range(len(items)) if position not in token_outputs]
    output.args = (tuple([items[position] for position in remaining]),)
    graph_module.recompile()
    return remaining


def write_back(graph_module: GraphModule, mutations: Mapping[int, str], constants: Mapping[str, torch.Tensor]) -> None:
    """Replaces outputs that are new values of placeholders by copies into those placeholders, in place.

    Args:
        graph_module: the graph.
        mutations: the name of the mutated placeholder, by the position of the output with its new value.
        constants: parameters and buffers by placeholder name; two of them may share a storage.

    The mutations are simultaneous: a value that aliases a storage that an earlier copy writes is cloned before all
    copies. A remaining output that is also a mutation's value is the placeholder, as in `ExportedProgram.module()`.
    """
    if not mutations:
        return
    graph = graph_module.graph
    output = graph.output_node()
    placeholders = {node.name: node for node in graph.find_nodes(op="placeholder")}
    storage_of = {node: _storage_key(node, constants) for node in placeholders.values()}
    items: Any = output.args[0]
    written: set[Hashable] = set()
    copies: list[tuple[Node, Node]] = []
    for position, name in mutations.items():
        target, value = placeholders[name], items[position]
        if value is target:
            continue
        aliased = storage_of.get(_view_root(value))
        if aliased is not None and (aliased in written or aliased == storage_of[target]):
            value = _clone(output, value)
        copies.append((target, value))
        written.add(storage_of[target])
    mutated: dict[Any, Node] = {}
    for target, value in copies:
        mutated.setdefault(value, _insert(output, _aten.copy_.default, (target, value), target.meta.get("val")))
    returned = [item for position, item in enumerate(items) if position not in mutations]
    output.args = (tuple([mutated.get(item, item) for item in returned]),)
    graph_module.recompile()


def _storage_key(placeholder: Node, constants: Mapping[str, torch.Tensor]) -> Hashable:
    """Returns a key that is equal for placeholders known to share a storage."""
    payload = constants.get(placeholder.name)
    return placeholder if payload is None else storage_identity(payload)


def _view_root(node: Node) -> Node:
    """Returns the node that a node is a view of, through any number of view operators."""
    while isinstance(node.target, OpOverload):
        position = operator_schema(node.target).aliased_argument
        base = node.args[position] if position is not None and position < len(node.args) else None
        if not isinstance(base, Node):
            break
        node = base
    return node


def _insert(output: Node, target: OpOverload, arguments: tuple[Node, ...], fake: object, **keywords: Any) -> Node:
    """Inserts a call before the output node, with the metadata of its last operand."""
    with output.graph.inserting_before(output):
        call = output.graph.call_function(target, arguments, keywords)
    call.meta = {**arguments[-1].meta, "val": fake}
    return call


def _clone(output: Node, value: Node) -> Node:
    fake: FakeTensor = value.meta["val"]
    with fake.fake_mode:
        copy = fake.new_empty(fake.shape)
    return _insert(output, _aten.clone.default, (value,), copy, memory_format=torch.contiguous_format)
