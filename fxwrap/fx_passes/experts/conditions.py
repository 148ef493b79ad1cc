"""Conditions that select the tokens of one expert: elements of a tensor of indices that are equal to a number."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from fxwrap.fx_passes.attention.nodes import is_tensor, keeps_order, permutation, sizes_of
from fxwrap.fx_passes.effects import name_of
from fxwrap.fx_passes.graph_copy import expressions_of
from fxwrap.fx_passes.prepared_graph import NodeValues

_SAME_ELEMENTS = frozenset({"alias", "clone", "contiguous", "detach", "to_copy", "lift_fresh_copy"})
_CLASS = "class"
_WIDE = (torch.int32, torch.int64)
"""Dtypes of indices that have a number beyond those of all experts."""


@dataclass(frozen=True)
class ExpertCondition:
    """Whether elements of `indices` are `number`: dimension d of the condition is dimension `axes[d]` of `indices`."""

    indices: Node
    axes: tuple[int, ...]
    number: int


@dataclass(frozen=True)
class _Comparison:
    """Indices compared with numbers from `first` on.

    `axes` has for each dimension that of the indices, "class" for the one along which numbers vary, or None for one of
    size 1 that the indices lack.
    """

    indices: Node
    axes: tuple[int | str | None, ...]
    first: int


def expert_condition(node: Node, fakes: NodeValues) -> ExpertCondition | None:
    """Returns the condition that a node computes; None for other nodes.

    Recognises comparisons with a number, and slices of one-hot encodings, also transposed.
    """
    comparison = _comparison(node, fakes)
    if comparison is None:
        return None
    axes = [axis for axis in comparison.axes if isinstance(axis, int)]
    if len(axes) < len(comparison.axes):
        return None
    return ExpertCondition(comparison.indices, tuple(axes), comparison.first)


def encoded_indices(node: Node, fakes: NodeValues) -> Node | None:
    """Returns the indices whose one-hot encoding a node is, with all classes along the last dimension."""
    comparison = _comparison(node, fakes)
    if comparison is None or comparison.first:
        return None
    rank = len(comparison.axes) - 1
    return comparison.indices if comparison.axes == (*range(rank), _CLASS) else None


def is_truth_of(node: Node) -> Node | None:
    """Returns the tensor whose truth value a node has in another dtype or in other memory; None for other nodes."""
    match name_of(node), node.args:
        case (("ne" | "gt"), (Node() as source, 0)):
            return source
        case name, (Node() as source, *_) if name in _SAME_ELEMENTS:
            return source
        case _:
            return None


def _comparison(node: object, fakes: NodeValues) -> _Comparison | None:
    if not isinstance(node, Node) or node.op != "call_function" or not is_tensor(node, fakes):
        return None
    match name_of(node), node.args:
        case "eq", (Node() as indices, int() as number) if type(number) is int:
            return _of_indices(indices, fakes, (), number)
        case "eq", (Node() as one, Node() as other):
            return _with_numbers(one, other, fakes) or _with_numbers(other, one, fakes)
        case "one_hot", (Node() as indices, int()):
            return _of_indices(indices, fakes, (_CLASS,), 0)
        case (("ne" | "gt"), (source, 0)):
            return _comparison(source, fakes)
        case name, (source, *_) if name in _SAME_ELEMENTS:
            return _comparison(source, fakes)
        case _:
            return _view(node, fakes)


def _of_indices(indices: Node, fakes: NodeValues, more: tuple[str, ...], first: int) -> _Comparison | None:
    if not is_tensor(indices, fakes) or fakes[indices].dtype not in _WIDE:
        return None
    return _Comparison(indices, (*range(fakes[indices].ndim), *more), first)


def _with_numbers(left: Node, numbers: Node, fakes: NodeValues) -> _Comparison | None:
    """Returns the comparison of `indices.unsqueeze(-1)` with `arange`."""
    match name_of(left), left.args:
        case "unsqueeze", (Node() as indices, int() as dim) if dim in (-1, fakes[left].ndim - 1):
            pass
        case _:
            return None
    match name_of(numbers), numbers.args:
        case "arange", (int(),):
            return _of_indices(indices, fakes, (_CLASS,), 0)
        case "arange", (int() as start, int()):
            return _of_indices(indices, fakes, (_CLASS,), start)
        case _:
            return None


def _view(node: Node, fakes: NodeValues) -> _Comparison | None:
    """Returns the comparison of which a node is a view."""
    arguments: Sequence[Any] = node.args
    source = _comparison(arguments[0] if arguments else None, fakes)
    if source is None:
        return None
    axes, rank = list(source.axes), len(source.axes)
    order = permutation(node, fakes)
    if order is not None:
        return replace(source, axes=tuple([axes[dim] for dim in order]))
    match name_of(node):
        case "select" if type(arguments[2]) is int:
            axis = axes.pop(arguments[1] % rank)
            if axis == _CLASS:
                return replace(source, axes=tuple(axes), first=source.first + arguments[2])
            return replace(source, axes=tuple(axes)) if axis is None else None
        case "unsqueeze":
            axes.insert(arguments[1] % (rank + 1), None)
        case "squeeze":
            axes = _squeezed(node, axes, fakes)
        case "view" | "unsafe_view" | "reshape" if sizes_of(node, fakes) == sizes_of(arguments[0], fakes):
            pass
        case _:
            return None
    return replace(source, axes=tuple(axes)) if len(axes) == fakes[node].ndim else None


def _squeezed(node: Node, axes: list[Any], fakes: NodeValues) -> list[Any]:
    """Returns the axes without those of size 1 that a call of `squeeze` removes."""
    arguments: Sequence[Any] = node.args
    sizes, dims = sizes_of(arguments[0], fakes), arguments[1] if len(arguments) > 1 else [*range(len(axes))]
    chosen = {dim % len(axes) for dim in ([dims] if isinstance(dims, int) else dims)}
    return [axis for dim, axis in enumerate(axes) if dim not in chosen or sizes[dim] != 1]


def _selection(indices: Node, fakes: NodeValues) -> Node:
    """Returns the call that selected indices, which are perhaps in other shapes."""
    node = indices
    while keeps_order(node, fakes) or (name_of(node) == "to_copy" and fakes[node].dtype in _WIDE):
        node = node.args[0]  # type: ignore[assignment]
    return node


def selected_experts(indices: Node, fakes: NodeValues) -> tuple[Node, int] | None:
    """Returns the call of `topk` whose indices these are, perhaps in other shapes, and its dimension."""
    node = _selection(indices, fakes)
    match node.target, node.args:
        case operator.getitem, (Node() as source, 1) if name_of(source) == "topk":
            scores: Any = source.args[0]
            dim: Any = source.args[2] if len(source.args) > 2 else source.kwargs.get("dim", -1)
            return source, dim % max(fakes[scores].ndim, 1)
        case _:
            return None


def are_in_range(indices: Node, count: int, fakes: NodeValues) -> bool:
    """Whether indices are known to be at least 0 and less than `count`: `topk` or `argmax` chose among so many."""
    selected = selected_experts(indices, fakes)
    call = _selection(indices, fakes)
    if selected is None and name_of(call) == "argmax" and len(call.args) > 1 and type(call.args[1]) is int:
        selected = call, call.args[1]
    if selected is None:
        return False
    scores: Any = selected[0].args[0]
    return bool(sizes_of(scores, fakes)[selected[1]] == count)


def are_distinct(indices: Node, axes: Sequence[int], fakes: NodeValues) -> bool:
    """Whether indices that differ in the dimension `axes` alone are known to differ: those of one call of `topk`."""
    if all(sizes_of(indices, fakes)[axis] == 1 for axis in axes):
        return True
    selected = selected_experts(indices, fakes)
    if selected is None or len(axes) != 1:
        return False
    topk, dim = selected
    return list(axes) == [dim] and expressions_of(fakes[topk][1].shape) == sizes_of(indices, fakes)
