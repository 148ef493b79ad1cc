"""What rules that move elements share: positions compared with bounds, elements chosen, computed positions checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import sympy
import torch

from fxwrap.loop_ir import (
    KERNEL_DTYPES,
    Atom,
    Compute,
    Constant,
    Index,
    IndexLike,
    IndexValue,
    Scalar,
    SizeAtom,
    as_index,
)
from fxwrap.lowering.definitions import Definition, Indices, Reader
from fxwrap.lowering.rules.registry import Call
from fxwrap.symbolic import Size, maximum, total

Condition: TypeAlias = "bool | Scalar"
"""What is known when the kernel is built, or computed in it, a bool."""


def unsupported(call: Call) -> str | None:
    """Returns why kernels cannot hold a tensor that a call takes or gives, or None."""
    fakes = call.fake if isinstance(call.fake, list | tuple) else (call.fake,)
    for fake in fakes:
        if isinstance(fake, torch.Tensor) and fake.layout is not torch.strided:
            return f"its result has the layout {fake.layout}"
    for item in (*fakes, *_leaves(call.arguments), *_leaves(tuple(call.keywords.values()))):
        if isinstance(item, Definition | torch.Tensor) and item.dtype not in KERNEL_DTYPES:
            return f"kernels have no {item.dtype}"
    return None


def _leaves(arguments: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for item in arguments:
        found.extend(item if isinstance(item, list | tuple) else (item,))
    return found


# --- dimensions and bounds of arguments ------------------------------------------------------------------------------


def dimension(dim: int, rank: int) -> int:
    """Returns a dimension counted from the front; a tensor without dimensions has a dimension 0 of size 1."""
    return dim % max(rank, 1)


def replaced(indices: Indices, dim: int, index: IndexLike) -> list[IndexLike]:
    """Returns the indices with another one at a dimension."""
    return [*indices[:dim], index, *indices[dim + 1 :]]


def known_position(index: Any, size: Size) -> Size | str:
    """Returns where a number from -size to size - 1 points, or why that is not known."""
    if not isinstance(index, int):
        return "the sign of a symbolic position is not known"
    return index if index >= 0 else total((size, index))


def slice_start(start: Any, end: Any, step: Any, size: Size, length: Size) -> Size | str:
    """Returns where a slice of a known length begins, with Python's rules, or why that is not known."""
    if not isinstance(step, int):
        return "its step is symbolic"
    if start is None:
        return 0
    if isinstance(start, int) and isinstance(size, int):
        return min(max(start + size if start < 0 else start, 0), size)
    if isinstance(start, int) and start >= 0:
        return start  # past the end, nothing is read
    if step == 1 and (end is None or end == size or (isinstance(end, int) and end >= 2**62)):
        return total((size, -length))
    if isinstance(start, int):
        return maximum(0, total((size, start)))
    return "the sign of a symbolic start is not known"


# --- conditions on positions -----------------------------------------------------------------------------------------


def below(reader: Reader, index: IndexLike, limit: IndexLike) -> Condition:
    """Returns whether an index is less than a limit; a Python bool where the ranges of both tell."""
    index, limit = as_index(index), as_index(limit)
    if surely_not_negative(limit - index - 1):
        return True
    if surely_not_negative(index - limit):
        return False
    return reader.body.index(index) < reader.body.index(limit)


def surely_not_negative(index: Index) -> bool:
    """Whether an index is at least 0 in every iteration, also where sizes that it names are 0.

    Sizes of axes may count as at least 1, for without one there is no iteration; other sizes may be 0, and numbers
    that were read from a tensor anything.
    """
    limits = index.bounds()
    return limits is not None and all(
        number > 0 and all(_is_size(atom) for atom in monomial)
        for monomial, number in limits[0].terms
    )


def _is_size(atom: Atom) -> bool:
    found = atom.expression if isinstance(atom, SizeAtom) else None
    return isinstance(found, sympy.Symbol) and str(found).startswith("s")


def at_least(reader: Reader, index: IndexLike, limit: IndexLike) -> Condition:
    """Returns whether an index is not less than a limit."""
    found = below(reader, index, limit)
    if isinstance(found, bool):
        return not found
    return reader.body.index(as_index(index)) >= reader.body.index(as_index(limit))


def within(reader: Reader, index: IndexLike, size: IndexLike) -> Condition:
    """Returns whether an index is from 0 to size - 1."""
    return both(at_least(reader, index, 0), below(reader, index, size))


def same(reader: Reader, left: IndexLike, right: IndexLike) -> Condition:
    """Returns whether two indices are equal."""
    difference = as_index(left) - as_index(right)
    if difference.constant is not None:
        return difference.constant == 0
    if (difference - 1).never_negative() or (-difference - 1).never_negative():
        return False
    return reader.body.index(as_index(left)).equals(reader.body.index(as_index(right)))


def both(*conditions: Condition) -> Condition:
    """Returns whether all conditions hold."""
    found: Condition = True
    for condition in conditions:
        if condition is False or found is False:
            return False
        if isinstance(condition, Scalar):
            found = condition if found is True else found & condition
    return found


def choose(
    reader: Reader, condition: Condition, inside: Callable[[], Scalar], otherwise: Callable[[], Scalar]
) -> Scalar:
    """Returns `inside()`, whose loads happen only under the condition, where it holds, and `otherwise()` elsewhere."""
    if condition is True:
        return inside()
    if condition is False:
        return otherwise()
    assert isinstance(condition, Scalar)
    with reader.body.masked(condition):
        value = inside()
    return condition.where(value, otherwise().to(value.dtype))


# --- computed positions ----------------------------------------------------------------------------------------------


def refused_positions(*tensors: Definition) -> str | None:
    """Returns why tensors cannot be the positions that a kernel reads or writes at, or None."""
    for tensor in tensors:
        if tensor.dtype not in (torch.int64, torch.int32):
            return f"kernels take positions of int64 and int32, not {tensor.dtype}"
    return None


def gathered_index(
    reader: Reader, position: Scalar, size: Size, *, wraps: bool = False, error: str = "index"
) -> Index:
    """Returns a position read from a tensor as an index from 0 to `size` - 1; with `wraps`, -1 is the last element.

    This is the one place with fxwrap's rule for positions out of bounds: the launch fails as eager does, with the class
    of error that `error` names ("index" or "runtime"), and the kernel, which runs on, takes element 0 instead, so that
    it never touches memory outside of a tensor; of one that may be empty it takes none. Where the position is known to
    be in bounds (an `arange`, say) nothing is checked, and it stays an affine index.
    """
    known = affine_index(position)
    if known is not None:
        for candidate in (known, known + size) if wraps else (known,):
            if surely_not_negative(candidate) and surely_not_negative(as_index(size) - 1 - candidate):
                return candidate
    position, limit = position.to(torch.int64), reader.body.index(size)
    if wraps:
        position = (position < 0).where(position + limit, position)
    inside = (position >= 0) & (position < limit)
    reader.body.require(inside, f"an index is out of bounds for a dimension of size {size}", error)
    return reader.body.gathered(inside.where(position, 0), size, None if isinstance(size, int) else inside)


def bounded_index(reader: Reader, position: Scalar, size: Size) -> Index:
    """Returns a position that a formula keeps from 0 to `size` - 1 as an index, unchecked."""
    known = affine_index(position)
    return reader.body.gathered(position, size) if known is None else known


def affine_index(value: Scalar) -> Index | None:
    """Returns the index expression that an integer scalar is known to be, or None."""
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
    """Returns the index that a cast gives, if the cast is from an integer and changes no value."""
    operation = value.body.operations[source]
    dtype = getattr(operation, "dtype", None)
    if dtype not in (torch.int32, torch.int64):
        return None
    index = affine_index(Scalar(value.body, source, dtype))
    limits = None if index is None else index.bounds()
    if limits is None or (value.dtype is torch.int32 and not _fits(limits)):
        return None
    return index


def _fits(limits: tuple[Index, Index]) -> bool:
    low, high = limits[0].constant, limits[1].constant
    return low is not None and high is not None and low >= -(2**31) and high < 2**31
