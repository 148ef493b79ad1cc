"""Matmuls of quantised rows and frozen int8 weights, which stay in the layout of the device's library.

oneDNN multiplies unsigned rows by signed weights, whose layout it prefers depends on the processor. `torch._int_mm`
takes signed rows, and rearranges the weights in each call. So the kernel that quantises the rows adds 128 to them, and
the library subtracts 128 times the sums of the weights, which it keeps beside them. Its sums are exact integers, stored
as float32, to which their reader converts them anyway.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch.fx import Node

from fxwrap.fx_passes.graph_copy import GraphCopy, is_contiguous, size_hint
from fxwrap.fx_passes.matmuls.prepacked_weights import LEAST_ROWS, frozen_nodes
from fxwrap.fx_passes.matmuls.rewrites import transpose_operand
from fxwrap.fx_passes.prepared_graph import FxPassContext, NodeValues, PreparedGraph
from fxwrap.torch_compat import FakeTensor

_aten = torch.ops.aten
_SIGN = -128
"""The sign bit of an int8."""

_LEAST_OPERATIONS = 1 << 25
"""Smaller matmuls take less time than a call of an operator in Python."""


@dataclass(frozen=True)
class _Matmul:
    """A matmul of int8 matrices, and the conversion of its int32 result to `dtype`, its only reader."""

    node: Node
    rows: Node
    weight: Node
    transposed: bool
    cast: Node
    dtype: torch.dtype


def prepack_int8_weights(graph: PreparedGraph, context: FxPassContext) -> PreparedGraph:
    """Returns a graph whose matmuls of computed int8 rows keep frozen weights in the library's layout."""
    frozen = frozen_nodes(graph, context)
    matmuls = [item for node in graph.nodes if (item := _match(node, graph.fakes, context, frozen)) is not None]
    if not matmuls:
        return graph
    copy, unsigned = GraphCopy(graph), dict[Node, Node]()
    for item in matmuls:
        before, name, rows = copy.node_map[item.node], item.node.name, copy.node_map[item.rows]
        if item.rows not in unsigned:
            flipped = copy.call(before, _aten.bitwise_xor.Scalar, (rows, _SIGN), f"{name}_flipped")
            unsigned[item.rows] = copy.call(
                before, _aten._to_copy.default, (flipped,), f"{name}_unsigned", {"dtype": torch.uint8}
            )
        operands = (unsigned[item.rows], copy.node_map[item.weight], item.transposed)
        end = copy.node_map[item.cast]
        sums = copy.call(end, torch.ops.fxwrap.prepacked_int8_linear.default, operands, f"{name}_sums")
        if item.dtype is not torch.float32:
            sums = copy.call(end, _aten._to_copy.default, (sums,), f"{name}_cast", {"dtype": item.dtype})
        copy.substitute(item.cast, sums, "fused", erased=[item.node])
    return copy.finish()


def _match(node: Node, fakes: NodeValues, context: FxPassContext, frozen: Collection[Node]) -> _Matmul | None:
    """Returns a matmul for which the library is faster with a weight in its own layout."""
    if node.target is not _aten._int_mm.default or str(node.target) in context.extern_operators or len(node.users) != 1:
        return None
    rows, right = node.all_input_nodes if len(node.all_input_nodes) == 2 else (node, node)
    cast, transposed = next(iter(node.users)), transpose_operand(right)
    dtype, weight = cast.kwargs.get("dtype"), right if transposed is None else transposed
    is_cast = cast.target is _aten._to_copy.default and set(cast.kwargs) == {"dtype"}
    if not is_cast or not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype is torch.float64:
        return None
    tensors = [fakes.get(item) for item in (rows, weight)]
    if rows.op != "call_function" or weight not in frozen:
        return None
    if not all(isinstance(item, FakeTensor) and is_contiguous(item) and item.dtype is torch.int8 for item in tensors):
        return None
    left, matrix = [item for item in tensors if isinstance(item, FakeTensor)]
    spec = context.options.device_specs().get(left.device.type)
    sizes = [size_hint(left.shape[0]), *matrix.shape]
    if spec is None or torch.int8 not in spec.matmuls.prepacked_dtypes or any(type(size) is not int for size in sizes):
        return None
    is_large = sizes[0] >= LEAST_ROWS and 2 * sizes[0] * sizes[1] * sizes[2] >= _LEAST_OPERATIONS
    return _Matmul(node, rows, weight, transposed is not None, cast, dtype) if is_large else None
