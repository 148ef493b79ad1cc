"""The atoms of index expressions that no other index is part of: axes, symbolic sizes and indirect indices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import sympy

from fxwrap.symbolic import Size, product


@dataclass(frozen=True, slots=True)
class Axis:
    """A loop variable: an integer from 0 to `size` - 1."""

    name: str
    size: Size

    @property
    def key(self) -> str:
        """The sort key."""
        return self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return self.name


def count_points(axes: Iterable[Axis]) -> Size:
    """Returns the number of points that axes span."""
    return product(axis.size for axis in axes)


@dataclass(frozen=True, slots=True)
class SizeAtom:
    """A symbolic size, or a part of one that is not a sum or product; the same in every iteration."""

    expression: sympy.Expr

    @property
    def key(self) -> str:
        """The sort key."""
        return f"~{self.expression}"

    def __str__(self) -> str:
        return str(self.expression)


@dataclass(frozen=True, slots=True)
class IndirectIndex:
    """An index from 0 to `size` - 1 that an operation of the kernel computes, for instance loads."""

    operation: int
    size: Size

    @property
    def key(self) -> str:
        """The sort key."""
        return f"%{self.operation:06d}"

    def __str__(self) -> str:
        return f"%{self.operation}"
