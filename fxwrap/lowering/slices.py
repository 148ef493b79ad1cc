"""Where slices begin and how many elements they have, for positions that are known when a program runs."""

from __future__ import annotations

from typing import Any

import sympy

from fxwrap.symbolic import Size, canonical, ceiling_divide, maximum, minimum, product, total
from fxwrap.torch_compat import Where

_END = 2**62


def from_front(position: Size, size: Size) -> Size:
    """Returns a position counted from the front: negative ones are counted from the end."""
    if isinstance(position, int):
        return position if position >= 0 else total((size, position))
    wrapped = sympy.sympify(total((size, position)))
    found: Size = canonical(Where(sympy.Lt(position, 0, evaluate=False), wrapped, position, evaluate=False))
    return found


def slice_start(start: Size | None, size: Size) -> Size:
    """Returns where a slice of a dimension begins; a start outside is moved to its nearest end."""
    return minimum(maximum(from_front(start or 0, size), 0), size)


def slice_count(start: Size, end: Size | None, step: int, size: Size) -> Size:
    """Returns how many elements a slice has that begins where `slice_start` says."""
    last = size if end is None or (isinstance(end, int) and end >= _END) else from_front(end, size)
    return ceiling_divide(maximum(total((minimum(last, size), product((start, -1)))), 0), step)


def is_within(position: Any, size: Size) -> Any:
    """Returns the condition that a position is that of an element."""
    at_least = sympy.Ge(position, product((size, -1)), evaluate=False)
    below = sympy.Lt(position, size, evaluate=False)
    return canonical(sympy.And(at_least, below, evaluate=False))
