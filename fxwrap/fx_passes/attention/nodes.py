"""The operators of attention formulas: how the elements of a result depend on those of its operands."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from fxwrap.fx_passes.effects import attribute_of, name_of
from fxwrap.fx_passes.graph_copy import expressions_of
from fxwrap.fx_passes.prepared_graph import NodeValues
from fxwrap.symbolic import Size, product
from fxwrap.torch_compat import FakeTensor, OpOverload, real_object, without_fake_mode

_VIEWS = frozenset({"view", "unsafe_view", "reshape", "unsqueeze", "squeeze", "alias", "detach", "clone", "contiguous"})
"""Operators whose result has their operand's elements, in the same order."""

ALIASES = frozenset({"alias", "detach"})
"""Operators whose result is their operand."""

ELEMENTWISE = frozenset({
    "abs", "add", "bitwise_and", "bitwise_not", "bitwise_or", "clamp", "clamp_max", "clamp_min", "div", "eq", "exp",
    "ge", "gt", "le", "logical_and", "logical_not", "logical_or", "lt", "masked_fill", "maximum", "minimum", "mul",
    "ne", "neg", "rsub", "sigmoid", "sub", "tanh", "to_copy", "where",
})  # fmt: skip
"""Operators of single elements that scores, biases and masks are computed with."""

_FOLDED = frozenset({
    "add", "alias", "clone", "detach", "div", "lift_fresh_copy", "mul", "neg", "pow", "reciprocal", "rsqrt", "sqrt",
    "sub", "to_copy",
})  # fmt: skip
"""Operators with which models compute a scale from a constant tensor."""

Sizes: TypeAlias = list[Any]
"""Sizes as ints and expressions, whose comparison installs no guard."""


def without_aliases(item: Any) -> Any:
    """Returns the node that a node aliases with the same shape, or the item itself."""
    while isinstance(item, Node) and name_of(item) in ALIASES:
        item = item.args[0]
    return item


def sizes_of(node: Node, fakes: NodeValues) -> Sizes:
    """Returns the sizes of a node's tensor as ints and expressions."""
    return expressions_of(fakes[node].shape)


def permutation(node: Node, fakes: NodeValues) -> list[int] | None:
    """Returns the dimensions of its operand in the order of the result's, for calls that permute them."""
    if node.op != "call_function" or not is_tensor(node.args[0] if node.args else None, fakes):
        return None
    arguments: Any = node.args
    rank = fakes[arguments[0]].ndim
    order = list(range(rank))
    match name_of(node):
        case "permute":
            return [dim % rank for dim in arguments[1]]
        case "transpose" | "t":
            if rank == 0:
                return order
            one, other = [dim % rank for dim in arguments[1:3] or (0, rank - 1)]
            order[one], order[other] = order[other], order[one]
            return order
        case _:
            return None


def keeps_order(node: Node, fakes: NodeValues) -> bool:
    """Whether a call returns the elements of its only tensor, in the same order and dtype."""
    source = node.args[0] if isinstance(node.target, OpOverload) and node.args else None
    if not isinstance(source, Node) or not is_tensor(source, fakes) or not is_tensor(node, fakes):
        return False
    name = name_of(node)
    if name in _VIEWS:
        return True
    if name == "expand":
        return element_count(source, fakes) == element_count(node, fakes)
    order = permutation(node, fakes)
    if order is None:
        return False
    sizes = sizes_of(source, fakes)
    moved = [dim for dim in order if sizes[dim] != 1]
    return moved == sorted(moved)


def is_tensor(node: object, fakes: NodeValues) -> bool:
    """Whether a value is a node of one tensor."""
    return isinstance(node, Node) and isinstance(fakes.get(node), FakeTensor)


def swaps_last_two(node: Node, fakes: NodeValues) -> bool:
    """Whether a call transposes the last two dimensions of its operand."""
    order = permutation(node, fakes)
    return order is not None and order == [*range(len(order) - 2), len(order) - 1, len(order) - 2]


def transposes_matrices(node: Node, fakes: NodeValues) -> bool:
    """Whether a call transposes the last two of its operand's dimensions that have more than one element."""
    order = permutation(node, fakes)
    if order is None:
        return False
    sizes = sizes_of(node.args[0], fakes)  # type: ignore[arg-type]
    moved = [dim for dim in order if sizes[dim] != 1]
    return len(moved) > 1 and [*moved[:-2], moved[-1], moved[-2]] == sorted(moved)


def moves_matrices(node: Node, fakes: NodeValues) -> bool:
    """Whether a call returns the elements of its operand in their order, or transposes its matrices."""
    return keeps_order(node, fakes) or transposes_matrices(node, fakes)


def is_cast(node: Node, fakes: NodeValues) -> bool:
    """Whether a call casts its operand to a floating-point dtype."""
    return name_of(node) == "to_copy" and is_tensor(node, fakes) and bool(fakes[node].is_floating_point())


def is_last_dimension(dim: object, rank: int) -> bool:
    """Whether a dimension's number is that of the last of some dimensions."""
    return dim in (-1, rank - 1)


def row_reduction(node: object, names: Sequence[str], fakes: NodeValues) -> tuple[Node, tuple[Node, ...]] | None:
    """Returns the tensor that calls reduce along its last dimension, which they keep, and these calls in order."""
    nodes: list[Node] = []
    is_kept = False
    while isinstance(node, Node) and name_of(node) not in names:
        rank = fakes[node].ndim if is_tensor(node, fakes) else 0
        is_added = name_of(node) == "unsqueeze" and node.args[1] in (-1, rank - 1) and not is_kept
        is_values = node.target is operator.getitem and node.args[1] == 0
        if not is_added and not is_values and name_of(node) not in ALIASES:
            return None
        is_kept |= is_added
        nodes.append(node)
        node = node.args[0]
    if not isinstance(node, Node) or node.kwargs:
        return None
    operand, dims, keeps = (*node.args, None, False)[:3]
    if not isinstance(operand, Node) or not is_tensor(operand, fakes) or keeps is is_kept:
        return None
    over: Any = [dims] if isinstance(dims, int) else dims
    rank = fakes[operand].ndim
    if not isinstance(over, list | tuple) or [dim % rank for dim in over] != [rank - 1]:
        return None
    unused = [user for user in node.users if user.target is operator.getitem and not user.users]  # positions of maxima
    return operand, (node, *unused, *reversed(nodes))


def is_row_logsumexp(node: Node, fakes: NodeValues) -> bool:
    """Whether a call returns the log-sum-exp of each row of its operand."""
    if name_of(node) != "logsumexp" or not is_tensor(node, fakes):
        return False
    operand, dims = node.args[:2]
    rank = fakes[operand].ndim  # type: ignore[index]
    return [dim % rank for dim in dims] == [rank - 1]  # type: ignore[union-attr]


def is_finite(item: object, fakes: NodeValues, depth: int = 0) -> bool:
    """Whether a value, if it has no overflow, is no infinity: it is computed from matmuls and numbers."""
    if isinstance(item, list | tuple):
        return all(is_finite(part, fakes, depth) for part in item)
    if not isinstance(item, Node):
        return not isinstance(item, float) or math.isfinite(item)
    if not is_tensor(item, fakes) or not fakes[item].is_floating_point() or item.target in _MATMULS:
        return True
    name, operands = name_of(item), item.args
    if name == "baddbmm":
        operands = operands[:1]
    elif name in CONSTANTS:
        operands = tuple([part for part in operands if isinstance(part, float)])
    is_computed = name in (*_VIEWS, *_MOVED, *_BOUNDED, *CONSTANTS)
    return is_computed and depth < _MAX_DEPTH and all(is_finite(part, fakes, depth + 1) for part in operands)


CONSTANTS = frozenset({"full", "full_like", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "scalar_tensor",
                       "zeros", "zeros_like"})  # fmt: skip
"""Operators whose result has one number."""

_MATMULS = frozenset({torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default})
_MOVED = ("cat", "constant_pad_nd", "expand", "permute", "select", "slice", "transpose")
_BOUNDED = ("add", "baddbmm", "div", "masked_fill", "mul", "neg", "rsub", "sigmoid", "sub", "tanh", "to_copy", "where")
_MAX_DEPTH = 24


def scales(node: Node, operand: Node, fakes: NodeValues) -> bool:
    """Whether a call multiplies the elements of an operand by factors that do not depend on it, 0 for masked ones."""
    arguments: Any = node.args
    others = [item for item in arguments if item is not operand]
    are_tensors = is_tensor(node, fakes) and is_tensor(operand, fakes)
    same_size = are_tensors and element_count(node, fakes) == element_count(operand, fakes)
    if not same_size or node.kwargs or len(others) != len(arguments) - 1:
        return False
    match name_of(node):
        case "mul":
            return True
        case "div":
            return arguments[0] is operand and len(arguments) == 2
        case "masked_fill":
            return arguments[0] is operand and is_zero(arguments[2], fakes)
        case "where":
            return arguments[0] is not operand and is_zero(others[1], fakes)
        case _:
            return False


def is_zero(item: object, fakes: NodeValues) -> bool:
    """Whether an argument is 0, or a tensor of zeros."""
    if isinstance(item, Node) and name_of(item) in ("full", "full_like", "zeros", "zeros_like", "scalar_tensor"):
        name = name_of(item)
        return "zeros" in name or bool(item.args[0 if name == "scalar_tensor" else 1] == 0)
    return bool((folded_number(item, fakes) if isinstance(item, Node) else item) == 0)


def element_count(node: Node, fakes: NodeValues) -> Size:
    """Returns the number of elements of a node's tensor, an int or an expression."""
    return product(sizes_of(node, fakes))


def folded_number(
    node: object, fakes: NodeValues, is_written: Callable[[Node], bool] = lambda _node: False
) -> bool | int | float | None:
    """Returns the value of a tensor of one element that is computed from constants; None for other nodes.

    `is_written` tells whether a call writes a node's memory.
    """
    value = _folded(node, fakes, is_written, 0)
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or value.is_complex():
        return None
    with without_fake_mode():
        number: Any = value.item()
    return number  # type: ignore[no-any-return]


def _folded(argument: Any, fakes: NodeValues, is_written: Callable[[Node], bool], depth: int) -> Any:
    """Returns the value of an argument: a tensor on the CPU, or a number; None if it is unknown."""
    if not isinstance(argument, Node):
        return argument if type(argument) in (bool, int, float) else None
    fake = fakes.get(argument)
    if depth > _MAX_FOLDED or (isinstance(fake, torch.Tensor) and (fake.numel() != 1 or is_written(argument))):
        return None
    if argument.op == "get_attr":
        value = real_object(attribute_of(argument))
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor) or value.numel() != 1:
            return None
        with without_fake_mode():
            return value.detach().cpu()
    if (
        not isinstance(argument.target, OpOverload)
        or name_of(argument) not in _FOLDED
        or argument.kwargs.keys() - {"dtype", "memory_format"}
    ):
        return None
    operands = [_folded(item, fakes, is_written, depth + 1) for item in argument.args]
    if any(item is None for item in operands):
        return None
    with without_fake_mode():
        return argument.target(*operands, **argument.kwargs)


_MAX_FOLDED = 8
"""The largest number of operators between a constant tensor and a number."""
