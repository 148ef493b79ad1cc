"""The kind (int, float or bool) of an expression, from its structure alone."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import sympy

from fxwrap import torch_compat
from fxwrap.errors import ExpressionError
from fxwrap.symbolic.functions import BY_CLASS, RELATION_BY_CLASS
from fxwrap.symbolic.symbols import Expression, Kind, symbol_kind

_INTEGER_INFINITIES = (torch_compat.int_oo, -torch_compat.int_oo)


def expression_kind(expression: Expression) -> Kind:
    """What a canonical expression is at run time: "int", "float" or "bool".

    A rational constant and a power with a negative exponent are floats: they mean true division. Raises
    `ExpressionError` for a node that the expression language does not have.
    """
    if type(expression) is int:
        return "int"
    return _kind(expression)


@lru_cache(maxsize=65536)
def _kind(node: sympy.Basic) -> Kind:
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
    spec = BY_CLASS.get(node_class)
    if spec is None:
        raise ExpressionError(f"the expression language has no {node_class.__name__} (in {node})")
    if spec.result != "joint":
        return spec.result
    operands = node.args[1:] if node_class is torch_compat.Where else node.args
    kinds = {_kind(operand) for operand in operands}
    return "bool" if kinds == {"bool"} else _arithmetic(kinds)


def _arithmetic(kinds: Iterable[Kind]) -> Kind:
    return "float" if "float" in kinds else "int"
