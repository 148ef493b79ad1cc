"""Results of operators of single elements that are only read in parts: each part is computed by itself.

Gated units split a gate from what it multiplies after an activation of both. Of a part with one reader no element is
in memory, and of another only while it is needed.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from fxwrap.fx_passes.effects import is_movable
from fxwrap.fx_passes.graph_copy import GraphCopy, fake_call, same_layout
from fxwrap.fx_passes.prepared_graph import FxPassContext, NodeValues, PreparedGraph
from fxwrap.fx_passes.storage_aliases import StorageAliases
from fxwrap.torch_compat import FakeTensor, OpOverload

_aten = torch.ops.aten
_SPLITS = frozenset({_aten.split.Tensor, _aten.split_with_sizes.default})
_COPIES = frozenset({_aten.clone.default, _aten._to_copy.default})
"""Operators of single elements that torch does not tag as such."""


@dataclass(frozen=True)
class _SplitResult:
    """A split of a result: the calls that compute it, each the operand of the next one, and the parts that are read."""

    split: Node
    calls: Sequence[Node]
    parts: Sequence[Node]


def split_before_activations(graph: PreparedGraph, context: FxPassContext) -> PreparedGraph:
    """Returns a graph that computes the parts of a result by themselves, where kernels read these and nothing else."""
    splits = [node for node in graph.nodes if node.target in _SPLITS and _calls_before(node, graph.fakes, context)]
    if not splits:
        return graph
    aliases = StorageAliases(graph, context)
    matches = [match for node in splits if (match := _match(node, aliases, context)) is not None]
    if not matches:
        return graph
    copy = GraphCopy(graph)
    for match in matches:
        _rewrite(copy, match)
    return copy.finish()


def _calls_before(split: Node, fakes: NodeValues, context: FxPassContext) -> list[Node]:
    """Returns the calls on single elements of one tensor that end with the operand of a split, the only reader."""
    calls: list[Node] = []
    node = split.args[0]
    while isinstance(node, Node) and len(node.users) == 1 and _is_of_single_elements(node, fakes, context):
        calls.insert(0, node)
        node = node.args[0]
    return calls


def _is_of_single_elements(node: Node, fakes: NodeValues, context: FxPassContext) -> bool:
    """Whether a fused operator maps each element of its only tensor to one of its result."""
    target = node.target
    if not isinstance(target, OpOverload) or str(target) not in context.fused_operators or not is_movable(node):
        return False
    if str(target) in context.extern_operators or (torch.Tag.pointwise not in target.tags and target not in _COPIES):
        return False
    operand, result = fakes.get(node.args[0]) if node.args else None, fakes.get(node)  # type: ignore[arg-type]
    is_only = node.all_input_nodes == [node.args[0]] if node.args else False
    is_same = isinstance(operand, FakeTensor) and isinstance(result, FakeTensor) and same_layout(operand, result)
    return is_only and is_same


def _match(split: Node, aliases: StorageAliases, context: FxPassContext) -> _SplitResult | None:
    calls = _calls_before(split, aliases.fakes, context)
    if any(aliases.is_mutated(node) for node in (*calls[0].all_input_nodes, *calls)) or aliases.is_returned(calls[-1]):
        return None
    parts = [user for user in split.users if user.target is operator.getitem]
    if len(parts) != len(split.users) or not aliases.has_kernels_as_readers(calls[-1]):
        return None
    for part in parts:
        fake = aliases.fakes[part]
        for call in calls:
            fake = fake_call(call.target, *_applied_to(call, fake))
        if not aliases.accepts_layout(part, fake):
            return None
    return _SplitResult(split, calls, parts)


def _applied_to(call: Node, operand: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a call on one tensor with another in its place."""
    applied: Any = map_arg((call.args, call.kwargs), lambda _: operand)
    return tuple(applied[0]), dict(applied[1])


def _rewrite(copy: GraphCopy, match: _SplitResult) -> None:
    split, first = copy.node_map[match.split], match.calls[0]
    base = copy.node_map[first].args[0]
    operands = copy.call(split, split.target, (base, *split.args[1:]), f"{match.split.name}_before")
    for part in match.parts:
        before = copy.node_map[part]
        result = copy.element(before, operands, part.args[1], f"{part.name}_operand")  # type: ignore[arg-type]
        for call in match.calls:
            old = copy.node_map[call]
            arguments, keywords = _applied_to(old, result)
            result = copy.call(before, old.target, arguments, f"{part.name}_{call.name}", keywords, origin=old)
        copy.substitute(part, result, "fused")
    for node in (match.split, *reversed(match.calls)):
        copy.erase(node)
