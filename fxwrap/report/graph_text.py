"""FX graphs as text: one node a row, with the types of results."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from fxwrap.torch_compat import DTYPE_NAMES

__all__ = ["graph_text"]


def graph_text(graph: GraphModule | ExportedProgram) -> str:
    """Returns a graph and its subgraphs as text, `%mm: f32[4, 8] = aten.mm.default(%x, %y)` for each node."""
    module = graph.graph_module if isinstance(graph, ExportedProgram) else graph
    rows = [_node_text(node) for node in module.graph.nodes]
    for name, child in module.named_modules():
        if name and isinstance(child, GraphModule):
            rows += ["", f"{name}:", *[f"  {_node_text(node)}" for node in child.graph.nodes]]
    return "\n".join(rows) + "\n"


def _node_text(node: Node) -> str:
    type_ = _type_text(node.meta.get("val"))
    result = f"%{node.name}: {type_}" if type_ else f"%{node.name}"
    match node.op:
        case "placeholder":
            return f"{result} = placeholder"
        case "output":
            return f"return {', '.join(_arguments(node))}"
        case "get_attr":
            return f"{result} = get_attr({node.target})"
        case _:
            name = node.target if isinstance(node.target, str) else _target_text(node.target)
            return f"{result} = {name}({', '.join(_arguments(node))})"


def _target_text(target: object) -> str:
    text = str(target)
    return text if not text.startswith("<") else str(getattr(target, "__name__", text))


def _arguments(node: Node) -> Iterator[str]:
    yield from [_text(item) for item in node.args]
    yield from [f"{name}={_text(item)}" for name, item in node.kwargs.items()]


def _text(item: object) -> str:
    match item:
        case Node():
            return f"%{item.name}"
        case tuple() | list():
            return f"[{', '.join([_text(part) for part in item])}]"
        case _:
            return str(item)


def _type_text(value: object) -> str:
    match value:
        case torch.Tensor():
            return f"{DTYPE_NAMES.get(value.dtype, value.dtype)}[{', '.join([str(size) for size in value.shape])}]"
        case tuple() | list():
            return f"({', '.join([_type_text(item) for item in value])})"
        case torch.SymInt() | torch.SymFloat() | torch.SymBool():
            return str(value)
        case _:
            return ""
