"""Sums of values at indices along several dimensions, in the joint graph of training, one dimension after the other.

An interpolation weights the corners around a position. Its gradient is a sum over the corners: of the gradient times a
weight for each dimension, added at an index for each dimension. Such a sum is separable. First the values are added
along one dimension, which leaves fewer elements, then these along the next: an element has a few terms in each, instead
of their product.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.fx import GraphModule, Node

from fxwrap.fx_passes.experts.rows import is_zero
from fxwrap.fx_passes.prepared_graph import Target
from fxwrap.fx_passes.training.joint_backward import call_like, have_static_sizes, operators_of_options
from fxwrap.options import Options
from fxwrap.torch_compat import FakeTensor
from fxwrap.wrapper_ir import varying_dims

_aten = torch.ops.aten
_PUTS: frozenset[Target] = frozenset({_aten._unsafe_index_put.default, _aten.index_put.default})

Factor: TypeAlias = tuple[Node, bool]
"""A vector along one dimension that values are multiplied by, or 1 minus it."""

Corner: TypeAlias = tuple[Node, tuple[Factor, ...]]
"""The indices along a dimension, and the factors of the values along it."""


def separate_sums(joint: GraphModule, options: Options) -> GraphModule:
    """Adds values at indices along several dimensions one dimension after the other, in place; returns the graph."""
    excluded = operators_of_options(options)
    if not excluded.isdisjoint(map(str, _PUTS)):
        return joint
    for root in reversed(joint.graph.find_nodes(op="call_function", target=_aten.add.Tensor)):
        if root.users and not any(_is_sum(user) and len(root.users) == 1 for user in root.users):
            _separate(root)
    return joint


def _separate(root: Node) -> None:
    """Replaces those terms of a sum that are the corners of all dimensions."""
    terms = [*_terms(root)]
    puts = [item for item in map(_weighted_put, terms) if item is not None]
    groups: dict[tuple[Node, tuple[int, ...]], list[_WeightedPut]] = {}
    for put in puts:
        groups.setdefault((put.base, tuple(put.corners)), []).append(put)
    for group in groups.values():
        corners = {dim: [*dict.fromkeys(put.corners[dim] for put in group)] for dim in group[0].corners}
        count = 1
        for items in corners.values():
            count *= len(items)
        separate = {tuple(put.corners.values()) for put in group}
        if len(group) < 2 or not count == len(group) == len(separate):
            continue
        replaced = {put.node for put in group}
        with root.graph.inserting_before(root):
            total = _sum(group[0], corners)
            for term in terms:
                if term not in replaced:
                    total = call_like(root, _aten.add.Tensor, total, term)
        root.replace_all_uses_with(total)
        root.graph.erase_node(root)
        return


def _sum(put: _WeightedPut, corners: Mapping[int, Sequence[Corner]]) -> Node:
    """Adds the base of a put at the corners, the last dimension first."""
    like, total = put.node, put.base
    sizes: list[int] = list(total.meta["val"].shape)
    for dim in sorted(corners, reverse=True):
        sizes[dim] = like.meta["val"].shape[dim]
        partial: Node | None = None
        for index, factors in corners[dim]:
            values = total
            for factor, is_complement in factors:
                weight = call_like(like, _aten.rsub.Scalar, factor, 1) if is_complement else factor
                values = call_like(like, _aten.mul.Tensor, values, weight)
            flat = call_like(like, _aten.view.default, index, [-1])
            fake = values.meta["val"]
            zeros = call_like(like, _aten.full.default, [*sizes], 0, dtype=fake.dtype, device=fake.device)
            added = call_like(like, _aten._unsafe_index_put.default, zeros, [None] * dim + [flat], values, True)
            partial = added if partial is None else call_like(like, _aten.add.Tensor, partial, added)
        assert partial is not None
        total = partial
    return total


def _is_sum(node: Node) -> bool:
    return node.target is _aten.add.Tensor and not node.kwargs and all(isinstance(item, Node) for item in node.args)


def _terms(node: Node, is_root: bool = True) -> Iterator[Node]:
    """Yields the terms of a sum, and of its terms that have no other user."""
    if _is_sum(node) and (is_root or len(node.users) == 1):
        for item in node.all_input_nodes:
            yield from _terms(item, False)
    else:
        yield node


# --- weighted values -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _WeightedPut:
    """A call that adds `base`, times factors along some dimensions, to zeros at indices along these."""

    node: Node
    base: Node
    corners: dict[int, Corner]


def _weighted_put(node: Node) -> _WeightedPut | None:
    """Returns a call that adds values to zeros at a vector of indices for each of some adjacent dimensions."""
    arguments: Any = node.args
    if node.target not in _PUTS or len(arguments) < 4 or not arguments[3] or len(node.users) != 1:
        return None
    zeros, indices, values, _ = arguments
    dims = [dim for dim, item in enumerate(indices) if item is not None]
    if not have_static_sizes(node, zeros, values) or not is_zero(zeros):
        return None
    rank = node.meta["val"].dim()
    if values.meta["val"].dim() != rank or dims != [*range(dims[0], dims[0] + len(dims))]:
        return None
    sizes = values.meta["val"].shape
    for number, dim in enumerate(dims):
        index = indices[dim]
        if not have_static_sizes(index) or varying_dims(index.meta["val"].shape, len(dims)) != [number]:
            return None
        if index.meta["val"].numel() != sizes[dim]:
            return None
    base, factors = _factors(values)
    if any(dim not in dims for dim, _ in factors):
        return None
    own = {dim: tuple(sorted((item for at, item in factors if at == dim), key=str)) for dim in dims}
    return _WeightedPut(node, base, {dim: (indices[dim], own[dim]) for dim in dims})


def _factors(values: Node) -> tuple[Node, tuple[tuple[int, Factor], ...]]:
    """Returns a tensor, and the vectors along a dimension, or 1 minus them, that values are its product with."""
    arguments = [item for item in values.args if isinstance(item, Node)]
    if len(arguments) != 2 or values.kwargs or not have_static_sizes(values, *arguments):
        return values, ()
    left, right = arguments
    if values.target is _aten.mul.Tensor:
        for x, vector in ((left, right), (right, left)):
            dims = varying_dims(vector.meta["val"].shape, values.meta["val"].dim())
            if len(dims) == 1 and _has_type_of(x, values):
                base, factors = _factors(x)
                return base, (*factors, (dims[0], (vector, False)))
    subtrahend = _subtrahend(values, right)
    if subtrahend is not None and subtrahend.target is _aten.mul.Tensor:
        base, factors = _factors(left)
        inner, more = _factors(subtrahend)
        if inner is base and more[:-1] == factors and more and not more[-1][1][1] and _has_type_of(left, values):
            return base, (*factors, (more[-1][0], (more[-1][1][0], True)))
    return values, ()


def _subtrahend(values: Node, right: Node) -> Node | None:
    """Returns what a difference of two tensors, or a sum with a negative one, subtracts from the left one."""
    if values.target is _aten.sub.Tensor:
        return right
    is_negative = values.target is _aten.add.Tensor and right.target is _aten.neg.default
    return right.args[0] if is_negative else None  # type: ignore[return-value]


def _has_type_of(x: Node, values: Node) -> bool:
    """Whether two tensors have one shape and one dtype."""
    own: FakeTensor = x.meta["val"]
    other: FakeTensor = values.meta["val"]
    return own.shape == other.shape and own.dtype == other.dtype
