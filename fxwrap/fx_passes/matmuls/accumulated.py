"""Sums with a matmul become matmuls that add to the other summand in its memory: the library's `beta * C`.

The sum of the gradients of queries, keys and values is one of three matmuls, and a residual is added to one. The call
that adds reads the other summand and writes the sum; otherwise it writes the matmul, which a kernel reads again. That
kernel may do other work too, so that only timing tells which is faster.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fxwrap.fx_passes.graph_copy import GraphCopy, expressions_of, has_static_strides, is_contiguous
from fxwrap.fx_passes.matmuls.activations import VIEWS
from fxwrap.fx_passes.prepared_graph import FxPassContext, PreparedGraph
from fxwrap.fx_passes.storage_aliases import StorageAliases

_aten = torch.ops.aten


@dataclass(frozen=True)
class Accumulation:
    """A sum of a matmul and a tensor that nothing reads later; `views` are those of the matmul that the sum reads."""

    matmul: Node
    addend: Node
    total: Node
    views: tuple[Node, ...] = ()

    @property
    def name(self) -> str:
        """The name of the sum's node."""
        return self.total.name

    @property
    def names(self) -> frozenset[str]:
        """The names of the sum, its matmul and the other summand."""
        return frozenset([self.name, self.matmul.name, self.addend.name])


def accumulate_matmuls(
    graph: PreparedGraph, context: FxPassContext, chosen: Collection[str] | None = None
) -> PreparedGraph:
    """Returns a graph in which matmuls add to the other summand: in `accumulated_dtypes`, or the sums `chosen`."""
    specs = context.options.device_specs()
    if chosen is None and not any(spec.matmuls.accumulated_dtypes for spec in specs.values()):
        return graph
    copy: GraphCopy | None = None
    for item in accumulations(graph, context):
        fake = graph.fakes[item.total]
        spec = specs.get(fake.device.type)
        is_default = spec is not None and fake.dtype in spec.matmuls.accumulated_dtypes
        if is_default if chosen is None else item.name in chosen:
            copy = copy or GraphCopy(graph)
            _accumulate(copy, item)
    return graph if copy is None else copy.finish()


def accumulations(graph: PreparedGraph, context: FxPassContext) -> list[Accumulation]:
    """Returns the sums that matmuls can compute in the memory of the other summand."""
    aliases = StorageAliases(graph, context)
    matches: list[Accumulation] = []
    for node in graph.nodes:
        if node.target is not _aten.add.Tensor or node.kwargs or str(node.target) in context.extern_operators:
            continue
        operands: Any = node.args
        pairs = ((operands[1], operands[0]), (operands[0], operands[1]))
        for product, addend in pairs:
            item = _match(product, addend, node, aliases, context)
            if item is not None and _dies(addend, item, aliases):
                matches.append(item)
                break
    return matches


def _match(
    product: Any, addend: Any, total: Node, aliases: StorageAliases, context: FxPassContext
) -> Accumulation | None:
    """Returns the sum of a matmul, which only the sum reads, and a tensor of its size, dtype and layout."""
    if not isinstance(product, Node) or not isinstance(addend, Node) or product is addend:
        return None
    views: list[Node] = []
    while product.target in VIEWS and [*product.users] == [total if not views else views[-1]]:
        views.append(product)
        product = product.args[0]
    is_matmul = product.target is _aten.mm.default and str(product.target) not in context.extern_operators
    if not is_matmul or len(product.users) != 1 or aliases.is_mutated(product):
        return None
    tensors = [aliases.fakes.get(item) for item in (product, addend, total)]
    for fake in tensors:
        if not isinstance(fake, torch.Tensor) or not has_static_strides(fake) or not is_contiguous(fake):
            return None
        if fake.dtype != tensors[0].dtype or fake.device != tensors[0].device:  # type: ignore[union-attr]
            return None
    _, other, result = tensors
    same = expressions_of(other.shape) == expressions_of(result.shape)  # type: ignore[union-attr]
    return Accumulation(product, addend, total, tuple(views)) if same else None


def _dies(addend: Node, item: Accumulation, aliases: StorageAliases) -> bool:
    """Whether the graph computes the other summand, and the matmul depends on all its other readers."""
    if aliases.is_mutated(addend) or aliases.is_returned(addend):
        return False
    nodes = aliases.aliases(addend)
    if any(node.op != "call_function" for node in nodes):
        return False
    before = _ancestors(item.matmul)
    return all(reader is item.total or reader in before for reader in aliases.readers(addend))


def _ancestors(node: Node) -> set[Node]:
    """Returns the nodes that a node depends on."""
    known: set[Node] = set()
    pending = [*node.all_input_nodes]
    while pending:
        item = pending.pop()
        if item not in known:
            known.add(item)
            pending += item.all_input_nodes
    return known


def _accumulate(copy: GraphCopy, item: Accumulation) -> None:
    before, name = copy.node_map[item.total], item.total.name
    addend, matmul = copy.node_map[item.addend], copy.node_map[item.matmul]
    sizes, shape = list(copy.fakes[matmul].shape), list(copy.fakes[before].shape)
    is_matrix = not item.views
    if not is_matrix:
        addend = copy.call(before, _aten.view.default, (addend, copy.size_arguments(before, sizes)), f"{name}_rows")
    total = copy.call(before, _aten.addmm.default, (addend, *matmul.args), f"{name}_accumulated", origin=matmul)
    if not is_matrix:
        total = copy.call(before, _aten.view.default, (total, copy.size_arguments(before, shape)), f"{name}_view")
    copy.substitute(item.total, total, "fused", erased=(*item.views[::-1], item.matmul))
