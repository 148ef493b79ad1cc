"""Backwards of depthwise convolutions: kernels compute one gradient where a library's call computes the other."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from fxwrap.devices import DeviceSpec
from fxwrap.fx_passes.graph_copy import GraphCopy
from fxwrap.fx_passes.prepared_graph import FxPassContext, NodeValues, PreparedGraph
from fxwrap.torch_compat import FakeTensor

_BACKWARD = torch.ops.aten.convolution_backward.default


def split_depthwise_gradients(graph: PreparedGraph, context: FxPassContext) -> PreparedGraph:
    """Returns a graph in which the gradient of an image that kernels compute is a call of its own."""
    specs = context.options.device_specs()
    is_preserved = str(_BACKWARD) in context.extern_operators
    calls = [node for node in graph.nodes if node.target is _BACKWARD and not is_preserved]
    matches = [node for node in calls if _computes_image_alone(node, graph.fakes, specs)]
    if not matches:
        return graph
    copy = GraphCopy(graph)
    for node in matches:
        _split(copy, node)
    return copy.finish()


def _computes_image_alone(node: Node, fakes: NodeValues, specs: Mapping[str, DeviceSpec]) -> bool:
    """Whether kernels compute the gradient of the image of a depthwise convolution, and not that of the weight."""
    arguments: Any = node.args
    _, operand, filters, *_, transposed, _, groups, needed = arguments
    image, weight = fakes.get(operand), fakes.get(filters)
    if not (needed[0] and needed[1]) or not isinstance(image, FakeTensor) or not isinstance(weight, FakeTensor):
        return False
    spec = specs.get(image.device.type)
    by_kernels = [
        spec is not None
        and spec.convolutions.generates_depthwise(image.dtype, image.shape, weight.shape, groups, transposed, results)
        for results in ((False, True, False), (False, False, True))
    ]
    return by_kernels == [True, False]


def _split(copy: GraphCopy, node: Node) -> None:
    """Computes the gradient of the image by a call before a backward, which computes the others."""
    call = copy.node_map[node]
    values: Any = call.args
    *arguments, (_, *others) = values
    fakes = copy.fakes[call]
    fake = (fakes[0], None, None)
    alone = copy.call(call, _BACKWARD, (*arguments, [True, False, False]), f"{node.name}_image", fake=fake)
    call.args = (*arguments, [False, *others])
    copy.retarget(node, _BACKWARD, (None, *fakes[1:]))
    for user in node.users:
        if user.target is operator.getitem and user.args[1] == 0:
            item = copy.call(copy.node_map[user], operator.getitem, (alone, 0), f"{user.name}_image", fake=fakes[0])
            copy.substitute(user, item, "view")
