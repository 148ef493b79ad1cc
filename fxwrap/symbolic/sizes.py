"""Arithmetic on sizes. Plain ints stay plain ints and need no sympy."""

from __future__ import annotations

from collections.abc import Iterable

import sympy

from fxwrap.symbolic.canonicalize import canonicalize
from fxwrap.symbolic.construct import apply, ceiling_division
from fxwrap.symbolic.functions import FUNCTION_BY_NAME
from fxwrap.symbolic.symbols import Size


def product(factors: Iterable[Size]) -> Size:
    """Returns the product of sizes, 1 for none."""
    constant, symbolic = 1, []
    for factor in factors:
        if isinstance(factor, int):
            constant *= factor
        else:
            symbolic.append(factor)
    return canonicalize(sympy.Mul(constant, *symbolic)) if symbolic and constant else constant


def total(terms: Iterable[Size]) -> Size:
    """Returns the sum of sizes, 0 for none."""
    constant, symbolic = 0, []
    for term in terms:
        if isinstance(term, int):
            constant += term
        else:
            symbolic.append(term)
    return canonicalize(sympy.Add(constant, *symbolic)) if symbolic else constant


def floor_divide(base: Size, divisor: Size) -> Size:
    """Returns the quotient rounded toward minus infinity. Raises ZeroDivisionError for a constant over 0."""
    if isinstance(base, int) and isinstance(divisor, int):
        return base // divisor
    return _apply_function("floordiv", base, divisor)


def ceiling_divide(base: Size, divisor: Size) -> Size:
    """Returns the quotient rounded up, for a positive divisor."""
    if isinstance(base, int) and isinstance(divisor, int):
        return -(-base // divisor)
    return canonicalize(ceiling_division(sympy.sympify(base), sympy.sympify(divisor)))


def remainder(base: Size, divisor: Size) -> Size:
    """Returns the remainder of floor division, which has the divisor's sign."""
    if isinstance(base, int) and isinstance(divisor, int):
        return base % divisor
    return _apply_function("python_mod", base, divisor)


def maximum(*operands: Size) -> Size:
    """Returns the largest of one or more sizes."""
    constant = all(isinstance(operand, int) for operand in operands)
    return max(operands) if constant else _apply_function("max", *operands)


def minimum(*operands: Size) -> Size:
    """Returns the smallest of one or more sizes."""
    constant = all(isinstance(operand, int) for operand in operands)
    return min(operands) if constant else _apply_function("min", *operands)


def _apply_function(name: str, *operands: Size) -> Size:
    return canonicalize(apply(FUNCTION_BY_NAME[name], [sympy.sympify(operand) for operand in operands]))
