"""Helpers of reduction rules: the reduced dimensions, and the results of a reduction as results of the call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fxwrap.loop_ir import POSITION_RESULTS, REDUCTIONS, Scalar, compute_dtype
from fxwrap.lowering.fusion.definitions import (
    Definition,
    ElementReader,
    Indices,
    Pointwise,
    Reduced,
    merge_indices,
    reduction,
    reduction_dims,
)
from fxwrap.lowering.rules.registry import ElementBody, OperatorCall, ReductionBody
from fxwrap.symbolic import Size, product


@dataclass(frozen=True)
class ReductionShape:
    """An operand's sizes and the reduced dimensions. A tensor of rank 0 is one element."""

    sizes: tuple[Size, ...]
    dims: tuple[int, ...]

    @property
    def parallel(self) -> tuple[Size, ...]:
        """The sizes of the dimensions that are not reduced."""
        return tuple([size for dim, size in enumerate(self.sizes) if dim not in self.dims])

    @property
    def reduced(self) -> tuple[Size, ...]:
        """The sizes of the reduced dimensions, (1,) for none."""
        return tuple([self.sizes[dim] for dim in self.dims]) or (1,)

    @property
    def count(self) -> Size:
        """The number of elements that each reduction combines."""
        return product(self.reduced)

    def operand_indices(self, parallel: Indices, reduced: Indices) -> Indices:
        """Returns the operand's indices, given its parallel and its reduced indices."""
        return merge_indices(len(self.sizes), self.dims, parallel, reduced)

    def outer_indices(self, indices: Indices) -> Indices:
        """Returns the parallel indices among an operand's."""
        return [index for dim, index in enumerate(indices) if dim not in self.dims]

    def load_element(self, operand: Definition) -> ReductionBody:
        """Returns a reduction body that loads the operand's element."""
        return lambda reader, parallel, reduced: reader.load(operand, self.operand_indices(parallel, reduced))


def reduction_shape(operand: Definition, dims: Sequence[int] | int | None) -> ReductionShape:
    """Returns the shape of a reduction over dimensions; None or an empty list means all."""
    return ReductionShape(operand.sizes, reduction_dims(len(operand.sizes), dims))


def build_reduction(
    call: OperatorCall, kind: str, rows: ReductionShape, dtype: torch.dtype, body: ReductionBody
) -> tuple[Reduced, ...]:
    """Returns the results of a reduction over rows: in the compute dtype of `dtype`, positions in int64."""
    computes = compute_dtype(dtype)
    parts = range(REDUCTIONS[kind].results)
    types = [torch.int64 if (kind, part) in POSITION_RESULTS else computes for part in parts]
    return reduction(kind, rows.parallel, rows.reduced, call.device, dtype, body, types)


def reduced_result(call: OperatorCall, fake: torch.Tensor, rows: ReductionShape, part: Reduced) -> Definition:
    """Returns a result of a reduction as a result of the call, in its dtype and with kept dimensions of size 1."""
    if fake.dim() == len(rows.parallel):
        return Reduced(part.sizes, fake.dtype, call.device, part.source, part.part)
    return outer_result(call, fake, rows, lambda reader, row: reader.load(part, row))


def outer_result(call: OperatorCall, fake: torch.Tensor, rows: ReductionShape, body: ElementBody) -> Pointwise:
    """Returns a result of the call that `body(reader, row)` computes for each row; reduced dimensions may be kept."""
    keeps_dims = fake.dim() == len(rows.sizes)

    def element(reader: ElementReader, indices: Indices) -> Scalar:
        return body(reader, rows.outer_indices(indices) if keeps_dims else indices)

    return call.define(element, fake)
