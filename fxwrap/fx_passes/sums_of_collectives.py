"""Sums of reduced tensors: one collective of the sum of operands instead of a sum of several collectives' results.

Tensor parallelism reduces the gradient of an activation once for each layer that reads it: queries, keys and values, or
the gate of an MLP beside its inner projection. A reduction is linear, so the sum of the operands is reduced once, with
a third or half of the communication.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fxwrap.fx_passes.graph_copy import GraphCopy, is_contiguous, is_sum, storages_of
from fxwrap.fx_passes.prepared_graph import NodeValues, PreparedGraph
from fxwrap.fx_passes.storage_aliases import written_storages
from fxwrap.torch_compat import OpOverload

_ADD = torch.ops.aten.add.Tensor
_WAIT = "_c10d_functional.wait_tensor.default"
_LINEAR = frozenset({"_c10d_functional.all_reduce.default", "_c10d_functional.reduce_scatter_tensor.default"})


@dataclass(frozen=True)
class _Reduction:
    """A linear collective whose result is only added to others: its operand, start and wait."""

    operand: Node
    start: Node
    wait: Node

    @property
    def key(self) -> Hashable:
        """The operator and the arguments that reductions of one sum have in common."""
        return (self.start.target, self.start.args[1:])


def reduce_sums_once(graph: PreparedGraph) -> PreparedGraph:
    """Returns a graph that reduces a sum of tensors once where it added all_reduces, or reduce_scatters, of its terms.

    The collectives have one reduction, "sum" or "avg", one group and one dtype, and no other readers. The order of
    additions changes, as it does between numbers of ranks.
    """
    reductions = _reductions(graph.nodes, graph.fakes)
    if len(reductions) < 2:
        return graph
    copy, is_changed = GraphCopy(graph), False
    sums = {node for node in graph.nodes if is_sum(node, graph.fakes)}
    for node in graph.nodes:
        if node not in sums or _is_inner(node, sums):
            continue
        terms, inner = _flatten(node, sums)
        merged = _common(terms, reductions)
        if merged:
            _replace(copy, node, terms, merged, inner)
            is_changed = True
    return copy.finish() if is_changed else graph


def _reductions(nodes: Sequence[Node], fakes: NodeValues) -> dict[Node, _Reduction]:
    """Returns the linear collectives with one reader each, a sum, by their wait."""
    waits = [node for node in nodes if _name(node) == _WAIT and len(node.users) == 1]
    if len(waits) < 2:
        return {}
    written = written_storages(nodes, fakes)
    reductions = [_reduction(node, fakes, written) for node in waits]
    return {item.wait: item for item in reductions if item is not None}


def _reduction(wait: Node, fakes: NodeValues, written: Collection[int]) -> _Reduction | None:
    start = wait.args[0]
    if not isinstance(start, Node) or _name(start) not in _LINEAR or len(start.users) > 1 or start.kwargs:
        return None
    operand, reduction = start.args[:2]
    if not isinstance(operand, Node) or reduction not in ("sum", "avg"):
        return None
    tensor, result = fakes.get(operand), fakes.get(wait)
    if not isinstance(tensor, torch.Tensor) or not isinstance(result, torch.Tensor):
        return None
    if not tensor.dtype.is_floating_point or tensor.dtype != result.dtype:
        return None
    if not is_contiguous(tensor) or not is_contiguous(result):
        return None
    storages = storages_of(tensor) | storages_of(result) | storages_of(fakes.get(start))
    return _Reduction(operand, start, wait) if storages.isdisjoint(written) else None


def _is_inner(node: Node, sums: Collection[Node]) -> bool:
    """Whether a sum is only a term of one other sum, once."""
    if len(node.users) != 1:
        return False
    (user,) = node.users
    return user in sums and user.args[0] is not user.args[1]


def _flatten(node: Node, sums: Collection[Node]) -> tuple[list[Node], list[Node]]:
    """Returns the terms of a sum, in order, and the sums inside it."""
    terms, inner, pending = list[Node](), list[Node](), list(reversed(node.args))
    while pending:
        item: Any = pending.pop()
        if item in sums and _is_inner(item, sums):
            inner.append(item)
            pending += reversed(item.args)
        else:
            terms.append(item)
    return terms, inner


def _common(terms: Sequence[Node], reductions: Mapping[Node, _Reduction]) -> list[_Reduction]:
    """Returns the reductions among the terms that can be one, the largest number of them; fewer than two are none."""
    by_key: dict[Hashable, list[_Reduction]] = {}
    for term in terms:
        if term in reductions:
            by_key.setdefault(reductions[term].key, []).append(reductions[term])
    largest = max(by_key.values(), key=len, default=[])
    return largest if len(largest) > 1 else []


def _replace(
    copy: GraphCopy, node: Node, terms: Sequence[Node], merged: Sequence[_Reduction], inner: Sequence[Node]
) -> None:
    """Replaces a sum by that of its other terms and of one collective."""
    before, first = copy.node_map[node], merged[0]
    operands = [copy.node_map[item.operand] for item in merged]
    total = operands[0]
    for operand in operands[1:]:
        total = copy.call(before, _ADD, (total, operand), node.name)
    arguments = (total, *copy.node_map[first.start].args[1:])
    for original in (first.start, first.wait):
        origin = copy.node_map[original]
        total = copy.call(before, original.target, arguments, original.name, fake=copy.fakes[origin], origin=origin)
        arguments = (total,)
    waits = {item.wait for item in merged}
    for term in terms:
        if term not in waits:
            total = copy.call(before, _ADD, (total, copy.node_map[term]), node.name)
    erased = dict.fromkeys([*inner, *[item for one in merged for item in (one.start, one.wait)]])
    copy.substitute(node, total, "fused", list(erased))


def _name(node: Node) -> str:
    return str(node.target) if isinstance(node.target, OpOverload) else ""
