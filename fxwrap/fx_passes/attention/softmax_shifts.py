"""A softmax of scores less the maximum of their rows is the softmax of the scores, which subtracts it anyway.

In the backward, the gradient of the maximum is the sum of the gradients of a row, less their sum: that of a softmax is
zero.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fxwrap.fx_passes.attention.mask_bounds import uniform_value
from fxwrap.fx_passes.attention.nodes import (
    ALIASES,
    is_cast,
    is_last_dimension,
    is_tensor,
    row_reduction,
    sizes_of,
    without_aliases,
)
from fxwrap.fx_passes.effects import name_of
from fxwrap.fx_passes.graph_copy import GraphCopy, storages_of
from fxwrap.fx_passes.prepared_graph import NodeValues, PreparedGraph
from fxwrap.fx_passes.storage_aliases import written_storages

_aten = torch.ops.aten
_MAX_DEPTH = 8
"""The largest number of operators between the gradients of a softmax and that of a maximum."""


@dataclass(frozen=True)
class _Shift:
    """A difference of scores and their maximum that only a softmax reads, and the nodes of the maximum."""

    difference: Node
    scores: Node
    maximum: tuple[Node, ...]


def remove_softmax_shifts(graph: PreparedGraph) -> PreparedGraph:
    """Returns a graph whose softmaxes over the last dimension read scores that are not shifted by their maximum."""
    fakes = graph.fakes
    softmaxes = [node for node in graph.nodes if name_of(node) == "softmax" and is_tensor(node, fakes)]
    shifts = {node: shift for node in softmaxes if (shift := _shift_of(node, fakes)) is not None}
    if not shifts:
        return graph
    copy, written = GraphCopy(graph), written_storages(graph.nodes, fakes)
    removed, read = set[Node](), set[Node]()
    for softmax, shift in shifts.items():
        sums = {shift.difference: shift.scores} | dict(_gradient_sums(softmax, fakes, written))
        for node, summand in sums.items():
            copy.substitute(node, copy.node_map[summand])
        removed.update(sums)
        read.update(sums.values())
    candidates = {node for shift in shifts.values() for node in shift.maximum}
    for node in reversed(graph.nodes):
        is_candidate = node in candidates or (bool(node.users) and node not in read)
        if is_candidate and node.op == "call_function" and not node.is_impure() and removed.issuperset(node.users):
            copy.erase(node)
            removed.add(node)
    return copy.finish()


def _shift_of(softmax: Node, fakes: NodeValues) -> _Shift | None:
    """Returns the shift of a softmax's operand; None where it has none."""
    node: Any = softmax.args[0]
    if not is_last_dimension(softmax.args[1], fakes[softmax].ndim):
        return None
    while is_tensor(node, fakes) and (is_cast(node, fakes) or name_of(node) in ALIASES) and len(node.users) == 1:
        node = node.args[0]
    if not isinstance(node, Node) or name_of(node) != "sub" or node.kwargs or len(node.users) > 1:
        return None
    scores, maximum = node.args
    reduced = row_reduction(maximum, ("amax", "max"), fakes)
    if reduced is None or not isinstance(scores, Node) or without_aliases(reduced[0]) is not without_aliases(scores):
        return None
    return _Shift(node, scores, reduced[1]) if sizes_of(scores, fakes) == sizes_of(node, fakes) else None


def _gradient_sums(softmax: Node, fakes: NodeValues, written: Set[int]) -> Iterator[tuple[Node, Node]]:
    """Yields sums of a gradient of the softmax and zeros, with that gradient."""
    results = [softmax]
    for node in results:
        results.extend([user for user in node.users if name_of(user) in ALIASES])
    gradients = [user for node in results for user in node.users
                 if user.target is _aten._softmax_backward_data.default and user.args[1] is node]  # fmt: skip
    for node in gradients:
        gradients.extend([user for user in node.users if is_cast(user, fakes) or name_of(user) in ALIASES])
    zeros = _Zeros(gradients, fakes, written)
    for node in gradients:
        for user in node.users:
            if name_of(user) == "add" and not user.kwargs and node in user.args:
                others = [item for item in user.args if item is not node]
                if len(others) == 1 and zeros.has(others[0]):
                    yield user, node


@dataclass(frozen=True)
class _Zeros:
    """What is computed from the sum of the gradients of a row, which is zero."""

    gradients: Collection[Node]
    fakes: NodeValues
    written: Set[int]

    def has(self, item: object, depth: int = 0) -> bool:
        """Whether a value is the sum, or a multiple of it."""
        if not isinstance(item, Node) or not is_tensor(item, self.fakes) or depth > _MAX_DEPTH:
            return False
        match name_of(item), item.args:
            case "sum", (operand, [dim], *_):
                rank = self.fakes[operand].ndim  # type: ignore[index]
                return is_last_dimension(dim, rank) and (self._is_gradient(operand) or self.has(operand, depth + 1))
            case "neg" | "to_copy" | "view" | "unsafe_view" | "unsqueeze" | "expand" | "div", (operand, *_):
                return self.has(operand, depth + 1)
            case "mul", operands:
                return any(self.has(operand, depth + 1) for operand in operands)
            case "scatter", (operand, _, _, source):
                return self._is_zero(operand) and self.has(source, depth + 1)
            case _:
                return False

    def _is_gradient(self, node: object) -> bool:
        """Whether a value is a gradient, perhaps negated."""
        while isinstance(node, Node) and node not in self.gradients and name_of(node) in ("neg", "to_copy"):
            node = node.args[0]
        return node in self.gradients

    def _is_zero(self, node: object) -> bool:
        is_written = lambda item: bool(storages_of(self.fakes[item]) & self.written)  # noqa: E731
        return isinstance(node, Node) and uniform_value(node, self.fakes.get, is_written) == 0
