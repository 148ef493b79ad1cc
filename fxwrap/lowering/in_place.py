"""Calls that write copies of their operands, where a copy ends in the operand: they write the operands themselves.

A functionalized graph says `y = call(copy of x)`, ..., `x.copy_(y)`. Where nothing can tell, the call may write `x`,
what reads `y` reads `x`, and the copy back is nothing. So it is for several calls in a row, each on what the one before
has written. A call that puts a tensor in the place of a slice becomes a write of that slice. Updating a cache then
costs what is written, and no copies of the cache. A large new tensor that is filled slice by slice is written so too:
what each slice is computed from need not be there at the same time.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from fxwrap.lowering.effects import attribute_of, has_effect, launches_kernel, operator_label, shown_operands
from fxwrap.lowering.graph_copy import bytes_of, expressions_of, same_layout
from fxwrap.lowering.operators import EMPTY, IN_PLACE_FORMS
from fxwrap.lowering.windows import Window, overwritten_window
from fxwrap.torch_compat import HigherOrderOperator, OpOverload, storage_identity
from fxwrap.wrapper_ir.operators import operator_facts, operator_name

_LEAST_FILLED = 2**24
"""Bytes from which on a new tensor is filled slice by slice: a launch for each costs nothing beside."""


@dataclass(frozen=True)
class InPlace:
    """What is written in place: for each call, the operands that its results are, by the results' keys.

    A result that is one tensor has the key None. `copies` are the copies back, which are nothing any more. `windows`
    says of calls that overwrite a slice which it is, and `parts` are the calls that these are made of.
    """

    written: Mapping[Node, Mapping[Any, Node]] = field(default_factory=dict)
    copies: frozenset[Node] = frozenset()
    windows: Mapping[Node, Window] = field(default_factory=dict)
    parts: frozenset[Node] = frozenset()


@dataclass(frozen=True)
class _Link:
    """A call, the key of one of its results, the node that takes that result, and the operand that it is a copy of.

    With `window`, it is this slice of the operand that is overwritten.
    """

    call: Node
    key: Any
    result: Node
    operand: Node
    window: Window | None = None


@dataclass(frozen=True)
class _Chain:
    """Calls from `target` on, each on the result of the one before; `end` copies the last result into the target.

    Of a new tensor that nobody has seen before (`fills`), `end` is where the graph ends.
    """

    target: Node
    links: tuple[_Link, ...]
    end: Node
    fills: bool = False


def calls_in_place(
    nodes: Sequence[Node], fakes: Mapping[Node, Any], gives_written: bool = False, kept: Collection[str] = ()
) -> InPlace:
    """Returns which calls of a graph may write their operands in place. Linear in nodes; installs no guards.

    Args:
        nodes: the graph's nodes in order.
        fakes: their fake values.
        gives_written: whether what is copied into a placeholder may be given back as the placeholder itself.
        kept: operators, "aten.index_put.default", whose calls and copies stay as they are.
    """
    copies = [node for node in nodes if node.target is torch.ops.aten.copy_.default and not node.kwargs]
    found = [_chain(node, *node.args, fakes, kept) for node in copies if len(node.args) == 2]
    found += [_filling(node, nodes[-1], fakes, kept) for node in nodes if node.target in EMPTY]
    chains = [chain for chain in found if chain is not None]
    if not chains:
        return InPlace()
    graph = _Graph(nodes, fakes, gives_written)
    written: dict[Node, dict[Any, Node]] = {}
    windows: dict[Node, Window] = {}
    dropped: set[Node] = set()
    for chain in chains:
        if not graph.take(chain):
            continue
        dropped.update(() if chain.fills else (chain.end,))
        for link in chain.links:
            written.setdefault(link.call, {})[link.key] = link.operand
            if link.window is not None:
                windows[link.call] = link.window
    parts = frozenset([part for window in windows.values() for part in window.parts])
    return InPlace(written, frozenset(dropped), windows, parts)


def _chain(
    end: Node, target: Any, source: Any, fakes: Mapping[Node, Any], kept: Collection[str]
) -> _Chain | None:
    """Returns the calls from a tensor to what is to overwrite it, or None where there is no way, or nothing between."""
    if not isinstance(target, Node) or target.op not in ("placeholder", "get_attr") or str(end.target) in kept:
        return None
    found: list[_Link] = []
    while source is not target:
        link = _link(source, fakes)
        if link is None or str(link.call.target) in kept:
            return None
        found.insert(0, link)
        source = link.operand
    return _Chain(target, tuple(found), end) if found else None


def _filling(
    node: Node, output: Node, fakes: Mapping[Node, Any], kept: Collection[str]
) -> _Chain | None:
    """Returns the calls that put one slice after another into a large new tensor, or None where it is another one."""
    fake = fakes.get(node)
    if not isinstance(fake, torch.Tensor) or bytes_of(fake) < _LEAST_FILLED:
        return None
    found: list[_Link] = []
    last = node
    while len(last.users) == 1:
        (user,) = last.users
        window = None if str(user.target) in kept else overwritten_window(user, fakes)
        if window is None or window.base is not last or window.source is None:
            break
        found.append(_Link(user, None, user, last, window))
        last = user
    return _Chain(node, tuple(found), output, fills=True) if found else None


def _link(node: Any, fakes: Mapping[Node, Any]) -> _Link | None:
    """Returns the call that a node is, or takes, a written copy from."""
    if not isinstance(node, Node):
        return None
    if (window := overwritten_window(node, fakes)) is not None:
        return _Link(node, None, node, window.base, window)
    if isinstance(node.target, OpOverload):
        given = node.args[0] if operator_name(node.target) in IN_PLACE_FORMS and node.args else None
        return _Link(node, None, node, given) if isinstance(given, Node) else None
    if node.target is not operator.getitem:
        return None
    call, key = node.args
    if not isinstance(call, Node) or not isinstance(call.target, HigherOrderOperator):
        return None
    base: Any = None
    if launches_kernel(call):
        base = call.kwargs["kwargs"].get(key)  # type: ignore[union-attr, arg-type]
    elif operator_label(call.target) == "auto_functionalized_v2" and isinstance(call.args[0], OpOverload):
        bases: Any = call.kwargs.get("_all_bases", ())
        before = max(operator_facts(call.args[0]).return_count, 1)
        base = bases[key - before] if isinstance(key, int) and before <= key < before + len(bases) else None
    return _Link(call, key, node, base) if isinstance(base, Node) else None


class _Graph:
    """A graph's nodes by the storage that they show, and the chains that are in place so far."""

    def __init__(self, nodes: Sequence[Node], fakes: Mapping[Node, Any], gives_written: bool) -> None:
        self.nodes = nodes
        self.fakes = fakes
        self.gives_written = gives_written
        self.place = {node: position for position, node in enumerate(nodes)}
        output = next(node for node in reversed(nodes) if node.op == "output")
        self.returned = set(_operands(output.args[0]))
        self.taken: set[Node] = set()
        self.on_storage: dict[int, list[Node]] = {}
        for node in nodes:
            fake = None if isinstance(node.target, HigherOrderOperator) else fakes.get(node)
            for part in fake if isinstance(fake, tuple | list) else (fake,):
                if isinstance(part, torch.Tensor):
                    self.on_storage.setdefault(storage_identity(part), []).append(node)

    def take(self, chain: _Chain) -> bool:
        """Whether a chain's calls write in place; it is remembered then."""
        before = self._in_memory_of(chain.target, chain.end)
        if not before.isdisjoint(self.taken) or not all(self._same_layout(link) for link in chain.links):
            return False
        own = {chain.end, *(link.call for link in chain.links)}
        own |= {part for link in chain.links if link.window is not None for part in link.window.parts}
        memory = set(before)
        for number, link in enumerate(chain.links):
            if sum(node in memory for node in _operands((link.call.args, link.call.kwargs))) != 1:
                return False  # it reads the same memory by another operand too
            if link.window is not None and link.window.source in memory:
                return False
            after = self._in_memory_of(link.result, chain.end)
            following = self.place[chain.links[number + 1].call] if number + 1 < len(chain.links) else None
            if not self._is_hidden(after - before, own, following):
                return False
            if not self._may_be_shown(chain, link) and not self.returned.isdisjoint(after - before):
                return False
            memory |= after
        if not self._is_read_in_time(chain, before, own):
            return False
        self.taken |= memory
        return True

    def _in_memory_of(self, start: Node, end: Node) -> set[Node]:
        """Returns the nodes that may show the memory of one, itself included, by storages and by schemas."""
        fake, pending = self.fakes.get(start), [start]
        if isinstance(fake, torch.Tensor):
            pending += self.on_storage.get(storage_identity(fake), ())
        if start.op == "get_attr":
            pending += [node for node in self.nodes if node.op == "get_attr" and _same_attribute(node, start)]
        found = set(pending)
        while pending:
            for user in pending.pop().users:
                if user not in found and user is not end and _may_show_operands(user):
                    found.add(user)
                    pending.append(user)
        return found

    def _same_layout(self, link: _Link) -> bool:
        """Whether a result is laid out as its operand is, without gaps or elements in one place."""
        old, new = self.fakes.get(link.operand), self.fakes.get(link.result)
        if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
            return False
        if old.dtype != new.dtype or old.device != new.device or not _is_dense(old):
            return False
        return same_layout(old, new)

    def _is_hidden(self, result: Collection[Node], own: Collection[Node], following: int | None) -> bool:
        """Whether nobody else writes a result, and it is read before the following call writes it."""
        for user in _users(result):
            if user not in own and has_effect(user):
                return False
            if user not in own and following is not None and self.place[user] > following:
                return False
        return True

    def _may_be_shown(self, chain: _Chain, link: _Link) -> bool:
        """Whether a result may be given back: an exported program's is the buffer itself in eager's module too.

        A new tensor's is its own.
        """
        return (self.gives_written or chain.fills) and link is chain.links[-1]

    def _is_read_in_time(self, chain: _Chain, before: Collection[Node], own: Collection[Node]) -> bool:
        """Whether the target's old content is read before the first call writes it, and nobody else writes there.

        What is read after the copy back is the new content; it is found where the last result says that it begins.
        """
        first, last = self.place[chain.links[0].call], self.place[chain.end]
        users = [user for user in _users(before) if user not in own]
        if any(has_effect(user) or first < self.place[user] < last for user in users):
            return False
        if not any(self.place[user] > last for user in [*users, *chain.end.users]):
            return True
        old, new = self.fakes[chain.target], self.fakes[chain.links[-1].result]
        return expressions_of([old.storage_offset()]) == expressions_of([new.storage_offset()])


def _may_show_operands(node: Node) -> bool:
    """Whether a call's results may be in the memory of its operands, by what is known of the call alone."""
    if node.target is operator.getitem:
        return True
    if isinstance(node.target, HigherOrderOperator):
        return bool(shown_operands(node))
    if not isinstance(node.target, OpOverload):
        return False
    facts = operator_facts(node.target)
    return facts.aliased is not None or facts.replacement is not None or bool(facts.written)


def _same_attribute(one: Node, other: Node) -> bool:
    first, second = attribute_of(one), attribute_of(other)
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return False
    return storage_identity(first) == storage_identity(second)


def _is_dense(fake: torch.Tensor) -> bool:
    """Whether a tensor fills its memory, each element in a place of its own; False where that is not known."""
    sizes, strides = expressions_of(fake.shape), expressions_of(fake.stride())
    left = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size != 1]
    step: Any = 1
    while left:
        inner = next((pair for pair in left if pair[1] == step), None)
        if inner is None:
            return False
        left.remove(inner)
        step = inner[0] * step
    return True


def _users(nodes: Collection[Node]) -> Iterator[Node]:
    for node in nodes:
        yield from node.users


def _operands(tree: Any) -> list[Node]:
    """Returns the nodes among arguments, each as often as it is one."""
    found: list[Node] = []
    map_arg(tree, found.append)
    return found
