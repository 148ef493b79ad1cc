"""Associative scans, taken apart into operators on whole tensors, which fuse.

As eager does it: neighbours are combined, what they give is scanned, and each other element is combined with the one
before it. So a scan of n elements is 2 log2(n) calls of the combine function, each on many elements at once.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fxwrap.errors import GraphError
from fxwrap.lowering.effects import attribute_of, operator_label
from fxwrap.lowering.graph_copy import GraphCopy, call_on_fakes, expression_of
from fxwrap.lowering.source import GraphSource, location_of
from fxwrap.torch_compat import HigherOrderOperator

_aten = torch.ops.aten


def with_associative_scans(source: GraphSource, fakes: dict[Node, Any]) -> tuple[GraphSource, dict[Node, Any]]:
    """Returns a graph whose associative scans are operators, and the fake values of its nodes.

    A scan stays one where its length is not known; it gets copies of its operands without gaps, so that its results are
    laid out as eager's. Raises GraphError for a combine function that does not give an element for two elements. A
    graph without such scans is returned itself.
    """
    scans = [node for node in source.graph_module.graph.nodes if _is_associative_scan(node) and node.users]
    if not scans:
        return source, fakes
    copy = GraphCopy(source, fakes)
    for node in scans:
        if not _has_known_length(node, fakes):
            copy.substitute(node, _without_gaps(copy, node))
            continue
        results = _Expansion(copy, node).results()
        for user in [*node.users]:
            copy.substitute(user, results[user.args[1]], "fused", (node,))
    return copy.finished()


def _is_associative_scan(node: Node) -> bool:
    return isinstance(node.target, HigherOrderOperator) and operator_label(node.target) == "associative_scan"


def _has_known_length(node: Node, fakes: Mapping[Node, Any]) -> bool:
    """Whether a scan's length is a number, and whoever reads its results says which."""
    known = type(fakes[_tensors(node)[0]].shape[0]) is int
    return known and all(user.target is operator.getitem for user in node.users)


def _tensors(node: Node) -> list[Node]:
    """Returns what a scan goes over."""
    found: Any = node.args[1]
    return [*found]


def _without_gaps(copy: GraphCopy, node: Node) -> Node:
    """Returns the call of a scan on copies of its operands, in the copy of the graph."""
    before = copy.made_of[node]
    dense = {"memory_format": torch.contiguous_format}
    over = [copy.call(before, _aten.clone.default, (copy.made_of[item],), dense, item.name) for item in _tensors(node)]
    graph, _, *extra = before.args
    fake = tuple([call_on_fakes(_aten.clone.default, (copy.fakes[item],), {}) for item in over])
    return copy.call(before, node.target, (graph, over, *extra), {}, node.name, fake)  # type: ignore[arg-type]


class _Expansion:
    """The operators of one scan, put in front of its node in a copy of the graph. Elements lie along dimension 0."""

    def __init__(self, copy: GraphCopy, node: Node) -> None:
        self._copy = copy
        self._node = node
        self._before = copy.made_of[node]
        graph: Any = node.args[0]
        self._path = str(graph.target)
        self._module: GraphModule = attribute_of(graph)

    def results(self) -> list[Node]:
        """Returns the scanned tensors."""
        return self._scan([self._copy.made_of[item] for item in _tensors(self._node)])

    def _scan(self, elements: Sequence[Node]) -> list[Node]:
        count = self._length(elements[0])
        if count < 2:
            return [*elements]
        left = [self._slice(item, 0, count - 1, 2) for item in elements]
        odd = self._scan(self._combined(left, [self._slice(item, 1, count, 2) for item in elements]))
        first = [self._slice(item, 0, 1) for item in elements]
        if count == 2:
            return [self._joined(pair) for pair in zip(first, odd, strict=True)]
        before = [self._slice(item, 0, (count - 1) // 2) for item in odd]
        later = self._combined(before, [self._slice(item, 2, count, 2) for item in elements])
        even = [self._joined(pair) for pair in zip(first, later, strict=True)]
        return [self._in_turns(*pair) for pair in zip(even, odd, strict=True)]

    def _in_turns(self, even: Node, odd: Node) -> Node:
        """Returns a tensor with these elements at its even and odd places."""
        count, last = self._length(odd), self._length(even)
        pairs = self._call(_aten.stack.default, [self._slice(even, 0, count), odd], 1)
        flat = self._call(_aten.flatten.using_ints, pairs, 0, 1)
        return flat if last == count else self._joined([flat, self._slice(even, count, last)])

    def _combined(self, left: Sequence[Node], right: Sequence[Node]) -> list[Node]:
        """Returns what the combine function gives for the elements of tensors, all at once."""
        extra: Any = self._before.args[2] if len(self._before.args) > 2 else ()
        given = iter([*left, *right, *extra])
        known: dict[Node, Any] = {}
        found: Any = ()
        for inner in self._module.graph.nodes:
            arguments, keywords = map_arg((inner.args, inner.kwargs), known.__getitem__)
            match inner.op:
                case "placeholder":
                    known[inner] = next(given)
                case "get_attr":
                    name = f"{self._path}.{inner.target}"
                    known[inner] = self._copy.attribute(self._before, name, attribute_of(inner))
                case "output":
                    found = arguments[0]
                case _:
                    known[inner] = self._call(inner.target, *arguments, **keywords)
        for item, like in zip(found, left, strict=True):
            self._check(self._copy.fakes[item], self._copy.fakes[like])
        return [*found]

    def _check(self, given: Any, wanted: Any) -> None:
        shown = [f"{item.dtype} of sizes {[*map(expression_of, item.shape)]}" for item in (given, wanted)]
        if shown[0] != shown[1]:
            reason = f"its function gives {shown[0]} for {shown[1]} at once, so it is not one of single elements"
            raise GraphError(self._node.name, reason, "Use combine_mode='generic'", location_of(self._node))

    def _slice(self, tensor: Node, start: int, end: int, step: int = 1) -> Node:
        if (start, end, step) == (0, self._length(tensor), 1):
            return tensor
        return self._call(_aten.slice.Tensor, tensor, 0, start, end, step)

    def _joined(self, tensors: Sequence[Node]) -> Node:
        return self._call(_aten.cat.default, [*tensors], 0)

    def _length(self, tensor: Node) -> int:
        found: int = self._copy.fakes[tensor].shape[0]
        return found

    def _call(self, target: Any, *arguments: Any, **keywords: Any) -> Node:
        return self._copy.call(self._before, target, arguments, keywords, self._node.name)
