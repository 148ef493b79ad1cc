"""Maxima of large windows as maxima of their rows, then of columns of these: 7 + 7 comparisons instead of 7 * 7."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fxwrap.fx_passes.effects import expand_to_rank
from fxwrap.fx_passes.graph_copy import GraphCopy
from fxwrap.fx_passes.prepared_graph import FxPassContext, NodeValues, PreparedGraph
from fxwrap.torch_compat import FakeTensor, OpOverload

_aten = torch.ops.aten
_RANKS: Mapping[OpOverload, int] = {_aten.max_pool2d_with_indices.default: 2, _aten.max_pool3d_with_indices.default: 3}

MAX_WINDOW = 27
"""The most elements of windows that kernels compare at once."""


@dataclass(frozen=True)
class _Windows:
    """The window, stride, padding and dilation of each dimension, and whether windows may end beyond the padding."""

    dimensions: Sequence[tuple[int, int, int, int]]
    ceil_mode: bool

    def are_separated(self) -> bool:
        """Whether windows are too large for a kernel, or twice as many elements are compared as along each dimension.

        The maxima along a dimension are computed for all elements of those before it, of which strides skip some.
        """
        widths, strides = [item[0] for item in self.dimensions], [item[1] for item in self.dimensions]
        compared = sum(width * math.prod(strides[:place]) for place, width in enumerate(widths))
        is_large = math.prod(widths) > MAX_WINDOW or 2 * compared <= math.prod(widths)
        return is_large and sum(width > 1 for width in widths) > 1

    def arguments(self, dimension: int) -> list[object]:
        """Returns the arguments of a pooling along one dimension."""
        places = range(len(self.dimensions))
        others = (1, 1, 0, 1)
        chosen = [self.dimensions[place] if place == dimension else others for place in places]
        return [*[list(options) for options in zip(*chosen, strict=True)], self.ceil_mode]


def separate_pools(graph: PreparedGraph, context: FxPassContext) -> PreparedGraph:
    """Returns a graph that takes the maxima of large windows, whose positions nothing reads, along each dimension.

    Not on massively parallel devices.
    """
    windows = {node: item for node in graph.nodes if (item := _windows(node, graph.fakes, context)) is not None}
    if not windows:
        return graph
    copy = GraphCopy(graph)
    for node, item in windows.items():
        before, name = copy.node_map[node], f"{node.name}_separate"
        result = before.args[0]
        for dimension in reversed(range(len(item.dimensions))):
            if item.dimensions[dimension][0] > 1:
                pool = copy.call(before, node.target, (result, *item.arguments(dimension)), name)
                result = copy.element(before, pool, 0, name)
        for user in node.users:
            if user.users:
                copy.substitute(user, result, "fused")  # type: ignore[arg-type]
            else:
                copy.erase(user)
        copy.erase(node)
    return copy.finish()


def _windows(node: Node, fakes: NodeValues, context: FxPassContext) -> _Windows | None:
    """Returns the windows of a pooling that is separated, else None."""
    rank = _RANKS.get(node.target) if isinstance(node.target, OpOverload) else None
    if rank is None or str(node.target) in context.extern_operators or str(node.target) not in context.fused_operators:
        return None
    fake = fakes.get(node.args[0])  # type: ignore[arg-type]
    spec = context.options.device_specs().get(fake.device.type) if isinstance(fake, FakeTensor) else None
    if spec is None or spec.massively_parallel:
        return None
    read = [user for user in node.users if user.target is not operator.getitem or user.users]
    if not read or any(user.target is not operator.getitem or user.args[1] != 0 for user in read):
        return None
    arguments: list[Any] = [*node.args[1:], *[[], 0, 1, False][len(node.args) - 2 :]]
    window, stride, padding, dilation, ceil_mode = arguments
    options = [expand_to_rank(option, rank) for option in (window, stride or window, padding, dilation)]
    if any(type(number) is not int for option in options for number in option):
        return None
    dimensions = [(size, step, pad, gap) for size, step, pad, gap in zip(*options, strict=True)]
    windows = _Windows(dimensions, bool(ceil_mode))
    return windows if windows.are_separated() else None
