"""Value ranges of symbols, and the bounds of expressions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy

from fxwrap import torch_compat
from fxwrap.errors import ExpressionError
from fxwrap.symbolic.canonicalize import canonicalize
from fxwrap.symbolic.functions import Number
from fxwrap.symbolic.symbols import Expression, symbol_kind
from fxwrap.torch_compat import sympy_functions

Bound: TypeAlias = Number | None
"""A finite bound, or None for no bound."""


@dataclass(frozen=True, slots=True)
class SymbolInfo:
    """The value range of a symbol: inclusive bounds (None: unbounded), a typical value `hint`, and a divisor.

    Raises `ExpressionError` if the bounds cross, if `divisor` is not positive, or if `hint` is out of bounds.
    """

    name: str
    lower: int | float | None = None
    upper: int | float | None = None
    hint: int | float | None = None
    divisor: int = 1

    def __post_init__(self) -> None:
        if self.lower is not None and self.upper is not None and self.lower > self.upper:
            raise ExpressionError(f"symbol {self.name} has crossed bounds ({self.lower}, {self.upper})")
        if self.divisor < 1:
            raise ExpressionError(f"symbol {self.name} has divisor {self.divisor}; a divisor is positive")
        below = self.hint is not None and self.lower is not None and self.hint < self.lower
        above = self.hint is not None and self.upper is not None and self.hint > self.upper
        if below or above:
            limits = f"({self.lower}, {self.upper})"
            raise ExpressionError(f"symbol {self.name} has hint {self.hint} outside {limits}")


def bounds(expression: Expression, infos: Mapping[str, SymbolInfo]) -> tuple[Bound, Bound]:
    """Returns inclusive lower and upper bounds of a canonical size or condition, None for an unknown one.

    `infos` is by symbol name; other symbols are unbounded. The bounds need not be tight. Source: PyTorch's value range
    analysis (`bound_sympy`).
    """
    if isinstance(expression, int):
        return expression, expression
    if any(_is_unbounded_node(node) for node in sympy.preorder_traversal(expression)):
        return None, None
    symbols = expression.free_symbols
    ranges = {symbol: _symbol_range(symbol.name, infos.get(symbol.name)) for symbol in symbols}
    try:
        # The analysis gives Mod the sign of C's remainder, but its value has the sign of Python's, like PythonMod.
        with_pythons_sign = expression.replace(sympy_functions.Mod, sympy_functions.PythonMod)
    except ZeroDivisionError:  # a constant modulus is zero
        return None, None
    limits = torch_compat.bound_sympy(with_pythons_sign, ranges)
    return _finite(limits.lower), _finite(limits.upper)


def _is_unbounded_node(node: sympy.Basic) -> bool:
    """Whether the range analysis has no rule for a node (asinh, negative powers) or a wrong one.

    Its rule for ModularIndexing is wrong for divisors that may be negative.
    """
    if isinstance(node, sympy_functions.OpaqueUnaryFn_asinh):
        return True
    if isinstance(node, sympy_functions.ModularIndexing):
        return not (node.args[1].is_positive and node.args[2].is_positive)
    return isinstance(node, sympy.Pow) and bool(node.exp.is_negative)


def _symbol_range(name: str, info: SymbolInfo | None) -> torch_compat.ValueRanges[Any]:
    kind = symbol_kind(name)
    if kind == "bool":
        return torch_compat.ValueRanges(sympy.false, sympy.true)
    infinity = torch_compat.int_oo if kind == "int" else sympy.oo
    lower, upper = (None, None) if info is None else (info.lower, info.upper)
    if info is not None and kind == "int" and info.divisor > 1:
        lower = None if lower is None else -(-math.ceil(lower) // info.divisor) * info.divisor
        upper = None if upper is None else math.floor(upper) // info.divisor * info.divisor
    as_number = sympy.Integer if kind == "int" else sympy.Float
    return torch_compat.ValueRanges(
        -infinity if lower is None else as_number(lower), infinity if upper is None else as_number(upper)
    )


def _finite(bound: sympy.Basic) -> Bound:
    value = canonicalize(bound)
    if isinstance(value, int):
        return value
    if isinstance(value, sympy.Float):
        return float(value)
    if value is sympy.true or value is sympy.false:
        return value is sympy.true
    return float(value) if isinstance(value, sympy.Rational) else None
