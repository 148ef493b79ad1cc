"""Calls that write copies of their operands, where the copy is copied back at last: they write the operands themselves.

A functionalized graph says `y = call(copy of x)`, ..., `x.copy_(y)`. Where nothing after the call reads what `x` held
before, the call may write `x`, what reads `y` reads `x`, and the copy back is nothing. So it is for several calls in a
row, each on what the one before has written.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from fxwrap.lowering.effects import launches_kernel, operator_label
from fxwrap.lowering.operators import operator_facts
from fxwrap.torch_compat import HigherOrderOperator, OpOverload, storage_identity


@dataclass(frozen=True)
class InPlace:
    """What is written in place: for each call, the operands that its results are, by the results' keys.

    `copies` are the copies back, which are nothing any more.
    """

    written: Mapping[Node, Mapping[Any, Node]] = field(default_factory=dict)
    copies: frozenset[Node] = frozenset()


@dataclass(frozen=True)
class _Link:
    """A call, the key of one of its results, the node that takes that result, and the operand that it is a copy of."""

    call: Node
    key: Any
    result: Node
    operand: Node


def calls_in_place(nodes: Sequence[Node], fakes: Mapping[Node, Any]) -> InPlace:
    """Returns which calls of a graph may write their operands in place, by the graph's fake values. Linear in nodes."""
    copies = [node for node in nodes if node.target is torch.ops.aten.copy_.default]
    if not copies:
        return InPlace()
    graph = _Graph(nodes, fakes)
    written: dict[Node, dict[Any, Node]] = {}
    dropped = set()
    for copy in copies:
        links = graph.links(copy)
        if links and all(graph.may_write(link, copy) for link in links):
            dropped.add(copy)
            for link in links:
                written.setdefault(link.call, {})[link.key] = link.operand
    return InPlace(written, frozenset(dropped))


class _Graph:
    """A graph's nodes by the storage that they show."""

    def __init__(self, nodes: Sequence[Node], fakes: Mapping[Node, Any]) -> None:
        self.fakes = fakes
        self.place = {node: position for position, node in enumerate(nodes)}
        self.on_storage: dict[int, list[Node]] = {}
        for node in nodes:
            storage = self._storage(node)
            if storage is not None:
                self.on_storage.setdefault(storage, []).append(node)

    def _storage(self, node: Node) -> int | None:
        fake = self.fakes.get(node)
        return storage_identity(fake) if isinstance(fake, torch.Tensor) else None

    def links(self, copy: Node) -> list[_Link]:
        """Returns the calls from what a copy reads to what it writes, the last first; none where there is no way."""
        target, source = copy.args[0], copy.args[1]
        if not isinstance(target, Node) or target.op not in ("placeholder", "get_attr") or copy.kwargs:
            return []
        found = []
        while source is not target:
            link = _link(source)
            if link is None:
                return []
            found.append(link)
            source = link.operand
        return found

    def may_write(self, link: _Link, copy: Node) -> bool:
        """Whether a call may write its operand, given that `copy` is left out then."""
        one, other = self.fakes.get(link.operand), self.fakes.get(link.result)
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
            return False
        if one.dtype != other.dtype or one.shape != other.shape or one.stride() != other.stride():
            return False
        old = set(self.on_storage[storage_identity(one)])
        if sum(node in old for node in _operands(link.call)) != 1:
            return False  # it reads the same memory by another operand too
        before = self.place[link.call]
        early = all(
            user in (link.call, copy) or self.place[user] < before for node in old - {copy} for user in node.users
        )
        new = self.on_storage[storage_identity(other)]
        return early and not any(user.op == "output" for node in new for user in node.users)


def _link(node: Any) -> _Link | None:
    """Returns the call that a node takes a written copy from."""
    if not isinstance(node, Node) or node.target is not operator.getitem:
        return None
    call, key = node.args
    if not isinstance(call, Node) or not isinstance(call.target, HigherOrderOperator):
        return None
    given: Any = None
    if launches_kernel(call):
        given = call.kwargs["kwargs"].get(key)  # type: ignore[union-attr, arg-type]
    elif operator_label(call.target) == "auto_functionalized_v2" and isinstance(call.args[0], OpOverload):
        bases: Any = call.kwargs.get("_all_bases", ())
        before = max(operator_facts(call.args[0]).return_count, 1)
        given = bases[key - before] if isinstance(key, int) and before <= key < before + len(bases) else None
    return _Link(call, key, node, given) if isinstance(given, Node) else None


def _operands(call: Node) -> Iterator[Node]:
    """Yields the operands of a call, each as often as it is one."""
    found: list[Node] = []
    map_arg((call.args, call.kwargs), found.append)
    yield from found
