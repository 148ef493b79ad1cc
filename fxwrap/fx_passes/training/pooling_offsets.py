"""Indices of max pooling in the joint graph of training: the forward saves offsets in windows, a byte each."""

from __future__ import annotations

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
    plane. Returns None where that has other users than backwards, or offsets do not fit, or sizes are symbolic.
    """
    rank = 3 if builder.target is _aten.max_pool3d_with_indices_backward.default else 2
    sizes = [item if type(item) is int else None for item in x.meta["val"].shape[-rank:]]
    if None in sizes:
        return None  # divisions of 64-bit integers by a size that is no constant
    options = [expand_to_rank(option, rank) for option in (kernel, stride or kernel, padding, dilation)]
    is_saved = all(user.target is builder.target for user in indices.users)
    is_known = all(type(number) is int for option in options for number in option)
    if not (is_saved and is_known and builder.gathers_pool_gradients):
        return None
    widths, steps, pads, gaps = options
    offsets = [(width - 1) * gap for width, gap in zip(widths, gaps, strict=True)]
    bits = [digit.bit_length() for digit in _largest_digits(offsets, sizes)]
    if sum(bits) > _BYTE_BITS:
        return None
    lengths = _lengths(builder, x, rank)
    fields = [(lengths[dim], sum(bits[dim + 1 :]), count) for dim, count in enumerate(bits) if count]
    first = _first_indices(builder, indices, steps, pads, lengths)
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


def _largest_digits(offsets: Sequence[int], sizes: Sequence[int | None]) -> list[int]:
    """Returns the largest offset along each dimension, of those in a window; None is an unknown size.

    An offset that is not less than the size of its dimension counts as offsets along the dimension before.
    """
    largest: list[int] = []
    carried = 0
    for position, (offset, size) in enumerate(zip(reversed(offsets), reversed(sizes), strict=True), start=1):
        total = offset + carried
        largest.insert(0, total if size is None or position == len(offsets) else min(total, size - 1))
        carried = total // (size or 1)
    return largest


def _lengths(builder: JointGraphBuilder, x: Node, rank: int) -> list[int | Node]:
    """Returns how far adjacent elements along each dimension of a plane are from each other."""
    lengths: list[int | Node] = [1]
    for dim in range(1, rank):
        lengths.insert(0, builder.product(lengths[0], builder.size(x, -dim)))
    return lengths


def _first_indices(
    builder: JointGraphBuilder, indices: Node, steps: Sequence[int], pads: Sequence[int], lengths: Sequence[int | Node]
) -> Node:
    """Returns the index in the plane of each window's first element, before the plane where that is padding."""
    counts = [builder.size(indices, dim - len(steps)) for dim in range(len(steps))]
    first, *others = [_range(builder, *numbers) for numbers in zip(counts, steps, pads, lengths, strict=True)]
    for other in others:
        first = builder.call(_aten.add.Tensor, builder.call(_aten.unsqueeze.default, first, -1), other)
    return first


def _range(builder: JointGraphBuilder, count: int | Node, step: int, pad: int, length: int | Node) -> Node:
    """Returns (k * step - pad) * length for k < count."""
    device = builder.replaced.device
    if isinstance(count, int) and isinstance(length, int):
        numbers = -pad * length, (count * step - pad) * length, step * length
        return builder.call(_aten.arange.start_step, *numbers, device=device)
    starts = builder.call(_aten.mul.Tensor, builder.call(_aten.arange.default, count, device=device), step)
    return builder.call(_aten.mul.Tensor, builder.call(_aten.sub.Tensor, starts, pad), length)


def _packed(builder: JointGraphBuilder, offset: Node, fields: Sequence[tuple[int | Node, int, int]]) -> Node:
    """Returns offsets in a plane as those along dimensions, each in bits of its own.

    A field is a dimension's length of a step, the position of its first bit and the number of its bits.
    """
    packed = None
    for length, shift, _ in fields:
        along = offset
        if length != 1:
            along = builder.call(_aten.div.Tensor_mode, offset, length, rounding_mode="floor")
            offset = builder.call(_aten.remainder.Scalar, offset, length)
        along = builder.call(_aten.mul.Tensor, along, 1 << shift)
        packed = along if packed is None else builder.call(_aten.add.Tensor, packed, along)
    return offset if packed is None else packed
