"""A fused function, whose emitted graphs tests transform with torch's tools, and what they ask of any such graph."""

from __future__ import annotations

import torch
from torch.fx import GraphModule
from torch.fx.passes.split_module import split_module

import fxwrap

LANGUAGES = {"cpp": fxwrap.Options(emitter="fx"), "triton": fxwrap.Options(emitter="fx", cpu_kernels="triton")}
"""Options of emitted graphs, by the language of their kernels."""

LAUNCHES = frozenset({
    torch.ops.fxwrap.cpp_kernel.default, torch.ops.fxwrap.cpp_kernel_functional.default,
    torch.ops.higher_order.triton_kernel_wrapper_mutation, torch.ops.higher_order.triton_kernel_wrapper_functional,
})  # fmt: skip
"""The targets of nodes that launch kernels."""


def fused(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matmul between two kernels."""
    hidden = (x.tanh() * 2) @ w
    return torch.softmax(hidden, -1), hidden.sum(0)


def count_launches(module: GraphModule) -> int:
    """The number of kernels that a graph launches, those of its submodules included."""
    graphs = [part.graph for part in module.modules() if isinstance(part, GraphModule)]
    return sum(node.target in LAUNCHES for graph in graphs for node in graph.nodes)


def split_in_order(module: GraphModule, parts: int = 2) -> GraphModule:
    """Returns a graph of so many submodules with about equally many nodes."""
    order = {node: position for position, node in enumerate(module.graph.nodes)}
    return split_module(module, module, lambda node: parts * order[node] // len(order))  # type: ignore[arg-type]
