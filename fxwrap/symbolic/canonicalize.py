"""Canonicalization of expressions of a ShapeEnv."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import sympy

from fxwrap.caching import bounded_cache
from fxwrap.errors import ExpressionError
from fxwrap.symbolic.construct import absolute, apply, compare, constant, left_shift, power, right_shift
from fxwrap.symbolic.functions import (
    FUNCTION_BY_CLASS,
    FUNCTION_BY_NAME,
    OPAQUE_FUNCTIONS,
    RELATION_BY_CLASS,
    FunctionSpec,
)
from fxwrap.symbolic.kinds import expression_kind
from fxwrap.symbolic.symbols import Expression, make_symbol
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
