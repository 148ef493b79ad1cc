"""The gradients of tensors that a `score_mod` captures: sums over scores that a kernel adds, and operators after them.

The joint graph of a score computes these gradients with `zeros_and_scatter`, which adds a number of each score to an
element of a tensor, and with operators on whole tensors after it: sums of two such gradients, factors, casts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fxwrap.torch_compat import OpOverload, flex_scatter_operator

_CAST = torch.ops.aten._to_copy.default

INDEX_COUNT = 4
"""The indices of a score: batch, head, query and key. A joint graph has None as their gradients."""


class UnsupportedGradientsError(Exception):
    """Gradients of captured tensors that are no sums over scores; the message says why."""


def matrix_orders(joint: GraphModule) -> dict[int, tuple[int, ...]]:
    """Returns the sums over scores in which each score has its own element, and the order of their dimensions.

    Sums are counted from 0, among the results of a joint graph after those of indices. An order is one of batch, head,
    query and key, as numbers from 0.
    """
    results: Any = joint.graph.output_node().args[0]
    placeholders = joint.graph.find_nodes(op="placeholder")
    return {
        number: order for number, item in enumerate(results[1 + INDEX_COUNT :])
        if isinstance(item, Node) and (order := _matrix_order(item, placeholders)) is not None
    }  # fmt: skip


def _matrix_order(scatter: Node, placeholders: Sequence[Node]) -> tuple[int, ...] | None:
    """Returns the order of the indices of a sum over scores that are those of a score, each once; None for others."""
    indices: Any = scatter.args[1] if scatter.target is flex_scatter_operator() else ()
    own = placeholders[1 : 1 + INDEX_COUNT]
    is_matrix = len(indices) == INDEX_COUNT and {*indices} == {*own}
    return tuple([own.index(item) for item in indices]) if is_matrix else None


@dataclass(frozen=True)
class CapturedGradients:
    """A joint graph, split where the sums over scores end.

    Fields:
        joint: returns the gradient of the score, None for each index, and the calls of `zeros_and_scatter`, whose
            values have the dtype of the computation, except where each score has its own element.
        sums: fake values of the sums, in these dtypes.
        after: returns the gradients of tensors from the sums and all operands of `score_mod` after the indices.
    """

    joint: GraphModule
    sums: tuple[torch.Tensor, ...]
    after: GraphModule


def split_captured_gradients(
    joint: GraphModule, buffers: Sequence[object], used: Collection[int], dtype: torch.dtype
) -> CapturedGradients:
    """Splits a joint graph of ATen operators on scalars, with the dtype of the computation.

    `buffers` are the operands of `score_mod` after the indices, and `used` the positions of those whose gradients are
    used, or of further results of the graph. Raises UnsupportedGradientsError.
    """
    return _Splitter(joint, buffers, dtype).split(used)


class _Splitter:
    def __init__(self, joint: GraphModule, buffers: Sequence[object], dtype: torch.dtype) -> None:
        self.module = joint
        self.buffers = buffers
        self.dtype = dtype
        operator = flex_scatter_operator()
        if operator is None:
            raise UnsupportedGradientsError("torch has no operator for gradients of captured tensors")
        self.scatter: OpOverload = operator
        self.placeholders = joint.graph.find_nodes(op="placeholder")
        self.scores = self._users_of(self.placeholders[: INDEX_COUNT + 2])
        self.sums: dict[Node, Node] = {}  # from a sum over scores to its number of each score, or its scatter

    def _users_of(self, nodes: Sequence[Node]) -> set[Node]:
        """Returns the nodes that depend on some nodes without a sum over scores between them, these included."""
        dependent = set(nodes)
        for node in self.module.graph.nodes:
            if any(item in dependent and item.target is not self.scatter for item in node.all_input_nodes):
                dependent.add(node)
        return dependent

    def split(self, used: Collection[int]) -> CapturedGradients:
        results: Any = self.module.graph.output_node().args[0]
        gradients = [results[1 + INDEX_COUNT + position] for position in used]
        after, values = Graph(), dict[Node, Node]()
        self._find_sums(gradients, [dict(enumerate(self.buffers)).get(position) for position in used])
        for number, total in enumerate(self.sums):
            values[total] = after.placeholder(f"sum_{number}")
        for node in self.placeholders[INDEX_COUNT + 2 :]:
            values[node] = after.placeholder(node.name)
        for node in self._needed(gradients):
            if node not in values:
                values[node] = after.node_copy(node, values.__getitem__)
        after.output(tuple([values[item] for item in gradients]))
        sums = tuple([self._fake(total) for total in self.sums])
        return CapturedGradients(self._joint(results[0]), sums, GraphModule(self.module, after))

    def _find_sums(self, gradients: Sequence[Node], buffers: Sequence[object]) -> None:
        for gradient, buffer in zip(gradients, buffers, strict=True):
            is_number = isinstance(buffer, torch.Tensor) and buffer.ndim == 0
            if is_number and gradient in self.scores and gradient.target is not self.scatter:
                self.sums[gradient] = gradient  # before torch 2.15, the sum over scores is implied
                continue
            for node in self._needed([gradient]):
                if node.target is self.scatter:
                    self._check(node)
                    self.sums[node] = node
                elif node in self.scores:
                    reason = f"the gradient of a captured tensor is computed from scores by '{node.target}'"
                    raise UnsupportedGradientsError(reason)

    def _needed(self, gradients: Sequence[Node]) -> list[Node]:
        """Returns the nodes that gradients are computed from, up to sums over scores, in the graph's order."""
        needed, stack = set[Node](), [*gradients]
        while stack:
            node = stack.pop()
            if node not in needed:
                needed.add(node)
                if node.target is not self.scatter and node not in self.sums:
                    stack.extend(node.all_input_nodes)
        return [node for node in self.module.graph.nodes if node in needed]

    def _check(self, node: Node) -> None:
        indices: Any = node.args[1]
        if any(not isinstance(item, Node) or item.meta["val"].ndim for item in (*indices, node.args[2])):
            raise UnsupportedGradientsError("a score_mod reads rows of a captured tensor, not elements")

    def _joint(self, score: Node) -> GraphModule:
        """Returns the joint graph whose results are the gradient of the score and the sums."""
        graph, values = Graph(), dict[Node, Node]()
        graph.graph_copy(self.module.graph, values)
        sums = [self._sum(graph, values, total) for total in self.sums]
        graph.output([values[score], *[None] * INDEX_COUNT, *sums])
        module = GraphModule(self.module, graph)
        graph.eliminate_dead_code()
        module.recompile()
        return module

    def _sum(self, graph: Graph, values: Mapping[Node, Node], total: Node) -> Node:
        """Adds the sum over scores of a number in the dtype of the computation."""
        arguments: Any = total.args if total.target is self.scatter else ((), (), total)
        shape, indices, number = arguments
        if self._is_matrix(total):
            return values[total]
        if number.target is _CAST and number.args[0].meta["val"].dtype is self.dtype:
            number = number.args[0]  # the gradient of a half-precision tensor: only the sum is rounded
        copied: Any = map_arg((shape, indices, number), values.__getitem__)
        if number.meta["val"].dtype is not self.dtype:
            cast = graph.call_function(_CAST, (copied[2],), {"dtype": self.dtype})
            cast.meta["val"] = number.meta["val"].to(self.dtype)
            copied = (*copied[:2], cast)
        scatter = graph.call_function(self.scatter, copied)
        scatter.meta["val"] = self._fake(total)
        return scatter

    def _is_matrix(self, total: Node) -> bool:
        return _matrix_order(total, self.placeholders) is not None

    def _fake(self, total: Node) -> torch.Tensor:
        fake: torch.Tensor = total.meta["val"]
        return fake if self._is_matrix(total) else fake.new_empty(fake.shape, dtype=self.dtype)
