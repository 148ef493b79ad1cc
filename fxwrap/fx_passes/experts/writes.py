"""Gradients of loops that write an expert's rows in place, as autograd writes them.

The gradient of a write is the gradient of its result with zeros in the rows written. An expert before it reads its own
rows of that. Where these are other rows, or where the gradient of the elements read before is added again, the rows are
those of the gradient of the loop's result, which does not depend on the other experts. The gradient of the loop's
initial tensor is that of its result with zeros in the rows of all experts: one masked fill.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fxwrap.fx_passes.attention.nodes import is_tensor
from fxwrap.fx_passes.effects import name_of
from fxwrap.fx_passes.experts.conditions import ExpertCondition, are_distinct, are_in_range, expert_condition
from fxwrap.fx_passes.experts.rows import coordinate, is_zero
from fxwrap.fx_passes.graph_copy import GraphCopy, same_layout, storages_of
from fxwrap.fx_passes.prepared_graph import NodeValues, PreparedGraph
from fxwrap.fx_passes.storage_aliases import written_storages

_aten = torch.ops.aten

_UNREAD = frozenset({"full", "index_put", "new_zeros", "zeros", "zeros_like"})
"""Operators of gradients of writes, which nothing reads afterwards."""


@dataclass(frozen=True)
class _Rows:
    """The rows of an expert in an index: its condition, and the dimensions of the indices that the index has."""

    condition: ExpertCondition
    axes: tuple[int, ...]


@dataclass(frozen=True)
class _ZeroedRows:
    """Writes of zeros into the rows of consecutive experts, from `first` to before `end`, of a tensor `source`."""

    source: Node
    rows: _Rows
    first: int
    end: int


def simplify_gradients_of_writes(graph: PreparedGraph) -> PreparedGraph:
    """Returns a graph in which experts read rows of gradients before other experts' rows in them become zeros."""
    sources = _Sources(graph.fakes, written_storages(graph.nodes, graph.fakes))
    replacements = {node: source for node in graph.nodes if (source := sources.of_sum(node)) is not None}
    reads = {node: source for node in graph.nodes if (source := sources.of_read(node)) is not None}
    zeroed = {node: writes for node in graph.nodes if (writes := sources.of_zeros(node)) is not None}
    if not replacements and not reads and not zeroed:
        return graph
    copy = GraphCopy(graph)
    unread = {copy.node_map[node] for node in (*replacements, *zeroed)}
    for node in graph.nodes:
        if node in replacements:
            copy.substitute(node, copy.node_map[replacements[node]], "fused")
        elif node in zeroed:
            copy.substitute(node, _with_zeros(copy, node, zeroed[node], graph.fakes), "fused")
        elif node in reads:
            copy.node_map[node].update_arg(0, copy.node_map[reads[node]])
    for node in reversed(graph.nodes):
        item = copy.node_map[node]
        if node not in zeroed and name_of(node) in _UNREAD and all(user in unread for user in item.users):
            unread.add(item)
            copy.erase(node)
    return copy.finish()


class _Sources:
    """The tensors that calls could read instead. `mutated` are the storages that calls of the graph write in place."""

    def __init__(self, fakes: NodeValues, mutated: Collection[int]) -> None:
        self._fakes = fakes
        self._mutated = mutated

    def of_read(self, node: Node) -> Node | None:
        """Returns the tensor before writes of other experts' rows, if a call reads rows of one expert after these."""
        if name_of(node) != "index":
            return None
        positions: Any = node.args[1]
        source: Any = node.args[0]
        rows, first = _rows(positions, self._fakes), source
        while rows is not None and self._writes_others(source, rows):
            source = source.args[0]
        return None if source is first else source

    def _writes_others(self, node: Node, rows: _Rows) -> bool:
        """Whether a call writes rows of other experts into a copy of a tensor."""
        if name_of(node) != "index_put":
            return False
        written = _rows(node.args[1], self._fakes)
        is_disjoint = written is not None and _are_disjoint(rows, written, self._fakes)
        return is_disjoint and not self._is_mutated(node, node.args[0], rows.condition.indices)

    def of_zeros(self, node: Node) -> _ZeroedRows | None:
        """Returns the writes of zeros into rows of experts, one after the other, of which a call is the last."""
        rows = self._zeroed(node)
        if rows is None or any(self._continues(user, rows) for user in node.users):
            return None
        numbers, source = {rows.condition.number}, node.args[0]
        while isinstance(source, Node) and (before := self._zeroed(source)) is not None:
            if not _are_disjoint(rows, before, self._fakes):
                break
            numbers.add(before.condition.number)
            source = source.args[0]
        first, end = min(numbers), max(numbers) + 1
        if len(numbers) != end - first or self._is_mutated(node, source, rows.condition.indices):
            return None
        return _ZeroedRows(source, rows, first, end)  # type: ignore[arg-type]

    def _continues(self, user: Node, rows: _Rows) -> bool:
        """Whether a call writes zeros into the rows of another expert after those of one."""
        after = self._zeroed(user)
        return after is not None and _are_disjoint(after, rows, self._fakes)

    def _zeroed(self, node: Node) -> _Rows | None:
        """Returns the rows of one expert into which a call writes zeros."""
        match name_of(node), node.args:
            case "index_put", (Node() as source, positions, Node() as zeros) if is_zero(zeros):
                rows = _rows(positions, self._fakes)
                is_whole = rows is not None and not _others(rows, self._fakes) and len(set(rows.axes)) == len(rows.axes)
                return rows if is_whole and self._is_same(node, source) else None
            case _:
                return None

    def of_sum(self, node: Node) -> Node | None:
        """Returns the tensor that a sum equals: its rows became zeros in one summand, and are the other summand."""
        operands = node.all_input_nodes
        if node.target is not torch.ops.aten.add.Tensor or node.kwargs or len(operands) != 2:
            return None
        for zeroed, restored in (operands, operands[::-1]):
            match name_of(zeroed), zeroed.args, name_of(restored), restored.args:
                case "index_put", (Node() as source, at, Node() as zeros), "index_put", (Node() as base, *rest):
                    tensors = (source, zeroed, zeros, restored, base, rest[1])
                    if self._is_same(node, source) and is_zero(zeros) and is_zero(base):
                        if self._restores(source, at, rest) and not self._is_mutated(*tensors):
                            return source
                case _:
                    pass
        return None

    def _restores(self, source: Node, positions: Any, added: Sequence[Any]) -> bool:
        """Whether arguments of `index_put` add rows of a tensor at the positions from which they were read."""
        if len(added) != 3 or not added[2] or added[0] != positions or name_of(added[1]) != "index":
            return False
        return added[1].args == (source, positions) and _has_distinct_rows(positions, self._fakes)

    def _is_mutated(self, *nodes: Any) -> bool:
        """Whether a call of the graph writes one of the tensors."""
        return any(storage in self._mutated for node in nodes for storage in storages_of(self._fakes.get(node)))

    def _is_same(self, node: Node, source: Node) -> bool:
        """Whether two tensors have the same dtype and layout."""
        one, other = self._fakes[node], self._fakes[source]
        return bool(one.dtype == other.dtype) and same_layout(one, other)


def _with_zeros(copy: GraphCopy, node: Node, zeroed: _ZeroedRows, fakes: NodeValues) -> Node:
    """Returns a tensor with zeros in the rows of experts, before the last write of these."""
    before, source, indices = copy.node_map[node], copy.node_map[zeroed.source], zeroed.rows.condition.indices

    def call(target: Any, *arguments: Any) -> Node:
        return copy.call(before, target, arguments, f"{node.name}_zeroed")

    if zeroed.first == 0 and are_in_range(indices, zeroed.end, fakes):
        return call(_aten.zeros_like.default, source)
    reached = call(_aten.ge.Scalar, copy.node_map[indices], zeroed.first)
    reached = call(_aten.logical_and.default, reached, call(_aten.lt.Scalar, copy.node_map[indices], zeroed.end))
    reached = call(_aten.permute.default, reached, list(zeroed.rows.axes))
    for _ in range(fakes[node].ndim - len(zeroed.rows.axes)):
        reached = call(_aten.unsqueeze.default, reached, -1)
    return call(_aten.masked_fill.Scalar, source, reached, 0)


def _rows(positions: Any, fakes: NodeValues) -> _Rows | None:
    """Returns the rows of an expert that an index has: its condition, or columns of the condition's `nonzero`."""
    if len(positions) == 1 and is_tensor(positions[0], fakes) and fakes[positions[0]].dtype is torch.bool:
        condition = expert_condition(positions[0], fakes)
        return None if condition is None else _Rows(condition, condition.axes)
    columns = [coordinate(item) if isinstance(item, Node) else None for item in positions]
    sources = {_nonzero(item) for item, column in zip(positions, columns, strict=True) if column is not None}
    if None in columns or len(sources) != 1:
        return None
    (source,) = sources
    mask: Any = source.args[0]
    condition = expert_condition(mask, fakes)
    if condition is None:
        return None
    return _Rows(condition, tuple([condition.axes[column] for column in columns if column is not None]))


def _nonzero(column: Node) -> Node:
    """Returns the call of `nonzero` of which a node is a column."""
    source = column.all_input_nodes[0]
    return source if name_of(source) == "nonzero" else source.all_input_nodes[0]


def _others(rows: _Rows, fakes: NodeValues) -> Sequence[int]:
    """Returns the dimensions of the indices that an index lacks."""
    return [axis for axis in range(fakes[rows.condition.indices].ndim) if axis not in rows.axes]


def _are_disjoint(one: _Rows, other: _Rows, fakes: NodeValues) -> bool:
    """Whether two indices have no element in common: an index has all dimensions, so an element is of one expert."""
    is_same = one.condition.indices is other.condition.indices and one.axes == other.axes
    return is_same and one.condition.number != other.condition.number and not _others(one, fakes)


def _has_distinct_rows(positions: Any, fakes: NodeValues) -> bool:
    """Whether an index has no element twice."""
    rows = _rows(positions, fakes)
    if rows is None or len(set(rows.axes)) < len(rows.axes):
        return False
    others = _others(rows, fakes)
    return not others or are_distinct(rows.condition.indices, others, fakes)
