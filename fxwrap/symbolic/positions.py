"""Positions and slices of a dimension whose size or positions are symbolic."""

from __future__ import annotations

import sympy

from fxwrap.symbolic.canonicalize import canonicalize, ceiling_divide, maximum, minimum, product, total
from fxwrap.symbolic.symbols import Expression, Size
from fxwrap.torch_compat import sympy_functions

__all__ = ["diagonal_length", "is_in_bounds", "normalize_index", "slice_length", "slice_start"]

_END = 2**62
"""Slices to an end this large have none."""


def normalize_index(position: Size, size: Size) -> Size:
    """Returns a position counted from the front; a negative one counts from the end."""
    if isinstance(position, int):
        return position if position >= 0 else total((size, position))
    wrapped = sympy.sympify(total((size, position)))
    is_negative = sympy.Lt(position, 0, evaluate=False)
    index: Size = canonicalize(sympy_functions.Where(is_negative, wrapped, position, evaluate=False))
    return index


def slice_start(start: Size | None, size: Size) -> Size:
    """Returns the first index of a slice of a dimension, clamped to the dimension."""
    return minimum(maximum(normalize_index(start or 0, size), 0), size)


def slice_length(start: Size, end: Size | None, step: int, size: Size) -> Size:
    """Returns the number of elements of a slice from `start`, a result of `slice_start`."""
    last = size if end is None or (isinstance(end, int) and end >= _END) else normalize_index(end, size)
    return ceiling_divide(maximum(total((minimum(last, size), product((start, -1)))), 0), step)


def diagonal_length(rows: Size, columns: Size, diagonal: int) -> Size:
    """Returns the number of elements of a diagonal of a matrix."""
    return maximum(minimum(total((rows, min(diagonal, 0))), total((columns, -max(diagonal, 0)))), 0)


def is_in_bounds(position: Size, size: Size) -> Expression:
    """Returns the condition that a position is the index of an element."""
    at_least = sympy.Ge(position, product((size, -1)), evaluate=False)
    below = sympy.Lt(position, size, evaluate=False)
    return canonicalize(sympy.And(at_least, below, evaluate=False))
