"""Sums at the places of a permutation, as autograd writes the gradients of gathered rows, become gathers.

A layer of experts sorts the tokens by expert, `order`, and gathers `x[order // k]` and `y[inverse]`. The gradient of a
gather adds rows at its indices: it must be zeros first, and additions of half precision need atomic ones in float32 and
a copy. Where the indices are a permutation, each place has one row, which a gather with the inverse permutation reads,
and where they are a permutation divided by k, the k rows of a place are a sum of gathered rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxwrap.fx_passes.experts.rows import is_zero
from fxwrap.fx_passes.graph_copy import is_contiguous
from fxwrap.fx_passes.prepared_graph import Target
from fxwrap.fx_passes.sorts import is_order, written_positions
from fxwrap.fx_passes.training.joint_backward import call_like, operators_of_options
from fxwrap.options import Options
from fxwrap.torch_compat import FakeTensor

_aten = torch.ops.aten


def gather_permuted_sums(joint: GraphModule, options: Options) -> GraphModule:
    """Turns sums of rows at the places of a permutation into gathers of rows, in place; returns the graph."""
    excluded, permutations = operators_of_options(options), _Permutations(joint)
    for node in list(joint.graph.nodes):
        item = _match(node, permutations) if str(node.target) not in excluded else None
        if item is None:
            continue
        result = _call(node, _aten.index.Tensor, item.rows, [permutations.inverse(item.permutation, node)])
        if item.count > 1:
            places, *sizes = _sizes(node)
            result = _call(node, _aten.view.default, result, [places, item.count, *sizes])
            result = _call(node, _aten.sum.dim_IntList, result, [1])
        node.replace_all_uses_with(result)
        joint.graph.erase_node(node)
    return joint


@dataclass(frozen=True)
class _PermutedSum:
    """A sum of rows at the places of a permutation divided by `count`: each place has so many rows."""

    rows: Node
    permutation: Node
    count: int


class _Permutations:
    """The permutations that a graph computes: orders of sorts, and their inverses."""

    def __init__(self, joint: GraphModule) -> None:
        self._inverses: dict[Node, Node | None] = {}
        for node in joint.graph.nodes:
            inverted = _inverted(node)
            if inverted is None and is_order(node) and len(_sizes(node)) == 1:
                inverted = node.args[0].args[0]
                self._inverses[node] = None
            if inverted in self and _sizes(node) == _sizes(inverted):  # type: ignore[arg-type]
                self._inverses[node] = inverted
                self._inverses[inverted] = self._inverses[inverted] or node  # type: ignore[index]

    def __contains__(self, node: object) -> bool:
        return node in self._inverses

    def inverse(self, permutation: Node, before: Node) -> Node:
        """Returns the inverse of a permutation, computed before a node if the graph has none there."""
        known = self._inverses[permutation]
        if known is None or not known < before:
            count, device = _sizes(permutation)[0], permutation.meta["val"].device
            positions = _call(before, _aten.arange.default, count, dtype=torch.int64, device=device)
            empty = _call(before, _aten.empty_like.default, permutation)
            known = _call(before, _aten.index_put.default, empty, [permutation], positions)
            self._inverses[permutation] = known
        return known


def _inverted(node: Node) -> Node | None:
    """Returns the permutation that a call inverts; None for another call than one that writes all positions."""
    indices, count = written_positions(node) or (node, -1)
    return indices if [count] == _sizes(indices) == _sizes(node) else None


def _match(node: Node, permutations: _Permutations) -> _PermutedSum | None:
    """Returns the operands of a call that adds rows to zeros at the places of a permutation, or of quotients of one."""
    match node.target, node.args:
        case _aten.index_put.default, (Node() as base, [Node() as indices], Node() as rows, True):
            pass
        case _aten.index_add.default, (Node() as base, 0, Node() as indices, Node() as rows):
            pass
        case _:
            return None
    result = node.meta.get("val")
    if node.kwargs or not is_zero(base) or not isinstance(result, FakeTensor) or not is_contiguous(result):
        return None
    permutation, count = _quotient(indices)
    if permutation not in permutations:
        return None
    sizes, (places, *inner) = _sizes(rows), _sizes(node)
    is_static = all(size > 0 for size in (places, *sizes))
    if not is_static or sizes != [places * count, *inner] or sizes[:1] != _sizes(permutation):
        return None
    return _PermutedSum(rows, permutation, count)


def _quotient(indices: Node) -> tuple[Node, int]:
    """Returns the dividend and the divisor of a floor division of integers by a constant; by 1 of others."""
    match indices.target, indices.args:
        case _aten.floor_divide.default | _aten.div.Tensor_mode, (Node() as dividend, int() as count) if count > 0:
            is_floor = indices.kwargs.get("rounding_mode", "floor") in ("floor", "trunc")  # of positive integers
            return (dividend, count) if is_floor else (indices, 1)
        case _:
            return indices, 1


def _sizes(node: Node) -> list[int]:
    """Returns the sizes of a node's tensor; -1 for those that are symbolic."""
    fake = node.meta.get("val")
    return [size if type(size) is int else -1 for size in fake.shape] if isinstance(fake, FakeTensor) else [-1]


def _call(before: Node, target: Target, *arguments: Any, **keywords: Any) -> Node:
    """Inserts a call before a node, with the metadata of that."""
    with before.graph.inserting_before(before):
        return call_like(before, target, *arguments, **keywords)
