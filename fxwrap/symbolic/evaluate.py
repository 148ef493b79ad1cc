"""The reference meaning of expressions: exact evaluation with Python's numbers."""

from __future__ import annotations

from collections.abc import Mapping

import sympy

from fxwrap import torch_compat
from fxwrap.errors import ExpressionError
from fxwrap.symbolic.construct import constant_value
from fxwrap.symbolic.functions import BY_CLASS, RELATION_BY_CLASS, Scalar
from fxwrap.symbolic.printing import ordered_terms
from fxwrap.symbolic.symbols import Expression


def evaluate(expression: Expression, environment: Mapping[str, Scalar]) -> Scalar:
    """The value of a canonical size or condition, given the values of its symbols by name.

    Integers are Python's (floor division toward minus infinity, no overflow), floats are IEEE doubles,
    added and multiplied in the order in which the printers write them. Raises `ExpressionError` for a symbol
    that `environment` lacks, and what Python raises (ZeroDivisionError, ValueError, OverflowError) where it
    does.
    """
    if type(expression) is int:
        return expression
    return _value(expression, environment)


def _value(node: sympy.Basic, environment: Mapping[str, Scalar]) -> Scalar:
    node_class = type(node)
    if node_class is sympy.Symbol:
        return _symbol_value(node.name, environment)
    if node_class is sympy.Add:
        total: Scalar = 0
        for term in ordered_terms(node):
            total += _value(term, environment)
        return total
    if node_class is sympy.Mul:
        product: Scalar = 1
        for factor in node.args:
            product *= _value(factor, environment)
        return product
    if node_class is sympy.Pow:
        base, exponent = node.args
        power: Scalar = _value(base, environment) ** int(exponent)
        return power
    spec = BY_CLASS.get(node_class)
    if spec is not None:
        if node_class is torch_compat.Where:
            chosen = node.args[1] if _value(node.args[0], environment) else node.args[2]
            return _value(chosen, environment)
        return spec.compute(*[_value(operand, environment) for operand in node.args])
    relation = RELATION_BY_CLASS.get(node_class)
    if relation is not None:
        return relation.compute(*[_value(operand, environment) for operand in node.args])
    return _constant(node)


def _symbol_value(name: str, environment: Mapping[str, Scalar]) -> Scalar:
    try:
        return environment[name]
    except KeyError:
        known = ", ".join(sorted(environment)) or "none"
        raise ExpressionError(f"symbol {name} has no value; symbols with one: {known}") from None


def _constant(node: sympy.Basic) -> Scalar:
    value = constant_value(node)
    if value is not None:
        return value
    if isinstance(node, sympy.Rational):
        quotient: float = node.p / node.q
        return quotient
    if isinstance(node, sympy.Number):
        return float(node)
    raise ExpressionError(f"the expression language has no {type(node).__name__} (in {node})")
