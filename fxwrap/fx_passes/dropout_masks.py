"""Dropout on CPUs: its mask is drawn alone, and its result is computed by operators that fuse.

torch's operator draws the mask, multiplies by it, and multiplies by the scale: two passes over data that kernels
around it read and write anyway. Graphs of plain `make_fx` have a product with random numbers instead, whose memory is
that of the operand: it first becomes the operator, for which passes look.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fxwrap.fx_passes.graph_copy import GraphCopy, is_contiguous
from fxwrap.fx_passes.prepared_graph import FxPassContext, NodeValues, PreparedGraph
from fxwrap.torch_compat import FakeTensor

_aten = torch.ops.aten
_DROPOUT = _aten.native_dropout.default
_BACKWARD = _aten.native_dropout_backward.default
_DRAWS = frozenset({_aten.bernoulli_.float, _aten.bernoulli.p})
_ALLOCATIONS = frozenset({_aten.empty_like.default, _aten.empty.memory_format})
_DIVISIONS = frozenset({_aten.div.Scalar, _aten.div.Tensor})


def recognize_dropout(graph: PreparedGraph, context: FxPassContext) -> PreparedGraph:
    """Returns a graph in which products with scaled random numbers on CPUs are calls of `native_dropout`.

    `make_fx` traces dropout on CPUs as such a product, and its backward as another one with the same numbers.
    `native_dropout` draws the same ones, as booleans.
    """
    if str(_DROPOUT) in context.extern_operators:
        return graph
    positions = {node: position for position, node in enumerate(graph.nodes)}
    noises = [noise for node in graph.nodes if (noise := _Noise.of(node, graph.fakes, positions)) is not None]
    if not noises:
        return graph
    copy = GraphCopy(graph)
    for noise in noises:
        noise.replace(copy)
    return copy.finish()


@dataclass(frozen=True)
class _Noise:
    """Random numbers that a dropout multiplies by.

    Fields:
        probability: that an element stays.
        nodes: the call that allocates them, that which draws zeros and ones, and that which divides these by the
            probability.
        products: the products with them in order, and their other operands; the first one is the dropout.
    """

    probability: float
    nodes: tuple[Node, Node, Node]
    products: Sequence[tuple[Node, Node]]

    @classmethod
    def of(cls, drawn: Node, fakes: NodeValues, positions: Mapping[Node, int]) -> _Noise | None:
        """Returns the noise that a call draws, if only products of tensors like it read it."""
        if drawn.target not in _DRAWS or drawn.kwargs or len(drawn.users) != 1:
            return None
        memory, probability = (*drawn.args, 0.5)[:2]
        (scaled,) = drawn.users
        if not isinstance(memory, Node) or memory.target not in _ALLOCATIONS:
            return None
        if not isinstance(probability, float) or not 0 < probability < 1:
            return None
        if len(memory.users) > 1 or scaled.target not in _DIVISIONS or scaled.args[1] != probability or scaled.kwargs:
            return None
        fake: FakeTensor = fakes[scaled]
        if fake.device.type != "cpu" or not is_contiguous(fake) or not all(_is_product(user) for user in scaled.users):
            return None
        products = []
        for user in sorted(scaled.users, key=positions.__getitem__):
            (other,) = [item for item in user.all_input_nodes if item is not scaled] or [scaled]
            if other is scaled or fakes[other].dtype is not fake.dtype or fakes[other].shape != fake.shape:
                return None
            products.append((user, other))
        is_drawn_after = bool(products) and positions[products[0][1]] < positions[drawn]
        return cls(probability, (memory, drawn, scaled), products) if is_drawn_after else None

    def replace(self, copy: GraphCopy) -> None:
        """Replaces the first product by a dropout, and the others, of gradients, by its backward."""
        (dropout, operand), *gradients = self.products
        before, name = copy.node_map[self.nodes[1]], dropout.name
        arguments = (copy.node_map[operand], 1.0 - self.probability, True)
        call = copy.call(before, _DROPOUT, arguments, name, origin=copy.node_map[dropout])
        result, mask = [copy.element(before, call, part, name) for part in range(2)]
        copy.substitute(dropout, result, "fused")
        for product, gradient in gradients:
            factors: tuple[Any, ...] = (copy.node_map[gradient], mask, 1.0 / self.probability)
            after = copy.node_map[product]
            copy.substitute(product, copy.call(after, _BACKWARD, factors, product.name), "fused")
        for node in self.nodes:
            copy.erase(node)


def _is_product(node: Node) -> bool:
    return node.target is _aten.mul.Tensor and all(isinstance(item, Node) for item in node.args) and not node.kwargs


def draw_dropout_masks(graph: PreparedGraph, context: FxPassContext) -> PreparedGraph:
    """Returns a graph in which dropout on CPUs is a product of its operand, a mask of eager's numbers and the scale."""
    if str(_DROPOUT) in context.extern_operators:
        return graph
    calls = [node for node in graph.nodes if node.target is _DROPOUT and _is_drawn(node, graph)]
    if not calls:
        return graph
    copy = GraphCopy(graph)
    for node in calls:
        _replace(copy, node)
    return copy.finish()


def _is_drawn(node: Node, graph: PreparedGraph) -> bool:
    """Whether a dropout on a CPU drops some elements; `bernoulli` returns contiguous masks only."""
    probability, mask = node.args[1], graph.fakes[node][1]
    return (
        mask.device.type == "cpu"
        and isinstance(probability, float)
        and 0 < probability < 1
        and node.args[2] is not False
        and is_contiguous(mask)
        and all(user.target is operator.getitem for user in node.users)
    )


def _replace(copy: GraphCopy, node: Node) -> None:
    before, name = copy.node_map[node], node.name
    source: Node = before.args[0]  # type: ignore[assignment]
    probability: float = node.args[1]  # type: ignore[assignment]
    mask = drawn_mask(copy, before, copy.fakes[before][1], 1.0 - probability, name)
    for user in node.users:
        result = mask
        if user.args[1] == 0:
            product = copy.call(before, _aten.mul.Tensor, (source, mask), name)
            result = copy.call(before, _aten.mul.Tensor, (product, 1.0 / (1.0 - probability)), name)
        copy.substitute(user, result, "fused")
    copy.erase(node)


def drawn_mask(copy: GraphCopy, before: Node, like: FakeTensor, probability: float, name: str) -> Node:
    """Returns a mask that is true with a probability, as `native_dropout` on CPUs draws a contiguous one."""
    keywords = {"dtype": torch.bool, "device": like.device}
    sizes = copy.size_arguments(before, like.shape)
    unused = copy.call(before, _aten.empty.memory_format, (sizes,), name, keywords)
    return copy.call(before, _aten.bernoulli.p, (unused, probability), name)
