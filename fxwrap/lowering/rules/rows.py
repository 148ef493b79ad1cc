"""What the rules of reductions share: the dimensions they run over, their results, and the dtypes they refuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch

from fxwrap.loop_ir import POSITION_RESULTS, REDUCTIONS, Scalar, compute_dtype
from fxwrap.lowering.definitions import (
    Definition,
    Indices,
    Pointwise,
    Reader,
    Reduced,
    joined_indices,
    pointwise,
    reduction,
    reduction_dims,
)
from fxwrap.lowering.rules.positions import unsupported
from fxwrap.lowering.rules.registry import Call, Result, rule
from fxwrap.symbolic import Size, product
from fxwrap.torch_compat import operator_overload


def kernel_rule(*names: str) -> Callable[[Callable[..., Result | str]], Callable[..., Result | str]]:
    """Registers a rule as `rule` does; it is given calls on tensors that kernels can hold, arguments by position."""

    def register(function: Callable[..., Result | str]) -> Callable[..., Result | str]:
        @wraps(function)
        def checked(call: Call, *arguments: Any, **keywords: Any) -> Result | str:
            return unsupported(call) or function(call, *_by_position(call, arguments, keywords), **keywords)

        rule(*names)(checked)
        return function

    return register


def _by_position(call: Call, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> list[Any]:
    """Returns the positional arguments, with those that were given by name taken out of the keywords.

    Rules name arguments as suits them: the schema's `self`, `input` and `dim` need not be theirs.
    """
    found = list(arguments)
    positional = [item for item in operator_overload(call.name)._schema.arguments if not item.kwarg_only]
    while any(item.name in keywords for item in positional[len(found) :]):
        item = positional[len(found)]
        found.append(keywords.pop(item.name, item.default_value))
    return found


@dataclass(frozen=True)
class Rows:
    """An operand's sizes, and the dimensions that a reduction runs over. A tensor without dimensions is one element."""

    sizes: tuple[Size, ...]
    dims: tuple[int, ...]

    @property
    def kept(self) -> tuple[Size, ...]:
        """The sizes of the dimensions that stay."""
        return tuple([size for dim, size in enumerate(self.sizes) if dim not in self.dims])

    @property
    def reduced(self) -> tuple[Size, ...]:
        """The sizes of the dimensions that are reduced, at least one of them."""
        return tuple([self.sizes[dim] for dim in self.dims]) or (1,)

    @property
    def count(self) -> Size:
        """How many elements each reduction combines."""
        return product(self.reduced)

    def joined(self, kept: Indices, reduced: Indices) -> Indices:
        """Returns the operand's indices, given those of kept and of reduced dimensions."""
        return joined_indices(len(self.sizes), self.dims, kept, reduced)

    def row(self, indices: Indices) -> Indices:
        """Returns the indices of the kept dimensions among an operand's, or among those of a result that keeps all."""
        return [index for dim, index in enumerate(indices) if dim not in self.dims]

    def element(self, operand: Definition) -> Callable[[Reader, Indices, Indices], Scalar]:
        """Returns a reduction's body that is the operand's element."""
        return lambda reader, kept, reduced: reader.load(operand, self.joined(kept, reduced))


def rows_of(operand: Definition, dims: Sequence[int] | int | None) -> Rows:
    """Returns the rows of an operand along dimensions; none given means all."""
    return Rows(operand.sizes, reduction_dims(len(operand.sizes), dims))


def combine(
    call: Call, kind: str, rows: Rows, dtype: torch.dtype, body: Callable[[Reader, Indices, Indices], Scalar]
) -> tuple[Reduced, ...]:
    """Returns the parts of a reduction over rows, in the dtype that arithmetic on `dtype` happens in, or int64."""
    computes = compute_dtype(dtype)
    parts = range(REDUCTIONS[kind].results)
    types = [torch.int64 if (kind, part) in POSITION_RESULTS else computes for part in parts]
    return reduction(kind, rows.kept, rows.reduced, call.device, dtype, body, types)


def reduced_result(call: Call, fake: torch.Tensor, rows: Rows, part: Reduced) -> Definition:
    """Returns a part of a reduction as a result of the call: in its dtype, and with its sizes of one, if any."""
    if fake.dim() == len(rows.kept):
        return Reduced(part.sizes, fake.dtype, call.device, part.source, part.part)
    return row_result(call, fake, rows, lambda reader, row: reader.load(part, row))


def row_result(call: Call, fake: torch.Tensor, rows: Rows, body: Callable[[Reader, Indices], Scalar]) -> Pointwise:
    """Returns a result of the call that `body(reader, row)` computes; its reduced dimensions are gone or of size 1."""
    whole = fake.dim() == len(rows.sizes)

    def spread(reader: Reader, indices: Indices) -> Scalar:
        return body(reader, rows.row(indices) if whole else indices)

    return pointwise(call.sizes_of(fake), fake.dtype, call.device, spread)
