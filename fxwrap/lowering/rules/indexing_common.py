"""Helpers of rules that move elements: comparisons of indices with bounds, masks, and checked indirect indices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import sympy
import torch

from fxwrap.loop_ir import (
    Atom,
    Compute,
    Constant,
    Index,
    IndexLike,
    IndexValue,
    Scalar,
    SizeAtom,
    as_index,
    value_range,
)
from fxwrap.lowering.fusion.definitions import ElementReader, Indices
from fxwrap.lowering.rules.registry import Declined, OperatorCall
from fxwrap.symbolic import Size, depends_on_data, maximum, product, total

Condition: TypeAlias = "bool | Scalar"
"""A condition that is known when the kernel is built, or a bool scalar of the kernel."""

# --- dimensions and bounds of arguments ------------------------------------------------------------------------------


def canonicalize_dim(dim: int, rank: int) -> int:
    """Returns a dimension counted from the front; a tensor of rank 0 has a dimension 0 of size 1."""
    return dim % max(rank, 1)


def replace_index(indices: Indices, dim: int, index: IndexLike) -> list[IndexLike]:
    """Returns the indices with the one at a dimension replaced."""
    return [*indices[:dim], index, *indices[dim + 1 :]]


def broadcast_sizes(shapes: Sequence[Sequence[Size]]) -> tuple[Size, ...]:
    """Returns the sizes that shapes broadcast to."""
    rank = max((len(shape) for shape in shapes), default=0)
    result: list[Size] = [1] * rank
    for shape in shapes:
        for dim, size in enumerate(shape, rank - len(shape)):
            result[dim] = size if result[dim] == 1 else result[dim]
    return tuple(result)


def resolve_index(index: Size, size: Size) -> Size:
    """Returns an index from -size to size - 1 counted from the front."""
    if not isinstance(index, int):
        raise Declined("the sign of a symbolic index is not known")
    return index if index >= 0 else total((size, index))


def resolve_checked_index(call: OperatorCall, index: Size, size: Size) -> Size:
    """Returns an index counted from the front. Declines one that may be out of bounds, for which eager raises."""
    position = resolve_index(index, size)
    if isinstance(index, int) and call.may_be_zero(total((size, -(index if index >= 0 else -index - 1)))):
        raise Declined("the dimension may have no such element, for which eager raises")
    return position


def check_region(call: OperatorCall, length: Size, source: Size) -> None:
    """Declines a source whose size may differ from the region's, for which eager raises.

    Guards of tracing compare the sizes of inputs, but not those that a run brings.
    """
    if depends_on_data(total((length, product((source, -1))))):
        raise Declined(f"the source may not fit into a dimension of size {call.sizes}, for which eager raises")


def resolve_slice_start(start: Size | None, end: Size | None, step: Size, size: Size, length: Size) -> Size:
    """Returns the first index of a slice of a known length, with Python's rules."""
    if not isinstance(step, int):
        raise Declined("its step is symbolic")
    if start is None:
        return 0
    if isinstance(start, int) and isinstance(size, int):
        return min(max(start + size if start < 0 else start, 0), size)
    if isinstance(start, int) and start >= 0:
        return start  # a slice past the end reads nothing
    if step == 1 and (end is None or end == size or (isinstance(end, int) and end >= 2**62)):
        return total((size, -length))
    if isinstance(start, int):
        return maximum(0, total((size, start)))
    raise Declined("the sign of a symbolic start is not known")


# --- conditions on indices -------------------------------------------------------------------------------------------


def index_less(reader: ElementReader, index: IndexLike, limit: IndexLike) -> Condition:
    """Returns whether an index is less than a limit, as a Python bool where the ranges of both decide."""
    index, limit = as_index(index), as_index(limit)
    if statically_known_nonnegative(limit - index - 1):
        return True
    if statically_known_nonnegative(index - limit):
        return False
    return reader.body.index(index) < reader.body.index(limit)


def statically_known_nonnegative(index: Index) -> bool:
    """Whether an index is at least 0 in every iteration, even where sizes in it are 0.

    Sizes of axes are at least 1 in an iteration. Other sizes may be 0, and unbacked symbols may be negative.
    """
    limits = index.bounds()
    return limits is not None and all(
        number > 0 and all(_is_size(atom) for atom in monomial) for monomial, number in limits[0].terms
    )


def _is_size(atom: Atom) -> bool:
    expression = atom.expression if isinstance(atom, SizeAtom) else None
    return isinstance(expression, sympy.Symbol) and str(expression).startswith("s")


def index_greater_equal(reader: ElementReader, index: IndexLike, limit: IndexLike) -> Condition:
    """Returns whether an index is not less than a limit."""
    less = index_less(reader, index, limit)
    if isinstance(less, bool):
        return not less
    return reader.body.index(as_index(index)) >= reader.body.index(as_index(limit))


def index_in_range(reader: ElementReader, index: IndexLike, size: IndexLike) -> Condition:
    """Returns whether an index is from 0 to size - 1."""
    return all_of(index_greater_equal(reader, index, 0), index_less(reader, index, size))


def index_equal(reader: ElementReader, left: IndexLike, right: IndexLike) -> Condition:
    """Returns whether two indices are equal."""
    difference = as_index(left) - as_index(right)
    if difference.constant is not None:
        return difference.constant == 0
    if (difference - 1).is_nonnegative() or (-difference - 1).is_nonnegative():
        return False
    return reader.body.index(as_index(left)).equals(reader.body.index(as_index(right)))


def all_of(*conditions: Condition) -> Condition:
    """Returns whether all conditions hold."""
    result: Condition = True
    for condition in conditions:
        if condition is False or result is False:
            return False
        if isinstance(condition, Scalar):
            result = condition if result is True else result & condition
    return result


def masked_where(
    reader: ElementReader, condition: Condition, inside: Callable[[], Scalar], otherwise: Callable[[], Scalar]
) -> Scalar:
    """Returns `inside()`, with its loads masked by the condition, where it holds, and `otherwise()` elsewhere."""
    if condition is True:
        return inside()
    if condition is False:
        return otherwise()
    assert isinstance(condition, Scalar)
    with reader.body.masked(condition):
        value = inside()
    return condition.where(value, otherwise().to(value.dtype))


def masked_sum(
    reader: ElementReader, terms: Iterable[tuple[Condition, Callable[[], Scalar]]], dtype: torch.dtype
) -> Scalar:
    """Returns the sum of the terms whose condition holds; there is at least one term. It is computed pairwise."""
    items = [*terms]

    def total(start: int, end: int) -> Scalar:
        middle = (start + end) // 2
        if end - start == 1:
            return masked_where(reader, *items[start], lambda: reader.number(0, dtype))
        return total(start, middle) + total(middle, end)

    return total(0, len(items))


# --- indirect indices ------------------------------------------------------------------------------------------------


def checked_indirect_index(
    reader: ElementReader,
    position: Scalar,
    size: Size,
    *,
    wrap_negative: bool = False,
    error: str = "index",
    writes: bool = False,
) -> Index:
    """Returns a position read from a tensor as an index from 0 to `size` - 1.

    With `wrap_negative`, -1 is the last element. An index out of bounds makes the launch fail as eager does, with the
    class of error that `error` names ("index" or "runtime"). The kernel continues with element 0, or without a load
    where the tensor may be empty, so that it never accesses memory outside the tensor. If the kernel `writes` the
    element, it continues without a store: the tensor may be an input, which keeps its content. A position that is known
    to be in bounds is not checked; an affine one (an `arange`) stays an affine index.
    """
    known = affine_index(position)
    if known is not None:
        for candidate in (known, known + size) if wrap_negative else (known,):
            if statically_known_nonnegative(candidate) and statically_known_nonnegative(as_index(size) - 1 - candidate):
                return candidate
    low, high = value_range(reader.body.operations, position.position)
    position, limit = position.to(torch.int64), reader.body.index(size)
    if wrap_negative and low < 0:
        position = (position < 0).where(position + limit, position)
    if isinstance(size, int) and (-size if wrap_negative else 0) <= low and high < size:
        return reader.body.indirect_index(position, size)
    inside = (position >= 0) & (position < limit)
    reader.body.device_assert(inside, f"an index is out of bounds for a dimension of size {size}", error)
    guard = None if isinstance(size, int) and not writes else inside
    return reader.body.indirect_index(inside.where(position, 0), size, guard)


def unchecked_indirect_index(reader: ElementReader, position: Scalar, size: Size) -> Index:
    """Returns a position that a formula bounds to 0 to `size` - 1 as an index, unchecked."""
    known = affine_index(position)
    return reader.body.indirect_index(position, size) if known is None else known


def affine_index(value: Scalar) -> Index | None:
    """Returns the index expression that an integer scalar equals, or None when it has none."""
    operation = value.body.operations[value.position]
    match operation:
        case IndexValue():
            return operation.index
        case Constant() if value.dtype is torch.int64:
            return as_index(int(operation.value))
        case Compute(name="add" | "sub" | "mul") if value.dtype is torch.int64:
            left, right = [affine_index(Scalar(value.body, item, value.dtype)) for item in operation.operands]
            if left is None or right is None:
                return None
            return {"add": Index.__add__, "sub": Index.__sub__, "mul": Index.__mul__}[operation.name](left, right)
        case Compute(name="cast") if value.dtype in (torch.int32, torch.int64):
            return _cast_index(value, operation.operands[0])
    return None


def _cast_index(value: Scalar, source: int) -> Index | None:
    """Returns the index that a cast from an integer equals, if the cast changes no value."""
    operation = value.body.operations[source]
    dtype = getattr(operation, "dtype", None)
    if dtype not in (torch.int32, torch.int64):
        return None
    index = affine_index(Scalar(value.body, source, dtype))
    limits = None if index is None else index.bounds()
    if limits is None or (value.dtype is torch.int32 and not _fits_int32(limits)):
        return None
    return index


def _fits_int32(limits: tuple[Index, Index]) -> bool:
    low, high = limits[0].constant, limits[1].constant
    return low is not None and high is not None and low >= -(2**31) and high < 2**31
