"""Masks of experts as one-hot encodings: of indices in another shape, or without tokens beyond an expert's capacity.

A router with a capacity multiplies the one-hot encoding of its choice by a mask. The product is the one-hot encoding of
indices that are beyond the experts where the mask excludes the token. A view of an encoding is the encoding of a view.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from fxwrap.fx_passes.attention.nodes import is_tensor, sizes_of
from fxwrap.fx_passes.effects import name_of
from fxwrap.fx_passes.experts.conditions import are_in_range, encoded_indices, is_truth_of
from fxwrap.fx_passes.graph_copy import GraphCopy
from fxwrap.fx_passes.prepared_graph import PreparedGraph

_aten = torch.ops.aten
_PRODUCTS = frozenset({"bitwise_and", "logical_and", "mul"})
_RESHAPES = frozenset({"view", "unsafe_view", "reshape"})


def encode_masks_of_experts(graph: PreparedGraph) -> PreparedGraph:
    """Returns a graph in which masked and reshaped one-hot encodings are encodings of other indices."""
    if not any(selects_by_mask(node, graph) for node in graph.nodes):
        return graph
    encoder = _Encoder(graph)
    for node in graph.nodes:
        if node.op == "call_function":
            encoder.add(node)
    return encoder.copy.finish() if encoder.changed else graph


def selects_by_mask(node: Node, graph: PreparedGraph) -> bool:
    """Whether the number of rows of a result depends on a mask."""
    if name_of(node) == "nonzero":
        return True
    match name_of(node), node.args:
        case "index", (_, [Node() as mask]):
            return is_tensor(mask, graph.fakes) and graph.fakes[mask].dtype is torch.bool
        case _:
            return False


class _Encoder:
    """Replaces encodings in a copy of a graph, in order. `changed` tells whether there were any."""

    def __init__(self, graph: PreparedGraph) -> None:
        self.copy = GraphCopy(graph)
        self.changed = False
        self._fakes = graph.fakes
        self._indices: dict[Node, tuple[Node, int]] = {}
        """Of encodings: the copy's node of indices, and the number of classes up to which they are known to be."""

    def add(self, node: Node) -> None:
        """Adds the next call."""
        if not is_tensor(node, self._fakes):
            return
        arguments: Any = node.args
        indices = encoded_indices(node, self._fakes)
        if indices is not None:
            count = self._fakes[node].shape[-1]
            known = count if are_in_range(indices, count, self._fakes) else 0
            self._indices[node] = self.copy.node_map[indices], known
        elif is_truth_of(node) in self._indices:
            self._indices[node] = self._indices[is_truth_of(node)]  # type: ignore[index]
        elif name_of(node) in _PRODUCTS and len(node.all_input_nodes) == 2:
            one, other = node.all_input_nodes
            encoding, mask = (one, other) if one in self._indices else (other, one)
            if encoding in self._indices and self._is_mask(mask, node):
                self._replace(node, self._masked(node, encoding, mask), 0)
        elif name_of(node) in _RESHAPES and arguments[0] in self._indices and self._keeps_classes(node):
            indices, known = self._indices[arguments[0]]
            viewed = self._caller(node)(_aten.view.default, indices, self._sizes(node)[:-1])
            self._replace(node, viewed, known)

    def _is_mask(self, mask: Node, node: Node) -> bool:
        """Whether a factor is 0 or 1, of the shape of the product."""
        same_shape = sizes_of(mask, self._fakes) == sizes_of(node, self._fakes)
        source = mask
        while is_truth_of(source) is not None:
            source = is_truth_of(source)  # type: ignore[assignment]
        return same_shape and is_tensor(source, self._fakes) and self._fakes[source].dtype is torch.bool

    def _keeps_classes(self, node: Node) -> bool:
        """Whether a view changes the dimensions before the classes alone, of static sizes."""
        sizes = self._sizes(node)
        source: Any = node.args[0]
        return bool(sizes) and sizes[-1] == self._sizes(source)[-1] and all(type(size) is int for size in sizes)

    def _sizes(self, node: Node) -> list[Any]:
        return list(self._fakes[node].shape)

    def _masked(self, node: Node, encoding: Node, mask: Node) -> Node:
        """Returns indices that are the number of classes where the mask is false."""
        call, (indices, known) = self._caller(node), self._indices[encoding]
        count = self._sizes(node)[-1]
        selected = indices if known == count else call(_aten.clamp.default, indices, 0, count - 1)
        selected = call(_aten.unsqueeze.default, selected, -1)
        allowed = call(_aten.squeeze.dim, call(_aten.gather.default, self.copy.node_map[mask], -1, selected), -1)
        return call(_aten.masked_fill.Scalar, indices, call(_aten.eq.Scalar, allowed, 0), count)

    def _replace(self, node: Node, indices: Node, known: int) -> None:
        """Replaces a call by the encoding of indices."""
        call, fake = self._caller(node), self._fakes[node]
        numbers = call(_aten.arange.default, fake.shape[-1], dtype=torch.int64, device=fake.device)
        encoding = call(_aten.eq.Tensor, call(_aten.unsqueeze.default, indices, -1), numbers)
        if fake.dtype is not torch.bool:
            encoding = call(_aten._to_copy.default, encoding, dtype=fake.dtype)
        self.copy.substitute(node, encoding, "fused")
        self._indices[node] = indices, known
        self.changed = True

    def _caller(self, node: Node) -> Callable[..., Node]:
        before = self.copy.node_map[node]

        def call(target: Any, *arguments: Any, **keywords: Any) -> Node:
            return self.copy.call(before, target, arguments, f"{node.name}_encoding", keywords)

        return call
