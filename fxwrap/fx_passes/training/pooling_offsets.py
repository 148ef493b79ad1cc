"""Indices of max pooling in the joint graph of training: the forward saves offsets in windows, a byte each."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.fx import Node

from fxwrap.fx_passes.effects import expand_to_rank
from fxwrap.fx_passes.training.joint_graph_builder import JointGraphBuilder

_aten = torch.ops.aten
_BYTE_BITS = 8


def save_window_offsets(
    builder: JointGraphBuilder, gradient: Node, x: Node, kernel: Sequence[int], stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], ceil_mode: bool, indices: Node,
) -> Node | None:  # fmt: skip
    """Returns the backward of a max pooling with indices that are computed from offsets within windows.

    An offset along each dimension has bits of its own in a byte, which the forward saves instead of an index in the
    plane. Returns None where that has other users than backwards, offsets do not fit, or sizes are symbolic: integers
    of 64 bits would be divided by a size that is no constant.
    """
    rank = 3 if builder.target is _aten.max_pool3d_with_indices_backward.default else 2
    sizes, counts = x.meta["val"].shape[-rank:], gradient.meta["val"].shape[-rank:]
    options = [expand_to_rank(option, rank) for option in (kernel, stride or kernel, padding, dilation)]
    numbers = (*sizes, *counts, *[number for option in options for number in option])
    is_saved = all(user.target is builder.target for user in indices.users)
    if not is_saved or not builder.gathers_pool_gradients or not all(type(number) is int for number in numbers):
        return None
    widths, steps, pads, gaps = options
    offsets = [(width - 1) * gap for width, gap in zip(widths, gaps, strict=True)]
    bits = [digit.bit_length() for digit in _largest_digits(offsets, sizes)]
    if sum(bits) > _BYTE_BITS:
        return None
    lengths = [math.prod(sizes[dim + 1 :]) for dim in range(rank)]  # of a step along each dimension
    fields = [(lengths[dim], sum(bits[dim + 1 :]), count) for dim, count in enumerate(bits) if count]
    windows = zip(counts, steps, pads, lengths, strict=True)
    starts = [[-pad * length, (count * step - pad) * length, step * length] for count, step, pad, length in windows]
    first = _grid(builder, starts, x.meta["val"].device)
    packed = _packed(builder, builder.call(_aten.sub.Tensor, indices, first), fields)
    packed = builder.cast(builder.cast(packed, torch.uint8), torch.int64)
    restored = first
    for length, shift, count in fields:
        along = builder.call(_aten.bitwise_right_shift.Tensor_Scalar, packed, shift) if shift else packed
        if shift + count < sum(bits):
            along = builder.call(_aten.bitwise_and.Scalar, along, (1 << count) - 1)
        restored = builder.call(_aten.add.Tensor, restored, builder.call(_aten.mul.Tensor, along, length))
    arguments = gradient, x, kernel, stride, padding, dilation, ceil_mode, restored
    return builder.call(builder.target, *arguments)


def _largest_digits(offsets: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Returns the largest offset along each dimension, of those in a window.

    An offset that is not less than the size of its dimension counts as offsets along the dimension before.
    """
    largest: list[int] = []
    carried = 0
    for position, (offset, size) in enumerate(zip(reversed(offsets), reversed(sizes), strict=True), start=1):
        total = offset + carried
        largest.insert(0, total if position == len(offsets) else min(total, size - 1))
        carried = total // size
    return largest


def _grid(builder: JointGraphBuilder, ranges: Sequence[Sequence[int]], device: torch.device) -> Node:
    """Returns the sums of numbers of ranges (start, end, step), with a dimension for each range."""
    first, *others = [builder.call(_aten.arange.start_step, *numbers, device=device) for numbers in ranges]
    for other in others:
        first = builder.call(_aten.add.Tensor, builder.call(_aten.unsqueeze.default, first, -1), other)
    return first


def _packed(builder: JointGraphBuilder, offset: Node, fields: Sequence[tuple[int, int, int]]) -> Node:
    """Returns offsets in a plane as those along dimensions, each in bits of its own.

    A field is a dimension's length of a step, the position of its first bit and the number of its bits.
    """
    packed = None
    for length, shift, _ in fields:
        along = offset
        if length > 1:
            along = builder.call(_aten.div.Tensor_mode, offset, length, rounding_mode="floor")
            offset = builder.call(_aten.remainder.Scalar, offset, length)
        along = builder.call(_aten.mul.Tensor, along, 1 << shift)
        packed = along if packed is None else builder.call(_aten.add.Tensor, packed, along)
    return offset if packed is None else packed
