"""From any expression of a ShapeEnv to the canonical one over our symbols."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias

import sympy

from fxwrap import torch_compat
from fxwrap.errors import ExpressionError
from fxwrap.symbolic.construct import apply, compare, constant, power
from fxwrap.symbolic.functions import (
    BY_CLASS,
    BY_NAME,
    OPAQUE_FUNCTIONS,
    RELATION_BY_CLASS,
    FunctionSpec,
)
from fxwrap.symbolic.kinds import expression_kind
from fxwrap.symbolic.symbols import Expression, make_symbol

Rename: TypeAlias = Mapping[sympy.Symbol, sympy.Symbol]

_FOREIGN_FUNCTIONS: dict[type[sympy.Basic], FunctionSpec] = {
    sympy.Max: BY_NAME["max"],
    sympy.Min: BY_NAME["min"],
    sympy.Mod: BY_NAME["python_mod"],
    sympy.floor: BY_NAME["floor_to_int"],
    sympy.ceiling: BY_NAME["ceil_to_int"],
    **{getattr(sympy, name): BY_NAME[name] for name in OPAQUE_FUNCTIONS if name not in ("log2", "sqrt")},
}
"""sympy's own functions, and the function of ours that means the same at run time."""

_SHAPE_ENV_PREFIXES = {"zf": "f", "zuf": "uf"}
_SHAPE_ENV_NAME = re.compile(r"(zf|zuf)(\d+)")


def canonical(expression: Expression | float, rename: Rename | None = None) -> Expression:
    """The canonical form of a size or condition: equal meaning, our symbols, one tree however it was built.

    A ShapeEnv symbol is replaced by `rename[symbol]` if there, else by ours of the same name (`zf3` becomes
    `f3`, `zuf3` becomes `uf3`). An integer constant comes back as a plain int. Idempotent. Raises
    `ExpressionError` for a symbol without a known name and for a function that the expression language does
    not have.
    """
    if type(expression) is int:
        return expression
    if isinstance(expression, (bool, int, float)):
        return unwrap(constant(expression))
    if rename is None:
        return _canonical_cached(expression)
    return unwrap(_Rebuilder(rename).rebuild(expression))


def unwrap(node: sympy.Basic) -> Expression:
    """The node, or a plain int if it is an integer constant."""
    return int(node) if isinstance(node, sympy.Integer) else node


@lru_cache(maxsize=65536)
def _canonical_cached(expression: sympy.Basic) -> Expression:
    return unwrap(_Rebuilder({}).rebuild(expression))


class _Rebuilder:
    """Rebuilds a tree from its leaves with our constructors, each distinct node once."""

    def __init__(self, rename: Rename) -> None:
        self._rename = rename
        self._done: dict[sympy.Basic, sympy.Basic] = {}

    def rebuild(self, node: sympy.Basic) -> sympy.Basic:
        done = self._done.get(node)
        if done is None:
            done = self._done[node] = self._rebuild_new(node)
        return done

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
        spec = BY_CLASS.get(node_class) or _FOREIGN_FUNCTIONS.get(node_class)
        if spec is not None:
            return _foreign_apply(spec, operands)
        rule = _OTHER_NODES.get(node_class)
        if rule is None:
            raise ExpressionError(f"the expression language has no {node_class.__name__} (in {node})")
        return rule(operands)

    def _choice(self, node: sympy.Piecewise) -> sympy.Basic:
        """Returns nested choices for what torch.sym_ite gives; the last case is the one that always holds."""
        *cases, (last, _) = [pair.args for pair in node.args]
        chosen = self.rebuild(last)
        for value, condition in reversed(cases):
            chosen = apply(BY_NAME["where"], (self.rebuild(condition), self.rebuild(value), chosen))
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
        return apply(BY_NAME["float_true_div"], [apply(spec, operands[:1]), apply(spec, operands[1:])])
    if spec.name in ("floor_to_int", "ceil_to_int") and expression_kind(operands[0]) == "int":
        return operands[0]
    return apply(spec, operands)


def _absolute(operands: Sequence[sympy.Basic]) -> sympy.Basic:
    return apply(BY_NAME["max"], (operands[0], sympy.Mul(-1, operands[0])))


def _left_shift(operands: Sequence[sympy.Basic]) -> sympy.Basic:
    return sympy.Mul(operands[0], power(sympy.Integer(2), operands[1]))


def _right_shift(operands: Sequence[sympy.Basic]) -> sympy.Basic:
    return apply(BY_NAME["floordiv"], (operands[0], power(sympy.Integer(2), operands[1])))


_OTHER_NODES: dict[type[sympy.Basic], Callable[[Sequence[sympy.Basic]], sympy.Basic]] = {
    sympy.Add: lambda operands: sympy.Add(*operands),
    sympy.Mul: lambda operands: sympy.Mul(*operands),
    sympy.Pow: lambda operands: power(operands[0], operands[1]),
    sympy.Abs: _absolute,
    torch_compat.LShift: _left_shift,
    torch_compat.RShift: _right_shift,
}
