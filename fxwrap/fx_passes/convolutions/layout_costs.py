"""The cost model of layouts: bytes that are copied, against bytes that libraries reorder around convolutions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from fxwrap.devices import ConvolutionLayoutCosts
from fxwrap.fx_passes.graph_copy import bytes_of, size_hint

_HALF = frozenset({torch.bfloat16, torch.float16})


@dataclass(frozen=True)
class LayoutCost:
    """The cost of the copies of a choice of layouts, and the bytes that libraries need not reorder; sizes by hints.

    Both are in the unit of `devices.ConvolutionLayoutCosts`.
    """

    copied: float = 0.0
    saved: int = 0

    def __add__(self, other: LayoutCost) -> LayoutCost:
        return LayoutCost(self.copied + other.copied, self.saved + other.saved)

    def __sub__(self, other: LayoutCost) -> LayoutCost:
        return LayoutCost(self.copied - other.copied, self.saved - other.saved)

    @property
    def gain(self) -> float:
        """The bytes that libraries need not reorder, less the cost of the copies; the layouts pay if it is positive."""
        return self.saved - self.copied


def copy_cost(tensors: Iterable[torch.Tensor], costs: ConvolutionLayoutCosts) -> LayoutCost:
    """Returns the cost of copying tensors to other layouts."""
    return LayoutCost(copied=costs.copied_byte * sum(map(bytes_of, tensors)))


def convolution_saving(
    images: tuple[torch.Tensor, torch.Tensor],
    weight: torch.Tensor,
    is_frozen: bool,
    stride: Sequence[int],
    groups: int,
    costs: ConvolutionLayoutCosts,
) -> LayoutCost:
    """Returns the bytes that a library need not reorder for a convolution of a channels-last image.

    oneDNN reorders the images of another layout, and weights at each call. In float32, weights of pointwise
    convolutions take longer to reorder for channels-last kernels, but these convolve overlapping windows faster.

    Args:
        images: of shape (batch, channels, height, width): the image, and the result or its gradient.
        weight: of shape (result's channels, channels of a group, height, width).
        is_frozen: whether the library has the weight in its own layout.
        stride: the steps of the windows, by dimension.
        groups: the number of groups.
        costs: the cost model of the device.
    """
    saved = costs.reorder_overhead_bytes + sum(map(bytes_of, images))
    if weight.dtype in _HALF:
        return LayoutCost(saved=saved)
    window = [size_hint(size) for size in weight.shape[2:]]
    if all(size == 1 for size in window):
        saved -= 0 if is_frozen else bytes_of(weight)
    elif groups == 1 and any(size > step for size, step in zip(window, stride, strict=True)):
        results = bytes_of(images[1]) // images[1].element_size()
        terms = bytes_of(weight) // (weight.element_size() * size_hint(weight.shape[0]))
        saved += results * terms // costs.products_per_byte
    return LayoutCost(saved=saved)
