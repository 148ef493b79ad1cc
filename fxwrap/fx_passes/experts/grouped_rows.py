"""The calls of a loop over experts, written once for the rows of all experts, as grouped matmuls."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch.fx import Node

from fxwrap.fx_passes.effects import name_of
from fxwrap.fx_passes.experts.bodies import ExpertLoop, ExpertResult, depends_on_rows
from fxwrap.fx_passes.experts.conditions import are_in_range
from fxwrap.fx_passes.experts.gradients import ExpertGradient, GradientSum
from fxwrap.fx_passes.experts.rows import (
    MATMULS,
    StackedOperand,
    call_on_all_experts,
    coordinate,
    is_selection,
    is_zero,
    stacked_views,
    sums_rows,
)
from fxwrap.fx_passes.graph_copy import GraphCopy, expression_of, is_contiguous, same_strides
from fxwrap.fx_passes.prepared_graph import NodeValues, Target
from fxwrap.fx_passes.sorts import narrowest_key

_aten = torch.ops.aten

MATRIX_ALIGNMENT = 16
"""The multiple of bytes that rows of a grouped matmul's operands must have."""


@dataclass(frozen=True)
class Terminal:
    """How a body changes the result: `rows` are added to the elements at the coordinates of `axes`, or written there.

    `read` are the calls that read the elements before and add to them, where the graph has these. The result and the
    rows have `leading` dimensions of size 1 before those.
    """

    rows: Node
    axes: tuple[int, ...]
    adds: bool
    read: tuple[Node, ...] = ()
    leading: int = 0


class GroupedMethod(Enum):
    """How rows of all experts are multiplied by the matrices of their experts."""

    LIBRARY = "grouped matmuls of the library; matrices of each expert's own are stacked in each call"
    FROZEN = "grouped matmuls of the library, with stacks of frozen matrices that are kept"
    EACH = "a matmul for each expert, whose number of rows the host waits for"


@dataclass(frozen=True)
class GroupedLoop:
    """A loop that grouped matmuls can compute: its operands that differ between experts, and how it ends.

    `terminals` are those of the result's last call, and of gradients that are rows, of the first body.
    """

    loop: ExpertLoop
    stacked: Mapping[Node, StackedOperand]
    terminals: Mapping[Node, Terminal]
    method: GroupedMethod


class GroupedRows:
    """Writes the calls of a body once for the rows of all experts.

    Those of the forward are before the result of the loop, those of each gradient before the sum over the experts.
    """

    def __init__(self, copy: GraphCopy, grouped: GroupedLoop, fakes: NodeValues) -> None:
        self._copy, self._grouped, self._fakes = copy, grouped, fakes
        self._loop, self._body = grouped.loop, grouped.loop.bodies[0]
        self._root = self._loop.result
        self._indices = copy.node_map[self._loop.indices]
        self._sizes = list(copy.fakes[self._indices].shape)
        self._count = len(self._loop.bodies)
        self._is_in_range = are_in_range(self._loop.indices, self._count, fakes)
        self._length = copy.fakes[self._indices].numel()
        self._values: dict[Node, Node] = {}
        self._stacks: dict[Node, Node] = {}
        self._host_ends: Node | None = None
        self._positions: Node | None = None
        self._sort()

    def result(self) -> Node:
        """Returns the result of the loop."""
        terminal = self._grouped.terminals[self._loop.last_call]
        if not terminal.adds:
            return self._written(self._in_order(self._rows(terminal), terminal), terminal)
        rows = self._sum(terminal)
        if not is_zero(self._loop.base):
            rows = self._call(_aten.add.Tensor, self._copy.node_map[self._loop.base], rows)
        dtype = self._fakes[self._loop.result].dtype
        return rows if self._copy.fakes[rows].dtype == dtype else self._call(_aten._to_copy.default, rows, dtype=dtype)

    def gradient(self, total: GradientSum) -> Node:
        """Returns a sum of gradients of all experts, and of other tensors."""
        self._root = total.root
        summands = [self._copy.node_map[node] for node in total.others]
        summands += [self._gradient(gradient, total.root) for gradient in total.gradients]
        result = summands[0]
        for summand in summands[1:]:
            result = self._call(_aten.add.Tensor, result, summand)
        fake = self._fakes[total.root]
        if self._copy.fakes[result].dtype != fake.dtype:
            result = self._call(_aten._to_copy.default, result, dtype=fake.dtype)
        if not same_strides(self._copy.fakes[result], fake):
            result = self._call(_aten.clone.default, result, memory_format=torch.contiguous_format)
        return result

    def results(self, result: ExpertResult, root: Node) -> list[Node]:
        """Returns a result of each expert, before the call `root`."""
        self._root = root
        stack = self._value(result.nodes[0])
        slices = [self._call(_aten.select.int, stack, 0, number) for number in range(self._count)]
        fakes = [(self._copy.fakes[item], self._fakes[node]) for item, node in zip(slices, result.nodes, strict=True)]
        if all(same_strides(*pair) for pair in fakes):
            return slices
        return [self._call(_aten.clone.default, item, memory_format=torch.contiguous_format) for item in slices]

    def _gradient(self, gradient: ExpertGradient, root: Node) -> Node:
        """Returns the gradients of all experts: added to each other, or those of slices in one tensor."""
        node = gradient.nodes[0]
        if node in self._grouped.terminals:
            result = self._sum(self._grouped.terminals[node])
        elif node in self._body.gradients:
            rows, _, dim, _ = node.args
            result = self._along(self._value(rows), dim)  # type: ignore[arg-type]
        else:
            result = self._along(self._value(node), root.args[1] if len(root.args) > 1 else 0)  # type: ignore[arg-type]
        for view in gradient.views:
            arguments = [self._operand(item, 0) for item in view.args[1:]]
            result = self._call(view.target, result, *arguments, origin=view, **view.kwargs)
        return result

    def _along(self, stack: Node, dim: int) -> Node:
        """Returns a tensor whose dimension of experts is `dim`, of one where it is the first."""
        rank = self._copy.fakes[stack].ndim
        order = list(range(1, rank))
        order.insert(dim % rank, 0)
        return stack if dim % rank == 0 else self._call(_aten.permute.default, stack, order)

    def _rows(self, terminal: Terminal) -> Node:
        """Returns rows in the order of the indices, whose dimensions come first."""
        rows = self._value(terminal.rows)
        for _ in range(terminal.leading):
            rows = self._call(_aten.select.int, rows, 0, 0)
        rows = self._call(_aten.index.Tensor, rows, [self._inverse()])
        return self._view(rows, [*self._sizes, *self._copy.fakes[rows].shape[1:]])

    def _sum(self, terminal: Terminal) -> Node:
        """Returns the sums of the rows at each element that experts add to."""
        rows = self._rows(terminal)
        if not self._is_in_range:
            inner = self._copy.fakes[rows].ndim - len(self._sizes)
            outside = self._view(self._outside, [*self._sizes, *[1] * inner])
            rows = self._call(_aten.masked_fill.Scalar, rows, outside, 0)
        others = [axis for axis in range(len(self._sizes)) if axis not in terminal.axes]
        if others:
            rows = self._call(_aten.sum.dim_IntList, rows, others)
        rows = self._in_order(rows, terminal)
        for _ in range(terminal.leading):
            rows = self._call(_aten.unsqueeze.default, rows, 0)
        return rows

    def _sort(self) -> None:
        """Sorts the indices: rows of the first expert are first, and rows of none last."""
        flat = self._indices
        if not is_contiguous(self._copy.fakes[flat]):
            flat = self._call(_aten.clone.default, flat, memory_format=torch.contiguous_format)
        flat = self._call(_aten.view.default, flat, [-1])
        if not isinstance(self._length, int):
            self._call(_aten.sym_size.int, flat, 0)  # the node of the number of rows, which later calls read
        if not self._is_in_range:
            below, above = self._call(_aten.lt.Scalar, flat, 0), self._call(_aten.ge.Scalar, flat, self._count)
            self._outside = self._call(_aten.logical_or.default, below, above)
            flat = self._call(_aten.masked_fill.Scalar, flat, self._outside, self._count)
        dtype = self._copy.fakes[flat].dtype
        keys = self._call(_aten._to_copy.default, flat, dtype=narrowest_key(self._count, dtype))
        ordered = self._call(_aten.sort.stable, keys, stable=True)
        self._experts, self._order = [self._call(operator.getitem, ordered, part) for part in (0, 1)]
        self._experts = self._call(_aten._to_copy.default, self._experts, dtype=dtype)
        numbers = self._arange(self._count, dtype)
        columns = self._call(_aten.unsqueeze.default, numbers, 1)
        before = self._call(_aten.le.Tensor, self._call(_aten.unsqueeze.default, flat, 0), columns)
        self._ends = self._call(_aten.sum.dim_IntList, before, [1], dtype=torch.int32)

    def _inverse(self) -> Node:
        """Returns the position of each index among the sorted ones."""
        if self._positions is None:
            numbers = self._arange(self._length, torch.int64)
            empty = self._call(_aten.empty_like.default, self._order)
            self._positions = self._call(_aten.index_put.default, empty, [self._order], numbers)
        return self._positions

    def _in_order(self, rows: Node, terminal: Terminal) -> Node:
        """Returns rows whose dimensions are those of the result."""
        axes = terminal.axes
        ascending = sorted(axes)
        if list(axes) == ascending:
            return rows
        rank = self._copy.fakes[rows].ndim
        order = [*[ascending.index(axis) for axis in axes], *range(len(axes), rank)]
        rows = self._call(_aten.permute.default, rows, order)
        return self._call(_aten.clone.default, rows, memory_format=torch.contiguous_format)

    def _written(self, rows: Node, terminal: Terminal) -> Node:
        """Returns the tensor before the loop with rows of experts written into it."""
        if self._is_in_range:
            return rows
        outside = self._in_order(self._view(self._outside, list(self._sizes)), terminal)
        shape = list(self._copy.fakes[outside].shape)
        mask = self._view(outside, shape + [1] * (self._copy.fakes[rows].ndim - len(shape)))
        return self._call(_aten.where.self, mask, self._copy.node_map[self._loop.base], rows)

    def _value(self, node: Node) -> Node:
        """Returns the result of a call of the body for all experts, computed where it is first read."""
        missing, needed = [node], set()
        while missing:
            item = missing.pop()
            if item not in needed and item not in self._values:
                needed.add(item)
                missing += [operand for operand in item.all_input_nodes if operand in self._body.nodes]
        for item in self._body.nodes:
            if item in needed:
                self._compute(item)
        return self._values[node]

    def _compute(self, node: Node) -> None:
        """Computes the result of one call of the body for all experts."""
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
        elif sums_rows(node, self._body, self._fakes):
            self._values[node] = self._sum_of_rows(node)
        elif not depends_on_rows(self._fakes[node], self._body):
            self._values[node] = self._of_each_expert(node)
        else:
            self._values[node] = self._row_wise(node)

    def _matmul(self, node: Node) -> Node:
        """Returns rows multiplied by the matrix of their expert."""
        *bias, left, right = node.args
        assert isinstance(left, Node) and isinstance(right, Node)
        method, rows = self._grouped.method, self._values[left]
        biases: list[Node] = []
        if method is GroupedMethod.EACH:
            biases = [self._stack(item) for item in bias if isinstance(item, Node) and item in self._grouped.stacked]
            arguments = [*self._matrices(right), biases[0] if biases else None, self._ends_on_host()]
            product = self._call(torch.ops.fxwrap.grouped_matmul.default, rows, *arguments, origin=node)
        elif method is GroupedMethod.FROZEN and self._grouped.stacked[right].is_separate:
            arguments = [*self._matrices(right), self._ends]
            product = self._call(torch.ops.fxwrap.frozen_grouped_mm.default, rows, *arguments, origin=node)
        else:
            product = self._call(_aten._grouped_mm.default, rows, self._stack(right), self._ends, origin=node)
        for item in bias if not biases else ():
            product = self._call(_aten.add.Tensor, product, self._operand(item, 2), origin=node)
        return product

    def _matrices(self, node: Node) -> tuple[list[Node], bool]:
        """Returns the matrices of the experts, or one stack of them, and whether they are transposed."""
        operand = self._grouped.stacked[node]
        if not operand.is_separate:
            return [self._stack(node)], False
        transposed = operand.is_transposed(self._fakes)
        nodes = operand.sources if transposed else self._loop.externals[node]
        return [self._copy.node_map[item] for item in nodes], transposed

    def _ends_on_host(self) -> Node:
        """Returns the ends of the groups in memory of the host, which waits for them once."""
        if self._host_ends is None:
            self._host_ends = self._call(torch.ops.fxwrap.to_host.default, self._ends)
        return self._host_ends

    def _sum_of_rows(self, node: Node) -> Node:
        """Returns the sums over the rows of each expert: a grouped matmul along the rows, of ones where rows are added.

        Ones are columns of aligned rows, of which one is read.
        """
        operands = [self._values[item] for item in node.args if isinstance(item, Node)]
        target, ends = _aten._grouped_mm.default, self._ends
        if self._grouped.method is GroupedMethod.EACH:
            target, ends = torch.ops.fxwrap.grouped_products.default, self._ends_on_host()
        if name_of(node) == "mm":
            return self._call(target, *operands, ends, origin=node)
        (rows,) = operands
        fake = self._copy.fakes[rows]
        count = self._copy.size_arguments(self._before, [self._length])
        columns = MATRIX_ALIGNMENT // fake.dtype.itemsize
        ones = self._call(_aten.full.default, [*count, columns], 1, dtype=fake.dtype, device=fake.device, origin=node)
        ones = self._call(_aten.t.default, ones, origin=node)
        sums = self._call(target, ones, rows, ends, origin=node)
        keeps = len(node.args) > 2 and node.args[2]
        if keeps:
            return self._call(_aten.slice.Tensor, sums, 1, 0, 1, origin=node)
        return self._call(_aten.select.int, sums, 1, 0, origin=node)

    def _of_each_expert(self, node: Node) -> Node:
        """Returns the results of a call on tensors of each expert that have no rows, along dimension 0."""
        shifted = call_on_all_experts(node, self._count, self._fakes)
        if shifted is None:
            return self._row_wise(node)
        target, arguments = shifted
        (source,) = node.all_input_nodes
        return self._call(target, self._values[source], *arguments, origin=node, **node.kwargs)

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
                return self._copy.size_arguments(self._before, [self._length])[0]
            case Node() if item in self._grouped.stacked:
                return self._of_each_row(item, rank)
            case Node():
                return self._copy.node_map[item]
            case tuple() | list():
                return [self._operand(part, rank) for part in item]
            case torch.SymInt() if expression_of(item) in self._body.rows:
                return self._copy.size_arguments(self._before, [self._length])[0]
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
            sources = [self._copy.node_map[item] for item in operand.sources]
            stack = self._call(_aten.stack.default, sources) if operand.is_separate else sources[0]
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

    @property
    def _before(self) -> Node:
        return self._copy.node_map[self._root]

    def _arange(self, count: int | torch.SymInt, dtype: torch.dtype) -> Node:
        device = self._copy.fakes[self._indices].device
        (end,) = self._copy.size_arguments(self._before, [count])
        return self._call(_aten.arange.default, end, dtype=dtype, device=device)

    def _view(self, tensor: Node, sizes: Sequence[int | torch.SymInt]) -> Node:
        return self._call(_aten.view.default, tensor, self._copy.size_arguments(self._before, sizes))

    def _call(self, target: Target, *arguments: Any, origin: Node | None = None, **keywords: Any) -> Node:
        """Inserts a call before the result of the loop, with the metadata of the body's call `origin`."""
        source = self._root if origin is None else origin
        return self._copy.call(
            self._before, target, arguments, f"{source.name}_rows", keywords, origin=self._copy.node_map[source]
        )
