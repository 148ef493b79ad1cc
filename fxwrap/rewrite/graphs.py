"""Patterns over emitted FX graphs, matched by torch.fx's own matcher on the graph's data flow.

In an emitted graph a kernel writes memory, and who reads it later names the memory. A matcher that follows arguments
sees nothing of that. So a copy of the graph is matched in which a launch gives what it writes; what is found there is
replaced in the graph itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node, symbolic_trace
from torch.fx.passes.utils.matcher_utils import InternalMatch, SubgraphMatcher

from fxwrap.errors import RewriteError
from fxwrap.rewrite.kernel_nodes import KernelNode, KernelTarget, kernel_of
from fxwrap.torch_compat import FakeTensor, OpOverload, on_fake_tensors, storage_identity
from fxwrap.wrapper_ir import Origin, operator_facts

_FRESH = frozenset(
    {
        torch.ops.aten.empty_strided.default, torch.ops.fxwrap.reuse.default,
        torch.ops.fxwrap.pool_slice.default, torch.ops.fxwrap.workspace.default,
    }
)  # fmt: skip
"""What gives memory without content."""


@dataclass(frozen=True)
class GraphMatch:
    """A match in a graph: the names of its nodes, and why it was left alone ("" where it was replaced)."""

    nodes: tuple[str, ...]
    refused: str = ""


def replace_in_graph(
    graph_module: GraphModule,
    pattern: Callable[..., Any],
    replacement: Callable[..., Any],
    *,
    where: Callable[[dict[str, Node]], bool] | None = None,
) -> list[GraphMatch]:
    """Replaces each match of a pattern in an emitted graph, in place, and compiles the graph's code again.

    Both functions take the same arguments, as for `torch.fx.replace_pattern`, and are traced symbolically. In `pattern`
    a `kernel_node(*operators)` stands for a launch. Only what may move is replaced: a match is left alone where memory
    that it reads is written between its nodes, where one of its nodes has another effect, or where a kernel writes
    memory that others share.

    Args:
        graph_module: what `to_fx` gave.
        pattern: a function of tensors that gives what the replacement has to give.
        replacement: a function of the same tensors, of operators that the graph may call.
        where: asked with the nodes that the pattern's arguments stand for, by name; false leaves a match alone.

    Returns the matches, in the order of the graph; those that were left alone say why. Raises RewriteError for a
    replacement that gives another dtype, shape or device.
    """
    found, made = symbolic_trace(pattern), symbolic_trace(replacement)
    flow = _Flow(graph_module)
    matcher = SubgraphMatcher(found.graph)
    names = [str(node.target) for node in found.graph.find_nodes(op="placeholder")]
    results = []
    for match in sorted(matcher.match(flow.graph), key=lambda item: flow.last(item)):
        nodes = flow.matched(match)
        reason = flow.obstacle(match)
        given = dict(zip(names, [flow.original(node) for node in match.placeholder_nodes], strict=True))
        if not reason and where is not None and not where(given):
            reason = "the condition does not hold"
        results.append(GraphMatch(tuple([node.name for node in nodes]), reason))
        if not reason:
            flow.replace(match, made, list(given.values()))
    graph_module.recompile()
    return results


@dataclass
class _Flow:
    """A graph as data flow, beside the graph itself. `index` is the place of each node of the graph."""

    module: GraphModule
    graph: Graph = field(default_factory=Graph)
    index: dict[Node, int] = field(default_factory=dict)
    sources: dict[Node, Node] = field(default_factory=dict)  # nodes of the copy -> the node that made them
    holders: dict[Node, Node] = field(default_factory=dict)  # nodes of the copy -> the node that names the memory
    writes: list[tuple[int, int]] = field(default_factory=list)  # place, storage

    def __post_init__(self) -> None:
        nodes = list(self.module.graph.nodes)
        self.index = {node: place for place, node in enumerate(nodes)}
        shared: dict[int, int] = {}
        for node in nodes:
            storage = _storage(node)
            if storage is not None:
                shared[storage] = shared.get(storage, 0) + 1
        content: dict[Node, Node] = {}
        for node in nodes:
            kernel = kernel_of(node) if node.op == "call_function" else None
            if kernel is not None and all(shared.get(_storage(out) or 0) == 1 for out in kernel.outs):
                self._launch(kernel, content)
            else:
                self._copy(node, content)
        self.graph.owning_module = self.module

    def _copy(self, node: Node, content: dict[Node, Node]) -> None:
        made = self.graph.node_copy(node, lambda operand: content[operand])
        self.sources[made] = node
        self.holders[made] = node
        content[node] = made
        written = _written(node)
        gives_it = len(written) == 1 and isinstance(node.meta.get("val"), torch.Tensor)  # as operators in place do
        for place, operand in enumerate(written):
            self._wrote(node, operand)
            content[operand] = made if gives_it else self._part(made, place, operand)

    def _part(self, made: Node, place: int, operand: Node) -> Node:
        """Returns a node for what memory holds that a node has written, and does not give."""
        part = self.graph.call_function(operator.getitem, (made, place))
        self.sources[part] = self.sources[made]
        self.holders[part] = operand
        return part

    def _launch(self, kernel: KernelNode, content: dict[Node, Node]) -> None:
        updated = [out for out in kernel.outs if content[out].target not in _FRESH]
        operands = tuple([content[item] for item in (*kernel.ins, *updated)])
        made = self.graph.call_function(KernelTarget(kernel.operators), operands)
        self.sources[made] = kernel.node
        content[kernel.node] = made
        for place, out in enumerate(kernel.outs):
            self._wrote(kernel.node, out)
            if len(kernel.outs) > 1:
                content[out] = self._part(made, place, out)
            else:
                self.holders[made] = out
                content[out] = made

    def _wrote(self, node: Node, operand: Node) -> None:
        storage = _storage(operand)
        if storage is not None:
            self.writes.append((self.index[node], storage))

    # --- matches ----------------------------------------------------------------------------------------------------

    def original(self, item: Any) -> Any:
        """Returns the node of the graph that names what a node of the copy stands for; a literal is itself."""
        return self.holders.get(item, item) if isinstance(item, Node) else item

    def matched(self, match: InternalMatch) -> list[Node]:
        """Returns the nodes of the graph that a match takes the place of, in order."""
        taken = [self.sources[node] for pn, node in match.nodes_map.items() if pn.op not in ("placeholder", "output")]
        return sorted(dict.fromkeys(taken), key=self.index.__getitem__)

    def last(self, match: InternalMatch) -> int:
        """Returns the place of a match's last node."""
        return self.index[self.matched(match)[-1]]

    def obstacle(self, match: InternalMatch) -> str:
        """Returns why a match cannot be replaced where its last node is, or ""."""
        nodes = self.matched(match)
        first, last = self.index[nodes[0]], self.index[nodes[-1]]
        own = {self.index[node] for node in nodes}
        for node in nodes:
            if kernel_of(node) is None and (node.is_impure() or _written(node)):
                return f"'{node.name}' has an effect"
        read = {_storage(operand) for node in nodes for operand in node.all_input_nodes}
        for place, storage in self.writes:
            if first < place < last and place not in own and storage in read:
                return "memory that it reads is written between its nodes"
        for node in match.returning_nodes:
            holder = self.original(node)
            start = self.index[self.sources[node]]
            used = [user for user in holder.users if start < self.index.get(user, last + 1) < last]
            if any(user not in nodes for user in used):
                return f"'{holder.name}' is used before the last node of the match"
        return ""

    def replace(self, match: InternalMatch, replacement: GraphModule, operands: Sequence[Any]) -> None:
        """Puts the replacement in the place of a match's last node."""
        nodes, graph = self.matched(match), self.module.graph
        placeholders = replacement.graph.find_nodes(op="placeholder")
        before = set(graph.nodes)
        named = {node: node.all_input_nodes for node in nodes}
        with graph.inserting_before(nodes[-1]):
            values = dict(zip(placeholders, operands, strict=True))
            given = graph.graph_copy(replacement.graph, values)
        results: list[Any] = list(given) if isinstance(given, tuple | list) else [given]
        origin = _origin(nodes)
        for node in graph.nodes:
            if node not in before:
                self.index[node] = self.index[nodes[-1]]
                node.meta["fxwrap_origin"] = origin
                _evaluate(node)
        for old, new in zip(match.returning_nodes, results, strict=True):
            self._redirect(old, new, nodes)
        for node in reversed(nodes):
            if not node.users:
                graph.erase_node(node)
        left = set(graph.nodes)
        for out in dict.fromkeys([operand for node in nodes for operand in named[node]]):
            if out in left and not out.users and out.target in _FRESH:
                graph.erase_node(out)

    def _redirect(self, old: Node, new: Node, nodes: Sequence[Node]) -> None:
        """Has readers of a match's result read another node; into memory that others see, it is copied."""
        holder, place = self.original(old), self.index[self.sources[old]]
        was, now = holder.meta.get("val"), new.meta.get("val")
        if _described(was) != _described(now):
            raise RewriteError(f"'{holder.name}' is {_described(was)}, and the replacement gives {_described(now)}")
        if holder.op != "call_function" and old.target is not holder.target:
            with self.module.graph.inserting_before(nodes[-1]):
                copied = self.module.graph.call_function(torch.ops.aten.copy_.default, (holder, new))
            self.index[copied] = self.index[nodes[-1]]
            _evaluate(copied)
            return
        holder.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new and self._is_later(user, place))
        for item, named in list(self.holders.items()):
            if named is holder and self.index[self.sources[item]] >= place:
                self.holders[item] = new

    def _is_later(self, user: Node, place: int) -> bool:
        return self.index.get(user, -1) > place


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return "no tensor" if value is not None else "nothing"
    return f"{value.dtype} {tuple(value.shape)} on {value.device}"


def _storage(node: Node) -> int | None:
    value = node.meta.get("val")
    return storage_identity(value) if isinstance(value, torch.Tensor) else None


def _written(node: Node) -> list[Node]:
    """Returns the operands that a node writes, by its schema; all of a kernel's that is not told apart."""
    if not isinstance(node.target, OpOverload):
        kernel = kernel_of(node) if node.op == "call_function" else None
        return list(kernel.outs) if kernel is not None else []
    facts = operator_facts(node.target)
    given = [facts.operand(name, node.args, tuple(node.kwargs.items())) for name in facts.written]
    flat = [part for item in given for part in (item if isinstance(item, tuple | list) else (item,))]
    return [item for item in flat if isinstance(item, Node)]


def _origin(nodes: Sequence[Node]) -> Origin:
    """Returns where the nodes of a match came from, together."""
    origins = [node.meta.get("fxwrap_origin") for node in nodes]
    return Origin(tuple(dict.fromkeys([source for origin in origins if origin for source in origin.sources])))


def _evaluate(node: Node) -> None:
    """Gives a new node its fake value, if its operands have theirs."""
    operands = [item.meta.get("val") for item in node.all_input_nodes]
    mode = next((item.fake_mode for item in operands if isinstance(item, FakeTensor)), None)
    if node.op != "call_function" or mode is None:
        return
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda item: item.meta.get("val"))
    with on_fake_tensors(mode):
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]
