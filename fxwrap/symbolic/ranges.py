"""What is known of symbols, and the bounds of expressions that follow from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy

from fxwrap import torch_compat
from fxwrap.errors import ExpressionError
from fxwrap.symbolic.canonical import canonical
from fxwrap.symbolic.functions import Scalar
from fxwrap.symbolic.symbols import Expression, symbol_kind

Bound: TypeAlias = Scalar | None
"""A finite bound, or None where there is none."""


@dataclass(frozen=True, slots=True)
class SymbolInfo:
    """What is known of one symbol: inclusive bounds (None: unbounded), a typical value, a common divisor.

    Raises `ExpressionError` if the bounds cross, if `divisor` is not positive, or if `hint` lies outside the
    bounds.
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
    """Inclusive lower and upper bounds of a canonical size or condition; None where none is known.

    `infos` is by symbol name; a symbol that it lacks is unbounded. The bounds hold for every assignment
    within the infos, but need not be reached. Source: PyTorch's value range analysis (`bound_sympy`).
    """
    if isinstance(expression, int):
        return expression, expression
    if any(_is_unbounded_node(node) for node in sympy.preorder_traversal(expression)):
        return None, None
    symbols = expression.free_symbols
    ranges = {symbol: _symbol_range(symbol.name, infos.get(symbol.name)) for symbol in symbols}
    try:
        # The analysis gives Mod of a negative number C's sign; its value has Python's, as PythonMod's has there.
        with_pythons_sign = expression.replace(torch_compat.Mod, torch_compat.PythonMod)
    except ZeroDivisionError:  # a modulus is seen to be zero: it has no value
        return None, None
    found = torch_compat.bound_sympy(with_pythons_sign, ranges)
    return _finite(found.lower), _finite(found.upper)


def _is_unbounded_node(node: sympy.Basic) -> bool:
    """Whether the range analysis has no rule for a node: asinh, and powers that mean a division.

    For a modular index by what may be negative it has wrong ones.
    """
    if isinstance(node, torch_compat.OpaqueUnaryFn_asinh):
        return True
    if isinstance(node, torch_compat.ModularIndexing):
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
    value = canonical(bound)
    if isinstance(value, int):
        return value
    if isinstance(value, sympy.Float):
        return float(value)
    if value is sympy.true or value is sympy.false:
        return value is sympy.true
    return float(value) if isinstance(value, sympy.Rational) else None
