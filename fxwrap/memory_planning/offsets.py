"""Symbolic offsets in a pool, with which live buffers never overlap for any value of the symbols."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from math import gcd

import sympy

from fxwrap.symbolic import Number, Size, ceiling_divide, evaluate, make_symbol, maximum, product, total

Term = tuple[str, Size]


def assign_symbolic_offsets(
    buffers: Sequence[tuple[int, int, Size]],
    placed: Sequence[int],
    alignment: int,
    fresh: Callable[[], str],
    values: Mapping[str, Number],
) -> tuple[list[Size], Size, tuple[Term, ...]]:
    """Returns offsets in bytes, the size of the pool, and the named terms that both use.

    If all sizes are multiples of one expression, so are the offsets, unless rounding makes the pool larger. Else each
    buffer is on top of the highest one below it. n log n in the number of buffers.

    Args:
        buffers: (first, end, size) of each; two are live at once if their ranges overlap.
        placed: offsets for typical sizes, which define the order of buffers.
        alignment: bytes that offsets are multiples of.
        fresh: returns an unused name of a symbol.
        values: the typical values of symbols, by name.
    """
    below = _below(buffers, placed)
    order = sorted(range(len(buffers)), key=lambda index: (placed[index], index))
    unit = _unit([size for _, _, size in buffers])
    if unit is not None:
        offsets, size, terms = _scaled(buffers, order, below, alignment, unit, fresh)
        tops = [offset + evaluate(size, values) for offset, (_, _, size) in zip(placed, buffers, strict=True)]
        ((name, step),) = terms
        if evaluate(size, {**values, name: evaluate(step, values)}) < max(tops) + alignment:
            return offsets, size, terms
    return _Stack(alignment, fresh).run(buffers, order, below)


def _below(buffers: Sequence[tuple[int, int, Size]], placed: Sequence[int]) -> list[list[int]]:
    """Returns for each buffer the ones directly below it; the relation's transitive closure orders all live pairs.

    It is enough to order each buffer with its neighbours by offset at the time it becomes live.
    """
    below: list[list[int]] = [[] for _ in buffers]
    live: list[tuple[int, int]] = []
    ends = sorted(range(len(buffers)), key=lambda index: buffers[index][1], reverse=True)
    for index in sorted(range(len(buffers)), key=lambda index: buffers[index][0]):
        while buffers[ends[-1]][1] <= buffers[index][0]:
            ended = ends.pop()
            del live[bisect_left(live, (placed[ended], ended))]
        at = bisect_left(live, (placed[index], index))
        if at:
            below[index].append(live[at - 1][1])
        if at < len(live):
            below[live[at][1]].append(index)
        live.insert(at, (placed[index], index))
    return below


def _unit(sizes: Sequence[Size]) -> sympy.Expr | None:
    """Returns the expression that all sizes are integer multiples of, or None."""
    unit: sympy.Expr | None = None
    for size in sizes:
        if isinstance(size, int):
            return None
        factor, rest = size.as_coeff_Mul()
        if not factor.is_Integer or factor <= 0 or (unit is not None and rest != unit):
            return None
        unit = rest
    return unit


def _scaled(
    buffers: Sequence[tuple[int, int, Size]],
    order: Sequence[int],
    below: Sequence[Sequence[int]],
    alignment: int,
    unit: sympy.Expr,
    fresh: Callable[[], str],
) -> tuple[list[Size], Size, tuple[Term, ...]]:
    factors = [int(size.as_coeff_Mul()[0]) for _, _, size in buffers]  # type: ignore[union-attr]
    common = gcd(*factors)
    counts = [factor // common for factor in factors]
    levels = [0] * len(buffers)
    for index in order:
        levels[index] = max([levels[other] + counts[other] for other in below[index]], default=0)
    name = fresh()
    step = product((ceiling_divide(product((common, unit)), alignment), alignment))
    symbol = make_symbol(name)
    size = max(level + count for level, count in zip(levels, counts, strict=True))
    return [product((level, symbol)) for level in levels], product((size, symbol)), ((name, step),)


class _Stack:
    """Stacks buffers on top of each other. Equal heights share a symbol."""

    def __init__(self, alignment: int, fresh: Callable[[], str]) -> None:
        self.alignment = alignment
        self.fresh = fresh
        self.terms: list[Term] = []
        self._named: dict[Size, Size] = {}

    def run(
        self, buffers: Sequence[tuple[int, int, Size]], order: Sequence[int], below: Sequence[Sequence[int]]
    ) -> tuple[list[Size], Size, tuple[Term, ...]]:
        """Returns the results of `assign_symbolic_offsets`."""
        offsets: list[Size] = [0] * len(buffers)
        tops: list[Size] = [0] * len(buffers)
        for index in order:
            heights = list(dict.fromkeys([tops[other] for other in below[index]]))
            offsets[index] = self.named(maximum(*heights)) if heights else 0
            tops[index] = self.named(total((offsets[index], self.rounded(buffers[index][2]))))
        covered = {other for others in below for other in others}
        highest = dict.fromkeys([top for index, top in enumerate(tops) if index not in covered])
        return offsets, self.named(maximum(*highest)), tuple(self.terms)

    def rounded(self, size: Size) -> Size:
        """Returns a size rounded up to the alignment."""
        return product((ceiling_divide(size, self.alignment), self.alignment))

    def named(self, expression: Size) -> Size:
        """Returns a symbol for an expression, one for equal expressions; integers and symbols are unchanged."""
        if isinstance(expression, int) or expression.is_Symbol:
            return expression
        if expression not in self._named:
            name = self.fresh()
            self.terms.append((name, expression))
            self._named[expression] = make_symbol(name)
        return self._named[expression]
