"""Convolutions of patches: the kernel is as large as the stride, so that each element of the image is read once.

Patch embeddings and the downsampling of some networks are such. Each is a matmul of patches, which one kernel copies
into rows: a GEMM needs no workspace, and its result is the channels-last image that networks of patches read as rows.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fxwrap.devices import DeviceSpec
from fxwrap.fx_passes.graph_copy import GraphCopy, expressions_of
from fxwrap.fx_passes.prepared_graph import NodeValues
from fxwrap.torch_compat import FakeTensor
from fxwrap.wrapper_ir import contiguous_strides

_aten = torch.ops.aten


@dataclass(frozen=True)
class PatchConvolution:
    """A convolution whose kernel is its stride, without padding, of a static image that patches fill.

    Fields:
        image, weight: the operands, of sizes (batch, channels, ...) and (outputs, channels, ...).
        bias: a number for each output channel, or None.
        kernel: the sizes of a patch.
        counts: the numbers of patches along each dimension.
        gradient: that of the result, in the backward of the weight and the bias; None in the forward.
    """

    image: Node
    weight: Node
    bias: Node | None
    kernel: tuple[int, ...]
    counts: tuple[int, ...]
    gradient: Node | None = None


def patch_convolutions(
    nodes: Collection[Node], fakes: NodeValues, specs: Mapping[str, DeviceSpec], preserved: Collection[str]
) -> dict[Node, PatchConvolution]:
    """Returns the convolutions that are matmuls of patches, where that is faster on their device.

    That is so for wide kernels, whose rows are neighbours in memory, and for images of one patch, which are no copy,
    unless it is a pixel and their matmul is no kernel.
    With a forward's are the backwards that compute no gradient of the image.
    """
    matches = {}
    for node in nodes:
        if node.target in _CONVOLUTIONS and str(node.target) not in preserved:
            match = _match(node, fakes, specs)
            if match is not None:
                matches[node] = match
    return matches


_CONVOLUTIONS = frozenset({_aten.convolution.default, _aten.convolution_backward.default})


def _match(node: Node, fakes: NodeValues, specs: Mapping[str, DeviceSpec]) -> PatchConvolution | None:
    arguments: Any = node.args
    bias = gradient = None
    if node.target is _aten.convolution.default:
        image, weight, bias, stride, padding, dilation, transposed, _, groups = arguments
    else:
        gradient, image, weight, _, stride, padding, dilation, transposed, _, groups, needed = arguments
        if needed[0] or not all(_reads_gradient(user) for user in node.users):
            return None
    fake, filters = fakes.get(image), fakes.get(weight)
    if not isinstance(fake, FakeTensor) or not isinstance(filters, FakeTensor) or transposed or groups != 1:
        return None
    spec = specs.get(fake.device.type)
    if spec is None:
        return None
    least = dict(spec.convolutions.patch_matmul_widths).get(fake.dtype)
    sizes = [*fake.shape[1:], *filters.shape]
    if least is None or fake.ndim != filters.ndim or not all(type(size) is int for size in sizes):
        return None
    kernel = tuple(filters.shape[2:])
    counts = tuple([size // step for size, step in zip(fake.shape[2:], kernel, strict=True)])
    is_filled = [count * step for count, step in zip(counts, kernel, strict=True)] == [*fake.shape[2:]]
    is_patch = tuple(stride) == kernel and not any(padding) and all(step == 1 for step in dilation) and is_filled
    if not is_patch or (kernel[-1] < least and math.prod(counts) > 1):
        return None
    if math.prod(kernel) == 1 and not _is_generated(fake, filters, spec):
        return None
    return PatchConvolution(image, weight, bias, kernel, counts, gradient)


def _is_generated(image: FakeTensor, filters: FakeTensor, spec: DeviceSpec) -> bool:
    """Whether a convolution of images of one pixel, such as of squeeze-and-excitation, becomes a kernel as a matmul."""
    return spec.matmuls.generates(image.dtype, image.shape[0], filters.numel() * filters.dtype.itemsize)


def _reads_gradient(user: Node) -> bool:
    """Whether a user of a backward reads a gradient that it computes, or is unused itself."""
    return user.target is operator.getitem and (bool(user.args[1]) or not user.users)


class PatchMatmulWriter:
    """Writes the matmuls of one convolution before a node of the copy.

    Columns of a patch are in the order of the image in memory: channels first, or last.
    """

    def __init__(self, copy: GraphCopy, before: Node, match: PatchConvolution, name: str) -> None:
        self.copy, self.before, self.match, self.name = copy, before, match, name
        self.image, self.weight = copy.node_map[match.image], copy.node_map[match.weight]
        fake = copy.fakes[self.image]
        self.batch, self.channels = fake.shape[:2]
        self.outputs = copy.fakes[self.weight].shape[0]
        self.is_last = fake.stride(1) == 1 and self.channels > 1
        self.spatial = range(1, len(match.kernel) + 1)

    def result(self) -> Node:
        """Returns the convolution's result, as a channels-last image."""
        weight, terms = self.weight, math.prod([self.channels, *self.match.kernel])
        if self.is_last:
            weight = self._call(_aten.permute.default, weight, [0, *[1 + dim for dim in self.spatial], 1])
        columns = self._call(_aten.t.default, self._view(self._dense(weight), self.outputs, terms))
        if self.match.bias is None:
            result = self._call(_aten.mm.default, self._rows(), columns)
        else:
            result = self._call(_aten.addmm.default, self.copy.node_map[self.match.bias], self._rows(), columns)
        result = self._view(result, self.batch, *self.match.counts, self.outputs)
        return self._call(_aten.permute.default, result, [0, len(self.spatial) + 1, *self.spatial])

    def gradient_of_weight(self) -> Node:
        """Returns the gradient of the weight, with its columns in the order of a patch's."""
        product = self._call(_aten.mm.default, self._call(_aten.t.default, self._gradient()), self._rows())
        if not self.is_last:
            return self._view(product, self.outputs, self.channels, *self.match.kernel)
        product = self._view(product, self.outputs, *self.match.kernel, self.channels)
        return self._call(_aten.permute.default, product, [0, len(self.spatial) + 1, *self.spatial])

    def gradient_of_bias(self) -> Node:
        """Returns the gradient of the bias."""
        return self._call(_aten.sum.dim_IntList, self._gradient(), [0])

    def _gradient(self) -> Node:
        """Returns the gradient of the result with a row for each patch."""
        assert self.match.gradient is not None
        order = [0, *[1 + dim for dim in self.spatial], 1]
        gradient = self._call(_aten.permute.default, self.copy.node_map[self.match.gradient], order)
        return self._view(self._dense(gradient), self.batch * math.prod(self.match.counts), self.outputs)

    def _rows(self) -> Node:
        """Returns the patches as rows of a matrix."""
        match = self.match
        split = [size for pair in zip(match.counts, match.kernel, strict=True) for size in pair]
        patches = self._view(self.image, self.batch, self.channels, *split)
        counts, kernel = [2 * dim for dim in self.spatial], [1 + 2 * dim for dim in self.spatial]
        order = [0, *counts, *([*kernel, 1] if self.is_last else [1, *kernel])]
        patches = self._dense(self._call(_aten.permute.default, patches, order))
        return self._view(patches, self.batch * math.prod(match.counts), math.prod([self.channels, *match.kernel]))

    def _dense(self, node: Node) -> Node:
        if _are_rows(self.copy.fakes[node]):
            return node
        return self._call(_aten.clone.default, node, memory_format=torch.contiguous_format)

    def _view(self, node: Node, *sizes: Any) -> Node:
        return self._call(_aten.view.default, node, self.copy.size_arguments(self.before, sizes))

    def _call(self, target: Any, *arguments: Any, **keywords: Any) -> Node:
        return self.copy.call(self.before, target, arguments, self.name, keywords)


def _are_rows(fake: torch.Tensor) -> bool:
    """Whether a tensor is contiguous, whatever the strides of dimensions of size 1. Installs no guard."""
    sizes = expressions_of(fake.shape)
    strides = zip(sizes, expressions_of(fake.stride()), contiguous_strides(tuple(sizes)), strict=True)
    return all(size == 1 or stride == expected for size, stride, expected in strides)
