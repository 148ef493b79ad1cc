"""What shows a tensor's memory, and what reads it: whether it may lie in memory otherwise, and nobody can tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from fxwrap.lowering.graph_copy import (
    can_run_again,
    items_of,
    nodes_by_storage,
    run_on_fakes,
    same_layout,
    storages_of,
    written_storages,
)
from fxwrap.lowering.rules import RULES
from fxwrap.torch_compat import FakeTensor, OpOverload
from fxwrap.wrapper_ir.operators import operator_facts

_ANY_ROWS = frozenset({
    "aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default",
    "aten._addmm_activation.default",
    "aten._scaled_dot_product_cudnn_attention.default", "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
})  # fmt: skip
"""Operators without a lowering rule that take rows of any distance without copying them."""


class StorageViews:
    """The nodes of a graph by the storage that their tensors are on."""

    def __init__(self, nodes: Sequence[Node], fakes: Mapping[Node, Any]) -> None:
        output = next(node for node in nodes if node.op == "output")
        self.fakes = fakes
        self._written = written_storages(nodes, fakes)
        self._given = {storage for node in output.all_input_nodes for storage in storages_of(fakes.get(node))}
        self._on_storage = nodes_by_storage(nodes, fakes)

    def shown(self, node: Node) -> list[Node]:
        """Returns the nodes whose tensors are on the storage of a node's, in the graph's order, the node included."""
        return list({item: None for storage in storages_of(self.fakes.get(node)) for item in self._on_storage[storage]})

    def is_written(self, node: Node) -> bool:
        """Whether some call writes the storage of a node's tensor."""
        return not self._written.isdisjoint(storages_of(self.fakes.get(node)))

    def is_given_back(self, node: Node) -> bool:
        """Whether the graph gives back a tensor on the storage of a node's."""
        return not self._given.isdisjoint(storages_of(self.fakes.get(node)))

    def readers(self, node: Node) -> list[Node]:
        """Returns what reads a tensor or a view of it, but for the graph's output."""
        shown = self.shown(node)
        users = {user: None for item in shown for user in item.users}
        return [user for user in users if user not in shown and user.op != "output"]

    def may_lie_as(self, node: Node, fake: FakeTensor) -> bool:
        """Whether all views of a tensor can be views of another, its rows further apart, and all readers give the same.

        What the graph gives back is not looked at: whether it may have other strides is the caller's to know.
        """
        shown, readers = self.shown(node), self.readers(node)
        if not all(can_run_again(item) and "as_strided" not in str(item.target) for item in shown):
            return False
        if not all(_takes_any_rows(reader) for reader in readers):
            return False
        found = {**self.fakes, node: fake}
        try:
            for item in (*[item for item in shown if item is not node], *readers):
                found[item] = run_on_fakes(item, found)
        except (RuntimeError, ValueError):  # a view that needs rows beside each other
            return False
        return all(same_layouts(found[reader], self.fakes[reader]) for reader in readers)


def _takes_any_rows(node: Node) -> bool:
    """Whether a call reads a tensor whose rows lie apart as fast as any, without a copy of it."""
    if not isinstance(node.target, OpOverload) or not operator_facts(node.target).name:
        return False
    name = operator_facts(node.target).name
    return name in _ANY_ROWS or name in RULES


def same_layouts(one: Any, other: Any) -> bool:
    """Whether the tensors of two fake values have equal sizes and strides, each its own."""
    pairs = zip(items_of(one), items_of(other), strict=True)
    return all(
        same_layout(mine, theirs) for mine, theirs in pairs
        if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor)
    )  # fmt: skip
