"""Dropout in the joint graph of training: the backward computes its result again from the mask.

torch's partitioner does not recompute random operators. If the backward reads the result of a dropout, as a matmul's
does, it saves that beside the mask, although the gradient of the dropout needs the mask anyway and the operand is saved
or cheap: for attention weights the largest tensors of a layer.
"""

from __future__ import annotations

import operator
from functools import partial

import torch
from torch.fx import GraphModule, Node

from fxwrap.fx_passes.training.joint_backward import backward_nodes, call_like, operators_of_options, redirect_backward
from fxwrap.loop_ir import HALF_PRECISION
from fxwrap.options import Options

_aten = torch.ops.aten
_DROPOUT = _aten.native_dropout.default


def recompute_dropout(joint: GraphModule, options: Options) -> GraphModule:
    """Lets the backward read dropouts through multiplications of their operands by their masks, in place.

    The forward reads the dropouts' own results, and the partitioner decides whether the products are saved or computed
    in the backward. Returns the graph.
    """
    if str(_DROPOUT) in operators_of_options(options):
        return joint
    backward = backward_nodes(joint)
    for node in joint.graph.find_nodes(op="call_function", target=_DROPOUT):
        parts = {part.args[1]: part for part in node.users if part.target is operator.getitem}
        if 0 in parts and isinstance(node.args[1], float) and 0 < node.args[1] < 1 and node.args[2] is not False:
            redirect_backward(parts[0], backward, partial(_product, node, parts[0]))
    return joint


def _product(dropout: Node, result: Node) -> Node:
    """Returns the dropout's operand times its mask and scale, computed in float32 for half precision."""
    operand, probability = dropout.args[0], dropout.args[1]
    assert isinstance(operand, Node) and isinstance(probability, float)
    dtype = result.meta["val"].dtype

    call = partial(call_like, result)
    mask = call(operator.getitem, dropout, 1)
    is_half = dtype in HALF_PRECISION
    product = call(_aten._to_copy.default, operand, dtype=torch.float32) if is_half else operand
    product = call(_aten.mul.Tensor, call(_aten.mul.Tensor, product, mask), 1 / (1 - probability))
    return call(_aten._to_copy.default, product, dtype=dtype) if is_half else product
