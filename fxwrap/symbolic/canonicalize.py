"""Canonicalization of expressions of a ShapeEnv."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy

from fxwrap import torch_compat
from fxwrap.caching import bounded_cache
from fxwrap.errors import ExpressionError
from fxwrap.symbolic.symbols import (
    FUNCTION_BY_CLASS,
    FUNCTION_BY_NAME,
    OPAQUE_FUNCTIONS,
    RELATION_BY_CLASS,
    Expression,
    FunctionSpec,
    Number,
    Size,
    absolute,
    apply,
    ceiling_division,
    compare,
    constant,
    expression_kind,
    left_shift,
    make_symbol,
    power,
    right_shift,
    symbol_kind,
)
from fxwrap.torch_compat import sympy_functions

Rename: TypeAlias = Mapping[sympy.Symbol, sympy.Symbol]

_FOREIGN_FUNCTIONS: dict[type[sympy.Basic], FunctionSpec] = {
    sympy.Max: FUNCTION_BY_NAME["max"],
    sympy.Min: FUNCTION_BY_NAME["min"],
    sympy.Mod: FUNCTION_BY_NAME["python_mod"],
    sympy.floor: FUNCTION_BY_NAME["floor_to_int"],
    sympy.ceiling: FUNCTION_BY_NAME["ceil_to_int"],
    **{getattr(sympy, name): FUNCTION_BY_NAME[name] for name in OPAQUE_FUNCTIONS if name not in ("log2", "sqrt")},
}
"""The functions that replace sympy's own."""

_SHAPE_ENV_PREFIXES = {"zf": "f", "zuf": "uf"}
_SHAPE_ENV_NAME = re.compile(r"(zf|zuf)(\d+)")


def canonicalize(expression: Expression | float, rename: Rename | None = None) -> Expression:
    """Returns the canonical form of a size or condition, the same tree however the expression was built.

    A ShapeEnv symbol becomes `rename[symbol]`, or fxwrap's symbol of the same name (`zf3` becomes `f3`, `zuf3`
    becomes `uf3`). Integer constants become plain ints. Idempotent. Raises `ExpressionError` for an unknown symbol
    name or function.
    """
    if type(expression) is int:
        return expression
    if isinstance(expression, (bool, int, float)):
        return unwrap(constant(expression))
    if rename is None:
        return _canonical_cached(expression)
    return unwrap(_Rebuilder(rename).rebuild(expression))


def unwrap(node: sympy.Basic) -> Expression:
    """Returns an integer constant as a plain int, any other node unchanged."""
    return int(node) if isinstance(node, sympy.Integer) else node


@bounded_cache(65536)
def _canonical_cached(expression: sympy.Basic) -> Expression:
    return unwrap(_Rebuilder({}).rebuild(expression))


class _Rebuilder:
    """Rebuilds a tree from its leaves with the constructors of `construct`, each distinct node once."""

    def __init__(self, rename: Rename) -> None:
        self._rename = rename
        self._done: dict[sympy.Basic, sympy.Basic] = {}

    def rebuild(self, node: sympy.Basic) -> sympy.Basic:
        if node not in self._done:
            self._done[node] = self._rebuild_new(node)
        return self._done[node]

    def _rebuild_new(self, node: sympy.Basic) -> sympy.Basic:
        if isinstance(node, sympy.Symbol):
            return self._symbol(node)
        if not node.args:
            return _leaf(node)
        if isinstance(node, sympy.Piecewise) and node.args[-1].args[1] == sympy.true:
            return self._choice(node)
        operands = [self.rebuild(argument) for argument in node.args]
        node_class = type(node)
        relation = RELATION_BY_CLASS.get(node_class)
        if relation is not None:
            return compare(relation.mark, operands[0], operands[1])
        spec = FUNCTION_BY_CLASS.get(node_class) or _FOREIGN_FUNCTIONS.get(node_class)
        if spec is not None:
            return _foreign_apply(spec, operands)
        rule = _OTHER_NODES.get(node_class)
        if rule is None:
            raise ExpressionError(f"the expression language has no {node_class.__name__} (in {node})")
        return rule(operands)

    def _choice(self, node: sympy.Piecewise) -> sympy.Basic:
        """Returns nested `where` for the result of torch.sym_ite, whose last case always holds."""
        *cases, (last, _) = [pair.args for pair in node.args]
        chosen = self.rebuild(last)
        for value, condition in reversed(cases):
            chosen = apply(FUNCTION_BY_NAME["where"], (self.rebuild(condition), self.rebuild(value), chosen))
        return chosen

    def _symbol(self, symbol: sympy.Symbol) -> sympy.Basic:
        renamed = self._rename.get(symbol)
        if renamed is not None:
            return renamed
        match = _SHAPE_ENV_NAME.fullmatch(symbol.name)
        return make_symbol(_SHAPE_ENV_PREFIXES[match[1]] + match[2] if match else symbol.name)


def _leaf(node: sympy.Basic) -> sympy.Basic:
    if isinstance(node, (sympy.Float, sympy.NumberSymbol)):
        return constant(float(node))
    if isinstance(node, sympy.Number) or node is sympy.true or node is sympy.false:
        return node
    raise ExpressionError(f"the expression language has no constant {node} ({type(node).__name__})")


def _foreign_apply(spec: FunctionSpec, operands: Sequence[sympy.Basic]) -> sympy.Basic:
    if spec.name == "log" and len(operands) == 2:
        return apply(FUNCTION_BY_NAME["float_true_div"], [apply(spec, operands[:1]), apply(spec, operands[1:])])
    if spec.name in ("floor_to_int", "ceil_to_int") and expression_kind(operands[0]) == "int":
        return operands[0]
    return apply(spec, operands)


_OTHER_NODES: dict[type[sympy.Basic], Callable[[Sequence[sympy.Basic]], sympy.Basic]] = {
    sympy.Add: lambda operands: sympy.Add(*operands),
    sympy.Mul: lambda operands: sympy.Mul(*operands),
    sympy.Pow: lambda operands: power(operands[0], operands[1]),
    sympy.Abs: absolute,
    sympy_functions.LShift: left_shift,
    sympy_functions.RShift: right_shift,
}


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
        # The analysis of Mod and ModularIndexing has the sign of C's remainder, but values have that of Python's.
        with_pythons_sign = expression.replace(sympy_functions.Mod, sympy_functions.PythonMod)
        with_pythons_sign = with_pythons_sign.replace(sympy_functions.ModularIndexing, _as_python_mod)
    except ZeroDivisionError:  # a constant modulus is zero
        return None, None
    limits = torch_compat.bound_sympy(with_pythons_sign, ranges)
    return _finite(limits.lower), _finite(limits.upper)


def _is_unbounded_node(node: sympy.Basic) -> bool:
    """Whether the range analysis has no rule for a node: asinh, negative powers."""
    if isinstance(node, sympy_functions.OpaqueUnaryFn_asinh):
        return True
    return isinstance(node, sympy.Pow) and bool(node.exp.is_negative)


def _as_python_mod(base: sympy.Basic, divisor: sympy.Basic, modulus: sympy.Basic) -> sympy.Basic:
    quotient = sympy_functions.FloorDiv(base, divisor)
    remainder: sympy.Basic = sympy_functions.PythonMod(quotient, modulus)
    return remainder


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
