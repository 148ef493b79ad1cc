"""Relations of sizes that hold for all values of their symbols: exact quotients, equality, order."""

from __future__ import annotations

from collections.abc import Mapping

import sympy

from fxwrap.caching import bounded_cache
from fxwrap.symbolic.callables import evaluate
from fxwrap.symbolic.canonicalize import SymbolInfo, bounds, canonicalize, product, total
from fxwrap.symbolic.symbols import Size
from fxwrap.torch_compat import sympy_functions

__all__ = [
    "difference",
    "divide_exactly",
    "is_at_most",
    "is_equal",
    "simplify_by_ranges",
    "size_symbols",
    "split_multiple",
]


_MAX_VALUES = 256
"""The largest range whose values are all tried."""

_MAX_SPLITS = 4
"""How many maxima and minima are told apart by ranges of symbols."""


def size_symbols(size: Size) -> set[str]:
    """Returns the names of a size's symbols."""
    return set() if isinstance(size, int) else {symbol.name for symbol in size.free_symbols}


def difference(left: Size, right: Size) -> Size:
    """Returns `left - right`."""
    if isinstance(left, int) and isinstance(right, int):
        return left - right
    return _difference(left, right)


@bounded_cache(16384)
def _difference(left: Size, right: Size) -> Size:
    return total((left, product((-1, right))))


def is_equal(left: Size, right: Size) -> bool:
    """Whether two sizes are equal for all values of their symbols; `max(size, 1)` in a stride counts as `size`.

    torch writes the strides of tensors that may be empty with such a maximum, and an empty tensor has no elements.
    """
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    return left == right or _expanded_difference(left, right) == 0


@bounded_cache(16384)
def _expanded_difference(left: Size, right: Size) -> sympy.Basic:
    return sympy.expand(_without_maximum(left) - _without_maximum(right))


def _without_maximum(size: Size) -> sympy.Basic:
    expression = sympy.sympify(size)
    if not any(map(_is_maximum_with_one, sympy.preorder_traversal(expression))):
        return expression
    return expression.replace(_is_maximum_with_one, lambda *operands: next(item for item in operands if item != 1))


def _is_maximum_with_one(node: sympy.Basic) -> bool:
    return node.func.__name__ == "Max" and len(node.args) == 2 and 1 in node.args


def divide_exactly(dividend: Size, divisor: Size) -> Size | None:
    """Returns the quotient if the division is exact for all values of the symbols, else None."""
    if isinstance(dividend, int) and isinstance(divisor, int):
        return dividend // divisor if divisor and dividend % divisor == 0 else None
    return _divide_exactly(dividend, divisor)


@bounded_cache(16384)
def _divide_exactly(dividend: Size, divisor: Size) -> Size | None:
    if divisor == 0:
        return None
    divisor = _without_maximum(divisor)
    quotient = sympy.expand(_without_maximum(dividend)) / divisor
    quotient = sympy.cancel(quotient) if divisor.has(sympy.Add) else sympy.expand(quotient)
    if any(sympy.fraction(term)[1] != 1 for term in sympy.Add.make_args(quotient)):
        return None
    result: Size = canonicalize(quotient)
    return result


def split_multiple(size: Size, divisor: Size) -> tuple[Size, Size]:
    """Returns `(quotient, rest)` with `size = quotient * divisor + rest`: of each term, the multiples of the divisor.

    For constants it is the floor division, for sums that of polynomials if the rest cannot be negative; the rest of a
    symbolic size may be larger than the divisor.
    """
    if isinstance(size, int) and isinstance(divisor, int):
        return divmod(size, divisor)
    if isinstance(divisor, sympy.Expr) and divisor.has(sympy.Add):
        parts = _divide_by_sum(size, divisor)
        if parts is not None:
            return parts
    quotients: list[Size] = []
    rest: list[Size] = []
    factor, primitive = sympy.sympify(divisor).as_coeff_Mul()
    unit = canonicalize(primitive)
    for coefficient, monomial in _terms(_without_maximum(size)):
        quotient = divide_exactly(canonicalize(monomial), unit)
        whole, left = (0, coefficient) if quotient is None else divmod(coefficient, factor)
        quotients.append(product((canonicalize(whole), quotient or 0)))
        rest.append(canonicalize(left * monomial))
    return total(quotients), total(rest)


@bounded_cache(16384)
def _divide_by_sum(size: Size, divisor: sympy.Expr) -> tuple[Size, Size] | None:
    """Returns the quotient and rest of polynomials with whole coefficients, if the rest cannot be negative."""
    dividend, divided = [sympy.expand(_without_maximum(item)) for item in (size, divisor)]
    try:
        quotients, _ = sympy.reduced(dividend, [divided], domain="QQ")  # none of zero
    except sympy.PolynomialError:  # functions that are no variables of polynomials
        return None
    whole = sum([coefficient // 1 * monomial for coefficient, monomial in _terms(sum(quotients))])
    for number in (whole, whole - 1):
        rest = sympy.expand(dividend - number * divided)
        if all(coefficient >= 0 for coefficient, _ in _terms(rest)):
            return canonicalize(number), canonicalize(rest)
    return None


def _terms(size: sympy.Expr) -> list[tuple[sympy.Number, sympy.Expr]]:
    """Returns the terms of a sum, each as its coefficient and the rest."""
    return [term.as_coeff_Mul() for term in sympy.Add.make_args(sympy.expand(size))]


def simplify_by_ranges(size: Size, infos: Mapping[str, SymbolInfo]) -> Size:
    """Returns a size with a constant for each function that has one value in the ranges of its symbols."""
    if isinstance(size, int) or size.is_Symbol:
        return size
    known = {name: infos[name] for name in sorted(size_symbols(size)) if name in infos}
    return _simplify_by_ranges(size, tuple(known.values()))


@bounded_cache(16384)
def _simplify_by_ranges(size: sympy.Expr, infos: tuple[SymbolInfo, ...]) -> Size:
    ranges = {info.name: info for info in infos}
    constants = {}
    for node in sympy.preorder_traversal(size):
        if node.is_Atom or isinstance(node, sympy.Add | sympy.Mul | sympy.Pow):
            continue
        lower, upper = bounds(node, ranges)
        if lower is not None and lower == upper:
            constants[node] = sympy.sympify(lower)
    simplified: Size = canonicalize(size.xreplace(constants)) if constants else size
    only_value = None if isinstance(simplified, int) else _only_value(simplified, ranges)
    return simplified if only_value is None else only_value


def _only_value(size: sympy.Expr, infos: Mapping[str, SymbolInfo]) -> int | None:
    """Returns the value of a size with functions of one symbol of few values, if it is the same for each of them."""
    names = size_symbols(size)
    info = infos.get(min(names, default=""))
    if len(names) != 1 or info is None or not isinstance(info.lower, int) or not isinstance(info.upper, int):
        return None
    if info.upper - info.lower > _MAX_VALUES or not size.atoms(sympy.Function):
        return None
    values = {evaluate(size, {info.name: value}) for value in range(info.lower, info.upper + 1)}
    (value,) = values if len(values) == 1 else (None,)
    return value if isinstance(value, int) else None


def is_at_most(left: Size, right: Size, infos: Mapping[str, SymbolInfo]) -> bool:
    """Whether `left <= right` for all values of the symbols, by their ranges; sizes `s...` without one are positive."""
    if isinstance(left, int) and isinstance(right, int):
        return left <= right
    rest = _expanded_difference(right, left)
    return _is_nonnegative(rest, {name: _range(name, infos) for name in size_symbols(rest)}, _MAX_SPLITS)


def _is_nonnegative(rest: sympy.Expr, ranges: Mapping[str, SymbolInfo], splits: int) -> bool:
    """Whether an expanded expression is at least 0; `splits` maxima and minima are replaced by either operand."""
    if _is_nonnegative_polynomial(rest, ranges):
        return True
    lower, _ = bounds(canonicalize(rest), ranges)
    if lower is not None and lower >= 0:
        return True
    cases = _cases_of_extreme(rest, ranges) if splits else None
    return cases is not None and all(_is_nonnegative(case, refined, splits - 1) for case, refined in cases)


def _cases_of_extreme(
    rest: sympy.Expr, ranges: Mapping[str, SymbolInfo]
) -> list[tuple[sympy.Expr, Mapping[str, SymbolInfo]]] | None:
    """Returns an expression with a maximum or minimum replaced by its operands, each with the ranges where it is that.

    None without a maximum or minimum of two operands that cross at one value of one symbol.
    """
    for node in sorted(rest.atoms(sympy_functions.Max, sympy_functions.Min), key=str):
        left, right = node.args if len(node.args) == 2 else (0, 0)
        distance = sympy.expand(left - right)
        if len(distance.free_symbols) != 1:
            continue
        symbol = next(iter(distance.free_symbols))
        slope = distance.coeff(symbol, 1)
        at_zero = distance - slope * symbol
        if not slope.is_Integer or not at_zero.is_Integer:
            continue
        if slope < 0:
            left, right, slope, at_zero = right, left, -slope, -at_zero
        first = -(int(at_zero) // int(slope))  # from here on, `left` is at least `right`
        above, below = (left, right) if isinstance(node, sympy_functions.Max) else (right, left)
        info = ranges[symbol.name]
        cases: list[tuple[sympy.Expr, Mapping[str, SymbolInfo]]] = []
        for operand, bound in ((above, {"lower": first}), (below, {"upper": first - 1})):
            refined = _restricted(info, **bound)
            if refined is not None:
                case = sympy.expand(rest.xreplace({node: operand}))
                cases.append((case, {**ranges, symbol.name: refined}))
        return cases
    return None


def _restricted(info: SymbolInfo, lower: int | None = None, upper: int | None = None) -> SymbolInfo | None:
    """Returns a range within other bounds, None if it is empty."""
    lower_bound = max([item for item in (info.lower, lower) if item is not None], default=None)
    upper_bound = min([item for item in (info.upper, upper) if item is not None], default=None)
    if lower_bound is not None and upper_bound is not None and lower_bound > upper_bound:
        return None
    return SymbolInfo(info.name, lower_bound, upper_bound, None, info.divisor)


def _is_nonnegative_polynomial(polynomial: sympy.Expr, ranges: Mapping[str, SymbolInfo]) -> bool:
    """Whether all coefficients of a polynomial in the distances of the symbols from their lower bounds are positive."""
    if any(info.lower is None for info in ranges.values()):
        return False
    shifts = {symbol: symbol + ranges[symbol.name].lower for symbol in polynomial.free_symbols}
    for term in sympy.Add.make_args(sympy.expand(polynomial.xreplace(shifts))):
        coefficient, factor = term.as_coeff_Mul()
        bases = [item.as_base_exp()[0] for item in sympy.Mul.make_args(factor) if not item.is_Number]
        if coefficient < 0 or not all(isinstance(base, sympy.Symbol) for base in bases):
            return False
    return True


def _range(name: str, infos: Mapping[str, SymbolInfo]) -> SymbolInfo:
    info = infos.get(name)
    if info is None:
        return SymbolInfo(name, lower=1 if name.startswith("s") else None)
    return info
