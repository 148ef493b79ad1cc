"""Offsets in a pool whose sizes are symbolic: expressions that never overlap, whatever the symbols are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd

import sympy

from fxwrap.symbolic import Size, ceiling_divide, make_symbol, maximum, product, total

Term = tuple[str, Size]


def stacked_offsets(
    buffers: Sequence[tuple[int, int, Size]], placed: Sequence[int], alignment: int, fresh: Callable[[], str]
) -> tuple[list[Size], Size, tuple[Term, ...]]:
    """Returns offsets in bytes, the size of the pool, and the named terms that both are made of.

    Args:
        buffers: (first, end, size) of each; live together where the spans overlap.
        placed: offsets that are good for typical sizes: what lies below what is taken from them.
        alignment: bytes that offsets are multiples of.
        fresh: gives a symbol's name that nothing has.

    Where all sizes are multiples of one expression, offsets are multiples of it too; else each buffer lies on the
    highest of those below it.
    """
    unit = _unit([size for _, _, size in buffers])
    if unit is not None:
        return _scaled(buffers, placed, alignment, unit, fresh)
    return _Stack(alignment, fresh).run(buffers, placed)


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
    placed: Sequence[int],
    alignment: int,
    unit: sympy.Expr,
    fresh: Callable[[], str],
) -> tuple[list[Size], Size, tuple[Term, ...]]:
    factors = [int(size.as_coeff_Mul()[0]) for _, _, size in buffers]  # type: ignore[union-attr]
    common = gcd(*factors)
    counts = [factor // common for factor in factors]
    name = fresh()
    step = product((ceiling_divide(product((common, unit)), alignment), alignment))
    levels = _levels(buffers, placed, counts)
    symbol = make_symbol(name)
    size = max(level + count for level, count in zip(levels, counts, strict=True))
    return [product((level, symbol)) for level in levels], product((size, symbol)), ((name, step),)


def _levels(buffers: Sequence[tuple[int, int, Size]], placed: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Returns offsets for whole sizes, in the order from bottom to top that other offsets give."""
    levels = [0] * len(buffers)
    done: list[int] = []
    for index in sorted(range(len(buffers)), key=lambda position: (placed[position], position)):
        first, end, _ = buffers[index]
        below = [levels[other] + counts[other] for other in done if _together(buffers[other], (first, end))]
        levels[index] = max(below, default=0)
        done.append(index)
    return levels


def _together(buffer: tuple[int, int, Size], span: tuple[int, int]) -> bool:
    return buffer[0] < span[1] and span[0] < buffer[1]


class _Stack:
    """Buffers on top of one another; equal heights have one name."""

    def __init__(self, alignment: int, fresh: Callable[[], str]) -> None:
        self.alignment = alignment
        self.fresh = fresh
        self.terms: list[Term] = []
        self._named: dict[Size, Size] = {}

    def run(
        self, buffers: Sequence[tuple[int, int, Size]], placed: Sequence[int]
    ) -> tuple[list[Size], Size, tuple[Term, ...]]:
        """Returns what `stacked_offsets` does."""
        offsets: dict[int, Size] = {}
        tops: dict[int, Size] = {}
        below: dict[int, set[int]] = {}
        for index in sorted(range(len(buffers)), key=lambda position: (placed[position], position)):
            first, end, size = buffers[index]
            under = [other for other in offsets if _together(buffers[other], (first, end))]
            covered: set[int] = set()
            for other in under:
                covered |= below[other] & set(under)
            direct = [other for other in under if other not in covered]
            below[index] = set(under)
            heights = list(dict.fromkeys(tops[other] for other in direct))
            offsets[index] = self.named(maximum(*heights)) if heights else 0
            tops[index] = self.named(total((offsets[index], self.rounded(size))))
        size = self.named(maximum(*dict.fromkeys(tops.values())))
        return [offsets[index] for index in range(len(buffers))], size, tuple(self.terms)

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
