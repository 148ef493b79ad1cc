"""Compilation of regions of a graph: tagged nodes are compiled, and the other nodes stay, in one GraphModule."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, GraphModule, Node, Proxy

from fxwrap.compile.compiled import Compiled
from fxwrap.compile.compiler import compile_graph
from fxwrap.errors import GraphError
from fxwrap.fx_passes.effects import attribute_of, has_effect, mutated_operands
from fxwrap.options import Options
from fxwrap.runtime.direct import can_bypass_dispatcher
from fxwrap.torch_compat import graph_codegen

TAG_KEY = "fxwrap"
"""The key in `node.meta["custom"]` of a node's tag; nodes with a true tag are compiled.

`torch.fx.traceback.annotate({"fxwrap": "attention"})` around a model's code sets it. A region has nodes with one tag.
"""

NodeSelector: TypeAlias = Callable[[Node], object]
"""Returns a node's tag, or a false value for a node that is not compiled."""


class CompiledRegion(torch.nn.Module):
    """A compiled region of a graph: `compiled` runs; `graph_module` is its graph.

    The graph runs instead while autograd records or operators are intercepted (fake tensors, tracing, vmap).
    """

    def __init__(self, compiled: Compiled, graph_module: GraphModule) -> None:
        super().__init__()
        self.compiled = compiled
        self.graph_module = graph_module

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        """Returns the tuple of the region's results."""
        is_direct = Proxy not in map(type, inputs) and can_bypass_dispatcher(self, *inputs)
        results: tuple[Any, ...] = (self.compiled if is_direct else self.graph_module)(*inputs)
        return results

    def __deepcopy__(self, _memo: dict[int, object]) -> CompiledRegion:
        return CompiledRegion(self.compiled, self.graph_module)


def node_tag(node: Node) -> object:
    """Returns the tag of a node; see `TAG_KEY`."""
    return (node.meta.get("custom") or {}).get(TAG_KEY)


def compile_regions(
    graph_module: GraphModule, *, select: NodeSelector = node_tag, options: Options | None = None, name: str = "part"
) -> GraphModule:
    """Returns a copy of a graph in which regions of selected nodes are compiled.

    Each region is a submodule `{name}_{number}`, a `CompiledRegion`, that takes its operands and returns the tuple of
    its results. All other nodes keep their names and `meta`, as do the region's results. Regions whose programs are
    equal up to names share one `Compiled`.

    A region ends before a selected node that depends on it through other nodes, before a node with another tag, and
    before an unselected node with an effect: mutation, random numbers and others.

    Args:
        graph_module: a graph of ATen overloads with fake values in `meta["val"]`, from make_fx, AOTAutograd or
            torch.export. It is not changed; the copy shares its parameters.
        select: returns the tag of a call. An `operator.getitem` is in the region of its operand.
        options: the options of all regions.
        name: the prefix of the submodules' names.

    Raises GraphError for a selected node that cannot be compiled, and for its operands without `meta["val"]`.
    """
    writer = _RegionGraphWriter(graph_module, options or Options(), name)
    for step in _schedule(graph_module.graph, select):
        writer.write(step)
    return writer.module()


@dataclass
class _Region:
    """Nodes that are compiled together, and the unselected nodes that depend on them and follow the region."""

    tag: object
    nodes: dict[Node, None] = field(default_factory=dict)
    deferred: dict[Node, None] = field(default_factory=dict)
    writes: bool = False

    def accepts(self, node: Node, tag: object, writes: bool) -> bool:
        """Returns whether a node may join the region, which runs before all deferred nodes.

        A node that does not depend on the region begins the next one once there are deferred nodes, so that the equal
        layers of a model become equal regions.
        """
        if self.tag != tag or any(operand in self.deferred for operand in node.all_input_nodes):
            return False
        return not self.deferred or (not writes and any(operand in self.nodes for operand in node.all_input_nodes))

    def flush(self) -> Iterator[Node | _Region]:
        """Yields the region and the deferred nodes."""
        yield self
        yield from self.deferred


def _schedule(graph: Graph, select: NodeSelector) -> Iterator[Node | _Region]:
    """Yields unselected nodes and regions in an executable order. Linear in the number of nodes."""
    region: _Region | None = None
    for node in graph.nodes:
        tag = _tag_of(node, select, region)
        if tag:
            writes = bool(_mutated_operands(node))
            if region is not None and not region.accepts(node, tag, writes):
                yield from region.flush()
                region = None
            region = region or _Region(tag)
            region.nodes[node] = None
            region.writes |= writes
            continue
        if region is not None and (node.op == "output" or has_effect(node) or _mutated_operands(node) or region.writes):
            yield from region.flush()
            region = None
        if region is not None and any(item in region.nodes or item in region.deferred for item in node.all_input_nodes):
            region.deferred[node] = None
        else:
            yield node


def _tag_of(node: Node, select: NodeSelector, region: _Region | None) -> object:
    if node.op != "call_function":
        if node.op in ("call_module", "call_method") and select(node):
            reason = f"{node.op} of '{node.target}' is not an ATen operator"
            raise GraphError(node.name, reason, "Trace it with make_fx, or do not select it")
        return None
    if node.target is operator.getitem:
        return region.tag if region is not None and node.args[0] in region.nodes else None
    return select(node)


def _mutated_operands(node: Node) -> list[Node]:
    fakes = {operand: operand.meta.get("val") for operand in node.all_input_nodes}
    return mutated_operands(node, fakes) if node.op == "call_function" else []


class _RegionGraphWriter:
    def __init__(self, source: GraphModule, options: Options, name: str) -> None:
        self.source = source
        self.options = options
        used = {node.name for node in source.graph.nodes} | set(dir(source))
        self.names = (f"{name}_{number}" for number in count() if f"{name}_{number}" not in used)
        self.graph = Graph()
        self.attributes: dict[str, Any] = {}
        self.new_nodes: dict[Node, Node] = {}
        self.compiled_by_key: MutableMapping[str, Compiled] = {}

    def module(self) -> GraphModule:
        """Returns the copy, with the calling convention of the original."""
        self.graph.set_codegen(copy.deepcopy(graph_codegen(self.source.graph)))
        self.graph.lint()
        module = GraphModule(self.attributes, self.graph, type(self.source).__name__)
        module.meta.update(self.source.meta)
        return module.train(self.source.training)

    def write(self, step: Node | _Region) -> None:
        """Adds a node or the call of a region to the copy."""
        if isinstance(step, _Region):
            self._call(list(step.nodes))
            return
        if step.op in ("get_attr", "call_module"):
            self.attributes[str(step.target)] = attribute_of(step)
        self.new_nodes[step] = self.graph.node_copy(step, self.new_nodes.__getitem__)

    def _call(self, nodes: Sequence[Node]) -> None:
        inner = set(nodes)
        outputs = [node for node in nodes if any(user not in inner for user in node.users)]
        graph, inputs = _extract_subgraph(nodes, outputs)
        module = GraphModule(self.source, graph, "Part")
        name = next(self.names)
        compiled = compile_graph(module, options=self.options, name=name, compiled_by_key=self.compiled_by_key)
        self.attributes[name] = CompiledRegion(compiled, module)
        call = self.graph.create_node("call_module", name, tuple([self.new_nodes[node] for node in inputs]), name=name)
        call.meta["val"] = tuple([node.meta.get("val") for node in outputs])
        for position, node in enumerate(outputs):
            item = self.graph.create_node("call_function", operator.getitem, (call, position), name=node.name)
            item.meta = dict(node.meta)
            self.new_nodes[node] = item


def _extract_subgraph(nodes: Sequence[Node], outputs: Sequence[Node]) -> tuple[Graph, list[Node]]:
    """Returns a graph of some nodes with these outputs, and the nodes that its placeholders replace."""
    graph = Graph()
    inner = set(nodes)
    node_map: dict[Node, Node] = {}
    operands = [item for item in dict.fromkeys([item for node in nodes for item in node.all_input_nodes])
                if item not in inner]  # fmt: skip
    for operand in operands:
        if operand.op == "get_attr" and isinstance(attribute_of(operand), GraphModule):
            continue
        if "val" not in operand.meta:
            raise GraphError(operand.name, "it has no meta['val']", "Trace the graph with make_fx over fake tensors")
        node_map[operand] = graph.placeholder(f"input_{len(node_map)}")  # equal regions get equal names
        node_map[operand].meta = dict(operand.meta)
    inputs = list(node_map)
    for node in (*[item for item in operands if item not in node_map], *nodes):
        node_map[node] = graph.node_copy(node, node_map.__getitem__)
    graph.output(tuple([node_map[node] for node in outputs]))
    return graph, inputs
