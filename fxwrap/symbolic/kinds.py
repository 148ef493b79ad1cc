"""The kind (int, float or bool) of an expression, inferred from its structure."""

from __future__ import annotations

from collections.abc import Iterable

import sympy

from fxwrap import torch_compat
from fxwrap.caching import bounded_cache
from fxwrap.errors import ExpressionError
from fxwrap.symbolic.functions import FUNCTION_BY_CLASS, RELATION_BY_CLASS
from fxwrap.symbolic.symbols import Expression, ScalarKind, symbol_kind
from fxwrap.torch_compat import sympy_functions

_INTEGER_INFINITIES = (torch_compat.int_oo, -torch_compat.int_oo)


def expression_kind(expression: Expression) -> ScalarKind:
    """Returns the run-time kind of a canonical expression: "int", "float" or "bool".

    Rational constants and powers with a negative exponent are floats. Raises `ExpressionError` for an unknown node.
    """
    if type(expression) is int:
        return "int"
    return _kind(expression)


@bounded_cache(65536)
def _kind(node: sympy.Basic) -> ScalarKind:
    node_class = type(node)
    if node_class is sympy.Symbol:
        return symbol_kind(node.name)
    if isinstance(node, sympy.Integer) or node in _INTEGER_INFINITIES:
        return "int"
    if isinstance(node, sympy.Number):
        return "float"
    if node is sympy.true or node is sympy.false or node_class in RELATION_BY_CLASS:
        return "bool"
    if node_class is sympy.Add or node_class is sympy.Mul:
        return _arithmetic(_kind(argument) for argument in node.args)
    if node_class is sympy.Pow:
        base, exponent = node.args
        natural = isinstance(exponent, sympy.Integer) and exponent >= 0
        return _arithmetic([_kind(base)]) if natural else "float"
    spec = FUNCTION_BY_CLASS.get(node_class)
    if spec is None:
        raise ExpressionError(f"the expression language has no {node_class.__name__} (in {node})")
    if spec.result != "promoted":
        return spec.result
    operands = node.args[1:] if node_class is sympy_functions.Where else node.args
    kinds = {_kind(operand) for operand in operands}
    return "bool" if kinds == {"bool"} else _arithmetic(kinds)


def _arithmetic(kinds: Iterable[ScalarKind]) -> ScalarKind:
    return "float" if "float" in kinds else "int"
