"""Equalities that a graph's guards guarantee, as replacements in the sizes of its tensors.

A graph holds only for sizes that satisfy its guards. Guards state equalities that the ShapeEnv does not solve:
`s0//8 == 4` where a feature map was divided into windows, `s0 + Mod(64 - Mod(s0, 64), 64) == 64` where a sequence was
padded to one chunk, `s1*s0 == s1*(s0 + s2)` where a slice that starts at `-s2` was contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import sympy
from sympy.core.function import Application

_MAX_ROUNDS = 4
"""How often the replacements simplify the guards that they come from, and a size."""

Replacements = Mapping[sympy.Basic, sympy.Basic]
"""An expression for each function, or symbol, that guards determine."""


def solve_equalities(
    equalities: Iterable[tuple[sympy.Expr, sympy.Expr]], is_positive: Callable[[sympy.Basic], bool]
) -> Replacements:
    """Returns replacements that hold wherever the equalities do.

    A replaced function is equal to its replacement, which has no symbols that the function lacks; a replaced symbol is
    equal to a number. `is_positive` says whether a factor is known to be positive.
    """
    replacements: dict[sympy.Basic, sympy.Basic] = {}
    pending = list(equalities)
    for _ in range(_MAX_ROUNDS):
        unsolved = []
        for left, right in pending:
            zero = _without_positive_factors(apply_replacements(left - right, replacements), is_positive)
            solution = _solve(zero)
            if solution is not None:
                replacements[solution[0]] = solution[1]
            elif zero != 0:
                unsolved.append((left, right))
        if len(unsolved) == len(pending):
            break
        pending = unsolved
    return replacements


def apply_replacements(expression: sympy.Expr, replacements: Replacements) -> sympy.Expr:
    """Returns an expression with all replacements applied, expanded if any applies."""
    for _ in range(_MAX_ROUNDS):
        replaced = expression.xreplace(dict(replacements))
        if replaced == expression:
            break
        expression = sympy.expand(replaced)
    return expression


def _without_positive_factors(zero: sympy.Expr, is_positive: Callable[[sympy.Basic], bool]) -> sympy.Expr:
    """Returns an expression that is zero where `zero` is: without factors of all terms that are positive."""
    expanded = sympy.expand(zero)
    terms = sympy.Add.make_args(expanded)
    common = set.intersection(*[set(sympy.Mul.make_args(term)) for term in terms])
    for factor in common:
        if is_positive(factor):
            expanded = sympy.expand(expanded / factor)
    return expanded


def _solve(zero: sympy.Expr) -> tuple[sympy.Basic, sympy.Expr] | None:
    """Returns a function or a symbol and its value, where a sum that is zero determines it."""
    coefficients = zero.as_coefficients_dict()
    functions = [(term.count_ops(), str(term), term) for term in coefficients if isinstance(term, Application)]
    for *_, term in sorted(functions, reverse=True):
        rest = _quotient(coefficients, term)
        if rest is not None and rest.free_symbols <= term.free_symbols and not rest.has(term):
            return term, rest
    symbols = [term for term in coefficients if isinstance(term, sympy.Symbol)]
    rest = _quotient(coefficients, symbols[0]) if len(symbols) == 1 else None
    return (symbols[0], rest) if rest is not None and rest.is_Integer else None


def _quotient(coefficients: Mapping[sympy.Expr, sympy.Rational], term: sympy.Expr) -> sympy.Expr | None:
    """Returns the value of a term of a sum that is zero; None if it need not be an integer."""
    factor = -coefficients[term]
    rest = [(coefficient / factor, other) for other, coefficient in coefficients.items() if other != term]
    if not all(coefficient.is_Integer for coefficient, _ in rest):
        return None
    return sympy.Add(*[coefficient * other for coefficient, other in rest])
