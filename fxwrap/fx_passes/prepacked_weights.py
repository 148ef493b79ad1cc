"""Prepacked weights: matmuls with frozen weights, which the device's library reads in a layout of its own.

A library rearranges both operands of a matmul into blocks before it multiplies. The weight's blocks are the same in
each call, so `fxwrap::prepacked_linear` keeps them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch.fx import Node

from fxwrap.fx_passes.graph_copy import GraphCopy, is_contiguous, storages_of, written_storages
from fxwrap.fx_passes.matmuls import Matmul, matmuls_of, transpose_operand
from fxwrap.fx_passes.prepared_graph import FxPassContext, NodeValues, PreparedGraph
from fxwrap.torch_compat import FakeTensor

_LEAST_OPERATIONS = 1 << 23
"""Smaller matmuls take less time than a call of an operator in Python."""

_LEAST_ROWS = 16
"""Matmuls of fewer rows are bound by reading the weight once."""


def prepack_weights(graph: PreparedGraph, context: FxPassContext) -> PreparedGraph:
    """Returns a graph whose matmuls with frozen weights are calls that keep the weights in the library's layout."""
    frozen = frozen_nodes(graph, context)
    matmuls = [item for item in matmuls_of(graph, context) if _benefits(item, graph.fakes, context, frozen)]
    if not matmuls:
        return graph
    copy = GraphCopy(graph)
    env = copy.node_map
    for matmul in matmuls:
        weight = transpose_operand(matmul.right)
        bias = None if matmul.bias is None else env[matmul.bias]
        arguments = (env[matmul.left], env[weight or matmul.right], bias, weight is not None)
        target, name = torch.ops.fxwrap.prepacked_linear.default, f"{matmul.node.name}_prepacked"
        copy.substitute(matmul.node, copy.call(env[matmul.node], target, arguments, name))
    return copy.finish()


def frozen_nodes(graph: PreparedGraph, context: FxPassContext) -> set[Node]:
    """Returns the parameters, buffers and constants that no call of the graph writes."""
    written = written_storages(graph.nodes, graph.fakes)
    inputs = [node for node in graph.nodes if node.op == "placeholder" and node.name not in graph.constants]
    static = {node for position, node in enumerate(inputs) if position in context.static_inputs}
    nodes = static | {node for node in graph.nodes if node.op == "get_attr" or node.name in graph.constants}
    return {node for node in nodes if written.isdisjoint(storages_of(graph.fakes.get(node)))}


def _benefits(matmul: Matmul, fakes: NodeValues, context: FxPassContext, frozen: Collection[Node]) -> bool:
    """Whether a matmul has a frozen weight, and its library is faster with the weight in its own layout."""
    weight = transpose_operand(matmul.right) or matmul.right
    if weight not in frozen:
        return False
    nodes = (matmul.node, matmul.left, weight, *([] if matmul.bias is None else [matmul.bias]))
    operands = _plain_tensors([fakes.get(node) for node in nodes])
    if not operands:
        return False
    result, left, *_ = operands
    spec = context.options.device_specs().get(left.device.type)
    if spec is None or left.dtype not in spec.prepacked_gemm_dtypes:
        return False
    rows, columns, terms = *result.shape, left.shape[1]
    reads_rows = transpose_operand(matmul.right) is not None  # as kernels read weights
    is_generated = reads_rows and spec.generates_matmul(left.dtype, rows, columns * terms * left.dtype.itemsize)
    return rows >= _LEAST_ROWS and not is_generated and 2 * rows * columns * terms >= _LEAST_OPERATIONS


def _plain_tensors(values: Sequence[object]) -> list[FakeTensor]:
    """Returns the values if all are contiguous tensors of static sizes, of one dtype and device; else none."""
    fakes = [value for value in values if isinstance(value, FakeTensor) and _is_static(value) and is_contiguous(value)]
    are_alike = len({(fake.dtype, fake.device) for fake in fakes}) == 1
    return fakes if are_alike and len(fakes) == len(values) else []


def _is_static(fake: FakeTensor) -> bool:
    return all(type(size) is int for size in fake.shape)
