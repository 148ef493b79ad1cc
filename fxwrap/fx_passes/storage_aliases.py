"""The nodes of a graph by the storages of their tensors, and which layouts their readers accept."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from fxwrap.fx_passes.effects import mutated_operands
from fxwrap.fx_passes.graph_copy import CallResults, can_propagate_fake, items_of, same_layout, storages_of
from fxwrap.fx_passes.prepared_graph import FxPassContext, NodeValues, PreparedGraph
from fxwrap.torch_compat import FakeTensor, OpOverload
from fxwrap.wrapper_ir.operators import operator_schema


def written_storages(nodes: Sequence[Node], fakes: NodeValues) -> set[int]:
    """Returns the identities of the storages that calls of a graph write."""
    return {
        storage for node in nodes if node.op == "call_function"
        for operand in mutated_operands(node, fakes) for storage in storages_of(fakes.get(operand))
    }  # fmt: skip


def nodes_by_storage(nodes: Sequence[Node], fakes: NodeValues) -> dict[int, list[Node]]:
    """Returns the nodes whose tensors share each storage."""
    nodes_of: dict[int, list[Node]] = {}
    for node in nodes:
        for storage in storages_of(fakes.get(node)):
            nodes_of.setdefault(storage, []).append(node)
    return nodes_of


_ROW_STRIDE_AGNOSTIC = frozenset({
    "aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default",
    "aten._addmm_activation.default",
    "aten._scaled_dot_product_cudnn_attention.default", "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
})  # fmt: skip
"""Operators without a lowering rule that read rows with any stride without copying them."""


class StorageAliases:
    """The nodes of a graph, grouped by the storage of their tensors."""

    def __init__(self, graph: PreparedGraph, context: FxPassContext) -> None:
        nodes, self.fakes = graph.nodes, graph.fakes
        self.fused_operators, self.extern_operators = context.fused_operators, context.extern_operators
        self._written = written_storages(nodes, self.fakes)
        self._returned = {
            storage for node in graph.output.all_input_nodes for storage in storages_of(self.fakes.get(node))
        }
        self._on_storage = nodes_by_storage(nodes, self.fakes)
        self._results = CallResults()

    def aliases(self, node: Node) -> list[Node]:
        """Returns the nodes whose tensors share a node's storage, in the graph's order, the node included."""
        return list({item: None for storage in storages_of(self.fakes.get(node)) for item in self._on_storage[storage]})

    def is_mutated(self, node: Node) -> bool:
        """Whether a call writes the storage of a node's tensor."""
        return not self._written.isdisjoint(storages_of(self.fakes.get(node)))

    def is_returned(self, node: Node) -> bool:
        """Whether the graph returns a tensor on the storage of a node's tensor."""
        return not self._returned.isdisjoint(storages_of(self.fakes.get(node)))

    def readers(self, node: Node) -> list[Node]:
        """Returns the nodes that read a tensor or a view of it, without the graph's output."""
        aliases = self.aliases(node)
        users = {user: None for item in aliases for user in item.users}
        return [user for user in users if user not in aliases and user.op != "output"]

    def has_kernels_as_readers(self, node: Node) -> bool:
        """Whether generated kernels alone read a tensor and its views, but for the graph's output."""
        targets = {str(user.target) for user in self.readers(node)}
        return targets.issubset(self.fused_operators) and targets.isdisjoint(self.extern_operators)

    def accepts_layout(self, node: Node, fake: FakeTensor) -> bool:
        """Whether a tensor can have the strides of `fake`: its views stay views, and its readers' results are equal.

        The graph's outputs are not checked: the caller knows whether their strides are fixed.
        """
        aliases, readers = self.aliases(node), self.readers(node)
        if not all(can_propagate_fake(item) and "as_strided" not in str(item.target) for item in aliases):
            return False
        if not all(self._accepts_any_row_stride(reader) for reader in readers):
            return False
        fakes = {**self.fakes, node: fake}
        try:
            for item in (*[item for item in aliases if item is not node], *readers):
                fakes[item] = self._results.run(item, fakes)
        except (RuntimeError, ValueError):  # a view that needs contiguous rows
            return False
        return all(same_layouts(fakes[reader], self.fakes[reader]) for reader in readers)

    def _accepts_any_row_stride(self, node: Node) -> bool:
        """Whether a call reads rows with any stride without a copy."""
        name = operator_schema(node.target).name if isinstance(node.target, OpOverload) else ""
        return name in _ROW_STRIDE_AGNOSTIC or name in self.fused_operators


def same_layouts(one: object, other: object) -> bool:
    """Whether the tensors of two fake values have equal sizes and strides, pair by pair."""
    pairs = zip(items_of(one), items_of(other), strict=True)
    return all(
        same_layout(first, second) for first, second in pairs
        if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)
    )  # fmt: skip
