"""Matmuls of packed weights, whose readers take slices of the columns, become one matmul for each slice.

SwiGLU multiplies two halves of one result: an element of the kernel that reads them needs two elements of the matmul,
in different columns. As two matmuls they are two sums of one kernel, whose epilogue reads both. A library's call is
better whole, so that the pass runs for matmuls that become kernels. Matmuls of groups of rows are such matmuls too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from operator import getitem

import torch
from torch.fx import Node

from fxwrap.fx_passes.graph_copy import GraphCopy, fake_call
from fxwrap.fx_passes.matmuls.activations import VIEWS
from fxwrap.fx_passes.matmuls.rewrites import Matmul, matmuls_of
from fxwrap.fx_passes.prepared_graph import FxPassContext, NodeValues, PreparedGraph
from fxwrap.fx_passes.storage_aliases import StorageAliases

_aten = torch.ops.aten
_GROUPED = _aten._grouped_mm.default
_GROUPED_NAME = str(_GROUPED)


@dataclass(frozen=True)
class _ColumnSlice:
    """The node of columns `start` to `end` of a matmul, perhaps with rows in several dimensions."""

    node: Node
    start: int
    end: int


def slice_matmuls(graph: PreparedGraph, context: FxPassContext) -> PreparedGraph:
    """Returns a graph in which matmuls that are read in disjoint slices of columns are one matmul for each slice."""
    grouped = [_match_grouped(node, graph.fakes, context) for node in graph.nodes]
    matmuls = [matmul for matmul in grouped if matmul is not None]
    if context.options.matmul_kernels == "generated":
        matmuls += matmuls_of(graph, context)
    if not matmuls:
        return graph
    aliases = StorageAliases(graph, context)
    sliced = [(matmul, _disjoint_slices(matmul, aliases)) for matmul in matmuls]
    if not any(slices for _, slices in sliced):
        return graph
    copy = GraphCopy(graph)
    for matmul, slices in sliced:
        for item in slices:
            _compute_slice(copy, matmul, item)
    return copy.finish()


def _match_grouped(node: Node, fakes: NodeValues, context: FxPassContext) -> Matmul | None:
    """Returns a matmul of groups of rows that becomes a kernel; its `bias` is None."""
    if node.target is not _GROUPED or node.kwargs or _GROUPED_NAME in context.extern_operators:
        return None
    match node.args:
        case (Node() as left, Node() as right, Node()):
            rows, weights = fakes[left], fakes[right]
        case _:
            return None
    spec = context.options.device_specs().get(rows.device.type)
    if spec is None or rows.ndim != 2 or weights.ndim != 3:
        return None
    sizes, has_columns = (rows.shape[0], weights.shape[0]), weights.stride(1) == 1
    if not spec.generates_grouped(context.options.matmul_kernels, rows.dtype, *sizes, has_columns):
        return None
    return Matmul(node, left, right, None)


def _disjoint_slices(matmul: Matmul, aliases: StorageAliases) -> list[_ColumnSlice]:
    """Returns the slices that all readers of a matmul take; none where there are other readers, or slices overlap."""
    node, fakes = matmul.node, aliases.fakes
    sizes = [*fakes[node].shape, *fakes[matmul.right].shape]
    if aliases.is_mutated(node) or aliases.is_returned(node) or any(type(size) is not int for size in sizes):
        return []
    readers = list(_column_slices(node, fakes))
    slices = sorted([item for item in readers if item is not None], key=lambda item: item.start)
    disjoint = all(first.end <= second.start for first, second in pairwise(slices))
    if len(slices) < len(readers) or len(slices) < 2 or not disjoint:
        return []
    contiguous = [fake_call(_aten.new_empty.default, (fakes[item.node], fakes[item.node].shape)) for item in slices]
    fits = all(aliases.accepts_layout(item.node, fake) for item, fake in zip(slices, contiguous, strict=True))
    return slices if fits else []


def _column_slices(node: Node, fakes: NodeValues) -> Iterator[_ColumnSlice | None]:
    """Yields the slices of the last dimension that a tensor's readers take; None for another reader."""
    shape = fakes[node].shape
    columns, last = shape[-1], (-1, len(shape) - 1)
    for user in node.users:
        match user.target, user.args:
            case target, (_, _) if target in VIEWS and fakes[user].shape[-1] == columns:
                yield from _column_slices(user, fakes)
            case _aten.slice.Tensor, (_, dim, int() as start, int() as end) if dim in last and 0 <= start <= end:
                yield _ColumnSlice(user, start, min(end, columns)) if start < columns else None
            case _aten.split.Tensor, (_, int(), dim) if dim in last:
                yield from _parts(user, fakes)
            case _aten.split_with_sizes.default, (_, _, dim) if dim in last:
                yield from _parts(user, fakes)
            case _:
                yield None


def _parts(split: Node, fakes: NodeValues) -> Iterator[_ColumnSlice | None]:
    """Yields the slices that are parts of a split."""
    widths = [part.shape[-1] for part in fakes[split]]
    for user in split.users:
        if user.target is not getitem or not isinstance(user.args[1], int):
            yield None
            continue
        start = sum(widths[: user.args[1]])
        yield _ColumnSlice(user, start, start + widths[user.args[1]])


def _compute_slice(copy: GraphCopy, matmul: Matmul, item: _ColumnSlice) -> None:
    """Replaces a slice of a matmul's result by the matmul of a slice of the columns."""
    before, name = copy.node_map[item.node], item.node.name
    columns, mapped = (item.start, item.end), copy.node_map
    last = copy.fakes[mapped[matmul.right]].ndim - 1
    right = copy.call(before, _aten.slice.Tensor, (mapped[matmul.right], last, *columns), f"{name}_columns")
    operands: tuple[Node, ...] = (mapped[matmul.left], right)
    target = matmul.node.target
    if target is _GROUPED:
        operands = (*operands, mapped[matmul.node.args[2]])  # type: ignore[index]
    elif matmul.bias is not None:
        bias = copy.call(before, _aten.slice.Tensor, (mapped[matmul.bias], 0, *columns), f"{name}_bias")
        operands = (bias, *operands)
    origin = mapped[matmul.node]
    result = copy.call(before, target, operands, f"{name}_matmul", origin=origin)
    sizes = list(copy.fakes[before].shape)
    if len(sizes) != 2:
        result = copy.call(before, _aten.view.default, (result, sizes), f"{name}_view")
    copy.substitute(item.node, result)
