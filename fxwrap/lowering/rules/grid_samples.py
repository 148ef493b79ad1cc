"""Samples of images or volumes at positions that a grid has: bilinear, and the nearest element.

A grid that other operators compute is stored as coordinates in elements, which are not rounded to half precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product as cartesian
from operator import add, and_, mul

import torch

from fxwrap.loop_ir import IndexLike, Scalar, as_index
from fxwrap.lowering.fusion.definitions import Definition, ElementReader, Indices, Stored, Viewed, pointwise
from fxwrap.lowering.rules.registry import Declined, LoweringResult, OperatorCall, lowering_rule

_BILINEAR, _NEAREST = 0, 1
_ZEROS, _BORDER, _REFLECTION = 0, 1, 2
"""The numbers of modes and of paddings in the operators' arguments."""


@lowering_rule("aten.grid_sampler_2d.default", "aten.grid_sampler_3d.default", dtypes="float", equal=("input", "grid"))
def _grid_sampler(
    call: OperatorCall, x: Definition, grid: Definition, mode: int, padding: int, align_corners: bool
) -> LoweringResult:
    if not call.spec.massively_parallel:
        raise Declined("the library computes several channels of a position at once on a CPU")
    if mode not in (_BILINEAR, _NEAREST):
        raise Declined("a bicubic sample is a sum of sixteen elements, each with a mask")
    return _GridSample(call, x, grid, mode, padding, align_corners).result()


@dataclass(frozen=True)
class _GridSample:
    """A sample of `x`, of sizes [batch, channels, ...], at the coordinates of `grid`, [batch, ..., dimensions].

    Coordinates are from -1 to 1 and the last dimension is first. `align_corners` is whether these are the middles of
    the outer elements, or their outer edges.
    """

    call: OperatorCall
    x: Definition
    grid: Definition
    mode: int
    padding: int
    align_corners: bool

    def result(self) -> Definition:
        """Returns the samples."""
        rank = len(self.x.sizes) - 2
        coordinates = pointwise(self.grid.sizes, self.grid.compute_dtype, self.call.device, self._coordinate)
        if not isinstance(self.grid, Stored | Viewed):
            self.call.in_memory.add(coordinates)  # instead of the grid

        def body(reader: ElementReader, indices: Indices) -> Scalar:
            batch, channel, *place = indices
            at = [reader.load(coordinates, [batch, *place, number]) for number in reversed(range(rank))]
            if self.mode == _NEAREST:
                return self._element(reader, [batch, channel], [item.apply("round") for item in at])
            low = [item.apply("floor") for item in at]
            high = [item + 1.0 for item in low]
            terms = []
            for corner in cartesian((False, True), repeat=rank):
                places = [high[n] if is_high else low[n] for n, is_high in enumerate(corner)]
                parts = [at[n] - low[n] if is_high else high[n] - at[n] for n, is_high in enumerate(corner)]
                terms.append(self._element(reader, [batch, channel], places, reduce(mul, parts)))
            return reduce(add, terms)

        return self.call.define(body)

    def _coordinate(self, reader: ElementReader, indices: Indices) -> Scalar:
        """Returns a coordinate of the grid in elements, within bounds unless these are padded with zeros."""
        x, size = reader.load(self.grid, indices) + 1.0, self._size(reader, indices[-1])
        x = x * ((size - 1.0) * 0.5) if self.align_corners else (x * size - 1.0) * 0.5
        if self.padding == _REFLECTION:
            x = self._reflected(x, size)
        if self.padding == _ZEROS:
            return x
        x = (x > 0.0).where(x, 0.0)  # also for NaN, as in eager mode
        return (x < size - 1.0).where(x, size - 1.0)

    def _size(self, reader: ElementReader, number: IndexLike) -> Scalar:
        """Returns the size of the dimension of a coordinate."""
        *others, size = [reader.number(item, self.grid.compute_dtype) for item in self.x.sizes[2:]]
        for position, other in enumerate(reversed(others), 1):
            if other.position != size.position:
                size = reader.body.index(as_index(number)).equals(position).where(other, size)
        return size

    def _reflected(self, x: Scalar, size: Scalar) -> Scalar:
        """Returns a coordinate reflected at the middles of the outer elements, or at their outer edges."""
        start, span = (0.0, size - 1.0) if self.align_corners else (-0.5, size)
        distance = abs(x - start)
        flips = (distance / span).apply("floor")
        rest = distance - flips * span
        is_even = (flips * 0.5).apply("floor").equals(flips * 0.5)
        reflected = is_even.where(rest, span - rest) + start
        return (span > 0.0).where(reflected, 0.0)

    def _element(
        self, reader: ElementReader, outer: Sequence[IndexLike], places: Sequence[Scalar], weight: Scalar | None = None
    ) -> Scalar:
        """Returns an element of the image times a weight; 0 beyond its bounds and where a coordinate is NaN."""
        sizes, dtype = self.x.sizes[2:], self.grid.compute_dtype
        bounds = [(at >= 0.0) & (at < reader.number(size, dtype)) for at, size in zip(places, sizes, strict=True)]
        is_inside = reduce(and_, bounds)
        at = [reader.body.indirect_index(item.to(torch.int64), size, is_inside) for item, size in zip(places, sizes)]

        def inside() -> Scalar:
            element = reader.load(self.x, [*outer, *at])
            return element if weight is None else element * weight

        return reader.body.where(is_inside, inside, 0)
