"""Operands of backwards in the joint graph of training of which only the shape is read.

The backward of a pooling takes the operand of the pooling, for its sizes and its memory format. torch's partitioner
would save its elements: those of the widest layers, if nothing else needs them.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from fxwrap.fx_passes.training.joint_backward import call_like, operators_of_options
from fxwrap.options import Options
from fxwrap.torch_compat import FakeTensor

_aten = torch.ops.aten

_AVERAGES_AND_PADDINGS = (
    _aten.avg_pool2d_backward.default, _aten.avg_pool3d_backward.default, _aten._adaptive_avg_pool2d_backward.default,
    _aten._adaptive_avg_pool3d_backward.default, _aten.reflection_pad1d_backward.default,
    _aten.reflection_pad2d_backward.default,
)  # fmt: skip
_MAXIMA = (_aten.max_pool2d_with_indices_backward.default, _aten.max_pool3d_with_indices_backward.default)
"""Backwards that read only the shape of their second operand; those of maxima are kernels on GPUs only."""


def drop_unread_operands(joint: GraphModule, options: Options) -> GraphModule:
    """Gives backwards zeros in place of operands whose elements they do not read, in place; returns the graph.

    Kernels do not compute zeros that they do not read. Operands of symbolic sizes stay.
    """
    excluded, specs = operators_of_options(options), options.device_specs()
    for target in (*_AVERAGES_AND_PADDINGS, *_MAXIMA):
        for node in joint.graph.find_nodes(op="call_function", target=target) if str(target) not in excluded else ():
            gradient, operand, *others = node.args
            spec = specs.get(node.meta["val"].device.type)
            if target in _MAXIMA and (spec is None or not spec.massively_parallel):
                continue
            zeros = _zeros_like(operand, node)
            if zeros is not None:
                node.args = (gradient, zeros, *others)
    return joint


def _zeros_like(operand: Node, before: Node) -> Node | None:
    """Returns zeros with the sizes and strides of an operand; None if these are symbolic, or elements not adjacent."""
    fake = operand.meta.get("val")
    if not isinstance(fake, FakeTensor) or fake.layout is not torch.strided:
        return None
    if any(type(number) is not int for number in (*fake.shape, *fake.stride())):
        return None
    strides = [*fake.stride()]
    order = sorted(range(fake.dim()), key=lambda dim: (-strides[dim], -fake.shape[dim], dim))
    sizes = [fake.shape[dim] for dim in order]
    if not fake.permute(order).is_contiguous():
        return None
    with before.graph.inserting_before(before):
        zeros = call_like(operand, _aten.full.default, sizes, 0, dtype=fake.dtype, device=fake.device)
        return call_like(operand, _aten.permute.default, zeros, [order.index(dim) for dim in range(fake.dim())])
