"""Calls on streams and events in FX graphs, as calls of operators.

Torch 2.11 leaves method calls on streams and events in Dynamo's graphs. AOTAutograd would execute them while it traces,
on the streams of the compiling process, and its graphs would have none of them. From torch 2.13 on, AOTAutograd wraps
each stream operator in a subgraph of the higher-order operator `control_deps`, which encodes the order of nodes as data
dependencies for Inductor's scheduler.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fxwrap.fx_passes.prepared_graph import Target
from fxwrap.torch_compat import (
    OpOverload,
    copy_dynamo_module,
    copy_dynamo_node,
    external_object_index,
    external_object_number,
    get_external_object,
    new_external_event,
)

_STREAMS = torch.ops.streams
_METHODS = frozenset({"wait_stream", "wait_event", "record_event", "synchronize"})
_SYNCHRONIZING = frozenset({"synchronize", "synchronize_device"})
"""fxwrap's operators for calls that torch 2.11 has no operator for."""


def stream_call(node: Node) -> str:
    """Returns the name of the stream operator that a node calls; "" for any other node."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace not in ("streams", "fxwrap"):
        return ""
    name: str = target.overloadpacket.__name__
    return name if target.namespace == "streams" or name in _SYNCHRONIZING else ""


def stream_number(node: Node) -> int:
    """Returns the number of the stream that a node runs on; 0 for the current stream."""
    custom = node.meta.get("custom")
    index = custom.get("stream") if isinstance(custom, dict) else None
    return external_object_number(index) if type(index) is int and node.op == "call_function" else 0


def replace_stream_methods(graph_module: GraphModule) -> GraphModule:
    """Returns a Dynamo graph in which method calls on streams and events are operator calls.

    Returns the graph itself if it has none of them, as from torch 2.13 on.
    """
    if not any(_is_stream_method(node) for node in graph_module.graph.nodes):
        return graph_module
    return copy_dynamo_module(graph_module, _StreamMethodReplacer(graph_module).graph)


def _is_stream_method(node: Node) -> bool:
    """Whether tracing would execute a node instead of recording it."""
    if node.op == "call_method":
        subject = node.args[0]
        example = subject.meta.get("example_value") if isinstance(subject, Node) else None
        return node.target in _METHODS and isinstance(example, torch.Stream | torch.Event)
    return node.op == "call_function" and node.target is torch.accelerator.synchronize


class _StreamMethodReplacer:
    """Copies a graph, with operators in place of method calls on streams and events."""

    def __init__(self, graph_module: GraphModule) -> None:
        self.graph = Graph()
        self._node_map: dict[Node, Node] = {}
        self._unnamed_events: list[int] = []  # indices of the events that `record_event()` without arguments creates
        for node in graph_module.graph.nodes:
            self._node_map[node] = self._copy_node(node)

    def _copy_node(self, node: Node) -> Node:
        if _is_stream_method(node):
            return self._operator_for(node)
        if node.target is _STREAMS.wait_event and node.args[0] is None:
            return self._wait_for_unnamed(node)
        return copy_dynamo_node(self.graph, node, self._node_map)

    def _operator_for(self, node: Node) -> Node:
        """Adds the operators of a method call, and returns the node of its result."""
        match node.target:
            case "wait_stream":
                return self._call(node, _STREAMS.wait_stream.default, self._index(node, 0), self._index(node, 1))
            case "wait_event":
                return self._call(node, _STREAMS.wait_event.default, self._index(node, 1), self._index(node, 0))
            case "record_event":
                return self._record(node)
            case "synchronize":
                return self._call(node, torch.ops.fxwrap.synchronize.default, self._index(node, 0))
            case _:
                return self._call(node, torch.ops.fxwrap.synchronize_device.default, *node.args)

    def _record(self, node: Node) -> Node:
        if len(node.args) > 1:
            event = self._node_map[node.args[1]]  # type: ignore[index]
        else:
            self._unnamed_events.append(new_external_event())
            event = self._call(node, get_external_object(), self._unnamed_events[-1])
        self._call(node, _STREAMS.record_event.default, event.args[0], self._index(node, 0))
        return event

    def _wait_for_unnamed(self, node: Node) -> Node:
        """Waits for every event that `record_event()` created before: the graph does not name the event."""
        if not self._unnamed_events:
            return self.graph.node_copy(node)
        waits = [self._call(node, _STREAMS.wait_event.default, event, node.args[1]) for event in self._unnamed_events]
        return waits[-1]

    def _index(self, node: Node, argument: int) -> int:
        """Returns the index of a stream or event in Dynamo's table of external objects."""
        return external_object_index(self._node_map[node.args[argument]])  # type: ignore[index]

    def _call(self, node: Node, target: Target, *arguments: Any) -> Node:
        call = self.graph.call_function(target, arguments)
        call.meta = {name: value for name, value in node.meta.items() if name != "example_value"}
        return call
