"""Calls of graphs, as torch.fx's tools make them out of one graph: their nodes take the place of the call."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fxwrap.converters.from_fx_reader import failure
from fxwrap.converters.fx_attributes import attribute_of
from fxwrap.converters.fx_replay import replayed_submodule


def flattened(module: GraphModule) -> GraphModule:
    """Returns a module without calls of graphs: a copy with their nodes in place, or itself where it calls none.

    Names of nodes are kept where two graphs do not share one. Raises ReadBackError for a call that does not pass what
    a graph takes.
    """
    if not any(_called(module, node) is not None for node in module.graph.nodes):
        return module
    graph = Graph()
    own = {id(attribute_of(module, node.target)): str(node.target) for node in module.graph.find_nodes(op="get_attr")}
    given = _copy(module, graph, "", None, own)
    output = graph.output(given)
    output.meta = dict(module.graph.output_node().meta)
    made = GraphModule(module, graph)
    made.meta = dict(module.meta)
    return made


def _called(module: GraphModule, node: Node) -> GraphModule | None:
    """Returns the graph that a node calls, if it calls one; one that is replayed is a function of the program."""
    if node.op != "call_module" or replayed_submodule(module, node) is not None:
        return None
    found = attribute_of(module, node.target)
    return found if isinstance(found, GraphModule) else None


def held_tensors(module: GraphModule, path: str = "") -> Iterator[tuple[str, Node, torch.Tensor]]:
    """Yields the tensors that nodes of a graph and of those inside of it get, each with its path and its node."""
    for node in module.graph.nodes:
        if node.op in ("get_attr", "call_module"):
            found = attribute_of(module, node.target)
            if isinstance(found, torch.Tensor):
                yield f"{path}{node.target}", node, found
            elif isinstance(found, GraphModule):
                yield from held_tensors(found, f"{path}{node.target}.")


def _copy(
    module: GraphModule, graph: Graph, prefix: str, given: Mapping[Node, Any] | None, known: dict[int, str]
) -> Any:
    """Copies a module's nodes to the end of a graph and returns what it gives.

    `prefix` is the path of the module in the outermost one; `given` is what its placeholders stand for, None for those
    of the outermost one. `known` are the names of attributes by id: one that several modules hold keeps one name.
    """
    env: dict[Node, Any] = dict(given or {})
    for node in module.graph.nodes:
        called = _called(module, node)
        if node.op == "output":
            return map_arg(node.args[0], env.__getitem__)
        if node in env:
            continue
        whole = env.get(node.args[0]) if node.target is operator.getitem and isinstance(node.args[0], Node) else None
        if called is not None:
            env[node] = _copy(called, graph, f"{prefix}{node.target}.", _passed(node, called, env), known)
        elif isinstance(whole, tuple | list):
            env[node] = whole[node.args[1]]
        else:
            env[node] = copied = graph.node_copy(node, env.__getitem__)
            if prefix and node.op in ("get_attr", "call_module"):
                found, path = attribute_of(module, node.target), prefix + str(node.target)
                copied.target = path if found is None else known.setdefault(id(found), path)
    raise AssertionError("a graph ends with its output")


def _passed(node: Node, called: GraphModule, env: Mapping[Node, Any]) -> dict[Node, Any]:
    """Returns what a call passes for each placeholder of the graph that it calls."""
    placeholders = called.graph.find_nodes(op="placeholder")
    names = {str(placeholder.target): placeholder for placeholder in placeholders}
    found = dict(zip(placeholders, node.args, strict=False))
    found |= {names[name]: item for name, item in node.kwargs.items() if name in names}
    if len(found) != len(placeholders) or len(node.args) + len(node.kwargs) != len(placeholders):
        reason = f"the graph takes {len(placeholders)} inputs, not {len(node.args) + len(node.kwargs)}"
        raise failure(node, reason, "Pass each of them once")
    return {placeholder: map_arg(item, env.__getitem__) for placeholder, item in found.items()}
