"""In-place operators that change the layout of a tensor, such as `squeeze_`, become operators that return a view.

The node of such a tensor has two layouts: earlier readers see the former, later ones the new layout. Passes know
one fake value of a node. AOTAutograd and `torch.export` leave none of these operators in their graphs.
"""

from __future__ import annotations

from copy import deepcopy

import torch
from torch.fx import GraphModule, Node

from fxwrap.torch_compat import OpOverload, view_of_in_place
from fxwrap.wrapper_ir.operators import operator_name, operator_schema


def replace_layout_changes(graph_module: GraphModule) -> GraphModule:
    """Returns a graph whose layout changes of its own tensors are views; the graph itself if it has none.

    Those of inputs and attributes stay: the caller sees them.
    """
    if not any(_view_of(node) for node in graph_module.graph.nodes):
        return graph_module
    copy = GraphModule(graph_module, deepcopy(graph_module.graph))
    positions = {node: position for position, node in enumerate(copy.graph.nodes)}
    tensors: dict[Node, list[Node]] = {}  # the nodes that are one tensor, by each of them
    for node in positions:
        operand = _returned_operand(node)
        if operand is None:
            tensors[node] = [node]
            continue
        same = tensors[operand]
        target = _view_of(node)
        if target is None or same[0].op != "call_function":
            tensors[node] = same
            same.append(node)
            continue
        with copy.graph.inserting_before(node):
            view = copy.graph.create_node("call_function", target, node.args, node.kwargs, node.name)
        view.meta = node.meta
        for reader in [reader for item in (*same, node) for reader in item.users]:
            if positions.get(reader, -1) > positions[node]:
                for item in (*same, node):
                    reader.replace_input_with(item, view)
        copy.graph.erase_node(node)
        tensors[view] = [view]
    return copy


def changes_layout(node: Node) -> bool:
    """Whether a node changes the layout of an operand in place."""
    return isinstance(node.target, OpOverload) and torch.Tag.inplace_view in node.target.tags


def _view_of(node: Node) -> OpOverload | None:
    """Returns the operator that returns a view with the layout that a call gives its operand in place."""
    return view_of_in_place(operator_name(node.target)) if changes_layout(node) else None  # type: ignore[arg-type]


def _returned_operand(node: Node) -> Node | None:
    """Returns the operand that a call writes and returns; None if it returns something else."""
    if not isinstance(node.target, OpOverload):
        return None
    operands = operator_schema(node.target).returned_operands(node.args, tuple(node.kwargs.items()))
    return operands[0] if operands and isinstance(operands[0], Node) else None
