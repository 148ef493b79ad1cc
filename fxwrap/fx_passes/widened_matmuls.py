"""Matmuls of half-precision matrices that the graph casts to float32 multiply the matrices before their casts.

Products of half-precision numbers are exact in float32, in which tensor cores add them: a library's matmul with float32
results needs no copies in float32. Kernels of ours multiply such operands like this by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fxwrap.devices import ROW_ALIGNMENT
from fxwrap.fx_passes.attention_nodes import is_cast, is_tensor
from fxwrap.fx_passes.effects import name_of
from fxwrap.fx_passes.graph_copy import GraphCopy, same_layout
from fxwrap.fx_passes.prepared_graph import FxPassContext, NodeValues, PreparedGraph, Target

_aten = torch.ops.aten

_WITH_DTYPE: Mapping[Target, Target] = {_aten.mm.default: _aten.mm.dtype, _aten.bmm.default: _aten.bmm.dtype}

_MOVES = frozenset({
    "alias", "clone", "detach", "expand", "permute", "squeeze", "t", "transpose", "unsafe_view", "unsqueeze", "view",
})  # fmt: skip
"""Operators between a cast and a matmul, which do the same to elements of any dtype."""


@dataclass(frozen=True)
class _Widened:
    """An operand that is cast to float32 from half precision: the cast, and the operators from it to the operand."""

    cast: Node
    moves: tuple[Node, ...]


def multiply_before_casts(graph: PreparedGraph, context: FxPassContext) -> PreparedGraph:
    """Returns a graph in which such matmuls are calls with float32 results, in `DeviceSpec.widening_gemm_dtypes`."""
    specs = context.options.device_specs()
    if not any(spec.widening_gemm_dtypes for spec in specs.values()):
        return graph
    chosen: list[tuple[Node, list[_Widened]]] = []
    for node in graph.nodes:
        if node.target not in _WITH_DTYPE or node.kwargs or str(node.target) in context.extern_operators:
            continue
        operands = [_widened(item, graph.fakes) for item in node.args]
        spec = specs.get(graph.fakes[node].device.type)
        dtypes = {graph.fakes[item.cast.all_input_nodes[0]].dtype for item in operands if item is not None}
        if spec is None or len(dtypes) > 1 or not dtypes <= spec.widening_gemm_dtypes:
            continue
        if all(item is not None for item in operands) and _is_aligned(node, dtypes.pop(), graph.fakes):
            chosen.append((node, [item for item in operands if item is not None]))
    if not chosen:
        return graph
    copy = GraphCopy(graph)
    for node, widened in chosen:
        before = copy.node_map[node]
        arguments = (*[_narrow(copy, before, item) for item in widened], torch.float32)
        copy.substitute(node, copy.call(before, _WITH_DTYPE[node.target], arguments, node.name))
    return copy.finish()


def _widened(operand: Any, fakes: NodeValues) -> _Widened | None:
    moves = list[Node]()
    while isinstance(operand, Node) and name_of(operand) in _MOVES and is_tensor(operand.args[0], fakes):
        moves.append(operand)
        operand = operand.args[0]
    if not isinstance(operand, Node) or not is_cast(operand, fakes) or fakes[operand].dtype != torch.float32:
        return None
    return _Widened(operand, tuple(reversed(moves)))


def _is_aligned(node: Node, dtype: torch.dtype, fakes: NodeValues) -> bool:
    """Whether rows of operands and result have sizes for which libraries are fast, in any layout of the operands."""
    operands: Any = node.args[:2]
    sizes = [size for item in (*operands, node) for size in fakes[item].shape[-2:]]
    return all(type(size) is int and size * dtype.itemsize % ROW_ALIGNMENT == 0 for size in sizes)


def _narrow(copy: GraphCopy, before: Node, operand: _Widened) -> Node:
    """Returns an operand in half precision, in the layout that it has in float32."""
    (source,) = [copy.node_map[item] for item in operand.cast.all_input_nodes]
    if not same_layout(copy.fakes[source], copy.fakes[copy.node_map[operand.cast]]):
        source = copy.call(before, _aten.clone.default, (source,), operand.cast.name)
    for move in operand.moves:
        arguments = torch.fx.map_arg(move.args[1:], copy.node_map.__getitem__)
        keywords = torch.fx.map_arg(move.kwargs, copy.node_map.__getitem__)
        source = copy.call(before, move.target, (source, *arguments), move.name, keywords)
    return source
