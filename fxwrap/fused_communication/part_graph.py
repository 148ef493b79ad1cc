"""Graphs in which a region is computed in parts: each collective of one part is started before the next part's work."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fxwrap.fused_communication.split_dimensions import (
    ATTENTION,
    MATMULS,
    MOVES,
    SplitOperands,
    Unsplittable,
    is_pointwise,
    part_arguments,
    sizes_of,
    tensor_of,
)
from fxwrap.fx_passes.effects import has_effect
from fxwrap.fx_passes.prepared_graph import Target
from fxwrap.torch_compat import OpOverload, in_fake_mode
from fxwrap.wrapper_ir import contiguous_strides

_aten = torch.ops.aten
_REDUCE = torch.ops._c10d_functional.all_reduce.default
_REDUCE_IN_PLACE = torch.ops._c10d_functional.all_reduce_.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default

_OUT_VARIANTS = {
    _aten.mm.default: _aten.mm.out,
    _aten.addmm.default: _aten.addmm.out,
    _aten.bmm.default: _aten.bmm.out,
    _aten.baddbmm.default: _aten.baddbmm.out,
}


@dataclass(frozen=True)
class Region:
    """The nodes of a graph that are computed in parts.

    Fields:
        parts: the number of parts of each tensor.
        dimensions: the dimension of each node's result that is divided.
        operands: the operands of which a part needs a part, by node.
    """

    parts: int
    dimensions: Mapping[Node, int]
    operands: Mapping[Node, SplitOperands]

    def reads_parts(self, node: Node, operand: Node) -> bool:
        """Whether a node of the region reads the parts of another one, not the whole."""
        return operand in self.dimensions and self.operands[node].get(operand) == self.dimensions[operand]


def stored_nodes(nodes: Sequence[Node], region: Region) -> set[Node]:
    """Returns the nodes of a region whose parts are stored in one tensor, since others read the whole.

    The whole of a view is a view of the whole. Elements that the region does not write to memory itself are computed
    again from the wholes of their operands. Raises Unsplittable for a tensor that has no dense layout.
    """
    segments = _segments(nodes, region)
    pending = [
        node for node in region.dimensions
        if any(user not in region.dimensions or not region.reads_parts(user, node) for user in node.users)
    ]  # fmt: skip
    stored, seen = set[Node](), set[Node]()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if is_move(node) or (is_pointwise(node) and not _is_written(node, region, segments)):
            pending += [operand for operand in node.all_input_nodes if operand in region.dimensions]
        elif is_divided(node, region):
            _require_dense(node)
            stored.add(node)
    return stored


def is_move(node: Node) -> bool:
    """Whether a node is a view, or takes one from a tuple of views."""
    if node.target is operator.getitem:
        return isinstance(node.args[0], Node) and node.args[0].target in MOVES
    return node.target in MOVES


def is_divided(node: Node, region: Region) -> bool:
    """Whether a node is a tensor with the divided dimension; other results of an operator are equal for all parts."""
    tensor = tensor_of(node)
    if tensor is None or region.dimensions[node] >= tensor.ndim:
        return False
    is_of_attention = node.target is operator.getitem and getattr(node.args[0], "target", None) in ATTENTION
    return not is_of_attention or tensor.ndim > 2  # others are states of random number generators, and sequence lengths


def _segments(nodes: Sequence[Node], region: Region) -> Mapping[Node, int]:
    """Returns the number of collectives of the region before each of its nodes."""
    segments, number = dict[Node, int](), 0
    for node in nodes:
        if node in region.dimensions:
            segments[node] = number
            number += node.target is _REDUCE
    return segments


def _is_written(node: Node, region: Region, segments: Mapping[Node, int]) -> bool:
    """Whether the region writes a result to memory: the graph returns it, or a call or a later segment reads it."""
    pending, seen = [*node.users], set[Node]()
    while pending:
        user = pending.pop()
        if user in seen:
            continue
        seen.add(user)
        if user.op == "output":
            return True
        if is_move(user):
            pending += [*user.users]
        elif user in region.dimensions and (
            user.target in MATMULS or user.target in ATTENTION or segments[user] > segments[node]
        ):
            return True
    return False


def _require_dense(node: Node) -> None:
    tensor = tensor_of(node)
    assert tensor is not None
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), sizes_of(node))):
        if size != 1 and stride != expected:
            raise Unsplittable(f"'{node.name}' has no dense layout")
        expected *= size


def graph_in_parts(graph_module: GraphModule, region: Region, stored: Collection[Node]) -> GraphModule:
    """Returns a graph that computes a region in parts.

    The nodes up to a collective are computed for one part after the other, each ending with the part's collective. So a
    part's result is awaited after the work of the next part. `stored` are the nodes whose whole is written.
    """
    rewriting = _Rewriting(region, stored, graph_module)
    for node in graph_module.graph.nodes:
        rewriting.add(node)
    rewriting.graph.eliminate_dead_code(is_impure_node=_is_impure)
    return GraphModule(graph_module, rewriting.graph)


def _is_impure(node: Node) -> bool:
    return node.op in ("placeholder", "output") or has_effect(node)


class _Rewriting:
    def __init__(self, region: Region, stored: Collection[Node], graph_module: GraphModule) -> None:
        self.region = region
        self.stored = stored
        self.graph = Graph()
        self.wholes: dict[Node, Node] = {}
        self.parts: dict[Node, list[Node]] = {}
        self.slices: dict[tuple[Node, int, int], Node] = {}
        self.pending: dict[Node, None] = {}  # nodes of the region
        self.deferred: dict[Node, None] = {}  # nodes that read them
        values = [node.meta.get("val") for node in graph_module.graph.nodes]
        self.mode = next(item.fake_mode for item in values if hasattr(item, "fake_mode"))

    def add(self, node: Node) -> None:
        """Adds a node of the original graph, or lets it wait for the next collective."""
        operands = node.all_input_nodes
        if node in self.region.dimensions:
            is_apart = any(item in self.pending and not self.region.reads_parts(node, item) for item in operands)
            if is_apart or any(item in self.deferred for item in operands):
                self._flush()
            self.pending[node] = None
            if node.target is _REDUCE:
                self._flush()
            return
        if node.op == "output" or _is_barrier(node):
            self._flush()
        if any(item in self.pending or item in self.deferred for item in operands):
            self.deferred[node] = None
        else:
            self._copy(node)

    def _copy(self, node: Node) -> None:
        self.wholes[node] = self.graph.node_copy(node, self._whole)

    def _flush(self) -> None:
        """Adds the nodes of the region that wait, part after part, then those that read them."""
        for number in range(self.region.parts):
            for node in self.pending:
                self.parts.setdefault(node, []).append(self._part_of(node, number))
        self.pending.clear()
        deferred = [*self.deferred]
        self.deferred.clear()
        for node in deferred:
            self._copy(node)

    def _part_of(self, node: Node, number: int) -> Node:
        """Adds the calls for one part of a node, and returns the part."""
        operands = self.region.operands[node]

        def mapped(operand: Node) -> Node:
            dimension = operands.get(operand)
            return self._whole(operand) if dimension is None else self._part(operand, dimension, number)

        arguments: Any = map_arg(node.args, mapped)
        keywords: Any = map_arg(node.kwargs, mapped)
        if isinstance(node.meta["val"], torch.Tensor):
            arguments = part_arguments(node, self.region.dimensions[node], self.region.parts, arguments)
        if node.target is _REDUCE:
            return self._reduced(node, arguments)
        if node not in self.stored:
            return self._call(node, node.target, arguments, keywords)
        place = self._slice(self._buffer(node), self.region.dimensions[node], number, node)
        if node.target in _OUT_VARIANTS:
            return self._call(node, _OUT_VARIANTS[node.target], arguments, {**keywords, "out": place})
        value = self._call(node, node.target, arguments, keywords)
        copied = self._call(node, _aten.copy_.default, (place, value))
        return copied if is_pointwise(node) else value

    def _reduced(self, node: Node, arguments: Sequence[Any]) -> Node:
        """Adds an all_reduce in the memory of its operand, or of a copy if others read that."""
        operand = arguments[0]
        if not operand.meta["val"].is_contiguous() or not self._is_private(node):
            keywords = {"memory_format": torch.contiguous_format}
            operand = self._call(node, _aten.clone.default, (operand,), keywords)
        return self._call(node, _REDUCE_IN_PLACE, (operand, *arguments[1:]))

    def _is_private(self, node: Node) -> bool:
        """Whether only an all_reduce reads its operand, a new tensor of the region."""
        (operand,) = node.all_input_nodes
        while operand in self.region.dimensions and len(operand.users) == 1 and operand not in self.stored:
            if not is_move(operand):
                return operand.target in MATMULS or is_pointwise(operand)
            (operand,) = operand.all_input_nodes
        return False

    def _part(self, node: Node, dimension: int, number: int) -> Node:
        if self.region.dimensions.get(node) == dimension:
            return self.parts[node][number]
        key = (node, dimension, number)
        if key not in self.slices:
            self.slices[key] = self._slice(self._whole(node), dimension, number, node)
        return self.slices[key]

    def _slice(self, whole: Node, dimension: int, number: int, origin: Node) -> Node:
        size = whole.meta["val"].shape[dimension] // self.region.parts
        return self._call(origin, _aten.slice.Tensor, (whole, dimension, number * size, (number + 1) * size))

    def _buffer(self, node: Node) -> Node:
        """Returns the tensor that parts of a node are stored in."""
        if node not in self.wholes:
            tensor = tensor_of(node)
            assert tensor is not None
            sizes, strides = list(tensor.shape), list(tensor.stride())
            keywords = {"dtype": tensor.dtype, "device": tensor.device}
            if strides == list(contiguous_strides(tuple(sizes))):
                buffer = self._call(node, _aten.empty.memory_format, (sizes,), keywords)
            else:
                buffer = self._call(node, _aten.empty_strided.default, (sizes, strides), keywords)
            self.wholes[node] = buffer
        return self.wholes[node]

    def _whole(self, node: Node) -> Node:
        """Returns the node with the whole of a node of the original graph."""
        if node not in self.wholes:
            if is_move(node) or (is_pointwise(node) and is_divided(node, self.region)):
                self.wholes[node] = self.graph.node_copy(node, self._whole)
            else:
                self.wholes[node] = self.parts[node][0]
        return self.wholes[node]

    def _call(
        self, origin: Node, target: Target, arguments: Sequence[Any], keywords: Mapping[str, Any] | None = None
    ) -> Node:
        keywords = dict(keywords or {})
        node = self.graph.create_node("call_function", target, tuple(arguments), keywords, f"{origin.name}_part")
        node.meta = {name: item for name, item in origin.meta.items() if name not in ("val", "tensor_meta")}
        values: Any = map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
        with in_fake_mode(self.mode):
            node.meta["val"] = target(*values[0], **values[1])
        return node


def _is_barrier(node: Node) -> bool:
    """Whether the order of a node and the nodes before it is fixed: it writes tensors, or has other effects."""
    if node.op != "call_function" or not has_effect(node):
        return False
    return not isinstance(node.target, OpOverload) or node.target.namespace != "_c10d_functional"
