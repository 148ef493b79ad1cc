"""Insertion of calls into the joint graph of training, in place of others."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from fxwrap.fx_passes.graph_copy import CallResults, expressions_of, is_contiguous
from fxwrap.fx_passes.prepared_graph import Target
from fxwrap.loop_ir import HALF_PRECISION
from fxwrap.torch_compat import FakeTensor

_aten = torch.ops.aten


class JointGraphBuilder:
    """Inserts calls before a node, with its metadata.

    Attributes:
        target: the node's operator.
        replaced: the node's fake value.
        results: the fake results of calls.
        row_sums: nodes of the row sums of some matrices, for sums that need no reduction.
        gathers_pool_gradients: whether the backward of a pooling gathers gradients on the node's device.
    """

    def __init__(
        self, graph: Graph, node: Node, results: CallResults, row_sums: dict[Node, Node], gathers_pool_gradients: bool
    ) -> None:
        self._graph = graph
        self._node = node
        self.results = results
        self.target = node.target
        self.replaced: FakeTensor = node.meta["val"]
        self.row_sums = row_sums
        self.gathers_pool_gradients = gathers_pool_gradients

    def call(self, target: Target, *arguments: Any, **keywords: Any) -> Node:
        """Returns a new call."""
        with self._graph.inserting_before(self._node):
            call = self._graph.call_function(target, arguments, keywords)
        fakes = {operand: operand.meta["val"] for operand in call.all_input_nodes}
        call.meta = {**self._node.meta, "val": self.results.run(call, fakes, self.replaced)}
        return call

    @property
    def has_softmax_backward(self) -> bool:
        """Whether the gradient of a softmax reads the node."""
        return any(user.target is _aten._softmax_backward_data.default for user in self._node.users)

    def cast(self, operand: Node, dtype: torch.dtype) -> Node:
        """Returns an operand in a dtype."""
        is_same = operand.meta["val"].dtype == dtype
        return operand if is_same else self.call(_aten._to_copy.default, operand, dtype=dtype)

    def upcast(self, operand: Node) -> Node:
        """Returns an operand in the dtype in which operators compute: float32 for half precision."""
        return self.cast(operand, torch.float32) if operand.meta["val"].dtype in HALF_PRECISION else operand

    def one_minus(self, value: Node) -> Node:
        """Returns 1 - value."""
        return self.call(_aten.add.Tensor, self.call(_aten.neg.default, value), 1)

    def result(self, value: Node) -> Node:
        """Returns a value in the node's dtype."""
        return self.cast(value, self.replaced.dtype)

    def with_strides(self, value: Node) -> Node | None:
        """Returns a value with the node's strides, which views of the result rely on; None if no copy has them.

        Operators on elements keep the strides of their operands; a softmax, for one, is contiguous.
        """
        if _orders_elements_alike(value.meta["val"], self.replaced):
            return value
        if not is_contiguous(self.replaced):
            return None
        return self.call(_aten.clone.default, value, memory_format=torch.contiguous_format)


def _orders_elements_alike(one: FakeTensor, other: FakeTensor) -> bool:
    """Whether two tensors of one shape have equal strides, but for those of dimensions of size 1."""
    pairs = zip(expressions_of(one.shape), expressions_of(one.stride()), expressions_of(other.stride()), strict=True)
    return all(size == 1 or stride == other_stride for size, stride, other_stride in pairs)
