"""Convolutions of images: their operands, and on which devices they read channels-last ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from fxwrap.devices import DeviceSpec
from fxwrap.fx_passes.graph_copy import expression_of
from fxwrap.fx_passes.prepared_graph import NodeValues, Target
from fxwrap.torch_compat import FakeTensor

_aten = torch.ops.aten

_CONVOLUTION_OPERANDS: Mapping[Target, tuple[tuple[int, ...], int]] = {
    _aten.convolution.default: ((0, 1), 6),
    _aten.convolution_backward.default: ((0, 1, 2), 7),
}
"""Convolutions: the positions of the operands to make channels-last, and of the argument `transposed`."""

STRIDE_AND_GROUPS: Mapping[Target, tuple[int, int]] = {
    _aten.convolution.default: (3, 8),
    _aten.convolution_backward.default: (4, 9),
}
"""Convolutions: the positions of the stride and of the number of groups."""

_SMALLEST_STRIDED_POINTWISE_CHANNELS = 16
"""Below so many input channels, oneDNN writes outside its buffers when it computes the gradient of a strided pointwise
convolution's weight from a channels-last image (torch 2.11 to 2.13, on a CPU with AVX-512)."""


def is_channels_last_convolution(node: Node, fakes: NodeValues, specs: Mapping[str, DeviceSpec]) -> bool:
    """Whether a node is a convolution of images on a device that prefers channels-last operands."""
    if node.target not in _CONVOLUTION_OPERANDS or node.args[_CONVOLUTION_OPERANDS[node.target][1]] is not False:
        return False
    if has_broken_channels_last_kernel(node, fakes):
        return False
    return all(
        isinstance(fake := fakes.get(operand), FakeTensor) and _is_image(fake, specs)
        for operand in convolution_operands(node)
    )


def has_broken_channels_last_kernel(node: Node, fakes: NodeValues) -> bool:
    """Whether the device's library corrupts memory in a convolution's backward of a channels-last image."""
    if node.target is not _aten.convolution_backward.default:
        return False
    weight = fakes[node.args[2]]  # type: ignore[index]
    if not isinstance(weight, torch.Tensor) or weight.device.type != "cpu":
        return False
    strides: Any = node.args[4]
    is_strided_pointwise = all(size == 1 for size in weight.shape[2:]) and any(stride != 1 for stride in strides)
    return is_strided_pointwise and weight.shape[1] < _SMALLEST_STRIDED_POINTWISE_CHANNELS


def convolution_operands(node: Node) -> list[Node]:
    """Returns a convolution's image and weight; for a backward, the gradient before them."""
    positions, _ = _CONVOLUTION_OPERANDS[node.target]
    return [node.args[position] for position in positions]  # type: ignore[misc]


def _is_image(fake: FakeTensor, specs: Mapping[str, DeviceSpec]) -> bool:
    if fake.ndim != 4 or fake.layout is not torch.strided:
        return False
    spec = specs.get(fake.device.type)
    return spec is not None and fake.dtype in spec.convolutions.channels_last_dtypes


def is_channels_last(fake: object) -> bool:
    """Whether an image is channels-last; supports symbolic sizes, unlike `is_contiguous` of torch 2.11."""
    if not isinstance(fake, torch.Tensor):
        return True
    stride: Any = 1
    for dim in (1, 3, 2, 0):
        size = expression_of(fake.shape[dim])
        if size != 1:
            if expression_of(fake.stride(dim)) != stride:
                return False
            stride *= size
    return True
