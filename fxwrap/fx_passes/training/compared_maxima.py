"""Maxima and minima in the joint graph of training: their backward compares the elements that the forward reduced.

The gradient of a maximum is that of the elements that equal it, divided by their number. The backward may compute
elements again from other saved tensors, or in another kernel; the last bit may then differ, so that none is equal, and
the gradient is NaN.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from fxwrap.fx_passes.effects import name_of

_aten = torch.ops.aten

_EXTREMES = frozenset({"amax", "amin", "max", "min", "aminmax", "linalg_vector_norm"})
"""Reductions with a result that may equal one of the elements."""

_VIEWS = frozenset({"view", "unsafe_view", "reshape", "unsqueeze", "squeeze", "expand", "alias", "detach"})
_EXACT = _VIEWS | {"permute", "transpose", "t", "abs", "neg"}
"""Operators that compute equal elements from equal ones, and whose results need not be saved."""


def save_compared_elements(joint: GraphModule) -> GraphModule:
    """Lets torch's partitioner save elements that are compared with their maximum, in place; returns the graph."""
    for node in joint.graph.find_nodes(op="call_function", target=_aten.eq.Tensor):
        for elements, extreme in (node.args, node.args[::-1]):
            reduced = _reduced(extreme)
            source = _without(elements, _EXACT)
            if reduced is not None and source is _without(reduced, _EXACT) and source.op == "call_function":
                source.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
    return joint


def _without(node: object, names: frozenset[str]) -> Node:
    """Returns the operand that a chain of operators of these names begins with."""
    assert isinstance(node, Node)
    while name_of(node) in names and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _reduced(node: object) -> Node | None:
    """Returns the operand of the reduction whose result, or a view of it, a node is."""
    reduction = _without(node, _VIEWS)
    if reduction.target is operator.getitem:
        reduction = reduction.args[0]  # type: ignore[assignment]
    is_extreme = name_of(reduction) in _EXTREMES and isinstance(reduction.args[0], Node)
    return reduction.args[0] if is_extreme else None  # type: ignore[return-value]
