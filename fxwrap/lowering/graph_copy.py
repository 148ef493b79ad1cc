"""A copy of a graph to be changed before it is lowered, with the fake values of its nodes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fxwrap.lowering.effects import written_operands
from fxwrap.lowering.source import GraphSource
from fxwrap.torch_compat import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    UnwrittenModule,
    in_fake_mode,
    storage_identity,
    symbol_hint,
)


def items_of(fake: Any) -> Sequence[Any]:
    """Returns the parts of a fake value that may be several."""
    return fake if isinstance(fake, tuple | list) else tuple(fake.values()) if isinstance(fake, dict) else (fake,)


def storages_of(fake: Any) -> set[int]:
    """Returns the identities of the storages that a fake value is on."""
    return {storage_identity(item) for item in items_of(fake) if isinstance(item, torch.Tensor)}


def expression_of(number: Any) -> Any:
    """Returns a size or stride without asking what it is: an int, or a symbolic number's expression."""
    return number if type(number) is int else number.node.expr


def expressions_of(numbers: Sequence[Any]) -> list[Any]:
    """Returns sizes or strides as ints and expressions, whose comparison installs no guard."""
    return [expression_of(number) for number in numbers]


def same_layout(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have equal sizes and strides, as far as is known without asking for it."""
    mine, theirs = [expressions_of((*item.shape, *item.stride())) for item in (one, other)]
    return mine == theirs


def hinted(number: Any) -> int:
    """Returns a size or stride, or what a symbolic one is expected to be; 1 where nothing is."""
    return number if type(number) is int else int(symbol_hint(number) or 1)


def bytes_of(fake: torch.Tensor) -> int:
    """Returns how many bytes a tensor's elements take, by the hints of its sizes."""
    count: int = fake.dtype.itemsize
    for size in fake.shape:
        count *= hinted(size)
    return count


def call_on_fakes(target: Callable[..., Any], arguments: Any, keywords: Any, like: Any = None) -> Any:
    """Runs a call on fake values; one without any is given a fake tensor that it is to be like."""
    mode = _mode_among((*arguments, *keywords.values(), like))
    with in_fake_mode(mode):
        return target(*arguments, **keywords)


def _mode_among(fakes: Sequence[Any]) -> FakeTensorMode | None:
    items = [item for part in fakes for item in items_of(part)]
    return next((item.fake_mode for item in items if isinstance(item, FakeTensor)), None)


def run_on_fakes(node: Node, fakes: Mapping[Node, Any], like: Any = None) -> Any:
    """Returns what a call of an operator, or an item taken out of its results, gives on fake values of its operands."""
    found: Any = map_arg((node.args, node.kwargs), fakes.__getitem__)
    arguments, keywords = found
    if node.target is operator.getitem:
        return arguments[0][arguments[1]]
    return call_on_fakes(node.target, arguments, keywords, like)  # type: ignore[arg-type]


def written_storages(nodes: Sequence[Node], fakes: Mapping[Node, Any]) -> set[int]:
    """Returns the identities of the storages that some call of a graph writes."""
    return {
        storage for node in nodes if node.op == "call_function"
        for operand in written_operands(node, fakes) for storage in storages_of(fakes.get(operand))
    }  # fmt: skip


class GraphCopy:
    """A graph of its own with the nodes of another, under their names; `fakes` are of its nodes."""

    def __init__(self, source: GraphSource, fakes: Mapping[Node, Any]) -> None:
        self._source = source
        self._old = fakes
        self._replaced: dict[Node, Node] = {}
        self._became: dict[Node, str] = {}
        self._given: list[tuple[Node, Any, dict[str, Any], str]] = []
        self.graph = Graph()
        self.made_of: dict[Node, Node] = {}
        self.fakes: dict[Node, Any] = {}
        for node in source.graph_module.graph.nodes:
            made = self.made_of[node] = self.graph.node_copy(node, self.made_of.__getitem__)
            if node in fakes:
                self.fakes[made] = fakes[node]

    def call(
        self, before: Node, target: Callable[..., Any], arguments: Any, keywords: Any, name: str, fake: Any = None
    ) -> Node:
        """Puts a call in front of a node of the copy, whose metadata it takes. Its fake value is found, or given."""
        with self.graph.inserting_before(before):
            made = self.graph.create_node("call_function", target, arguments, keywords, name)
        if fake is None:
            fake = run_on_fakes(made, self.fakes, self.fakes[before])
        made.meta = {**before.meta, "val": fake}
        self.fakes[made] = fake
        return made

    def attribute(self, before: Node, path: str, payload: Any) -> Node:
        """Puts an attribute of the graph's module, which this is, in front of a node of the copy."""
        with self.graph.inserting_before(before):
            made = self.graph.create_node("get_attr", path)
        mode = _mode_among((self.fakes[before],))
        is_real = isinstance(payload, torch.Tensor) and not isinstance(payload, FakeTensor)
        fake = mode.from_tensor(payload, static_shapes=True) if is_real and mode is not None else payload
        self.fakes[made] = made.meta["val"] = fake
        return made

    def substitute(self, node: Node, made: Node, became: str = "view", gone: Sequence[Node] = ()) -> None:
        """Has one of the copy's nodes take the place of a node; with it go nodes that nothing else reads.

        `became` is what coverage says of them: they show what another call gives, or are "fused" with it.
        """
        self._became |= dict.fromkeys((node, *gone), became)
        self.made_of[node].replace_all_uses_with(made)
        self._replaced |= {item: self.made_of[item] for item in (node, *gone)}
        self.made_of[node] = made

    def give_back(self, node: Node, target: Callable[..., Any], keywords: dict[str, Any], name: str) -> None:
        """Has the graph give back what an operator makes of a node's tensor, as it is in the end."""
        self._given.append((node, target, keywords, name))

    def finished(self) -> tuple[GraphSource, dict[Node, Any]]:
        """Returns the changed graph and the fake values of its nodes: views of what was replaced are made again."""
        nodes = list(self._source.graph_module.graph.nodes)
        moved = set(self._replaced)
        for node in nodes:
            shows = any(operand in moved and storages_of(self._old[operand]) & storages_of(self._old.get(node))
                        for operand in node.all_input_nodes)  # fmt: skip
            if shows and node not in moved and can_run_again(node):
                moved.add(node)
                made = self.made_of[node]
                self.fakes[made] = made.meta["val"] = run_on_fakes(made, self.fakes)
        for node, target, keywords, name in self._given:
            self._give(node, target, keywords, name)
        order = {node: place for place, node in enumerate(nodes)}
        for node in sorted(self._replaced, key=order.__getitem__, reverse=True):
            self.fakes.pop(self._replaced[node], None)
            self.graph.erase_node(self._replaced[node])
        module = UnwrittenModule(self._source.graph_module, self.graph)
        replaced = {**self._source.replaced, **{node: self._became[node] for node in self._replaced}}
        return replace(self._source, graph_module=module, replaced=replaced), self.fakes

    def _give(self, node: Node, target: Callable[..., Any], keywords: dict[str, Any], name: str) -> None:
        (output,), made = self.graph.find_nodes(op="output"), self.made_of[node]
        with self.graph.inserting_before(output):
            given = self.graph.create_node("call_function", target, (made,), keywords, name)
        self.fakes[given] = run_on_fakes(given, self.fakes)
        given.meta = {**made.meta, "val": self.fakes[given]}
        output.replace_input_with(made, given)


def nodes_by_storage(nodes: Sequence[Node], fakes: Mapping[Node, Any]) -> dict[int, list[Node]]:
    """Returns the nodes whose tensors are on each storage."""
    found: dict[int, list[Node]] = {}
    for node in nodes:
        for storage in storages_of(fakes.get(node)):
            found.setdefault(storage, []).append(node)
    return found


def can_run_again(node: Node) -> bool:
    """Whether `run_on_fakes` can tell what a node gives."""
    return isinstance(node.target, OpOverload) or node.target is operator.getitem
