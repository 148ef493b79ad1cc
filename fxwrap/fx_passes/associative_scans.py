"""Expansion of associative scans into operators on whole tensors, which fuse.

The algorithm is that of `torch._higher_order_ops.associative_scan`: combine neighbours, scan the results recursively,
and combine each remaining element with the one before it. A scan of n elements takes 2 log2(n) calls of the combine
function.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxwrap.errors import GraphError
from fxwrap.fx_passes.effects import attribute_of, calls_higher_order
from fxwrap.fx_passes.graph_copy import GraphCopy, expressions_of, fake_call
from fxwrap.fx_passes.model_source import location_of
from fxwrap.fx_passes.prepared_graph import NodeValues, PreparedGraph, Target

_aten = torch.ops.aten


def expand_associative_scans(graph: PreparedGraph) -> PreparedGraph:
    """Returns a graph in which associative scans of static length are operators.

    A scan of symbolic length stays a call, on contiguous clones of its operands: its results then have eager's strides.
    Raises GraphError for a combine function that does not map two elements to one.
    """
    scans = [node for node in graph.nodes if calls_higher_order(node, "associative_scan") and node.users]
    if not scans:
        return graph
    copy = GraphCopy(graph)
    for node in scans:
        if not _is_expandable(node, graph.fakes):
            copy.substitute(node, _clone_operands(copy, node))
            continue
        results = _Expansion(copy, node).results()
        for user in [*node.users]:
            copy.substitute(user, results[user.args[1]], "fused", (node,))  # type: ignore[index]
    return copy.finish()


def _is_expandable(node: Node, fakes: NodeValues) -> bool:
    is_static = type(fakes[_scanned(node)[0]].shape[0]) is int
    return is_static and all(user.target is operator.getitem for user in node.users)


def _scanned(node: Node) -> list[Node]:
    return [*node.args[1]]  # type: ignore[misc]


def _clone_operands(copy: GraphCopy, node: Node) -> Node:
    before, clone = copy.node_map[node], _aten.clone.default
    dense = {"memory_format": torch.contiguous_format}
    clones = [copy.call(before, clone, (copy.node_map[item],), item.name, dense) for item in _scanned(node)]
    combine, _, *extra = before.args
    fake = tuple([fake_call(clone, (copy.fakes[item],)) for item in clones])
    return copy.call(before, node.target, (combine, clones, *extra), node.name, fake=fake)


class _Expansion:
    """Writes the operators of one scan before its node. Elements are along dimension 0."""

    def __init__(self, copy: GraphCopy, node: Node) -> None:
        self._copy = copy
        self._node = node
        self._before = copy.node_map[node]
        combine: Any = node.args[0]
        self._path = str(combine.target)
        self._module: GraphModule = attribute_of(combine)

    def results(self) -> list[Node]:
        """Returns the scanned tensors."""
        return self._scan([self._copy.node_map[item] for item in _scanned(self._node)])

    def _scan(self, elements: Sequence[Node]) -> list[Node]:
        count = self._length(elements[0])
        if count < 2:
            return [*elements]
        left = [self._slice(item, 0, count - 1, 2) for item in elements]
        odd = self._scan(self._combine(left, [self._slice(item, 1, count, 2) for item in elements]))
        first = [self._slice(item, 0, 1) for item in elements]
        if count == 2:
            return [self._cat(pair) for pair in zip(first, odd, strict=True)]
        before = [self._slice(item, 0, (count - 1) // 2) for item in odd]
        later = self._combine(before, [self._slice(item, 2, count, 2) for item in elements])
        even = [self._cat(pair) for pair in zip(first, later, strict=True)]
        return [self._interleave(*pair) for pair in zip(even, odd, strict=True)]

    def _interleave(self, even: Node, odd: Node) -> Node:
        """Returns a tensor with these elements at even and odd positions."""
        count, last = self._length(odd), self._length(even)
        pairs = self._call(_aten.stack.default, [self._slice(even, 0, count), odd], 1)
        flat = self._call(_aten.flatten.using_ints, pairs, 0, 1)
        return flat if last == count else self._cat([flat, self._slice(even, count, last)])

    def _combine(self, left: Sequence[Node], right: Sequence[Node]) -> list[Node]:
        """Inlines the combine function on tensors of elements, and returns its results."""
        extra: Any = self._before.args[2] if len(self._before.args) > 2 else ()
        operands = [*left, *right, *extra]
        results = self._copy.inline(self._before, self._module, operands, self._node.name, self._path)
        for result, like in zip(results, left, strict=True):
            self._check(self._copy.fakes[result], self._copy.fakes[like])
        return [*results]

    def _check(self, result: torch.Tensor, element: torch.Tensor) -> None:
        shown = [f"{item.dtype} of sizes {expressions_of(item.shape)}" for item in (result, element)]
        if shown[0] != shown[1]:
            reason = f"its combine function returns {shown[0]} for elements of {shown[1]}, so it is not elementwise"
            raise GraphError(self._node.name, reason, "Use combine_mode='generic'", location_of(self._node))

    def _slice(self, tensor: Node, start: int, end: int, step: int = 1) -> Node:
        if (start, end, step) == (0, self._length(tensor), 1):
            return tensor
        return self._call(_aten.slice.Tensor, tensor, 0, start, end, step)

    def _cat(self, tensors: Sequence[Node]) -> Node:
        return self._call(_aten.cat.default, [*tensors], 0)

    def _length(self, tensor: Node) -> int:
        return self._copy.fakes[tensor].shape[0]  # type: ignore[no-any-return]

    def _call(self, target: Target, *arguments: object, **keywords: object) -> Node:
        return self._copy.call(self._before, target, arguments, self._node.name, keywords)
