"""The check of an expert's body: each call computes rows from the rows of the same token and expert.

In training, some calls sum over the rows of an expert. Their results, the gradients of its weights, have no rows.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fxwrap.fx_passes.attention.nodes import permutation
from fxwrap.fx_passes.effects import name_of
from fxwrap.fx_passes.experts.bodies import ExpertBody, depends_on_rows, row_dimension
from fxwrap.fx_passes.graph_copy import expression_of, expressions_of, same_layout
from fxwrap.fx_passes.prepared_graph import NodeValues, Target
from fxwrap.symbolic import product
from fxwrap.torch_compat import OpOverload

_aten = torch.ops.aten

_VIEWS = frozenset({
    "alias", "clone", "detach", "expand", "permute", "select", "slice", "split", "split_with_sizes", "squeeze", "t",
    "to_copy", "transpose", "unbind", "unsqueeze",
})  # fmt: skip
"""Operators that neither move an element to another row nor, if the row's dimension is there after, lose one."""
_COPIES = frozenset({"to_copy"})
"""Views of slices that compute new tensors: a stack of their results is written by the same kernels."""
_RESHAPES = frozenset({"view", "unsafe_view", "reshape"})
_REDUCTIONS = frozenset({"amax", "amin", "log_softmax", "mean", "softmax", "sum"})
"""Operators that compute along the dimensions of their second argument."""
_GRADIENTS_OF_VIEWS = frozenset({"select_backward", "slice_backward"})
MATMULS = frozenset({"mm", "addmm"})


@dataclass(frozen=True)
class StackedOperand:
    """One operand for each expert: slices of a tensor, or tensors of their own, of one shape and layout.

    Fields:
        sources: the tensor that has all slices, or the tensor of each expert.
        dim: the dimension of experts of a tensor that has all slices; 0 for the stack of tensors.
        views: the views of each slice or tensor: the calls of the first expert.
    """

    sources: tuple[Node, ...]
    dim: int
    views: tuple[Node, ...] = ()

    @property
    def is_separate(self) -> bool:
        """Whether each expert has a tensor of its own."""
        return len(self.sources) > 1

    def is_transposed(self, fakes: NodeValues) -> bool:
        """Whether the operands are the transposed matrices of `sources`."""
        return [permutation(view, fakes) for view in self.views] == [[1, 0]]


def stacked_operand(nodes: Sequence[Node], fakes: NodeValues) -> StackedOperand | None:
    """Returns the operands of all experts, in order, as slices of one tensor, or else as tensors of one layout."""
    slices = _slices(nodes, fakes)
    if slices is not None:
        return slices
    first = nodes[0]
    if _are_alike(nodes) and name_of(first) not in _COPIES and _shifted(first, fakes) is not None:
        inner = stacked_operand([item for node in nodes for item in node.all_input_nodes], fakes)
        return None if inner is None else StackedOperand(inner.sources, inner.dim, (*inner.views, first))
    tensors = [fakes.get(node) for node in nodes]
    if not all(isinstance(fake, torch.Tensor) and _is_like(fake, tensors[0]) for fake in tensors):
        return None
    return StackedOperand(tuple(nodes), 0)


def _is_like(fake: torch.Tensor, other: Any) -> bool:
    """Whether two tensors have one dtype, device and layout, of static sizes."""
    is_static = all(type(size) is int for size in fake.shape)
    return is_static and (fake.dtype, fake.device) == (other.dtype, other.device) and same_layout(fake, other)


def _are_alike(nodes: Sequence[Node]) -> bool:
    """Whether nodes are calls of one operator with one tensor each, and equal further arguments."""
    first = nodes[0]
    return all(
        node.target == first.target and node.kwargs == first.kwargs and node.args[1:] == first.args[1:]
        and len(node.all_input_nodes) == 1 and node.args[0] is node.all_input_nodes[0] for node in nodes
    )  # fmt: skip


def _slices(nodes: Sequence[Node], fakes: NodeValues) -> StackedOperand | None:
    """Returns operands that are slices of one tensor, in order, or equal views of such slices."""
    first = nodes[0]
    arguments: Sequence[Sequence[Any]] = [node.args for node in nodes]
    if any(node.target != first.target or node.kwargs != first.kwargs for node in nodes) or not arguments[0]:
        return None
    sources = [item[0] for item in arguments]
    same_source = isinstance(sources[0], Node) and all(source is sources[0] for source in sources)
    if same_source and [item[-1] for item in arguments] == list(range(len(nodes))):
        source, dim = sources[0], None
        if name_of(first) == "select":
            dim = arguments[0][1]
        if first.target is operator.getitem and name_of(source) == "unbind":
            dim = source.args[1] if len(source.args) > 1 else 0
            source = source.args[0]
        if dim is not None:
            count = fakes[source].shape[dim]
            return StackedOperand((source,), dim % fakes[source].ndim) if expression_of(count) == len(nodes) else None
    if not _are_alike(nodes):
        return None
    inner = _slices(sources, fakes)
    if inner is None or _shifted(first, fakes) is None:
        return None
    return StackedOperand(inner.sources, inner.dim, (*inner.views, first))


def _shifted(view: Node, fakes: NodeValues) -> tuple[Target, tuple[Any, ...]] | None:
    """Returns the target and arguments, but the operand, of a view of each slice as one view of the stacked tensor."""
    arguments: Any = view.args
    if view.target is operator.getitem:
        return (view.target, arguments[1:]) if name_of(arguments[0]) in ("split", "split_with_sizes") else None
    source = fakes.get(arguments[0])
    if not isinstance(source, torch.Tensor) or not isinstance(view.target, OpOverload):
        return None
    order = permutation(view, fakes)
    if order is not None:
        return _aten.permute.default, ([0, *[dim + 1 for dim in order]],)
    rank = source.ndim
    match name_of(view), arguments[1:]:
        case (("alias" | "detach" | "to_copy"), ()):
            return view.target, ()
        case "unsqueeze", (dim,):
            return view.target, (dim % (rank + 1) + 1,)
        case (("slice" | "select"), (int() as dim, *rest)):
            return view.target, (dim % rank + 1, *rest)
        case (("split" | "split_with_sizes"), (sizes, *rest)):
            return view.target, (sizes, (rest[0] if rest else 0) % rank + 1)
        case _:
            return None


def call_on_all_experts(node: Node, count: int, fakes: NodeValues) -> tuple[Target, tuple[Any, ...]] | None:
    """Returns the target and further arguments of the call on the results of all experts, along dimension 0.

    `node` is a call on a tensor of one expert that has no rows.
    """
    shifted = _shifted(node, fakes)
    source: Any = node.args[0]
    if shifted is not None:
        return shifted
    arguments: Any = node.args[1:]
    match name_of(node), arguments:
        case name, ([*sizes],) if name in _RESHAPES and all(type(size) is int for size in sizes):
            return node.target, ([count, *sizes],)
        case name, ([*sizes], int() as dim, *rest) if name in _GRADIENTS_OF_VIEWS and _are_ints((*sizes, *rest)):
            rank = fakes[source].ndim + (name == "select_backward")
            return node.target, ([count, *sizes], dim % rank + 1, *rest)
        case "squeeze", (int() as dim,):
            return node.target, (dim % max(fakes[source].ndim, 1) + 1,)
        case _:
            return None


def _are_ints(numbers: Sequence[object]) -> bool:
    return all(type(number) is int for number in numbers)


def stacked_views(operand: StackedOperand, fakes: NodeValues) -> Iterator[tuple[Target, tuple[Any, ...], Node | None]]:
    """Yields the calls that view the slices of all experts: target, arguments after the operand, and their origin.

    The result has the experts along dimension 0.
    """
    if operand.dim:
        rank = fakes[operand.sources[0]].ndim
        rest = [dim for dim in range(rank) if dim != operand.dim]
        yield _aten.permute.default, ([operand.dim, *rest],), None
    for view in operand.views:
        shifted = _shifted(view, fakes)
        assert shifted is not None
        yield *shifted, view


class RowCheck:
    """Checks that the calls of a body compute each row from that row."""

    def __init__(self, body: ExpertBody, stacked: Collection[Node], fakes: NodeValues) -> None:
        self._body = body
        self._stacked = stacked
        self._fakes = fakes

    def holds(self, excluded: Collection[Node]) -> bool:
        """Whether all calls of the body, but the excluded ones, are known to compute rows from rows."""
        return all(self._is_row_wise(node) for node in self._body.nodes if node not in excluded)

    def row(self, node: object) -> int | None:
        """Returns the dimension of a tensor's rows; None for tensors without one."""
        return row_dimension(node, self._body, self._fakes) if isinstance(node, Node) else None

    def _is_row_wise(self, node: Node) -> bool:
        name, arguments = name_of(node), node.args
        if is_selection(node, self._body, self._fakes) or coordinate(node) is not None:
            return True
        if not self._has_rows(node):
            return self._is_of_expert(node)
        rows = [self.row(part) for part in self._parts(node)]
        if None in rows or any(row != rows[0] for row in rows):
            return False
        if name == "cat" or name in _GRADIENTS_OF_VIEWS:
            return self._joins_within(node, rows[0])
        source = arguments[0]
        if not isinstance(source, Node):
            return False
        if node.target is operator.getitem:
            return source in self._body.nodes
        if not isinstance(node.target, OpOverload):
            return False
        if name in MATMULS:
            return self._is_matmul(node)
        if name in ("index", "index_select", "gather"):
            return self._is_gather(node)
        if torch.Tag.pointwise in node.target.tags:
            return self._is_pointwise(node, rows[0])
        if not all(self._is_inner(item) for item in node.all_input_nodes):
            return False
        if name in _RESHAPES:
            return self._keeps_rows(source, node)
        return name in _VIEWS or (name in _REDUCTIONS and self._reduces_within(node))

    def _parts(self, node: Node) -> list[Any]:
        """Returns the tensors of a result: a call of several results has users that select them."""
        if isinstance(self._fakes[node], torch.Tensor):
            return [node]
        return [user for user in node.users if user.target is operator.getitem]

    def _has_rows(self, node: Node) -> bool:
        """Whether a size of a result depends on the number of rows."""
        return any(depends_on_rows(self._fakes[part], self._body) for part in self._parts(node))

    def _is_of_expert(self, node: Node) -> bool:
        """Whether a call without rows sums over an expert's rows, or computes from such sums of the same expert."""
        name, inputs = name_of(node), node.all_input_nodes
        if is_base_of_gradient(node, self._body) or sums_rows(node, self._body, self._fakes):
            return True
        fakes = [self._fakes[item] for item in inputs]
        if not inputs or not all(item in self._body.nodes and self._is_of_expert(item) for item in inputs):
            return False
        if not isinstance(node.target, OpOverload) or not isinstance(self._fakes[node], torch.Tensor):
            return False
        if name != "to_copy" and torch.Tag.pointwise in node.target.tags:
            return all(fake.ndim == self._fakes[node].ndim for fake in fakes)
        return len(inputs) == 1 and call_on_all_experts(node, 1, self._fakes) is not None

    def _joins_within(self, node: Node, row: int | None) -> bool:
        """Whether a call concatenates within rows, or returns the gradient of a slice of rows."""
        dims: Sequence[Any] = [*node.args[1:], 0] if name_of(node) == "cat" else node.args[2:]
        inputs = [self.row(item) for item in node.all_input_nodes if item not in self._body.guards]
        if row is None or type(dims[0]) is not int or dims[0] % self._fakes[node].ndim == row:
            return False
        is_moved = name_of(node) == "select_backward" and dims[0] % self._fakes[node].ndim < row
        return all(item == row - is_moved for item in inputs)

    def _is_inner(self, node: Node) -> bool:
        return node in self._body.nodes or node in self._body.guards

    def _is_matmul(self, node: Node) -> bool:
        """Whether a call multiplies rows by a matrix, and adds a vector that is the same for all rows of an expert."""
        *bias, left, right = node.args
        is_inner = [self._is_inner(item) for item in (*bias, left, right)]  # type: ignore[arg-type]
        if node.kwargs or len(bias) > 1 or is_inner != [False] * len(bias) + [True, False] or self.row(left) != 0:
            return False
        return all(self._fakes[item].ndim == 1 for item in bias)  # type: ignore[index]

    def _is_gather(self, node: Node) -> bool:
        """Whether a call indexes a tensor from outside by consecutive vectors that have an element for each row.

        Or by an index of the rows' elements, in one dimension.
        """
        source, indices = node.args[0], node.args[1]
        assert isinstance(source, Node)
        if self._is_inner(source) or source in self._stacked or self._body.reads_result(node, source):
            return False
        if name_of(node) != "index":
            index: Any = node.args[2]
            is_row = self.row(index) == 0 if name_of(node) == "gather" else self._is_vector(index)
            return type(indices) is int and indices == 0 and index in self._body.nodes and is_row
        assert isinstance(indices, list | tuple)
        first = next((dim for dim, item in enumerate(indices) if item is not None), 0)
        vectors = indices[first:]
        return all(isinstance(item, Node) and self._is_vector(item) for item in vectors)

    def _is_vector(self, node: Node) -> bool:
        return node in self._body.nodes and self._fakes[node].ndim == 1 and self.row(node) == 0

    def _is_pointwise(self, node: Node, row: int | None) -> bool:
        """Whether operands have their rows where the result has them, or none."""
        target: Any = node.target
        rank = self._fakes[node].ndim
        numbers = [item for item in (*node.args, *node.kwargs.values()) if isinstance(item, torch.SymInt)]
        if row is None or numbers or torch.Tag.nondeterministic_seeded in target.tags:
            return False
        for item in node.all_input_nodes:
            fake = self._fakes[item]
            if not isinstance(fake, torch.Tensor):
                return False
            if item in self._body.nodes:
                if (self.row(item) or 0) + rank - fake.ndim != row or self.row(item) is None:
                    return False
            elif item in self._stacked:
                if row != 0 or fake.ndim >= rank:
                    return False
            elif rank - fake.ndim <= row and fake.shape[row - rank] != 1:
                return False
        return True

    def _keeps_rows(self, source: Node, node: Node) -> bool:
        """Whether a view has as many elements before each row as its operand."""
        before, after = self.row(source), self.row(node)
        if before is None or after is None:
            return False
        sizes = [expressions_of(self._fakes[item].shape) for item in (source, node)]
        return bool(product(sizes[0][:before]) == product(sizes[1][:after]))

    def _reduces_within(self, node: Node) -> bool:
        dims: Any = node.args[1] if len(node.args) > 1 else None
        source: Any = node.args[0]
        row, rank = self.row(source), self._fakes[source].ndim
        dims = [dims] if isinstance(dims, int) else dims
        return row is not None and bool(dims) and all(dim % rank != row for dim in dims)


def sums_rows(node: Node, body: ExpertBody, fakes: NodeValues) -> bool:
    """Whether a call sums over the rows of matrices: a product with a transposed matrix, or a sum of rows."""
    arguments: Any = node.args
    if node.kwargs or not all(item in body.nodes for item in node.all_input_nodes):
        return False
    match name_of(node), arguments:
        case "mm", (left, right):
            return row_dimension(left, body, fakes) == 1 and row_dimension(right, body, fakes) == 0
        case "sum", (rows, [0], *_):
            return len(fakes[rows].shape) == 2 and row_dimension(rows, body, fakes) == 0
        case _:
            return False


def is_base_of_gradient(node: Node, body: ExpertBody) -> bool:
    """Whether a call returns the zeros to which the rows of a gradient are added, and nothing else."""
    return is_zero(node) and all(user in body.gradients and user.args[0] is node for user in node.users)


def is_zero(node: Node) -> bool:
    """Whether a call returns zeros."""
    is_filled = name_of(node) == "full" and node.args[1] in (0, 0.0) and not isinstance(node.args[1], Node)
    return is_filled or name_of(node) in ("zeros", "zeros_like", "new_zeros")


def is_selection(node: Node, body: ExpertBody, fakes: NodeValues) -> bool:
    """Whether a call of a body selects rows by the expert's condition: `nonzero`, `unbind` of it, or an index."""
    match name_of(node), node.args:
        case "nonzero", _:
            return True
        case "unbind", (Node() as source, dim):
            return name_of(source) == "nonzero" and dim in (1, -1)
        case "index", (Node() as source, [Node() as mask]):
            return mask not in body.nodes and source not in body.nodes and fakes[mask].dtype is torch.bool
        case _:
            return False


def coordinate(node: Node) -> int | None:
    """Returns the dimension of the condition whose coordinates a call of a body has, if it is a column of `nonzero`."""
    match name_of(node), node.args:
        case "select", (Node() as source, (1 | -1), int() as column) if name_of(source) == "nonzero":
            return column
        case "getitem", (Node() as source, int() as column) if name_of(source) == "unbind":
            inner = source.args[0]
            return column if isinstance(inner, Node) and name_of(inner) == "nonzero" else None
        case _:
            return None
