"""Layer norms in the joint graph of training: kernels of the backward compute their results again.

The backward of a norm reads its operand and its statistics, from which a result is a few operations. torch's
partitioner takes the operator for one that cannot be recomputed: a result that is the operand of the next norm, as
that of a patch embedding, would be saved beside its own operand.
"""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxwrap.fx_passes.effects import name_of
from fxwrap.fx_passes.prepared_graph import Target
from fxwrap.fx_passes.training.joint_backward import (
    CHAINED,
    backward_nodes,
    call_like,
    operators_of_options,
    redirect_backward,
)
from fxwrap.options import Options
from fxwrap.torch_compat import FakeTensor, OpOverload

_aten = torch.ops.aten
_LAYER_NORM = _aten.native_layer_norm.default
_NORM_BACKWARDS = frozenset({_aten.native_layer_norm_backward.default, _aten.native_group_norm_backward.default})


def recompute_norms(joint: GraphModule, options: Options) -> GraphModule:
    """Lets kernels of the backward read layer norms through their operands and statistics, in place.

    The forward reads the norms' own results, and so does a matmul, which reads no computed operand. Returns the graph.
    """
    if str(_LAYER_NORM) in operators_of_options(options):
        return joint
    backward = _backward_only(joint)
    for node in reversed(joint.graph.find_nodes(op="call_function", target=_LAYER_NORM)):
        parts = {part.args[1]: part for part in node.users if part.target is operator.getitem}
        if {*parts} == {0, 1, 2} and _is_exact(parts[1]):
            redirect_backward(parts[0], backward, partial(_normalized, node, parts, backward), _is_kernel)
    return joint


def _backward_only(joint: GraphModule) -> set[Node]:
    """Returns the nodes that depend on a tangent, and others, but for views and copies, that these alone need."""
    dependent = backward_nodes(joint)
    needed = {*dependent}
    for node in reversed(joint.graph.nodes):
        if node.op == "call_function" and node.users and needed.issuperset(node.users):
            needed.add(node)
    return dependent | {node for node in needed if name_of(node) not in CHAINED}


def _is_exact(statistic: Node) -> bool:
    """Whether a statistic is not rounded to half precision."""
    fake = statistic.meta.get("val")
    return isinstance(fake, FakeTensor) and fake.dtype in (torch.float32, torch.float64)


def _is_kernel(user: Node) -> bool:
    """Whether a generated kernel computes a call, which can compute operands too. A copy may be a matmul's operand."""
    target = user.target
    if name_of(user) in CHAINED:
        return False
    return target in _NORM_BACKWARDS or (isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags)


def _normalized(norm: Node, parts: dict[Any, Node], backward: set[Node]) -> Node:
    """Returns a layer norm's result from its operand, mean and 1 / std, computed in their dtype, in the backward.

    The operand may be the result of an earlier norm, which the backward then reads here.
    """
    arguments: Any = norm.args
    x, _, weight, bias, _ = arguments
    result, mean, rstd = [parts[number] for number in range(3)]
    dtype = mean.meta["val"].dtype

    def call(target: Target, *operands: Any, **keywords: Any) -> Node:
        node = call_like(result, target, *operands, **keywords)
        backward.add(node)
        return node

    def cast(operand: Node, to: torch.dtype) -> Node:
        is_same = operand.meta["val"].dtype == to
        return operand if is_same else call(_aten._to_copy.default, operand, dtype=to)

    value = call(_aten.mul.Tensor, call(_aten.sub.Tensor, cast(x, dtype), mean), rstd)
    if weight is not None:
        value = call(_aten.mul.Tensor, value, cast(weight, dtype))
    if bias is not None:
        value = call(_aten.add.Tensor, value, cast(bias, dtype))
    return cast(value, result.meta["val"].dtype)
