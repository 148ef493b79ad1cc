"""Convolutions of patches: the kernel is as large as the stride, so that each element of the image is read once.

Patch embeddings and the downsampling of some networks are such. Each is a matmul of patches, which one kernel copies
into rows: a GEMM needs no workspace, and its result is the channels-last image that networks of patches read as rows.
"""

from __future__ import annotations

import math
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
    """

    image: Node
    weight: Node
    bias: Node | None
    kernel: tuple[int, ...]
    counts: tuple[int, ...]


def patch_convolutions(
    nodes: Collection[Node], fakes: NodeValues, specs: Mapping[str, DeviceSpec], preserved: Collection[str]
) -> dict[Node, PatchConvolution]:
    """Returns the convolutions that are matmuls of patches, where that is faster on their device.

    That is so for wide kernels, whose rows are neighbours in memory, and for images of one patch, which are no copy.
    """
    matches = {}
    for node in nodes:
        if node.target is _aten.convolution.default and str(node.target) not in preserved:
            match = _match(node, fakes, specs)
            if match is not None:
                matches[node] = match
    return matches


def _match(node: Node, fakes: NodeValues, specs: Mapping[str, DeviceSpec]) -> PatchConvolution | None:
    arguments: Any = node.args
    image, weight, bias, stride, padding, dilation, transposed, _, groups = arguments
    fake, filters = fakes.get(image), fakes.get(weight)
    if not isinstance(fake, FakeTensor) or not isinstance(filters, FakeTensor) or transposed or groups != 1:
        return None
    spec = specs.get(fake.device.type)
    least = None if spec is None else dict(spec.patch_matmul_widths).get(fake.dtype)
    sizes = [*fake.shape[1:], *filters.shape]
    if least is None or fake.ndim != filters.ndim or not all(type(size) is int for size in sizes):
        return None
    kernel = tuple(filters.shape[2:])
    counts = tuple([size // step for size, step in zip(fake.shape[2:], kernel, strict=True)])
    is_filled = [count * step for count, step in zip(counts, kernel, strict=True)] == [*fake.shape[2:]]
    is_patch = tuple(stride) == kernel and not any(padding) and all(step == 1 for step in dilation) and is_filled
    if not is_patch or math.prod(kernel) == 1 or (kernel[-1] < least and math.prod(counts) > 1):
        return None
    return PatchConvolution(image, weight, bias, kernel, counts)


def write_patch_matmul(copy: GraphCopy, before: Node, match: PatchConvolution, name: str) -> Node:
    """Writes a matmul of patches before a node of the copy; returns its result as a channels-last image.

    Columns of a patch are in the order of the image in memory: channels first, or last.
    """
    image, weight = copy.node_map[match.image], copy.node_map[match.weight]
    fake, spatial = copy.fakes[image], len(match.kernel)
    batch, outputs = fake.shape[0], copy.fakes[weight].shape[0]
    dims = range(spatial)

    def call(target: Any, *arguments: Any, **keywords: Any) -> Node:
        return copy.call(before, target, arguments, name, keywords)

    def view(node: Node, *sizes: Any) -> Node:
        return call(_aten.view.default, node, copy.size_arguments(before, sizes))

    split = [size for pair in zip(match.counts, match.kernel, strict=True) for size in pair]
    patches = view(image, *fake.shape[:2], *split)
    counts, kernel = [2 + 2 * dim for dim in dims], [3 + 2 * dim for dim in dims]
    is_last = fake.stride(1) == 1 and fake.shape[1] > 1
    patches = call(_aten.permute.default, patches, [0, *counts, *([*kernel, 1] if is_last else [1, *kernel])])
    if not _are_rows(copy.fakes[patches]):
        patches = call(_aten.clone.default, patches, memory_format=torch.contiguous_format)
    terms = math.prod([fake.shape[1], *match.kernel])
    rows = view(patches, batch * math.prod(match.counts), terms)
    if is_last:
        weight = call(_aten.permute.default, weight, [0, *[2 + dim for dim in dims], 1])
    if not _are_rows(copy.fakes[weight]):
        weight = call(_aten.clone.default, weight, memory_format=torch.contiguous_format)
    columns = call(_aten.t.default, view(weight, outputs, terms))
    if match.bias is None:
        result = call(_aten.mm.default, rows, columns)
    else:
        result = call(_aten.addmm.default, copy.node_map[match.bias], rows, columns)
    result = view(result, batch, *match.counts, outputs)
    return call(_aten.permute.default, result, [0, spatial + 1, *[1 + dim for dim in dims]])


def _are_rows(fake: torch.Tensor) -> bool:
    """Whether a tensor is contiguous, whatever the strides of dimensions of size 1. Installs no guard."""
    sizes = expressions_of(fake.shape)
    strides = zip(sizes, expressions_of(fake.stride()), contiguous_strides(tuple(sizes)), strict=True)
    return all(size == 1 or stride == expected for size, stride, expected in strides)
