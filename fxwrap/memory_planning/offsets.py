"""Offsets in a pool whose sizes are symbolic: expressions that never overlap, whatever the symbols are."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from math import gcd

import sympy

from fxwrap.symbolic import Scalar, Size, ceiling_divide, evaluate, make_symbol, maximum, product, total

Term = tuple[str, Size]


def symbolic_offsets(
    buffers: Sequence[tuple[int, int, Size]],
    placed: Sequence[int],
    alignment: int,
    fresh: Callable[[], str],
    values: Mapping[str, Scalar],
) -> tuple[list[Size], Size, tuple[Term, ...]]:
    """Returns offsets in bytes, the size of the pool, and the named terms that both are made of.

    Where all sizes are multiples of one expression, offsets are multiples of it too, unless rounding up to that makes
    the pool larger; else each buffer lies on the highest of those below it. n log n in the number of buffers.

    Args:
        buffers: (first, end, size) of each; live together where the spans overlap.
        placed: offsets that are good for typical sizes: what lies below what is taken from them.
        alignment: bytes that offsets are multiples of.
        fresh: gives a symbol's name that nothing has.
        values: those typical sizes, by the names of symbols.
    """
    below = _below(buffers, placed)
    order = sorted(range(len(buffers)), key=lambda index: (placed[index], index))
    unit = _unit([size for _, _, size in buffers])
    if unit is not None:
        offsets, size, terms = _scaled(buffers, order, below, alignment, unit, fresh)
        tops = [place + _number(size, values) for place, (_, _, size) in zip(placed, buffers, strict=True)]
        ((name, step),) = terms
        if _number(size, {**values, name: _number(step, values)}) < max(tops) + alignment:
            return offsets, size, terms
    return _Stack(alignment, fresh).run(buffers, order, below)


def _number(size: Size, values: Mapping[str, Scalar]) -> int:
    return size if isinstance(size, int) else int(evaluate(size, values))


def _below(buffers: Sequence[tuple[int, int, Size]], placed: Sequence[int]) -> list[list[int]]:
    """Returns for each buffer those that it must lie on; that it lies on others that are below these follows.

    Two that are live at once are neighbours in the order of offsets, or others are between them. So it is enough that
    each lies on the one that is below it when it becomes live, and below the one that is above it then.
    """
    found: list[list[int]] = [[] for _ in buffers]
    live: list[tuple[int, int]] = []
    ends = sorted(range(len(buffers)), key=lambda index: buffers[index][1], reverse=True)
    for index in sorted(range(len(buffers)), key=lambda index: buffers[index][0]):
        while buffers[ends[-1]][1] <= buffers[index][0]:
            gone = ends.pop()
            del live[bisect_left(live, (placed[gone], gone))]
        at = bisect_left(live, (placed[index], index))
        if at:
            found[index].append(live[at - 1][1])
        if at < len(live):
            found[live[at][1]].append(index)
        live.insert(at, (placed[index], index))
    return found


def _unit(sizes: Sequence[Size]) -> sympy.Expr | None:
    """Returns the expression that all sizes are integer multiples of, if there is one."""
    found: sympy.Expr | None = None
    for size in sizes:
        if isinstance(size, int):
            return None
        factor, rest = size.as_coeff_Mul()
        if not factor.is_Integer or factor <= 0 or (found is not None and rest != found):
            return None
        found = rest
    return found


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
    """Buffers on top of one another; equal heights have one name."""

    def __init__(self, alignment: int, fresh: Callable[[], str]) -> None:
        self.alignment = alignment
        self.fresh = fresh
        self.terms: list[Term] = []
        self._named: dict[Size, Size] = {}

    def run(
        self, buffers: Sequence[tuple[int, int, Size]], order: Sequence[int], below: Sequence[Sequence[int]]
    ) -> tuple[list[Size], Size, tuple[Term, ...]]:
        """Returns what `symbolic_offsets` does."""
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
        """Returns a size in whole multiples of the alignment."""
        return product((ceiling_divide(size, self.alignment), self.alignment))

    def named(self, expression: Size) -> Size:
        """Returns a symbol for an expression, the same for equal ones; numbers and symbols stay."""
        if isinstance(expression, int) or expression.is_Symbol:
            return expression
        known = self._named.get(expression)
        if known is None:
            name = self.fresh()
            self.terms.append((name, expression))
            known = self._named[expression] = make_symbol(name)
        return known
