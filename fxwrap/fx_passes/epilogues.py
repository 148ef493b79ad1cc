"""Epilogues of a library's matmul: activations, and second results, which training reads.

A GEMM that adds a bias and applies an activation to its accumulators saves a kernel that reads and writes the result.
In training, the backward reads the activation's input, which such a call can store too. The matmul of a weight's
gradient can sum an operand as it multiplies it: that is the gradient of the bias. The kernel that would compute a
second result may do other work too, so that only timing tells which is faster.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fxwrap.devices import ROW_ALIGNMENT, DeviceSpec
from fxwrap.fx_passes.activations import VIEWS, Activation, match_activation
from fxwrap.fx_passes.graph_copy import GraphCopy, expression_of, expressions_of
from fxwrap.fx_passes.matmuls import Matmul, matmuls_of
from fxwrap.fx_passes.prepared_graph import FxPassContext, NodeValues, PreparedGraph
from fxwrap.fx_passes.storage_aliases import StorageAliases
from fxwrap.torch_compat import FakeTensor

_aten = torch.ops.aten
_SUM = _aten.sum.dim_IntList
_TRANSPOSITIONS = frozenset({_aten.t.default, _aten.permute.default, _aten.transpose.int})


def _supports_epilogue(matmul: Matmul, fakes: NodeValues, specs: Mapping[str, DeviceSpec]) -> bool:
    """Whether a library has epilogues for a matmul: its kernels for aligned rows do."""
    fake = fakes.get(matmul.node)
    spec = specs.get(fake.device.type) if isinstance(fake, FakeTensor) else None
    if fake is None or spec is None or fake.dtype not in spec.matmuls.epilogue_dtypes:
        return False
    lengths = [fake.shape[1], *[_row_length(fakes[operand]) for operand in (matmul.left, matmul.right)]]
    return all(type(length) is int and length * fake.dtype.itemsize % ROW_ALIGNMENT == 0 for length in lengths)


def _row_length(fake: torch.Tensor) -> int | torch.SymInt | None:
    """Returns the length of the contiguous rows or columns of a matrix; None if neither is contiguous."""
    strides = expressions_of(fake.stride())
    return fake.shape[1] if strides[1] == 1 else fake.shape[0] if strides[0] == 1 else None


# --- activations ------------------------------------------------------------------------------------------------------


def fuse_epilogues(graph: PreparedGraph, context: FxPassContext) -> PreparedGraph:
    """Returns a graph in which a matmul and the activation that alone reads it are one call."""
    specs = context.options.device_specs()
    matches: list[tuple[Matmul, Activation]] = []
    for matmul in matmuls_of(graph, context):
        if _supports_epilogue(matmul, graph.fakes, specs):
            activation = match_activation(matmul.node, graph.fakes, context.options)
            if activation is not None and activation.is_only_reader:
                matches.append((matmul, activation))
    if not matches:
        return graph
    copy = GraphCopy(graph)
    zeros: dict[Hashable, Node] = {}
    for matmul, activation in matches:
        _fuse_activation(copy, matmul, activation, zeros)
    return copy.finish()


def _fuse_activation(copy: GraphCopy, matmul: Matmul, activation: Activation, zeros: dict[Hashable, Node]) -> None:
    """Replaces a matmul and its activation by one call; `zeros` caches the biases of matmuls without one."""
    before = copy.node_map[matmul.node]
    fake = copy.fakes[before]
    if matmul.bias is None:
        key = (fake.shape[1], fake.dtype, fake.device)
        if key not in zeros:
            keywords = {"dtype": fake.dtype, "device": fake.device}
            zeros[key] = copy.call(before, _aten.full.default, ([fake.shape[1]], 0), "no_bias", keywords)
        bias = zeros[key]
    else:
        bias = copy.node_map[matmul.bias]
    operands = (bias, copy.node_map[matmul.left], copy.node_map[matmul.right])
    keywords = {"use_gelu": True} if activation.is_gelu else {}
    fused = copy.call(before, _aten._addmm_activation.default, operands, f"{matmul.node.name}_epilogue", keywords)
    _substitute_view(copy, activation.result, fused, activation.nodes[:-1])
    copy.substitute(matmul.node, fused, "fused")


def _substitute_view(copy: GraphCopy, node: Node, fused: Node, erased: Collection[Node] = ()) -> None:
    """Replaces a node by a contiguous tensor, as a view with its sizes."""
    before = copy.node_map[node]
    sizes = copy.fakes[before].shape
    if expressions_of(sizes) != expressions_of(copy.fakes[fused].shape):
        arguments = (fused, copy.size_arguments(before, sizes))
        fused = copy.call(before, _aten.view.default, arguments, f"{node.name}_view")
    copy.substitute(node, fused, "fused", erased=tuple(erased))


# --- second results ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SecondResult:
    """A tensor that a matmul can compute as its second result.

    Fields:
        matmul: the matmul.
        epilogue: that of `fxwrap::fused_matmul`.
        nodes: the operators that the call computes beside the matmul; other operators read the last one only.
        views: views of the tensor that it sums, among them those that the matmul and the sum read.
    """

    matmul: Matmul
    epilogue: str
    nodes: tuple[Node, ...]
    views: tuple[Node, ...] = ()

    @property
    def name(self) -> str:
        """The name of the matmul's node."""
        return self.matmul.node.name

    @property
    def names(self) -> frozenset[str]:
        """The names of all operators that the call computes, and of the views."""
        return frozenset([self.name, *[node.name for node in (*self.nodes, *self.views)]])


def fuse_second_results(graph: PreparedGraph, context: FxPassContext, chosen: Collection[str]) -> PreparedGraph:
    """Returns a graph in which the matmuls of these names have second results."""
    items = [item for item in second_results(graph, context) if item.name in chosen]
    if not items:
        return graph
    copy = GraphCopy(graph)
    for item in items:
        _fuse_second_result(copy, item)
    return copy.finish()


def second_results(graph: PreparedGraph, context: FxPassContext) -> list[SecondResult]:
    """Returns the tensors that matmuls can compute as their second results, at most one for each."""
    specs = context.options.device_specs()
    matmuls = [matmul for matmul in matmuls_of(graph, context) if _supports_epilogue(matmul, graph.fakes, specs)]
    if not matmuls:
        return []
    aliases = StorageAliases(graph, context)
    positions = {node: position for position, node in enumerate(graph.nodes)}
    matches: list[SecondResult] = []
    sums: set[Node] = set()
    for matmul in matmuls:
        match = _match_stored_input(matmul, graph.fakes, context) or _match_sums(matmul, graph.fakes, context)
        if match is None or not sums.isdisjoint(match.nodes):
            continue
        precedes_readers = all(positions[matmul.node] < positions[user] for user in match.nodes[-1].users)
        if precedes_readers and not any(aliases.is_mutated(item) for item in (matmul.node, matmul.left, matmul.right)):
            sums.update(match.nodes)
            matches.append(match)
    return matches


def _match_stored_input(matmul: Matmul, fakes: NodeValues, context: FxPassContext) -> SecondResult | None:
    """Returns the GELU of a matmul that other operators read, too, or the graph returns."""
    activation = match_activation(matmul.node, fakes, context.options)
    if activation is None or not activation.is_gelu or activation.is_only_reader:
        return None
    return SecondResult(matmul, "gelu", activation.nodes)


def _match_sums(matmul: Matmul, fakes: NodeValues, context: FxPassContext) -> SecondResult | None:
    """Returns the sums of a matmul's operand along the inner dimension."""
    if matmul.bias is not None or str(_SUM) in context.extern_operators:
        return None
    for epilogue, rows in (("left_sums", _transposed(matmul.left, fakes)), ("right_sums", matmul.right)):
        views = [] if rows is None else _row_views(rows, fakes)
        for item in views:
            for user in item.users:
                if user.target is _SUM and _sums_rows(user, fakes[item], fakes.get(user)):
                    transposed = [] if rows is matmul.right else [matmul.left]
                    return SecondResult(matmul, epilogue, (user,), (*views[1:], *transposed))
    return None


def _transposed(node: Node, fakes: NodeValues) -> Node | None:
    """Returns the matrix of which a matrix is the transpose."""
    source = node.args[0] if node.target in _TRANSPOSITIONS else None
    if not isinstance(source, Node) or fakes[source].ndim != 2:
        return None
    swapped = list(reversed(expressions_of(fakes[source].stride())))
    return source if expressions_of(fakes[node].stride()) == swapped else None


def _row_views(rows: Node, fakes: NodeValues) -> list[Node]:
    """Returns the tensor of which a matrix is a view with the same last dimension, and all such views of it."""

    def width(node: Node) -> Any:
        fake = fakes[node]
        return expression_of(fake.shape[-1]) if fake.ndim else None

    length = width(rows)
    while rows.target in VIEWS and width(source := rows.all_input_nodes[0]) == length:
        rows = source
    views = [rows]
    for item in views:
        views += [user for user in item.users if user.target in VIEWS and width(user) == length]
    return views


def _sums_rows(node: Node, source: FakeTensor, result: object) -> bool:
    """Whether a sum is over all dimensions but the last, in the dtype of its operand."""
    dims: Any = node.args[1] if len(node.args) > 1 else None
    if not dims or not isinstance(result, FakeTensor) or result.dtype != source.dtype:
        return False
    return {dim % source.ndim for dim in dims} == set(range(source.ndim - 1))


def _fuse_second_result(copy: GraphCopy, item: SecondResult) -> None:
    matmul, name = item.matmul, item.name
    before = copy.node_map[matmul.node]
    bias = None if matmul.bias is None else copy.node_map[matmul.bias]
    operands = (copy.node_map[matmul.left], copy.node_map[matmul.right], bias, item.epilogue)
    call = copy.call(before, torch.ops.fxwrap.fused_matmul.default, operands, f"{name}_fused")
    first, second = [copy.call(before, operator.getitem, (call, index), f"{name}_{index}") for index in (0, 1)]
    if item.epilogue == "gelu":
        first, second = second, first
    *inner, last = item.nodes
    _substitute_view(copy, last, second, inner)
    copy.substitute(matmul.node, first, "fused")
