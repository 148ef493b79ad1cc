"""Calls of graphs, as torch.fx's tools split one graph into several, replaced by the nodes of the graph."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fxwrap.converters.from_fx.graph_importer import is_function_call
from fxwrap.converters.from_fx.nodes import failure
from fxwrap.converters.fx.replay import module_attribute
from fxwrap.torch_compat import is_opaque


def inline_subgraphs(module: GraphModule) -> GraphModule:
    """Returns a copy of a module without calls of graphs, or the module itself if it has none.

    Nodes keep their names if these are unique. Raises FxImportError for a call with missing or unknown inputs.
    """
    if not any(_called_subgraph(module, node) is not None for node in module.graph.nodes):
        return module
    graph = Graph()
    names = {
        id(module_attribute(module, node.target)): str(node.target) for node in module.graph.find_nodes(op="get_attr")
    }
    output = graph.output(_inline_into(module, graph, "", {}, names))
    output.meta = dict(module.graph.output_node().meta)
    inlined = GraphModule(module, graph)
    inlined.meta = dict(module.meta)
    return inlined


def _called_subgraph(module: GraphModule, node: Node) -> GraphModule | None:
    """Returns the graph that a node calls, if any; a replayed one, or a region, is a line of the program instead."""
    if node.op != "call_module" or is_function_call(module, node):
        return None
    submodule = module_attribute(module, node.target)
    return submodule if isinstance(submodule, GraphModule) else None


def constant_attributes(module: GraphModule, path: str = "") -> Iterator[tuple[str, Node, Any]]:
    """Yields the tensors and opaque objects that nodes of a graph and of its submodules read, with path and node."""
    for node in module.graph.nodes:
        if node.op in ("get_attr", "call_module"):
            attribute = module_attribute(module, node.target)
            if isinstance(attribute, torch.Tensor) or is_opaque(attribute):
                yield f"{path}{node.target}", node, attribute
            elif isinstance(attribute, GraphModule):
                yield from constant_attributes(attribute, f"{path}{node.target}.")


def _inline_into(
    module: GraphModule, graph: Graph, prefix: str, arguments: Mapping[Node, Any], names: dict[int, str]
) -> Any:
    """Copies a module's nodes to the end of a graph and returns its output.

    `prefix` is the path of the module in the outermost one, `arguments` are those of its placeholders, which the
    outermost one keeps. `names` are the names of attributes by id: a shared attribute keeps one name.
    """
    env: dict[Node, Any] = dict(arguments)
    for node in module.graph.nodes:
        called = _called_subgraph(module, node)
        if node.op == "output":
            return map_arg(node.args[0], env.__getitem__)
        if node in env:
            continue
        items = env.get(node.args[0]) if node.target is operator.getitem and isinstance(node.args[0], Node) else None
        if called is not None:
            inner = _placeholder_arguments(node, called, env)
            env[node] = _inline_into(called, graph, f"{prefix}{node.target}.", inner, names)
        elif isinstance(items, tuple | list):
            env[node] = items[node.args[1]]
        else:
            env[node] = copy = graph.node_copy(node, env.__getitem__)
            if prefix and node.op in ("get_attr", "call_module"):
                attribute, path = module_attribute(module, node.target), prefix + str(node.target)
                copy.target = path if attribute is None else names.setdefault(id(attribute), path)
    raise AssertionError("a graph ends with its output")


def _placeholder_arguments(node: Node, called: GraphModule, env: Mapping[Node, Any]) -> dict[Node, Any]:
    placeholders = called.graph.find_nodes(op="placeholder")
    by_name = {str(placeholder.target): placeholder for placeholder in placeholders}
    arguments = dict(zip(placeholders, node.args, strict=False))
    arguments |= {by_name[name]: item for name, item in node.kwargs.items() if name in by_name}
    count = len(node.args) + len(node.kwargs)
    if not len(arguments) == count == len(placeholders):
        raise failure(node, f"the graph takes {len(placeholders)} inputs, not {count}", "Pass each of them once")
    return {placeholder: map_arg(item, env.__getitem__) for placeholder, item in arguments.items()}
