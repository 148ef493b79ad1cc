"""Operators that compute each part of a dimension from a part of their operands: how a split of a result propagates.

A part of a result of these operators needs the same part of some operands, the split ones, and all of the others: half
of the rows of a matmul is the matmul of half of the rows. The table follows a dimension of the result to dimensions of
the operands.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import Node

from fxwrap.torch_compat import OpOverload
from fxwrap.wrapper_ir.operators import operator_schema

SplitOperands: TypeAlias = Mapping[Node, int]
"""The operands of which a part is needed, with the dimension of the part."""

_aten = torch.ops.aten
_C10D = "_c10d_functional."

VIEWS = frozenset({_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default})
"""Operators with the sizes of the result as their second argument, which keep the order of elements."""

EXPAND = _aten.expand.default

MOVES = VIEWS | {
    EXPAND, _aten.alias.default, _aten.detach.default, _aten.permute.default, _aten.select.int, _aten.slice.Tensor,
    _aten.split.Tensor, _aten.split_with_sizes.default, _aten.squeeze.dim, _aten.squeeze.dims, _aten.t.default,
    _aten.transpose.int, _aten.unbind.int, _aten.unsqueeze.default, operator.getitem,
}  # fmt: skip
"""Operators without work: their results are views, or elements of a tuple."""

MATMULS = frozenset({_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default})

ATTENTION = frozenset({
    _aten._scaled_dot_product_flash_attention.default, _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default, _aten._scaled_dot_product_flash_attention_for_cpu.default,
})  # fmt: skip

_REDUCTIONS = frozenset({
    _aten.amax.default, _aten.amin.default, _aten.mean.dim, _aten.sum.dim_IntList, _aten.var.correction,
    _aten.var_mean.correction,
})  # fmt: skip
"""Reductions with the dimensions as their second argument, and perhaps a `keepdim`."""

_ALONG_A_DIMENSION = frozenset({_aten._softmax.default, _aten._log_softmax.default})


@dataclass(frozen=True)
class Unsplittable(Exception):
    """A part of a result does not follow from parts of the operands."""

    reason: str


def is_pointwise(node: Node) -> bool:
    """Whether each element of a call's result is computed from one element of each operand, without random numbers."""
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.pointwise not in target.tags:
        return target in (_aten.clone.default, _aten._to_copy.default)
    return operator_schema(target).is_pure


def tensor_of(node: object) -> Tensor | None:
    """Returns the fake tensor of a node; None for nodes with other values."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value if isinstance(value, Tensor) else None


def sizes_of(node: object) -> tuple[int, ...]:
    """Returns the sizes of a node's tensor. Raises Unsplittable for symbolic ones, and for other values."""
    tensor = tensor_of(node)
    if tensor is None:
        raise Unsplittable("an operand is no tensor")
    if any(type(size) is not int for size in tensor.shape):
        raise Unsplittable("sizes are symbolic")
    return tuple(tensor.shape)


def split_operands(node: Node, dimension: int, parts: int) -> SplitOperands:
    """Returns the operands of which a part of a call's result needs a part, with the dimension of each.

    Args:
        node: a call of an operator. If its result is a tuple, the dimension is that of all tensors in it.
        dimension: of the result, not negative.
        parts: the number of parts, equal ones along the dimension.

    Raises Unsplittable.
    """
    rule = _RULES.get(node.target)
    if rule is None and is_pointwise(node):
        rule = _pointwise
    if rule is None:
        raise Unsplittable(f"{node.target} is not known to compute parts of its result from parts of its operands")
    operands = rule(node, dimension, parts)
    for operand, position in operands.items():
        if isinstance(operand.meta.get("val"), Tensor) and sizes_of(operand)[position] % parts:
            raise Unsplittable(f"{sizes_of(operand)[position]} elements are no {parts} equal parts")
    return operands


def _same(node: Node, dimension: int, parts: int) -> SplitOperands:
    return {_operand(node): dimension}


def _operand(node: Node, position: int = 0) -> Node:
    operand = node.args[position] if position < len(node.args) else None
    if not isinstance(operand, Node):
        raise Unsplittable("an operand is no tensor")
    return operand


def _argument(node: Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)


def _pointwise(node: Node, dimension: int, parts: int) -> SplitOperands:
    sizes, result = sizes_of(node), dict[Node, int]()
    for operand in node.all_input_nodes:
        own = sizes_of(operand)
        position = dimension - (len(sizes) - len(own))
        if position >= 0 and own[position] == sizes[dimension]:
            result[operand] = position
    return result


def _view(node: Node, dimension: int, parts: int) -> SplitOperands:
    sizes, own = sizes_of(node), sizes_of(_operand(node))
    outer = prod(sizes[:dimension])
    for position in range(len(own)):
        if prod(own[:position]) == outer and own[position] > 1 and own[position] % parts == 0:
            return {_operand(node): position}
    raise Unsplittable("a view divides the rows of a part")


def _permute(node: Node, dimension: int, parts: int) -> SplitOperands:
    order: Any = node.args[1]
    return {_operand(node): order[dimension] % len(order)}


def _transpose(node: Node, dimension: int, parts: int) -> SplitOperands:
    rank = len(sizes_of(node))
    one, other = [int(item) % rank for item in (node.args[1:] or (0, rank - 1))]  # type: ignore[arg-type]
    return {_operand(node): {one: other, other: one}.get(dimension, dimension)}


def _unsqueeze(node: Node, dimension: int, parts: int) -> SplitOperands:
    added = int(node.args[1]) % len(sizes_of(node))  # type: ignore[arg-type]
    return {_operand(node): dimension - (dimension > added)}


def _squeeze(node: Node, dimension: int, parts: int) -> SplitOperands:
    dims: Any = node.args[1]
    sizes = sizes_of(_operand(node))
    removed = {item % len(sizes) for item in (dims if isinstance(dims, tuple | list) else [dims])}
    remaining = [item for item in range(len(sizes)) if item not in removed or sizes[item] != 1]
    return {_operand(node): remaining[dimension]}


def _expand(node: Node, dimension: int, parts: int) -> SplitOperands:
    sizes, own = sizes_of(node), sizes_of(_operand(node))
    position = dimension - (len(sizes) - len(own))
    if position < 0 or own[position] != sizes[dimension]:
        raise Unsplittable("the dimension is expanded")
    return {_operand(node): position}


def _along(default: int) -> Callable[[Node, int, int], SplitOperands]:
    """Returns the rule of views and softmaxes that work along a dimension, their second argument or `dim`."""

    def rule(node: Node, dimension: int, parts: int) -> SplitOperands:
        operand = _operand(node)
        worked = int(_argument(node, default, "dim", 0)) % len(sizes_of(operand))
        if node.target in (_aten.select.int, _aten.unbind.int):
            return {operand: dimension + (dimension >= worked)}
        if worked == dimension:
            raise Unsplittable(f"{node.target} works along the dimension")
        return {operand: dimension}

    return rule


def _cat(node: Node, dimension: int, parts: int) -> SplitOperands:
    operands: Any = node.args[0]
    if int(_argument(node, 1, "dim", 0)) % len(sizes_of(node)) == dimension:
        raise Unsplittable("aten.cat.default works along the dimension")
    if any(len(sizes_of(item)) != len(sizes_of(node)) for item in operands):
        raise Unsplittable("an operand has other dimensions")
    return dict.fromkeys(operands, dimension)


def _getitem(node: Node, dimension: int, parts: int) -> SplitOperands:
    return {_operand(node): dimension}


def _matmul(node: Node, dimension: int, parts: int) -> SplitOperands:
    """Rows of the left operand, columns of the right one, or matrices of a batch; a bias may be a row."""
    has_bias = node.target in (_aten.addmm.default, _aten.baddbmm.default)
    left, right = _operand(node, has_bias), _operand(node, has_bias + 1)
    rank = len(sizes_of(node))
    if left is right:
        raise Unsplittable("a matmul has one operand twice")
    if dimension == rank - 1:
        operands = {right: dimension}
    else:
        operands = {left: 0, right: 0} if dimension < rank - 2 else {left: dimension}
    if has_bias:
        bias, sizes = _operand(node), sizes_of(node)
        own = sizes_of(bias)
        position = dimension - (rank - len(own))
        if bias in (left, right):
            raise Unsplittable("a matmul has one operand twice")
        if position >= 0 and own[position] == sizes[dimension]:
            operands[bias] = position
    return operands


def _reduction(node: Node, dimension: int, parts: int) -> SplitOperands:
    operand, keeps = _operand(node), bool(_argument(node, 2, "keepdim", False))
    if node.target in (_aten.var.correction, _aten.var_mean.correction):
        keeps = bool(node.kwargs.get("keepdim", False))
    dims, rank = _argument(node, 1, "dim", None), len(sizes_of(operand))
    if not isinstance(dims, tuple | list) or not dims:
        raise Unsplittable(f"{node.target} reduces the dimension")
    reduced = {int(item) % rank for item in dims}
    remaining = [item for item in range(rank) if keeps or item not in reduced]
    position = remaining[dimension]
    if position in reduced:
        raise Unsplittable(f"{node.target} reduces the dimension")
    return {operand: position}


def _layer_norm(node: Node, dimension: int, parts: int) -> SplitOperands:
    normed: Any = node.args[1]
    if dimension >= len(sizes_of(_operand(node))) - len(normed):
        raise Unsplittable(f"{node.target} reduces the dimension")
    return {_operand(node): dimension}


def _embedding(node: Node, dimension: int, parts: int) -> SplitOperands:
    indices = _operand(node, 1)
    if dimension >= len(sizes_of(indices)):
        raise Unsplittable("the dimension is that of the embedding's columns")
    return {indices: dimension}


def _attention(node: Node, dimension: int, parts: int) -> SplitOperands:
    """Sequences of a batch, without dropout. A bias has the batch or is the same for all."""
    names = operator_schema(node.target).argument_names  # type: ignore[arg-type]
    arguments = {**dict(zip(names, node.args)), **node.kwargs}
    if dimension != 0:
        raise Unsplittable("attention reads all tokens of a sequence")
    if arguments.get("dropout_p"):
        raise Unsplittable("attention draws random numbers")
    result = {_operand(node, position): 0 for position in range(3)}
    batch = sizes_of(node.args[0])[0]
    for name in ("attn_bias", "attn_mask"):
        bias = arguments.get(name)
        if isinstance(bias, Node) and len(sizes_of(bias)) == 4 and sizes_of(bias)[0] == batch:
            result[bias] = 0
    return result


_Rule: TypeAlias = Callable[[Node, int, int], SplitOperands]
_RULES: Mapping[object, _Rule] = {
    torch.ops._c10d_functional.all_reduce.default: _same,
    torch.ops._c10d_functional.wait_tensor.default: _same,
    _aten.alias.default: _same,
    _aten.detach.default: _same,
    operator.getitem: _getitem,
    **dict.fromkeys(VIEWS, _view),
    _aten.permute.default: _permute,
    _aten.transpose.int: _transpose,
    _aten.t.default: _transpose,
    _aten.unsqueeze.default: _unsqueeze,
    _aten.squeeze.dim: _squeeze,
    _aten.squeeze.dims: _squeeze,
    EXPAND: _expand,
    _aten.select.int: _along(1),
    _aten.unbind.int: _along(1),
    _aten.slice.Tensor: _along(1),
    _aten.split.Tensor: _along(2),
    _aten.split_with_sizes.default: _along(2),
    **dict.fromkeys(_ALONG_A_DIMENSION, _along(1)),
    _aten.cat.default: _cat,
    **dict.fromkeys(MATMULS, _matmul),
    **dict.fromkeys(_REDUCTIONS, _reduction),
    _aten.native_layer_norm.default: _layer_norm,
    _aten.embedding.default: _embedding,
    **dict.fromkeys(ATTENTION, _attention),
}


def part_arguments(node: Node, dimension: int, parts: int, arguments: Sequence[Any]) -> list[Any]:
    """Returns the arguments of the call that computes a part: these, whose tensors are parts, with its sizes."""
    result = list(arguments)
    if node.target in VIEWS or node.target is EXPAND:
        sizes = list(sizes_of(node))
        sizes[dimension] //= parts
        result[1] = sizes
    return result
