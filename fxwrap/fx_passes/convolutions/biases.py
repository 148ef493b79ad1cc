"""Biases of convolutions: kernels that read a result add them, and kernels sum their gradients.

GPU libraries add no bias to a convolution: torch adds it in a pass over the result, and sums its gradient by an
operator that fuses with nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from fxwrap.devices import DeviceSpec
from fxwrap.fx_passes.convolutions.pointwise_results import decides_strides
from fxwrap.fx_passes.graph_copy import GraphCopy, fake_call, fresh_like, layout_text, same_layout
from fxwrap.fx_passes.prepared_graph import FxPassContext, NodeValues, PreparedGraph
from fxwrap.fx_passes.storage_aliases import StorageAliases
from fxwrap.torch_compat import FakeTensor

_aten = torch.ops.aten
_FORWARD, _BACKWARD = _aten.convolution.default, _aten.convolution_backward.default
_BIAS = 2
"""The position of a convolution's bias, of the gradient among the results of a backward, and in its mask."""


def unfuse_convolution_biases(graph: PreparedGraph, context: FxPassContext) -> PreparedGraph:
    """Returns a graph in which kernels add the biases of convolutions and sum the gradients of these."""
    specs = context.options.device_specs()
    targets = {target for target in (_FORWARD, _BACKWARD) if str(target) not in context.extern_operators}
    calls = [node for node in graph.nodes if node.target in targets and _prefers_kernels(node, graph.fakes, specs)]
    if not calls:
        return graph
    aliases = StorageAliases(graph, context)
    forwards = [node for node in calls if node.target is _FORWARD and _adds_bias_in_kernel(node, aliases)]
    gradients = {node: gradient for node in calls if (gradient := _bias_gradient(node)) is not None}
    if not forwards and not gradients:
        return graph
    copy = GraphCopy(graph)
    for node in forwards:
        _unfuse_bias(copy, node)
    for node, gradient in gradients.items():
        _sum_gradient(copy, node, gradient)
    return copy.finish()


def _prefers_kernels(node: Node, fakes: NodeValues, specs: Mapping[str, DeviceSpec]) -> bool:
    """Whether a library adds biases of a convolution's dtype, and sums their gradients, in passes of its own."""
    arguments: Any = node.args
    fake = fakes.get(arguments[0])
    spec = specs.get(fake.device.type) if isinstance(fake, FakeTensor) else None
    return spec is not None and fake is not None and fake.dtype in spec.convolutions.unfused_bias_dtypes


def _adds_bias_in_kernel(node: Node, aliases: StorageAliases) -> bool:
    """Whether a convolution has a bias, and its result is read by kernels alone."""
    arguments: Any = node.args
    result, bias = aliases.fakes.get(node), aliases.fakes.get(arguments[_BIAS])
    if not isinstance(result, FakeTensor) or not isinstance(bias, FakeTensor) or bias.dtype != result.dtype:
        return False
    if aliases.is_mutated(node) or not _keeps_layout(result, bias):
        return False
    return bool(aliases.readers(node)) and aliases.has_kernels_as_readers(node)


def _keeps_layout(result: FakeTensor, bias: FakeTensor) -> bool:
    """Whether the sum of a convolution and its bias has the strides of the convolution.

    Where the convolution does not decide them, they are those of torch's call.
    """
    if decides_strides(result):
        return True
    shaped = fake_call(_aten.view.default, (bias, _bias_shape(result)))
    return same_layout(fake_call(_aten.add.Tensor, (result, shaped)), result)


def _bias_shape(result: FakeTensor) -> list[int]:
    return [-1, *[1] * (result.ndim - 2)]


def _unfuse_bias(copy: GraphCopy, node: Node) -> None:
    before, name = copy.node_map[node], node.name
    image, weight, bias, *others = before.args
    result = copy.fakes[before]
    plain = copy.call(before, _FORWARD, (image, weight, None, *others), f"{name}_plain", fake=_like(result))
    shaped = copy.call(before, _aten.view.default, (bias, _bias_shape(result)), f"{name}_bias")
    total = copy.call(before, _aten.add.Tensor, (plain, shaped), f"{name}_biased", fake=_like(result))
    copy.substitute(node, total, "fused")


def _like(result: FakeTensor) -> object:
    """Returns a new tensor like a result of static layout, else None: then a call infers it."""
    return None if layout_text(result) is None else fresh_like(result.fake_mode, result)


def _bias_gradient(node: Node) -> Node | None:
    """Returns the gradient of the bias that a convolution's backward computes, or None."""
    arguments: Any = node.args
    if node.target is not _BACKWARD or not arguments[-1][_BIAS]:
        return None
    gradients = [user for user in node.users if user.target is operator.getitem and user.args[1] == _BIAS]
    return gradients[0] if len(gradients) == 1 else None


def _sum_gradient(copy: GraphCopy, node: Node, bias_gradient: Node) -> None:
    """Replaces the bias gradient by a sum; the call computes the others, if there are any."""
    call, old = copy.node_map[node], copy.node_map[bias_gradient]
    arguments: Any = call.args
    gradient, image, weight, _, *others, needed = arguments
    dims = [dim for dim in range(copy.fakes[gradient].ndim) if dim != 1]
    total = copy.call(call, _aten.sum.dim_IntList, (gradient, dims), f"{old.name}_sum", origin=old)
    copy.substitute(bias_gradient, total, "fused")
    if len(node.users) == 1:
        copy.erase(node)
        return
    call.args = (gradient, image, weight, None, *others, [*needed[:_BIAS], False])
    copy.retarget(node, _BACKWARD, (*copy.fakes[call][:_BIAS], None))
