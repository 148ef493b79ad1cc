"""Arithmetic on sizes that gives sizes: plain ints stay plain ints, and cost no sympy."""

from __future__ import annotations

from collections.abc import Iterable

import sympy

from fxwrap.symbolic.canonical import canonical
from fxwrap.symbolic.construct import apply, ceiling_division
from fxwrap.symbolic.functions import BY_NAME
from fxwrap.symbolic.symbols import Size


def product(factors: Iterable[Size]) -> Size:
    """The product of sizes, 1 for none: the number of elements of a shape."""
    constant, symbolic = 1, []
    for factor in factors:
        if isinstance(factor, int):
            constant *= factor
        else:
            symbolic.append(factor)
    return canonical(sympy.Mul(constant, *symbolic)) if symbolic and constant else constant


def total(terms: Iterable[Size]) -> Size:
    """The sum of sizes, 0 for none."""
    constant, symbolic = 0, []
    for term in terms:
        if isinstance(term, int):
            constant += term
        else:
            symbolic.append(term)
    return canonical(sympy.Add(constant, *symbolic)) if symbolic else constant


def floor_divide(base: Size, divisor: Size) -> Size:
    """Floor division toward minus infinity. Raises ZeroDivisionError for the constants `x` and 0."""
    if isinstance(base, int) and isinstance(divisor, int):
        return base // divisor
    return _applied("floordiv", base, divisor)


def ceiling_divide(base: Size, divisor: Size) -> Size:
    """Division rounded up, for a positive divisor."""
    if isinstance(base, int) and isinstance(divisor, int):
        return -(-base // divisor)
    return canonical(ceiling_division(sympy.sympify(base), sympy.sympify(divisor)))


def remainder(base: Size, divisor: Size) -> Size:
    """The remainder of floor division; it has the divisor's sign."""
    if isinstance(base, int) and isinstance(divisor, int):
        return base % divisor
    return _applied("python_mod", base, divisor)


def maximum(*operands: Size) -> Size:
    """The largest of one or more sizes."""
    constant = all(isinstance(operand, int) for operand in operands)
    return max(operands) if constant else _applied("max", *operands)


def minimum(*operands: Size) -> Size:
    """The smallest of one or more sizes."""
    constant = all(isinstance(operand, int) for operand in operands)
    return min(operands) if constant else _applied("min", *operands)


def _applied(name: str, *operands: Size) -> Size:
    return canonical(apply(BY_NAME[name], [sympy.sympify(operand) for operand in operands]))
