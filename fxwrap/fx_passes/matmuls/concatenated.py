"""Concatenations of matmuls that are kernels become slice writes, so that each kernel stores its part of the result."""

from __future__ import annotations

import torch
from torch.fx import Node

from fxwrap.fx_passes.graph_copy import GraphCopy
from fxwrap.fx_passes.matmuls.rewrites import MATMULS
from fxwrap.fx_passes.prepared_graph import FxPassContext, NodeValues, PreparedGraph
from fxwrap.fx_passes.storage_aliases import StorageAliases
from fxwrap.torch_compat import FakeTensor

_aten = torch.ops.aten
_MAX_DEPTH = 16
"""The longest chain of operators from a matmul to a concatenation."""


def fill_concatenations(graph: PreparedGraph, context: FxPassContext) -> PreparedGraph:
    """Returns a graph in which a `cat` of results of matmuls is a new tensor whose slices are overwritten in turn."""
    if context.options.matmul_kernels != "generated" or "aten.cat.default" in context.extern_operators:
        return graph
    aliases = StorageAliases(graph, context)
    filled = [node for node in graph.nodes if _is_filled(node, aliases, context)]
    if not filled:
        return graph
    copy = GraphCopy(graph)
    for node in filled:
        _fill(copy, node)
    return copy.finish()


def _is_filled(node: Node, aliases: StorageAliases, context: FxPassContext) -> bool:
    """Whether a node concatenates results of different matmuls, of static sizes, to a contiguous tensor."""
    if node.target is not _aten.cat.default or not isinstance(node.args[0], list | tuple):
        return False
    operands, fakes = list(node.args[0]), aliases.fakes
    tensors = [fakes.get(item) if isinstance(item, Node) else None for item in (*operands, node)]
    if len({*operands}) < len(operands) or len(operands) < 2 or aliases.is_mutated(node):
        return False
    for fake in tensors:
        if not isinstance(fake, FakeTensor) or fake.ndim != fakes[node].ndim or fake.dtype != fakes[node].dtype:
            return False
        if not all(type(size) is int for size in fake.shape) or not fake.is_contiguous():
            return False
    return all(_is_matmul_result(item, fakes, context, _MAX_DEPTH) for item in operands if isinstance(item, Node))


def _is_matmul_result(node: Node, fakes: NodeValues, context: FxPassContext, depth: int) -> bool:
    """Whether a node computes elements of a matmul, one by one, that nothing else reads."""
    if len(node.users) != 1 or node.op != "call_function" or not depth:
        return False
    if node.target in MATMULS:
        return str(node.target) not in context.extern_operators
    if str(node.target) not in context.fused_operators:
        return False
    count = fakes[node].numel() if isinstance(fakes.get(node), FakeTensor) else None
    sources = [item for item in node.all_input_nodes if isinstance(fakes.get(item), FakeTensor)]
    return any(fakes[item].numel() == count and _is_matmul_result(item, fakes, context, depth - 1) for item in sources)


def _fill(copy: GraphCopy, node: Node) -> None:
    """Replaces a concatenation by writes of its operands into slices of a new tensor."""
    before, fake = copy.node_map[node], copy.fakes[copy.node_map[node]]
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    assert isinstance(dim, int) and isinstance(node.args[0], list | tuple)
    keywords = {"dtype": fake.dtype, "device": fake.device}
    filled = copy.call(before, _aten.empty.memory_format, (list(fake.shape),), f"{node.name}_empty", keywords)
    start = 0
    for number, item in enumerate(node.args[0]):
        operand = copy.node_map[item]
        end = start + copy.fakes[operand].shape[dim]
        filled = copy.call(
            before, _aten.slice_scatter.default, (filled, operand, dim, start, end), f"{node.name}_part{number}"
        )
        start = end
    copy.substitute(node, filled, "fused")
