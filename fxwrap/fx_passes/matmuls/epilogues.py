"""Epilogues of a library's matmul: activations, also with their input.

A GEMM that adds a bias and applies an activation to its accumulators saves a kernel that reads and writes the result.
In training, the backward reads the activation's input, which such a call can store too. The kernel that would compute
the activation may do other work, so that only timing tells which is faster.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass

import torch
from torch.fx import Node

from fxwrap.devices import ROW_ALIGNMENT, DeviceSpec
from fxwrap.fx_passes.graph_copy import GraphCopy, expressions_of
from fxwrap.fx_passes.matmuls.activations import Activation, match_activation
from fxwrap.fx_passes.matmuls.rewrites import Matmul, matmuls_of
from fxwrap.fx_passes.prepared_graph import FxPassContext, NodeValues, PreparedGraph
from fxwrap.fx_passes.storage_aliases import StorageAliases
from fxwrap.torch_compat import FakeTensor

_aten = torch.ops.aten


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


# --- GELU with its input ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GeluMatmul:
    """A matmul and its tanh-GELU, where other operators read the matmul, too, or the graph returns it."""

    matmul: Matmul
    gelu: Activation

    @property
    def name(self) -> str:
        """The name of the matmul's node."""
        return self.matmul.node.name

    @property
    def names(self) -> frozenset[str]:
        """The names of the matmul and of the operators that compute the GELU."""
        return frozenset([self.name, *[node.name for node in self.gelu.nodes]])


def fuse_gelu_matmuls(graph: PreparedGraph, context: FxPassContext, chosen: Collection[str]) -> PreparedGraph:
    """Returns a graph in which the matmuls of these names and their GELU are one call each."""
    matches = [match for match in gelu_matmuls(graph, context) if match.name in chosen]
    if not matches:
        return graph
    copy = GraphCopy(graph)
    for match in matches:
        _fuse_gelu(copy, match)
    return copy.finish()


def gelu_matmuls(graph: PreparedGraph, context: FxPassContext) -> list[GeluMatmul]:
    """Returns the matmuls that can store the input of their GELU."""
    specs = context.options.device_specs()
    matches: list[GeluMatmul] = []
    for matmul in matmuls_of(graph, context):
        if _supports_epilogue(matmul, graph.fakes, specs):
            activation = match_activation(matmul.node, graph.fakes, context.options)
            if activation is not None and activation.is_gelu and not activation.is_only_reader:
                matches.append(GeluMatmul(matmul, activation))
    if not matches:
        return []
    aliases = StorageAliases(graph, context)
    return [match for match in matches if not aliases.is_mutated(match.matmul.node)]


def _fuse_gelu(copy: GraphCopy, match: GeluMatmul) -> None:
    matmul, name = match.matmul, match.name
    before = copy.node_map[matmul.node]
    bias = None if matmul.bias is None else copy.node_map[matmul.bias]
    operands = (copy.node_map[matmul.left], copy.node_map[matmul.right], bias)
    call = copy.call(before, torch.ops.fxwrap.gelu_matmul.default, operands, f"{name}_gelu")
    result, stored = [copy.element(before, call, index, f"{name}_{index}") for index in (0, 1)]
    _substitute_view(copy, match.gelu.result, result, match.gelu.nodes[:-1])
    copy.substitute(matmul.node, stored, "fused")
