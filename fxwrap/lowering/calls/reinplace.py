"""Re-inplacing: calls that write copies of their operands write the operands themselves where nothing observes it.

A functionalised graph contains `y = call(copy of x)`, ..., `x.copy_(y)`. If nothing observes the difference, the call
may write `x`, readers of `y` read `x`, and the copy back is dropped; so too for a chain of calls, each on the result of
the one before. A call that overwrites a slice becomes a write of that slice. The update of a cache then costs only the
slice, without copies of the cache. A large new tensor that is filled slice by slice is written in the same way, so that
the operands of all slices need not be live at the same time.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from fxwrap.fx_passes.effects import (
    EMPTY_OPERATORS,
    IN_PLACE_VARIANTS,
    aliased_operands,
    attribute_of,
    has_effect,
    launches_user_kernel,
    operator_label,
)
from fxwrap.fx_passes.graph_copy import bytes_of, expressions_of, is_dense, same_layout
from fxwrap.lowering.builder import Fakes
from fxwrap.lowering.calls.slice_writes import SliceWrite, match_slice_write
from fxwrap.torch_compat import HigherOrderOperator, OpOverload, storage_identity
from fxwrap.wrapper_ir.operators import operator_name, operator_schema

MIN_FILLED_BYTES = 2**24
"""The size from which on a new tensor is filled slice by slice: each slice takes a launch."""


@dataclass(frozen=True)
class ReinplacePlan:
    """The calls that write in place.

    Fields:
        written: for each such call, the operand that each result aliases, by the result's key (None for one tensor).
        copies: the copies back, which are dropped.
        slice_writes: the slice that each call overwrites, for those that overwrite slices.
        parts: the calls that these slice writes replace.
    """

    written: Mapping[Node, Mapping[object, Node]] = field(default_factory=dict)
    copies: frozenset[Node] = frozenset()
    slice_writes: Mapping[Node, SliceWrite] = field(default_factory=dict)
    parts: frozenset[Node] = frozenset()


@dataclass(frozen=True)
class _FunctionalWrite:
    """A call, the key of one of its results, the node of that result, and the operand that the call copies.

    With `slice_write`, the call overwrites only this slice of the operand.
    """

    call: Node
    key: object
    result: Node
    operand: Node
    slice_write: SliceWrite | None = None


@dataclass(frozen=True)
class _Chain:
    """Calls from `target` on, each on the result of the one before; `end` copies the last result into the target.

    If the target is a new tensor (`fills`), `end` is the output of the graph.
    """

    target: Node
    links: tuple[_FunctionalWrite, ...]
    end: Node
    fills: bool = False


def plan_reinplacing(
    nodes: Sequence[Node],
    fakes: Fakes,
    returns_mutated_inputs: bool = False,
    preserved_operators: Collection[str] = (),
    fills_small: bool = False,
) -> ReinplacePlan:
    """Returns the calls of a graph that may write their operands in place. Linear in nodes; installs no guards.

    Args:
        nodes: the graph's nodes in order.
        fakes: their fake values.
        returns_mutated_inputs: whether the graph may return a mutated placeholder itself.
        preserved_operators: operators, "aten.index_put.default", whose calls and copies are unchanged.
        fills_small: whether small new tensors are filled slice by slice, too.
    """
    copies = [node for node in nodes if node.target is torch.ops.aten.copy_.default and not node.kwargs]
    matches = [_match_chain(node, *node.args, fakes, preserved_operators) for node in copies if len(node.args) == 2]
    matches += [
        _match_fill(node, nodes[-1], fakes, preserved_operators)
        for node in nodes
        if node.target in EMPTY_OPERATORS and _is_filled(fakes.get(node), fills_small)
    ]
    chains = [chain for chain in matches if chain is not None]
    if not chains:
        return ReinplacePlan()
    graph = _AliasGraph(nodes, fakes, returns_mutated_inputs)
    written: dict[Node, dict[object, Node]] = {}
    slice_writes: dict[Node, SliceWrite] = {}
    dropped: set[Node] = set()
    for chain in chains:
        if not graph.try_reinplace(chain):
            continue
        dropped.update(() if chain.fills else (chain.end,))
        for link in chain.links:
            written.setdefault(link.call, {})[link.key] = link.operand
            if link.slice_write is not None:
                slice_writes[link.call] = link.slice_write
    parts = frozenset([part for slice_write in slice_writes.values() for part in slice_write.parts])
    return ReinplacePlan(written, frozenset(dropped), slice_writes, parts)


def _match_chain(
    end: Node, target: object, source: object, fakes: Fakes, preserved_operators: Collection[str]
) -> _Chain | None:
    """Returns the chain of calls from a placeholder or attribute to the source of a copy into it, if there is one."""
    if not isinstance(target, Node) or target.op not in ("placeholder", "get_attr"):
        return None
    if str(end.target) in preserved_operators:
        return None
    links: list[_FunctionalWrite] = []
    while source is not target:
        link = _match_functional_write(source, fakes)
        if link is None or str(link.call.target) in preserved_operators:
            return None
        links.insert(0, link)
        source = link.operand
    return _Chain(target, tuple(links), end) if links else None


def _is_filled(fake: object, fills_small: bool) -> bool:
    return isinstance(fake, torch.Tensor) and (fills_small or bytes_of(fake) >= MIN_FILLED_BYTES)


def _match_fill(node: Node, output: Node, fakes: Fakes, preserved_operators: Collection[str]) -> _Chain | None:
    """Returns the chain of calls that fill a new tensor slice by slice, if there is one."""
    links: list[_FunctionalWrite] = []
    last = node
    while len(last.users) == 1:
        (user,) = last.users
        slice_write = None if str(user.target) in preserved_operators else match_slice_write(user, fakes)
        if slice_write is None or slice_write.base is not last or slice_write.source is None:
            break
        links.append(_FunctionalWrite(user, None, user, last, slice_write))
        last = user
    return _Chain(node, tuple(links), output, fills=True) if links else None


def _match_functional_write(node: object, fakes: Fakes) -> _FunctionalWrite | None:
    """Returns the call whose result a node is, if that is a modified copy of an operand."""
    if not isinstance(node, Node):
        return None
    if (slice_write := match_slice_write(node, fakes)) is not None:
        return _FunctionalWrite(node, None, node, slice_write.base, slice_write)
    if isinstance(node.target, OpOverload):
        operand = node.args[0] if operator_name(node.target) in IN_PLACE_VARIANTS and node.args else None
        return _FunctionalWrite(node, None, node, operand) if isinstance(operand, Node) else None
    if node.target is not operator.getitem:
        return None
    call, key = node.args
    if not isinstance(call, Node) or not isinstance(call.target, HigherOrderOperator):
        return None
    base: object = None
    if launches_user_kernel(call):
        base = call.kwargs["kwargs"].get(key)  # type: ignore[union-attr, arg-type]
    elif operator_label(call.target) == "auto_functionalized_v2" and isinstance(call.args[0], OpOverload):
        bases: Sequence[object] = call.kwargs.get("_all_bases", ())  # type: ignore[assignment]
        returns = max(operator_schema(call.args[0]).return_count, 1)
        base = bases[key - returns] if isinstance(key, int) and returns <= key < returns + len(bases) else None
    return _FunctionalWrite(call, key, node, base) if isinstance(base, Node) else None


class _AliasGraph:
    """A graph's nodes by storage, and the chains that write in place so far."""

    def __init__(self, nodes: Sequence[Node], fakes: Fakes, returns_mutated_inputs: bool) -> None:
        self.nodes = nodes
        self.fakes = fakes
        self.returns_mutated_inputs = returns_mutated_inputs
        self.position = {node: position for position, node in enumerate(nodes)}
        output = next(node for node in reversed(nodes) if node.op == "output")
        self.returned = set(_operands(output.args[0]))
        self.reinplaced: set[Node] = set()
        self.on_storage: dict[int, list[Node]] = {}
        for node in nodes:
            fake = None if isinstance(node.target, HigherOrderOperator) else fakes.get(node)
            for part in fake if isinstance(fake, tuple | list) else (fake,):
                if isinstance(part, torch.Tensor):
                    self.on_storage.setdefault(storage_identity(part), []).append(node)

    def try_reinplace(self, chain: _Chain) -> bool:
        """Returns whether a chain's calls may write in place, and records it if so."""
        before = self._aliases(chain.target, chain.end)
        if not before.isdisjoint(self.reinplaced) or not all(self._same_layout(link) for link in chain.links):
            return False
        own = {chain.end, *(link.call for link in chain.links)}
        own |= {part for link in chain.links if link.slice_write is not None for part in link.slice_write.parts}
        memory = set(before)
        for number, link in enumerate(chain.links):
            if sum(node in memory for node in _operands((link.call.args, link.call.kwargs))) != 1:
                return False  # another operand reads the same memory
            if link.slice_write is not None and link.slice_write.source in memory:
                return False
            after = self._aliases(link.result, chain.end)
            following = self.position[chain.links[number + 1].call] if number + 1 < len(chain.links) else None
            if not self._is_unobserved(after - before, own, following):
                return False
            if not self._may_be_returned(chain, link) and not self.returned.isdisjoint(after - before):
                return False
            memory |= after
        if not self._is_read_before_write(chain, before, own):
            return False
        self.reinplaced |= memory
        return True

    def _aliases(self, start: Node, end: Node) -> set[Node]:
        """Returns the nodes that may alias one, itself included, by storages and by schemas."""
        fake, pending = self.fakes.get(start), [start]
        if isinstance(fake, torch.Tensor):
            pending += self.on_storage.get(storage_identity(fake), ())
        if start.op == "get_attr":
            pending += [node for node in self.nodes if node.op == "get_attr" and _same_storage(node, start)]
        aliases = set(pending)
        while pending:
            for user in pending.pop().users:
                if user not in aliases and user is not end and _may_alias_operands(user):
                    aliases.add(user)
                    pending.append(user)
        return aliases

    def _same_layout(self, link: _FunctionalWrite) -> bool:
        """Whether a result has the layout of its operand, which is dense."""
        old, new = self.fakes.get(link.operand), self.fakes.get(link.result)
        if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
            return False
        return old.dtype == new.dtype and old.device == new.device and is_dense(old) and same_layout(old, new)

    def _is_unobserved(self, result: Collection[Node], own: Collection[Node], following: int | None) -> bool:
        """Whether no call outside the chain writes a result, or reads it after the following call of the chain."""
        for user in _users(result):
            if user not in own and not _only_reads(user):
                return False
            if user not in own and following is not None and self.position[user] > following:
                return False
        return True

    def _may_be_returned(self, chain: _Chain, link: _FunctionalWrite) -> bool:
        """Whether the graph may return a result: eager modules of exported programs return the mutated buffer too."""
        return (self.returns_mutated_inputs or chain.fills) and link is chain.links[-1]

    def _is_read_before_write(self, chain: _Chain, before: Collection[Node], own: Collection[Node]) -> bool:
        """Whether the target's old content is read only before the first call, and only the chain writes it.

        Readers after the copy back read the new content, at the offset of the last result.
        """
        first, last = self.position[chain.links[0].call], self.position[chain.end]
        users = [user for user in _users(before) if user not in own]
        if any(not _only_reads(user) or first < self.position[user] < last for user in users):
            return False
        if not any(self.position[user] > last for user in [*users, *chain.end.users]):
            return True
        old, new = self.fakes[chain.target], self.fakes[chain.links[-1].result]
        return expressions_of([old.storage_offset()]) == expressions_of([new.storage_offset()])


def _only_reads(node: Node) -> bool:
    """Whether a call's operands are only read, until it returns. Attention does, which may draw random numbers."""
    if not isinstance(node.target, OpOverload):
        return not has_effect(node)
    schema = operator_schema(node.target)
    return not schema.mutated_arguments and not schema.fixed_effects


def _may_alias_operands(node: Node) -> bool:
    """Whether a call's results may alias its operands, judged by the call alone."""
    if node.target is operator.getitem:
        return True
    if isinstance(node.target, HigherOrderOperator):
        return bool(aliased_operands(node))
    if not isinstance(node.target, OpOverload):
        return False
    schema = operator_schema(node.target)
    return schema.aliased_argument is not None or schema.replacement is not None or bool(schema.mutated_arguments)


def _same_storage(one: Node, other: Node) -> bool:
    first, second = attribute_of(one), attribute_of(other)
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return False
    return storage_identity(first) == storage_identity(second)


def _users(nodes: Collection[Node]) -> Iterator[Node]:
    for node in nodes:
        yield from node.users


def _operands(tree: object) -> list[Node]:
    """Returns the nodes among arguments, each as often as it occurs."""
    nodes: list[Node] = []
    map_arg(tree, nodes.append)  # type: ignore[type-var]
    return nodes
