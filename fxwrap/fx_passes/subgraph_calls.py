"""Higher-order operators that mean the call of their graph: the graph's calls take their place."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fxwrap.fx_passes.effects import attribute_of, operator_label
from fxwrap.torch_compat import HigherOrderOperator

_INLINED: Mapping[str, Callable[..., tuple[Node, Sequence[Any]]]] = {
    "control_deps": lambda _after, graph, *operands: (graph, operands),  # AOTAutograd wraps stream operators in it
    "foreach_map": lambda graph, *operands: (graph, operands),
    "hints_wrapper": lambda graph, operands, *_hints: (graph, operands),
    "invoke_quant": lambda graph, *operands: (graph, operands),
    "invoke_quant_packed": lambda graph, *operands: (graph, operands),
    "run_const_graph": lambda graph, operands: (graph, operands),
    "strict_mode": lambda graph, operands: (graph, operands),
    "tag_activation_checkpoint": lambda graph, *operands: (graph, operands),
    "wrap": lambda graph, *operands: (graph, operands),
    "wrap_with_set_grad_enabled": lambda _enabled, graph, *operands: (graph, operands),
}
"""For each operator, a function of its arguments that returns the graph and its operands."""


def inline_subgraph_calls(graph_module: GraphModule) -> GraphModule:
    """Returns a graph with the calls inside these operators in their place; the graph itself if it has none.

    Keyword arguments of the operators are hints for other compilers, and are dropped.
    """
    while any(_is_subgraph_call(node) for node in graph_module.graph.nodes):
        graph_module = _inline(graph_module)
    return graph_module


def is_hint(node: Node) -> bool:
    """Whether a node is only a keyword argument of such operators."""
    return bool(node.users) and all(_is_subgraph_call(user) and node in user.kwargs.values() for user in node.users)


def _inline(graph_module: GraphModule) -> GraphModule:
    graph = Graph()
    node_map: dict[Node, Any] = {}
    for node in graph_module.graph.nodes:
        if _is_subgraph_call(node):
            inner, operands = _call_of(node)
            node_map[node] = _copy_calls(graph, inner, map_arg(operands, node_map.__getitem__))
        elif node.target is operator.getitem and _is_subgraph_call(node.args[0]):
            node_map[node] = node_map[node.args[0]][node.args[1]]
        elif not is_hint(node) and not _is_inlined_graph(node):
            node_map[node] = graph.node_copy(node, lambda operand: node_map[operand])
    return GraphModule(graph_module, graph)


def _call_of(node: Node) -> tuple[Node, Sequence[Any]]:
    """Returns the graph that a node calls, and its operands."""
    return _INLINED[operator_label(node.target)](*node.args)  # type: ignore[arg-type]


def _is_subgraph_call(node: object) -> bool:
    target = node.target if isinstance(node, Node) else None
    return isinstance(target, HigherOrderOperator) and operator_label(target) in _INLINED


def _is_inlined_graph(node: Node) -> bool:
    is_used = node.op == "get_attr" and bool(node.users)
    return is_used and all(_is_subgraph_call(user) and _call_of(user)[0] is node for user in node.users)


def _copy_calls(graph: Graph, attribute: Node, operands: Sequence[Any]) -> Any:
    """Copies the calls of the graph that an attribute holds into another, and returns its results."""
    inner: GraphModule = attribute_of(attribute)
    node_map: dict[Node, Any] = dict(zip(inner.graph.find_nodes(op="placeholder"), operands, strict=True))
    for node in inner.graph.nodes:
        if node.op not in ("placeholder", "output"):
            copy = node_map[node] = graph.node_copy(node, node_map.__getitem__)
            if node.op == "get_attr":
                copy.target = f"{attribute.target}.{node.target}"
    return map_arg(inner.graph.output_node().args[0], node_map.__getitem__)
