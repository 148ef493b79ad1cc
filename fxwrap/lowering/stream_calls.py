"""Calls about streams and events, as calls of operators in the graph itself.

Torch 2.11 leaves calls of their methods to whoever runs a graph of Dynamo's. AOTAutograd runs it to trace it: it makes
the calls there and then, on the streams that the model was compiled with, and its own graphs have none of them.
From 2.13 on AOTAutograd puts each operator about streams in a graph of its own, within a higher-order operator that
hands on what is used after it; Inductor, which sorts nodes anew, keeps their order by that.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fxwrap.lowering.effects import operator_label
from fxwrap.torch_compat import (
    HigherOrderOperator,
    copy_dynamo_node,
    dynamo_module,
    external_place,
    get_external_object,
    new_external_event,
)

_STREAMS = torch.ops.streams
_METHODS = frozenset({"wait_stream", "wait_event", "record_event", "synchronize"})


def with_stream_calls(graph_module: GraphModule) -> GraphModule:
    """Returns a graph of Dynamo's with what it does with streams and events as calls of operators.

    The graph itself is not changed. One that has no calls of their methods, as from torch 2.13 on, is given back.
    """
    if not any(_is_lost(node) for node in graph_module.graph.nodes):
        return graph_module
    return dynamo_module(graph_module, _Copy(graph_module).graph)


def _is_lost(node: Node) -> bool:
    """Whether a node does something with streams that tracing would do itself."""
    if node.op == "call_method":
        return node.target in _METHODS and isinstance(_object(node.args[0]), torch.Stream | torch.Event)
    return node.op == "call_function" and node.target is torch.accelerator.synchronize


def _object(given: Any) -> Any:
    return given.meta.get("example_value") if isinstance(given, Node) else None


class _Copy:
    """A copy of a graph, with operators for such calls."""

    def __init__(self, graph_module: GraphModule) -> None:
        self.graph = Graph()
        self._made: dict[Node, Node] = {}
        self._unnamed: list[int] = []  # the places of events that `record_event()` has made
        for node in graph_module.graph.nodes:
            self._made[node] = self._copied(node)

    def _copied(self, node: Node) -> Node:
        if _is_lost(node):
            return self._as_operator(node)
        if node.target is _STREAMS.wait_event and node.args[0] is None:
            return self._wait_for_unnamed(node)
        return copy_dynamo_node(self.graph, node, self._made)

    def _as_operator(self, node: Node) -> Node:
        """Makes what stands for a call, and returns what gives its result."""
        match node.target:
            case "wait_stream":
                return self._call(node, _STREAMS.wait_stream.default, self._place(node, 0), self._place(node, 1))
            case "wait_event":
                return self._call(node, _STREAMS.wait_event.default, self._place(node, 1), self._place(node, 0))
            case "record_event":
                return self._record(node)
            case "synchronize":
                return self._call(node, torch.ops.fxwrap.synchronize.default, self._place(node, 0))
            case _:
                return self._call(node, torch.ops.fxwrap.synchronize_device.default, *node.args)

    def _record(self, node: Node) -> Node:
        if len(node.args) > 1:
            event = self._made[node.args[1]]  # type: ignore[index]
        else:
            self._unnamed.append(new_external_event())
            event = self._call(node, get_external_object(), self._unnamed[-1])
        self._call(node, _STREAMS.record_event.default, event.args[0], self._place(node, 0))
        return event

    def _wait_for_unnamed(self, node: Node) -> Node:
        """Makes a wait for every event that `record_event()` made before: which one is meant the graph does not say."""
        if not self._unnamed:
            return self.graph.node_copy(node)
        return [self._call(node, _STREAMS.wait_event.default, place, node.args[1]) for place in self._unnamed][-1]

    def _place(self, node: Node, index: int) -> int:
        return external_place(self._made[node.args[index]])  # type: ignore[index]

    def _call(self, node: Node, target: Any, *arguments: Any) -> Node:
        made = self.graph.call_function(target, arguments)
        made.meta = {name: value for name, value in node.meta.items() if name != "example_value"}
        return made


# --- operators in graphs of their own -------------------------------------------------------------------------------


def unwrapped(graph_module: GraphModule) -> GraphModule:
    """Returns a graph with what it wraps to keep its order as calls in their turn; one that wraps nothing as it is."""
    if not any(_wraps(node) for node in graph_module.graph.nodes):
        return graph_module
    graph = Graph()
    made: dict[Node, Any] = {}
    for node in graph_module.graph.nodes:
        if _wraps(node):
            inner = getattr(graph_module, node.args[1].target)
            made[node] = _inlined(graph, inner, [made[operand] for operand in node.args[2:]])
        elif node.target is operator.getitem and _wraps(node.args[0]):
            made[node] = made[node.args[0]][node.args[1]]
        elif not (node.op == "get_attr" and node.users and all(_wraps(user) for user in node.users)):
            made[node] = graph.node_copy(node, made.__getitem__)
    return GraphModule(graph_module, graph)


def _wraps(node: Node) -> bool:
    return isinstance(node.target, HigherOrderOperator) and operator_label(node.target) == "control_deps"


def _inlined(graph: Graph, inner: GraphModule, operands: list[Node]) -> Any:
    """Copies the calls of a graph into another, and returns what it gives of the operands it is called with."""
    made = dict(zip(inner.graph.find_nodes(op="placeholder"), operands, strict=True))
    for node in inner.graph.nodes:
        if node.op == "output":
            return map_arg(node.args[0], made.__getitem__)
        if node.op != "placeholder":
            made[node] = graph.node_copy(node, made.__getitem__)
    raise AssertionError("a graph ends with its output")
