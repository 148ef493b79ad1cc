"""The calls of a loop over experts, written once for the rows of all experts, as grouped matmuls."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fxwrap.fx_passes.effects import name_of
from fxwrap.fx_passes.expert_bodies import ExpertLoop
from fxwrap.fx_passes.expert_conditions import are_in_range
from fxwrap.fx_passes.expert_rows import MATMULS, StackedOperand, coordinate, is_selection, stacked_views
from fxwrap.fx_passes.graph_copy import GraphCopy, expression_of, is_contiguous
from fxwrap.fx_passes.prepared_graph import NodeValues, Target

_aten = torch.ops.aten


@dataclass(frozen=True)
class Terminal:
    """How a body changes the result: `rows` are added to the elements at the coordinates of `axes`, or written there.

    `read` are the calls that read the elements before and add to them, where the graph has these.
    """

    rows: Node
    axes: tuple[int, ...]
    adds: bool
    read: tuple[Node, ...] = ()


@dataclass(frozen=True)
class GroupedLoop:
    """A loop that grouped matmuls can compute: its operands that differ between experts, and how it ends."""

    loop: ExpertLoop
    stacked: Mapping[Node, StackedOperand]
    terminal: Terminal


class GroupedRows:
    """Writes the calls of a body once for the rows of all experts, before the result of the loop."""

    def __init__(self, copy: GraphCopy, grouped: GroupedLoop, fakes: NodeValues) -> None:
        self._copy, self._grouped, self._fakes = copy, grouped, fakes
        self._loop, self._body = grouped.loop, grouped.loop.bodies[0]
        self._before = copy.node_map[self._loop.result]
        self._indices = copy.node_map[self._loop.indices]
        self._sizes = list(copy.fakes[self._indices].shape)
        self._count = len(self._loop.bodies)
        self._is_in_range = are_in_range(self._loop.indices, self._count, fakes)
        self._length = copy.fakes[self._indices].numel()
        self._values: dict[Node, Node] = {}
        self._stacks: dict[Node, Node] = {}
        self._sort()

    def result(self) -> Node:
        """Returns the result of the loop."""
        terminal = self._grouped.terminal
        for node in self._body.nodes:
            if node not in terminal.read:
                self._compute(node)
        rows = self._call(_aten.index.Tensor, self._values[terminal.rows], [self._inverse()])
        inner = list(self._copy.fakes[rows].shape)[1:]
        rows = self._view(rows, [*self._sizes, *inner])
        if not terminal.adds:
            return self._written(self._in_order(rows))
        if not self._is_in_range:
            outside = self._view(self._outside, [*self._sizes, *[1] * len(inner)])
            rows = self._call(_aten.masked_fill.Scalar, rows, outside, 0)
        others = [axis for axis in range(len(self._sizes)) if axis not in terminal.axes]
        if others:
            rows = self._call(_aten.sum.dim_IntList, rows, others)
        rows = self._in_order(rows)
        if not _is_zero(self._loop.base):
            rows = self._call(_aten.add.Tensor, self._copy.node_map[self._loop.base], rows)
        dtype = self._fakes[self._loop.result].dtype
        return rows if self._copy.fakes[rows].dtype == dtype else self._call(_aten._to_copy.default, rows, dtype=dtype)

    def _sort(self) -> None:
        """Sorts the indices: rows of the first expert are first, and rows of none last."""
        flat = self._indices
        if not is_contiguous(self._copy.fakes[flat]):
            flat = self._call(_aten.clone.default, flat, memory_format=torch.contiguous_format)
        flat = self._view(flat, [self._length])
        if not self._is_in_range:
            below, above = self._call(_aten.lt.Scalar, flat, 0), self._call(_aten.ge.Scalar, flat, self._count)
            self._outside = self._call(_aten.logical_or.default, below, above)
            flat = self._call(_aten.masked_fill.Scalar, flat, self._outside, self._count)
        ordered = self._call(_aten.sort.stable, flat, stable=True)
        self._experts, self._order = [self._call(operator.getitem, ordered, part) for part in (0, 1)]
        dtype = self._copy.fakes[flat].dtype
        numbers = self._arange(self._count, dtype)
        columns = self._call(_aten.unsqueeze.default, numbers, 1)
        before = self._call(_aten.le.Tensor, self._call(_aten.unsqueeze.default, flat, 0), columns)
        self._ends = self._call(_aten.sum.dim_IntList, before, [1], dtype=torch.int32)

    def _inverse(self) -> Node:
        """Returns the position of each index among the sorted ones."""
        numbers = self._arange(self._length, torch.int64)
        empty = self._call(_aten.empty_like.default, self._order)
        return self._call(_aten.index_put.default, empty, [self._order], numbers)

    def _in_order(self, rows: Node) -> Node:
        """Returns rows whose dimensions are those of the result."""
        axes = self._grouped.terminal.axes
        ascending = sorted(axes)
        if list(axes) == ascending:
            return rows
        rank = self._copy.fakes[rows].ndim
        order = [*[ascending.index(axis) for axis in axes], *range(len(axes), rank)]
        rows = self._call(_aten.permute.default, rows, order)
        return self._call(_aten.clone.default, rows, memory_format=torch.contiguous_format)

    def _written(self, rows: Node) -> Node:
        """Returns the tensor before the loop with rows of experts written into it."""
        if self._is_in_range:
            return rows
        outside = self._in_order(self._view(self._outside, list(self._sizes)))
        shape = list(self._copy.fakes[outside].shape)
        mask = self._view(outside, shape + [1] * (self._copy.fakes[rows].ndim - len(shape)))
        return self._call(_aten.where.self, mask, self._copy.node_map[self._loop.base], rows)

    def _compute(self, node: Node) -> None:
        """Computes the rows of one call of the body, for all experts."""
        column = coordinate(node)
        if column is not None:
            self._values[node] = self._coordinate(self._body.condition.axes[column])
        elif name_of(node) == "index" and is_selection(node, self._body, self._fakes):
            positions = [self._coordinate(axis) for axis in self._body.condition.axes]
            self._values[node] = self._call(_aten.index.Tensor, self._operand(node.args[0], 0), positions, origin=node)
        elif is_selection(node, self._body, self._fakes):
            pass
        elif name_of(node) in MATMULS and node.args[-1] in self._grouped.stacked:
            self._values[node] = self._matmul(node)
        else:
            self._values[node] = self._row_wise(node)

    def _matmul(self, node: Node) -> Node:
        """Returns rows multiplied by the matrix of their expert."""
        *bias, left, right = node.args
        assert isinstance(left, Node) and isinstance(right, Node)
        product = self._call(_aten._grouped_mm.default, self._values[left], self._stack(right), self._ends, origin=node)
        for item in bias:
            product = self._call(_aten.add.Tensor, product, self._operand(item, 2), origin=node)
        return product

    def _row_wise(self, node: Node) -> Node:
        """Returns the result of the call on the rows of all experts."""
        fake = self._fakes[node]
        rank = fake.ndim if isinstance(fake, torch.Tensor) else 0
        arguments = [self._operand(item, rank) for item in node.args]
        keywords = {name: self._operand(item, rank) for name, item in node.kwargs.items()}
        return self._call(node.target, *arguments, origin=node, **keywords)

    def _operand(self, item: Any, rank: int) -> Any:
        """Returns an argument of a call on all rows, whose result has `rank` dimensions."""
        match item:
            case Node() if item in self._values:
                return self._values[item]
            case Node() if item in self._body.guards:
                return self._length
            case Node() if item in self._grouped.stacked:
                return self._of_each_row(item, rank)
            case Node():
                return self._copy.node_map[item]
            case tuple() | list():
                return [self._operand(part, rank) for part in item]
            case torch.SymInt() if expression_of(item) in self._body.rows:
                return self._length
            case _:
                return item

    def _of_each_row(self, node: Node, rank: int) -> Node:
        """Returns the operand of each row's expert, with dimensions of size 1 for those that it lacks."""
        experts = self._experts
        if not self._is_in_range:
            experts = self._call(_aten.clamp_max.default, experts, self._count - 1)
        gathered = self._call(_aten.index.Tensor, self._stack(node), [experts])
        inner = list(self._copy.fakes[gathered].shape)[1:]
        return self._view(gathered, [self._length, *[1] * (rank - 1 - len(inner)), *inner])

    def _stack(self, node: Node) -> Node:
        """Returns an operand of all experts, which are dimension 0."""
        if node not in self._stacks:
            operand = self._grouped.stacked[node]
            stack = self._copy.node_map[operand.stacked]
            for target, arguments, origin in stacked_views(operand, self._fakes):
                keywords = {} if origin is None else origin.kwargs
                stack = self._call(target, stack, *arguments, origin=origin, **keywords)
            self._stacks[node] = stack
        return self._stacks[node]

    def _coordinate(self, axis: int) -> Node:
        """Returns the coordinate of each row among the indices, in one dimension."""
        position, inner = self._order, 1
        for size in self._sizes[axis + 1 :]:
            inner *= size
        if inner != 1:
            position = self._call(_aten.floor_divide.default, position, inner)
        return self._call(_aten.remainder.Scalar, position, self._sizes[axis]) if axis else position

    def _arange(self, count: int | torch.SymInt, dtype: torch.dtype) -> Node:
        device = self._copy.fakes[self._indices].device
        (end,) = self._copy.size_arguments(self._before, [count])
        return self._call(_aten.arange.default, end, dtype=dtype, device=device)

    def _view(self, tensor: Node, sizes: Sequence[int | torch.SymInt]) -> Node:
        return self._call(_aten.view.default, tensor, self._copy.size_arguments(self._before, sizes))

    def _call(self, target: Target, *arguments: Any, origin: Node | None = None, **keywords: Any) -> Node:
        """Inserts a call before the result of the loop, with the metadata of the body's call `origin`."""
        source = self._loop.result if origin is None else origin
        return self._copy.call(
            self._before, target, arguments, f"{source.name}_rows", keywords, origin=self._copy.node_map[source]
        )


def _is_zero(node: Node) -> bool:
    """Whether a call returns zeros."""
    is_filled = name_of(node) == "full" and node.args[1] in (0, 0.0) and not isinstance(node.args[1], Node)
    return is_filled or name_of(node) in ("zeros", "zeros_like", "new_zeros")
