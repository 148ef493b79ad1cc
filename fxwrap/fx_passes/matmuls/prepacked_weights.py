"""Matmuls as linear layers of the device's library: frozen weights in a layout of its own, biases in its accumulators.

A library rearranges both operands of a matmul into blocks before it multiplies. The weight's blocks are the same in
each call, so `fxwrap::prepacked_linear` keeps them. `aten.addmm` copies the bias into each row of the result before it
multiplies; `fxwrap::biased_linear` does not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch.fx import Node

from fxwrap.devices import DeviceSpec
from fxwrap.fx_passes.graph_copy import GraphCopy, is_contiguous, size_hint, storages_of
from fxwrap.fx_passes.matmuls.rewrites import Matmul, matmuls_of, transpose_operand
from fxwrap.fx_passes.prepared_graph import FxPassContext, NodeValues, PreparedGraph
from fxwrap.fx_passes.storage_aliases import written_storages
from fxwrap.torch_compat import FakeTensor

_LEAST_OPERATIONS = 1 << 23
"""Smaller matmuls take less time than a call of an operator in Python."""

LEAST_ROWS = 16
"""Matmuls of fewer rows are bound by reading the weight once."""

_LEAST_RESULTS = 1 << 16
"""Copies of a bias to fewer elements take less time than a call of an operator in Python."""

_MOST_PRODUCTS_PER_ROW = 4
"""With longer sums, rearranging the weight takes as long as copying the bias."""

_BLOCK = 16
"""Lengths of weights that oneDNN rearranges fast are multiples of this."""


def prepack_weights(graph: PreparedGraph, context: FxPassContext) -> PreparedGraph:
    """Returns a graph whose matmuls with frozen weights are calls that keep the weights in the library's layout."""
    frozen, fakes = frozen_nodes(graph, context), graph.fakes
    rows = {
        item: (None if type(fakes[item.left].shape[0]) is not int else fakes[item.left].shape[0],)
        for item in matmuls_of(graph, context) if _benefits(item, fakes, context, frozen)
    }  # fmt: skip
    return _with_linears(graph, rows, "prepacked_linear") if rows else graph


def call_biased_linears(graph: PreparedGraph, context: FxPassContext) -> PreparedGraph:
    """Returns a graph whose matmuls with a bias are linear layers of the device's library where that is faster."""
    matmuls = [item for item in matmuls_of(graph, context) if _copies_bias(item, graph.fakes, context)]
    return _with_linears(graph, dict.fromkeys(matmuls, ()), "biased_linear") if matmuls else graph


def _with_linears(
    graph: PreparedGraph, matmuls: Mapping[Matmul, tuple[int | None, ...]], operator: str
) -> PreparedGraph:
    """Returns a graph in which matmuls are calls of `fxwrap::prepacked_linear` or `fxwrap::biased_linear`.

    `matmuls` has the last arguments of each call.
    """
    copy = GraphCopy(graph)
    env, target = copy.node_map, getattr(torch.ops.fxwrap, operator).default
    for matmul, last in matmuls.items():
        weight = transpose_operand(matmul.right)
        bias = None if matmul.bias is None else env[matmul.bias]
        arguments = (env[matmul.left], env[weight or matmul.right], bias, weight is not None, *last)
        copy.substitute(matmul.node, copy.call(env[matmul.node], target, arguments, f"{matmul.node.name}_linear"))
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
    operands = _library_operands(matmul, fakes, context)
    if operands is None or (transpose_operand(matmul.right) or matmul.right) not in frozen:
        return False
    spec, dtype, rows, columns, products = operands
    return dtype in spec.matmuls.prepacked_dtypes and 2 * rows * columns * products >= _LEAST_OPERATIONS


def _copies_bias(matmul: Matmul, fakes: NodeValues, context: FxPassContext) -> bool:
    """Whether a linear layer of the library is faster than a matmul that copies its bias first."""
    operands = None if matmul.bias is None else _library_operands(matmul, fakes, context)
    if operands is None:
        return False
    spec, dtype, rows, columns, products = operands
    is_large = rows * columns >= _LEAST_RESULTS and products <= _MOST_PRODUCTS_PER_ROW * rows
    return dtype in spec.matmuls.biased_linear_dtypes and is_large and columns % _BLOCK == products % _BLOCK == 0


def _library_operands(
    matmul: Matmul, fakes: NodeValues, context: FxPassContext
) -> tuple[DeviceSpec, torch.dtype, int, int, int] | None:
    """Returns device, dtype and numbers of rows, columns and products of a matmul; None if it may become a kernel.

    Also None if its operands are not contiguous tensors of one dtype and, but for the number of rows, of static sizes.
    A symbolic number of rows is its hint.
    """
    weight = transpose_operand(matmul.right) or matmul.right
    nodes = (matmul.node, matmul.left, weight, *([] if matmul.bias is None else [matmul.bias]))
    tensors = _plain_tensors([fakes.get(node) for node in nodes])
    spec = context.options.device_specs().get(tensors[0].device.type) if tensors else None
    if spec is None:
        return None
    result, left, *_ = tensors
    (rows, columns), products = result.shape, left.shape[1]
    if type(columns) is not int or type(products) is not int:
        return None
    reads_rows = weight is not matmul.right  # as kernels read weights
    if size_hint(rows) < LEAST_ROWS or (
        reads_rows and spec.matmuls.generates(left.dtype, rows, columns * products * left.dtype.itemsize)
    ):
        return None
    return spec, left.dtype, size_hint(rows), columns, products


def _plain_tensors(values: Sequence[object]) -> list[FakeTensor]:
    """Returns the values if all are contiguous tensors of one dtype and device; else none."""
    fakes = [value for value in values if isinstance(value, FakeTensor) and is_contiguous(value)]
    are_alike = len({(fake.dtype, fake.device) for fake in fakes}) == 1
    return fakes if are_alike and len(fakes) == len(values) else []
