"""Padded matmuls: GEMMs whose rows are multiples of ROW_ALIGNMENT, which tensor cores need to run at full speed.

A matmul with other row lengths (a vocabulary of 50257 words) becomes a larger matmul of zero-padded operands, and a
slice of its result. Operands computed by generated kernels are computed with the zeros; others are copied. An output of
the graph keeps its strides: it is copied, chunk by chunk of columns, so that the result is never in memory twice.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias, cast

import torch
from torch.fx import Node

from fxwrap.devices import ROW_ALIGNMENT, GemmPaddingCosts
from fxwrap.fx_passes.graph_copy import GraphCopy, bytes_of, fake_call, has_static_strides, is_contiguous, size_hint
from fxwrap.fx_passes.matmuls.rewrites import MATMULS, transpose_operand
from fxwrap.fx_passes.prepared_graph import FxPassContext, NodeValues, PreparedGraph
from fxwrap.fx_passes.storage_aliases import StorageAliases
from fxwrap.torch_compat import FakeTensor, tree_flatten

_aten = torch.ops.aten

Padding: TypeAlias = tuple[int, ...]
"""The padding of `constant_pad_nd`: the zeros appended to the last dimension and the one before, each after a 0."""

Columns: TypeAlias = tuple[int, int]
"""A range of a result's columns."""


@dataclass(frozen=True)
class _Operand:
    """A matrix or vector as stored: the matmul reads `node`, or its transpose if `transposed`."""

    node: Node
    transposed: bool

    def padding(self, rows: int, columns: int) -> Padding:
        """Returns the padding of the stored matrix that adds rows and columns to the matrix that the matmul reads."""
        return (0, rows, 0, columns) if self.transposed else (0, columns, 0, rows)


@dataclass(frozen=True)
class _PaddedMatmul:
    """A matmul and its padding: the rows, terms of the inner dimension and columns that are added.

    `is_generated` is whether a kernel is faster than a padded matmul whose result is copied.
    """

    matmul: Node
    bias: Node | None
    left: _Operand
    right: _Operand
    rows: int
    inner_size: int
    columns: int
    costs: GemmPaddingCosts
    is_generated: bool

    @property
    def operands(self) -> list[tuple[_Operand, Padding]]:
        """The call's operands in order, each with its padding."""
        left, right = self.left.padding(self.rows, self.inner_size), self.right.padding(self.inner_size, self.columns)
        bias = [] if self.bias is None else [(_Operand(self.bias, False), (0, self.columns))]
        return [*bias, (self.left, left), (self.right, right)]


def pad_matmuls(graph: PreparedGraph, context: FxPassContext, kernels: Collection[str] = ()) -> PreparedGraph:
    """Returns a graph whose large matmuls have aligned rows, where that saves more than the copies cost.

    Matmuls that become kernels, the nodes named `kernels`, stay as they are: a kernel stores rows of any length.
    """
    if context.options.matmul_kernels == "generated":
        return graph
    nodes = [node for node in graph.nodes if node.name not in kernels]
    matches = [match for node in nodes if (match := _match_padded_matmul(node, graph.fakes, context)) is not None]
    if not matches:
        return graph
    views = StorageAliases(graph, context)
    matmuls = {match.matmul for match in matches}
    copies = [(match, _required_copies(match, views, matmuls, graph.flexible_stride_outputs)) for match in matches]
    profitable = [
        (match, outputs) for match, outputs in copies if outputs is not None and not (outputs and match.is_generated)
    ]  # fmt: skip
    if not profitable:
        return graph
    writer = _PaddingWriter(GraphCopy(graph))
    for match, outputs in profitable:
        writer.write(match, outputs, _chunk_width(match, graph.fakes) if outputs else 0)
    return replace(writer.copy.finish(), unpadded=graph)


# --- matching ---------------------------------------------------------------------------------------------------------


def _match_padded_matmul(node: Node, fakes: NodeValues, context: FxPassContext) -> _PaddedMatmul | None:
    """Returns the padding of a matmul; None for other calls, aligned rows, and matmuls too small to save enough."""
    if node.target not in MATMULS or node.kwargs or str(node.target) in context.extern_operators:
        return None
    result = fakes.get(node)
    if not isinstance(result, FakeTensor):
        return None
    spec = context.options.device_specs().get(result.device.type)
    if spec is None or result.dtype not in spec.matmuls.padding_dtypes or not is_contiguous(result):
        return None
    *biases, left_node, right_node = cast(tuple[Node, ...], node.args)
    if any(fakes[bias].ndim != 1 for bias in biases):
        return None
    left, right = _stored_operand(left_node, fakes), _stored_operand(right_node, fakes)
    (rows, columns), inner_size = result.shape, fakes[left_node].shape[1]
    costs = spec.matmuls.padding_costs
    if left is None or right is None:
        return None
    if costs.saved_bytes(*map(size_hint, (rows, columns, inner_size))) < costs.min_saved_bytes:
        return None
    padding_for = partial(_padding_for, step=ROW_ALIGNMENT // result.dtype.itemsize)
    match = _PaddedMatmul(
        node, biases[0] if biases else None, left, right,
        rows=padding_for(rows) if left.transposed else 0,
        inner_size=padding_for(inner_size) if right.transposed or not left.transposed else 0,
        columns=padding_for(columns), costs=costs,
        is_generated=context.options.matmul_kernels == "auto"
        and spec.matmuls.generates_unaligned(result.dtype, size_hint(rows), columns, inner_size),
    )  # fmt: skip
    return match if any((match.rows, match.inner_size, match.columns)) else None


def _stored_operand(node: Node, fakes: NodeValues) -> _Operand | None:
    """Returns the stored matrix of an operand whose rows or columns are contiguous."""
    strides = fakes[node].stride()
    if type(strides[1]) is int and strides[1] == 1:
        return _Operand(node, transposed=False)
    base = transpose_operand(node) if type(strides[0]) is int and strides[0] == 1 else None
    return None if base is None else _Operand(base, transposed=True)


def _padding_for(size: int | torch.SymInt, step: int) -> int:
    """Returns the padding of a size to a multiple of `step`; sizes of 1 and symbols are not padded."""
    return -size % step if type(size) is int and size > 1 else 0


# --- cost -------------------------------------------------------------------------------------------------------------


def _required_copies(
    match: _PaddedMatmul, views: StorageAliases, matmuls: Collection[Node], flexible_stride_outputs: Collection[int]
) -> list[Node] | None:
    """Returns the outputs that padding copies; None if padding is impossible or costs more than it saves."""
    matmul, fakes = match.matmul, views.fakes
    if views.is_mutated(matmul) or not views.accepts_layout(matmul, _sliced_fake(match, fakes[matmul])):
        return None
    outputs = _fixed_stride_outputs(matmul, views, flexible_stride_outputs) if match.columns else []
    if not all(is_contiguous(fakes[node]) for node in outputs):
        return None
    copied = [
        operand.node for operand, padding in match.operands
        if any(padding) and not _is_fusible_producer(operand.node, views, matmuls)
    ]  # fmt: skip
    cost = sum(match.costs.copy_overhead_bytes + 2 * bytes_of(fakes[node]) for node in (*copied, *outputs))
    left: Node = matmul.args[-2]  # type: ignore[assignment]
    sizes = (*fakes[matmul].shape, fakes[left].shape[1])
    return outputs if match.costs.saved_bytes(*map(size_hint, sizes)) > cost else None


def _sliced_fake(match: _PaddedMatmul, result: FakeTensor) -> FakeTensor:
    """Returns the fake value of a result that is a slice of a padded one."""
    rows, columns = result.shape
    fake = fake_call(_aten.new_empty.default, (result, [rows + match.rows, columns + match.columns]))
    if match.rows:
        fake = fake_call(_aten.slice.Tensor, (fake, 0, 0, rows))
    if match.columns:
        fake = fake_call(_aten.slice.Tensor, (fake, 1, 0, columns))
    return fake  # type: ignore[no-any-return]


def _is_fusible_producer(node: Node, views: StorageAliases, matmuls: Collection[Node]) -> bool:
    """Whether a generated kernel computes a tensor only for padded matmuls, so that it can write the zeros."""
    fused = node.op == "call_function" and str(node.target) in views.fused_operators and views.aliases(node)[0] is node
    return fused and not views.is_returned(node) and all(reader in matmuls for reader in views.readers(node))


def _chunk_width(match: _PaddedMatmul, fakes: NodeValues) -> int:
    """Returns the columns of a chunk of the result; 0 to compute it whole.

    Chunks need a transposed right operand: any range of its columns is then aligned.
    """
    columns, multiple = fakes[match.matmul].shape[1], match.costs.chunk_column_multiple
    width = max(round(columns / match.costs.target_chunks / multiple), 1) * multiple
    return width if match.right.transposed and width < columns else 0


def _fixed_stride_outputs(node: Node, views: StorageAliases, flexible_stride_outputs: Collection[int]) -> list[Node]:
    """Returns the outputs on a tensor's storage whose strides are fixed."""
    returned = tree_flatten(node.graph.output_node().args)[0]
    fixed = {item for position, item in enumerate(returned) if position not in flexible_stride_outputs}
    outputs = [item for item in views.aliases(node) if any(user.op == "output" for user in item.users)]
    return [item for item in outputs if item in fixed or not has_static_strides(views.fakes[item])]


# --- rewriting --------------------------------------------------------------------------------------------------------


class _PaddingWriter:
    """Writes padded matmuls into a copy of the graph, which pads each operand once."""

    def __init__(self, copy: GraphCopy) -> None:
        self.copy = copy
        self._padded: dict[tuple[Node, Padding, Columns | None], Node] = {}

    def write(self, match: _PaddedMatmul, outputs: Collection[Node], chunk_width: int) -> None:
        """Replaces a matmul, in chunks of columns unless `chunk_width` is 0; clones these outputs."""
        if chunk_width:
            self.copy.substitute(match.matmul, self._in_chunks(match, chunk_width))
            return
        self.copy.substitute(match.matmul, self._result(match, None))
        for node in outputs:
            self.copy.clone_output(node, f"{node.name}_contiguous")

    def _in_chunks(self, match: _PaddedMatmul, width: int) -> Node:
        """Returns a contiguous result, into which chunks of columns are copied."""
        copy, matmul, before = self.copy, match.matmul, self.copy.node_map[match.matmul]
        like = copy.fakes[before]
        keywords = {"dtype": like.dtype, "device": like.device}
        result = copy.call(before, _aten.empty.memory_format, (list(like.shape),), f"{matmul.name}_whole", keywords)
        columns = like.shape[1]
        for start in range(0, columns, width):
            end = min(start + width, columns)
            chunk = self._result(match if end == columns else replace(match, columns=0), (start, end))
            clone = copy.call(before, _aten.clone.default, (chunk,), f"{matmul.name}_columns")
            arguments = (result, clone, 1, start, end)
            result = copy.call(before, _aten.slice_scatter.default, arguments, f"{matmul.name}_until_{end}")
        return result

    def _result(self, match: _PaddedMatmul, columns: Columns | None) -> Node:
        """Returns a slice of the padded result: all of it, or a range of columns."""
        copy, matmul, before = self.copy, match.matmul, self.copy.node_map[match.matmul]
        *bias, (left, left_padding), (right, right_padding) = match.operands
        operands = [self._operand(before, operand, padding, columns) for operand, padding in bias]
        operands.append(self._operand(before, left, left_padding, None))
        operands.append(self._operand(before, right, right_padding, columns))
        result = copy.call(before, matmul.target, operands, f"{matmul.name}_padded")
        start, end = columns or (0, copy.fakes[before].shape[1])
        for dim, padding, size in ((0, match.rows, copy.fakes[before].shape[0]), (1, match.columns, end - start)):
            if padding:
                result = copy.call(before, _aten.slice.Tensor, (result, dim, 0, size), f"{matmul.name}_slice")
        return result

    def _operand(self, before: Node, operand: _Operand, padding: Padding, columns: Columns | None) -> Node:
        """Returns a padded operand, or the part of it that a range of the result's columns needs."""
        copy, name = self.copy, operand.node.name
        result = copy.node_map[operand.node]
        if columns is not None:
            result = copy.call(before, _aten.slice.Tensor, (result, 0, *columns), f"{name}_slice")
        if any(padding):
            key = (operand.node, padding, columns)
            if key not in self._padded:
                arguments = (result, list(padding))
                self._padded[key] = copy.call(before, _aten.constant_pad_nd.default, arguments, f"{name}_padded")
            result = self._padded[key]
        return copy.call(before, _aten.t.default, (result,), f"{name}_transposed") if operand.transposed else result
