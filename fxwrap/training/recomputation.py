"""Recomputation: a backward computes cheap values of its forward again, instead of keeping their memory in between.

The partitioner of the joint graph, which `torch.compile` uses to split forward and backward, decides which values are
kept. Both parts then stay in one graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.fx.traceback import annotate

from fxwrap.fx_passes import partitioner
from fxwrap.fx_passes.effects import attribute_of
from fxwrap.fx_passes.prepared_graph import RECOMPUTED
from fxwrap.options import Options
from fxwrap.torch_compat import LazyGraphModule

_MARK = "fxwrap_backward"
"""The key of the annotation of nodes that a backward creates; its value is the number of the backward and a role."""


@contextmanager
def marked_backwards() -> Iterator[None]:
    """Annotates the nodes that each `backward()` creates, and among them the gradient of the loss."""
    original: Callable[..., None] = torch.autograd.backward
    numbers = iter(range(1 << 30))

    def backward(tensors: Any, grad_tensors: Any = None, *arguments: Any, **keywords: Any) -> None:
        number = next(numbers)
        losses = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
        if grad_tensors is None and all(loss.numel() == 1 for loss in losses):
            with annotate({_MARK: (number, "tangent")}):
                grad_tensors = tuple([torch.ones_like(loss, memory_format=torch.preserve_format) for loss in losses])
        with annotate({_MARK: (number, "gradient")}):
            original(tensors, grad_tensors, *arguments, **keywords)

    with patch.object(torch.autograd, "backward", backward):
        yield


@dataclass(frozen=True)
class _Pair:
    """The nodes of a forward and of its backward, in order; `tangents` are gradients of the loss."""

    forward: tuple[Node, ...]
    tangents: tuple[Node, ...]
    backward: tuple[Node, ...]


def recompute(graph_module: GraphModule, options: Options) -> GraphModule:
    """Returns the graph, in which each backward recomputes values of its forward as the partitioner decides."""
    for number in range(len(_pairs(graph_module.graph))):
        pair = _pairs(graph_module.graph)[number]
        if pair.tangents:
            graph_module = _Repartition(graph_module, pair, number + 1).result(options)
    return graph_module


def _pairs(graph: Graph) -> list[_Pair]:
    """Returns the forwards with their backwards: all calls since the previous backward are a forward."""
    pairs, forward, tangents, backward, current = list[_Pair](), list[Node](), list[Node](), list[Node](), None
    for node in graph.nodes:
        if node.op not in ("call_function", "get_attr"):
            continue
        mark = node.meta.get("custom", {}).get(_MARK)
        if mark is not None:
            if current is not None and mark[0] != current:
                pairs.append(_Pair(tuple(forward), tuple(tangents), tuple(backward)))
                forward, tangents, backward = [], [], []
            current = mark[0]
            (tangents if mark[1] == "tangent" else backward).append(node)
        elif current is None:
            forward.append(node)
        else:  # after a backward: a forward or an update
            pairs.append(_Pair(tuple(forward), tuple(tangents), tuple(backward)))
            forward, tangents, backward, current = [node], [], [], None
    if current is not None:
        pairs.append(_Pair(tuple(forward), tuple(tangents), tuple(backward)))
    return pairs


class _Repartition:
    """Replaces a forward and its backward by the two graphs that the partitioner makes of them."""

    def __init__(self, graph_module: GraphModule, pair: _Pair, number: int) -> None:
        self.graph_module = graph_module
        self.number = number
        self.pair = pair
        inside = {*pair.forward, *pair.backward}
        known = {*inside, *pair.tangents}
        operands = dict.fromkeys(item for node in (*pair.forward, *pair.backward) for item in node.all_input_nodes)
        self.inputs = [node for node in operands if node not in known]
        self.forward_results = [node for node in pair.forward if not set(node.users) <= inside]
        self.backward_results = [node for node in pair.backward if not set(node.users) <= known]

    def result(self, options: Options) -> GraphModule:
        """Returns the graph with the new parts."""
        joint, fakes = self._joint()
        count = len(self.forward_results)
        parts: Any = partitioner(options)(joint, fakes, num_fwd_outputs=count)
        return self._merged(*parts)

    def _joint(self) -> tuple[GraphModule, Any]:
        graph = Graph()
        copies: dict[Node, Node] = {}
        for kind, nodes in (("primals", self.inputs), ("tangents", self.pair.tangents)):
            for number, node in enumerate(nodes):
                copies[node] = graph.placeholder(f"{kind}_{number + 1}")
                copies[node].meta = dict(node.meta)
        for node in (*self.pair.forward, *self.pair.backward):
            copies[node] = graph.node_copy(node, copies.__getitem__)
        results = [*self.forward_results, *self.backward_results]
        output = graph.output(tuple([copies[node] for node in results]))
        output.meta["val"] = tuple([node.meta.get("val") for node in results])
        fakes = tuple([[node.meta["val"] for node in nodes] for nodes in (self.inputs, self.pair.tangents)])
        return LazyGraphModule(self.graph_module, graph), fakes

    def _merged(self, forward: GraphModule, backward: GraphModule) -> GraphModule:
        """Returns the whole graph: forward, gradient of the loss, backward, and the rest."""
        graph = Graph()
        copies: dict[Node, Node] = {}
        attributes: dict[str, object] = {}
        own = {*self.pair.forward, *self.pair.backward, *self.pair.tangents}
        first = self.pair.forward[0] if self.pair.forward else self.pair.tangents[0]
        for node in self.graph_module.graph.nodes:
            if node is first:
                for part in (forward, backward):
                    attributes |= self._rename_attributes(part)
                self._copy_parts(graph, copies, forward, backward)
            if node not in own:
                copies[node] = graph.node_copy(node, copies.__getitem__)
                if node.op == "get_attr":
                    attributes[str(node.target)] = attribute_of(node)
        return LazyGraphModule(attributes, graph)

    def _rename_attributes(self, part: GraphModule) -> dict[str, object]:
        """Makes the attributes of a part unique; other pairs may have others of the same names. Returns them."""
        attributes: dict[str, object] = {}
        for node in part.graph.nodes:
            if node.op == "get_attr":
                name = f"{node.target}_{self.number}".replace(".", "_")
                attributes[name] = attribute_of(node)
                node.target = name
        return attributes

    def _copy_parts(self, graph: Graph, copies: dict[Node, Node], forward: GraphModule, backward: GraphModule) -> None:
        inputs = {f"primals_{number + 1}": copies[node] for number, node in enumerate(self.inputs)}
        values, saved = _copy_part(graph, forward, inputs)
        copies.update(zip(self.forward_results, values, strict=False))
        for node in self.pair.tangents:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        tangents = {f"tangents_{number + 1}": copies[node] for number, node in enumerate(self.pair.tangents)}
        repeated = dict.fromkeys([node.name for node in forward.graph.nodes], self.number)
        values, _ = _copy_part(graph, backward, {**inputs, **saved, **tangents}, repeated)
        copies.update(zip(self.backward_results, values, strict=True))


def _copy_part(
    graph: Graph, part: GraphModule, inputs: Mapping[str, Node], repeated: Mapping[str, int] = MappingProxyType({})
) -> tuple[Sequence[Any], dict[str, Node]]:
    """Copies the calls of a part; returns its results, and its returned nodes by name.

    `repeated` has the number of the backward by names of calls that an earlier part makes too.
    """
    copies: dict[Node, Node] = {}
    for node in part.graph.nodes:
        if node.op == "placeholder":
            copies[node] = inputs[str(node.target)]
        elif node.op != "output":
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.name in repeated:
                copies[node].meta[RECOMPUTED] = repeated[node.name]
    returned = part.graph.output_node()
    results: Any = map_arg(returned.args[0], copies.__getitem__)
    return results, {node.name: copies[node] for node in returned.all_input_nodes}
