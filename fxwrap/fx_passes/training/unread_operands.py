"""Operands of backwards in the joint graph of training of which only the shape is read.

The backward of a pooling takes the operand of the pooling, for its sizes and its memory format. torch's partitioner
would save its elements: those of the widest layers, if nothing else needs them.
"""

from __future__ import annotations

import sympy
import torch
from torch.fx import GraphModule, Node

from fxwrap.fx_passes.graph_copy import expressions_of
from fxwrap.fx_passes.training.joint_backward import call_like, operators_of_options
from fxwrap.options import Options
from fxwrap.torch_compat import FakeTensor

_aten = torch.ops.aten

_AVERAGES_AND_PADDINGS = (
    _aten.avg_pool2d_backward.default, _aten.avg_pool3d_backward.default, _aten.reflection_pad1d_backward.default,
    _aten.reflection_pad2d_backward.default,
)  # fmt: skip
_ADAPTIVE = (_aten._adaptive_avg_pool2d_backward.default, _aten._adaptive_avg_pool3d_backward.default)
"""Backwards that are kernels where the sizes of their planes are known."""

_MAXIMA = (_aten.max_pool2d_with_indices_backward.default, _aten.max_pool3d_with_indices_backward.default)
"""Backwards that read only the shape of their second operand; those of maxima are kernels on GPUs only."""


def drop_unread_operands(joint: GraphModule, options: Options) -> GraphModule:
    """Gives backwards zeros in place of operands whose elements they do not read, in place; returns the graph.

    Kernels do not compute zeros that they do not read.
    """
    excluded, specs = operators_of_options(options), options.device_specs()
    for target in (*_AVERAGES_AND_PADDINGS, *_ADAPTIVE, *_MAXIMA):
        for node in joint.graph.find_nodes(op="call_function", target=target) if str(target) not in excluded else ():
            gradient, operand, *others = node.args
            spec = specs.get(node.meta["val"].device.type)
            if target in _MAXIMA and (spec is None or not spec.massively_parallel):
                continue
            rank = node.meta["val"].dim() - 2
            if target in _ADAPTIVE and any(type(size) is not int for size in node.meta["val"].shape[-rank:]):
                continue  # a call would read zeros that a kernel writes
            zeros = _zeros_like(operand, node)
            if zeros is not None:
                node.args = (gradient, zeros, *others)
    return joint


def _zeros_like(operand: Node, before: Node) -> Node | None:
    """Returns zeros with the sizes and strides of an operand; None if its elements are not known to be adjacent."""
    fake = operand.meta.get("val")
    if not isinstance(fake, FakeTensor) or fake.layout is not torch.strided:
        return None
    order = _memory_order(fake)
    if order is None:
        return None
    with before.graph.inserting_before(before):
        sizes = [_size(operand, dim) for dim in order]
        zeros = call_like(operand, _aten.full.default, sizes, 0, dtype=fake.dtype, device=fake.device)
        return call_like(operand, _aten.permute.default, zeros, [order.index(dim) for dim in range(fake.dim())])


def _size(operand: Node, dim: int) -> int | Node:
    """Returns a size of an operand at the graph's point of insertion: the node of a symbolic one."""
    size = operand.meta["val"].shape[dim]
    return size if type(size) is int else call_like(operand, _aten.sym_size.int, operand, dim)


def _memory_order(fake: FakeTensor) -> list[int] | None:
    """Returns the dimensions of a tensor whose elements are adjacent, the one with the longest stride first."""
    sizes, strides = expressions_of(fake.shape), expressions_of(fake.stride())
    if all(isinstance(number, int) for number in (*sizes, *strides)):
        order = sorted(range(fake.dim()), key=lambda dim: (-strides[dim], -sizes[dim], dim))
        return order if fake.permute(order).is_contiguous() else None
    rest, step, reverse = [dim for dim in range(fake.dim()) if sizes[dim] != 1], sympy.Integer(1), list[int]()
    while rest:
        inner = next((dim for dim in rest if strides[dim] == step), None)
        if inner is None:
            return None
        rest.remove(inner)
        reverse.append(inner)
        step = sizes[inner] * step
    return [*[dim for dim in range(fake.dim()) if sizes[dim] == 1], *reversed(reverse)]
