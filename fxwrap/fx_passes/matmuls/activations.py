"""The activations of a matmul's results: relu, and GELU's tanh form as an operator or in any algebraic form."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fxwrap.fx_passes.graph_copy import expression_of, is_contiguous
from fxwrap.fx_passes.prepared_graph import NodeValues, Target
from fxwrap.options import Options

_aten = torch.ops.aten
VIEWS = frozenset({_aten.view.default, _aten._unsafe_view.default})
"""Views between a matmul and the calls that read its result."""

_FORMULA: Mapping[Target, Callable[..., float]] = {
    _aten.add.Tensor: operator.add,
    _aten.add.Scalar: operator.add,
    _aten.sub.Tensor: operator.sub,
    _aten.mul.Tensor: operator.mul,
    _aten.mul.Scalar: operator.mul,
    _aten.pow.Tensor_Scalar: operator.pow,
    _aten.tanh.default: math.tanh,
    _aten.clone.default: float,
    _aten._to_copy.default: float,
}
"""The operators in formulas of GELU's tanh approximation, as functions of numbers; views may be between them."""
_MAX_FORMULA_LENGTH = 18


@dataclass(frozen=True)
class Activation:
    """An activation of a matmul.

    Fields:
        nodes: the operators that compute it, in order; only the last has other readers.
        is_gelu: whether it is the tanh form of GELU, else relu.
        is_only_reader: whether nothing else reads the matmul.
    """

    nodes: tuple[Node, ...]
    is_gelu: bool
    is_only_reader: bool

    @property
    def result(self) -> Node:
        """The node of the activation's result."""
        return self.nodes[-1]


def match_activation(matmul: Node, fakes: NodeValues, options: Options) -> Activation | None:
    """Returns the activation of a matmul's results, or of a view of them, with their dtype and a contiguous layout."""
    inputs = [matmul]
    for item in inputs:
        inputs += [user for user in item.users if user.target in VIEWS]
    readers = [user for item in inputs for user in item.users if user not in inputs]
    for nodes in _formulas(inputs, readers, options):
        if _has_dtype_and_size(nodes, fakes, matmul) and (
            nodes[0].target is _aten.relu.default or _is_gelu(inputs, nodes)
        ):
            return Activation(nodes, nodes[0].target is not _aten.relu.default, set(readers) <= set(nodes))
    return None


def _formulas(inputs: Sequence[Node], readers: Sequence[Node], options: Options) -> Iterator[tuple[Node, ...]]:
    """Yields the operators that may be an activation of one tensor, of which `inputs` are views."""
    for node in readers:
        if node.target in (_aten.relu.default, _aten.gelu.default) and str(node.target) not in options.preserve_ops:
            yield (node,)
    reached: dict[Node, None] = {}
    pending = list(readers)
    while pending and len(reached) <= _MAX_FORMULA_LENGTH:
        node = pending.pop(0)
        if (
            node in reached
            or (node.target not in _FORMULA and node.target not in VIEWS)
            or str(node.target) in options.preserve_ops
        ):
            continue
        if all(operand in inputs or operand in reached for operand in node.all_input_nodes):
            reached[node] = None
            pending += node.users
    if not any(node.target is _aten.tanh.default for node in reached):
        return
    for end in reached:
        formula = _dependences(end, reached)
        if all(user in formula for node in formula if node is not end for user in node.users):
            yield tuple([node for node in reached if node in formula])


def _dependences(end: Node, reached: Collection[Node]) -> set[Node]:
    """Returns the nodes among `reached` that a node depends on, itself included."""
    nodes, pending = {end}, [end]
    while pending:
        new = [node for node in pending.pop().all_input_nodes if node in reached and node not in nodes]
        nodes.update(new)
        pending += new
    return nodes


def _has_dtype_and_size(nodes: Sequence[Node], fakes: NodeValues, matmul: Node) -> bool:
    """Whether operators compute each element of their result from one of a matmul, and the result has its dtype."""
    source, result = fakes[matmul], fakes.get(nodes[-1])
    if not isinstance(result, torch.Tensor) or result.dtype != source.dtype or not is_contiguous(result):
        return False
    sizes = [expression_of(item.numel()) for node in nodes if isinstance(item := fakes.get(node), torch.Tensor)]
    return is_contiguous(source) and sizes == [expression_of(source.numel())] * len(nodes)


def _is_gelu(inputs: Sequence[Node], nodes: Sequence[Node]) -> bool:
    """Whether operators compute GELU's tanh approximation, in any algebraic form.

    The formula consists of polynomials and one tanh. It is compared with GELU at more points than it has terms.
    """
    if nodes[0].target is _aten.gelu.default:
        return nodes[0].kwargs.get("approximate") == "tanh"
    for step in range(-40, 41):
        x = step / 8
        values: dict[Node, float] = dict.fromkeys(inputs, x)
        for node in nodes:
            value = _evaluate(node, values)
            if value is None:
                return False
            values[node] = value
        expected = 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        if abs(values[nodes[-1]] - expected) > 1e-7 * max(1.0, abs(x)):
            return False
    return True


def _evaluate(node: Node, values: Mapping[Node, float]) -> float | None:
    """Returns the value of a formula's operator on numbers; None for arguments that are not numbers."""
    if node.target in VIEWS:
        return values[node.all_input_nodes[0]]
    operands: list[Any] = [values[item] if isinstance(item, Node) else item for item in node.args]
    if not all(isinstance(item, int | float) for item in operands):
        return None
    match node.target:
        case _aten._to_copy.default:
            dtype = node.kwargs.get("dtype")
            is_cast = set(node.kwargs) == {"dtype"} and isinstance(dtype, torch.dtype) and dtype.is_floating_point
            return float(operands[0]) if is_cast else None
        case _aten.clone.default:
            return float(operands[0])
        case _ if node.kwargs:
            return None
        case _:
            try:
                return _FORMULA[node.target](*operands)
            except ArithmeticError:  # a power beyond float64's range, or a negative one of 0
                return None
