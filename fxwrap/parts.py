"""Parts of a graph: the nodes that a user tags are compiled, and the rest stays as it is, in one GraphModule."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node, Proxy

from fxwrap.compiler import Compiled, compile_graph
from fxwrap.errors import GraphError
from fxwrap.lowering.effects import attribute_of, has_effect, written_operands
from fxwrap.options import Options
from fxwrap.runtime.direct import is_direct
from fxwrap.torch_compat import graph_codegen

TAG = "fxwrap"
"""The key in `node.meta["custom"]` whose value, if it is true, says that a node is to be compiled.

`torch.fx.traceback.annotate({"fxwrap": "attention"})` around a model's code puts it there. Nodes with different values
are never in one part.
"""

Select = Callable[[Node], Any]
"""Says of a node whether it is to be compiled; what it says, if true, must be equal for nodes of one part."""


class CompiledPart(torch.nn.Module):
    """A part of a graph that has been compiled: `compiled` runs, `graph_module` is what it was compiled from.

    Where a gradient is recorded or somebody watches operators (fake tensors, tracing, vmap), the latter runs instead.
    """

    def __init__(self, compiled: Compiled, graph_module: GraphModule) -> None:
        super().__init__()
        self.compiled = compiled
        self.graph_module = graph_module

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        """Returns the tuple of the part's results."""
        runs = self.compiled if Proxy not in map(type, inputs) and is_direct(self, *inputs) else self.graph_module
        results: tuple[Any, ...] = runs(*inputs)
        return results

    def __deepcopy__(self, _memo: dict[int, Any]) -> CompiledPart:
        return CompiledPart(self.compiled, self.graph_module)


def tagged(node: Node) -> Any:
    """Returns the tag that says that a node is to be compiled; see `TAG`."""
    return (node.meta.get("custom") or {}).get(TAG)


def compile_parts(
    graph_module: GraphModule,
    *,
    select: Select = tagged,
    options: Options | None = None,
    name: str = "part",
) -> GraphModule:
    """Returns a copy of a graph in which selected nodes are compiled, and all others are as they were.

    Each part is a submodule `{name}_{number}`, a `CompiledPart`, that takes what it needs of the rest and gives the
    tuple of its results. Placeholders, outputs, names and `meta` of the nodes outside stay, as do those of the nodes
    whose results are used outside. Parts whose programs are equal up to names share one `Compiled`.

    A part ends before a selected node that needs results of it through nodes outside, before a node of another tag, and
    before a node outside that writes memory, draws random numbers or has another effect.

    Args:
        graph_module: a graph of ATen overloads with fake values in `meta["val"]`, from make_fx, AOTAutograd or
            torch.export. It is not changed; the copy shares its parameters.
        select: says of a call whether it is to be compiled. An `operator.getitem` goes with what it takes from.
        options: see `Options`, for all parts.
        name: how the submodules' names begin.

    Raises GraphError for a selected node that cannot be compiled, and for an operand of one without `meta["val"]`.
    """
    writer = _Writer(graph_module, options or Options(), name)
    for step in _planned(graph_module.graph, select):
        writer.write(step)
    return writer.module()


@dataclass
class _Part:
    """Nodes to be compiled together, and those outside that need what they give and so come after them."""

    tag: Any
    nodes: dict[Node, None] = field(default_factory=dict)
    after: dict[Node, None] = field(default_factory=dict)
    writes: bool = False

    def takes(self, node: Node, tag: Any, writes: bool) -> bool:
        """Returns whether the part may grow by a node, which runs where the part runs: before all of `after`.

        One that needs nothing of the part begins the next as soon as something outside follows this one: then equal
        layers of a model are equal parts.
        """
        if self.tag != tag or any(operand in self.after for operand in node.all_input_nodes):
            return False
        return not self.after or (not writes and any(operand in self.nodes for operand in node.all_input_nodes))


def _planned(graph: Graph, select: Select) -> Iterator[Node | _Part]:
    """Yields the nodes outside of parts and the parts, in an order in which they can run. Linear in the nodes."""
    part: _Part | None = None
    for node in graph.nodes:
        tag = _tag_of(node, select, part)
        if tag:
            writes = bool(_writes(node))
            if part is not None and not part.takes(node, tag, writes):
                yield from _closed(part)
                part = None
            part = part or _Part(tag)
            part.nodes[node] = None
            part.writes |= writes
            continue
        if part is not None and (node.op == "output" or has_effect(node) or _writes(node) or part.writes):
            yield from _closed(part)
            part = None
        if part is not None and any(item in part.nodes or item in part.after for item in node.all_input_nodes):
            part.after[node] = None
        else:
            yield node


def _closed(part: _Part) -> Iterator[Node | _Part]:
    yield part
    yield from part.after


def _tag_of(node: Node, select: Select, part: _Part | None) -> Any:
    if node.op != "call_function":
        if node.op in ("call_module", "call_method") and select(node):
            reason = f"{node.op} of '{node.target}' is not an ATen operator"
            raise GraphError(node.name, reason, "Trace it with make_fx, or leave it out")
        return None
    if node.target is operator.getitem:
        return part.tag if part is not None and node.args[0] in part.nodes else None
    return select(node)


def _writes(node: Node) -> list[Node]:
    fakes = {operand: operand.meta.get("val") for operand in node.all_input_nodes}
    return written_operands(node, fakes) if node.op == "call_function" else []


class _Writer:
    """Writes the copy: nodes as they were, and a call for each part."""

    def __init__(self, source: GraphModule, options: Options, name: str) -> None:
        self.source = source
        self.options = options
        taken = {node.name for node in source.graph.nodes} | set(dir(source))
        self.names = (f"{name}_{number}" for number in count() if f"{name}_{number}" not in taken)
        self.graph = Graph()
        self.attributes: dict[str, Any] = {}
        self.made: dict[Node, Node] = {}
        self.known: MutableMapping[str, Compiled] = {}

    def module(self) -> GraphModule:
        """Returns the copy, which is run and called as the graph was."""
        self.graph.set_codegen(copy.deepcopy(graph_codegen(self.source.graph)))
        self.graph.lint()
        made = GraphModule(self.attributes, self.graph, type(self.source).__name__)
        made.meta.update(self.source.meta)
        return made.train(self.source.training)

    def write(self, step: Node | _Part) -> None:
        """Adds a node or the call of a part to the copy."""
        if isinstance(step, _Part):
            self._call(list(step.nodes))
            return
        if step.op in ("get_attr", "call_module"):
            self.attributes[str(step.target)] = attribute_of(step)
        self.made[step] = self.graph.node_copy(step, self.made.__getitem__)

    def _call(self, nodes: Sequence[Node]) -> None:
        inner = set(nodes)
        outputs = [node for node in nodes if any(user not in inner for user in node.users)]
        graph, inputs = _part_graph(nodes, outputs)
        module = GraphModule(self.source, graph, "Part")
        name = next(self.names)
        compiled = compile_graph(module, options=self.options, name=name, known=self.known)
        self.attributes[name] = CompiledPart(compiled, module)
        call = self.graph.create_node("call_module", name, tuple([self.made[node] for node in inputs]), name=name)
        call.meta["val"] = tuple([node.meta.get("val") for node in outputs])
        for position, node in enumerate(outputs):
            taken = self.graph.create_node("call_function", operator.getitem, (call, position), name=node.name)
            taken.meta = dict(node.meta)
            self.made[node] = taken


def _part_graph(nodes: Sequence[Node], outputs: Sequence[Node]) -> tuple[Graph, list[Node]]:
    """Returns a graph of some nodes, which gives these outputs, and the nodes that its placeholders stand for."""
    graph = Graph()
    inner = set(nodes)
    made: dict[Node, Node] = {}
    inputs = [item for item in dict.fromkeys([item for node in nodes for item in node.all_input_nodes])
              if item not in inner]  # fmt: skip
    for item in inputs:
        if item.op == "get_attr" and isinstance(attribute_of(item), GraphModule):
            continue
        if "val" not in item.meta:
            raise GraphError(item.name, "it has no meta['val']", "Trace the graph with make_fx over fake tensors")
        made[item] = graph.placeholder(f"input_{len(made)}")  # equal parts have equal names in what they say
        made[item].meta = dict(item.meta)
    taken = list(made)
    for item in inputs:
        if item not in made:
            made[item] = graph.node_copy(item)
    for node in nodes:
        made[node] = graph.node_copy(node, made.__getitem__)
    graph.output(tuple([made[node] for node in outputs]))
    return graph, taken
