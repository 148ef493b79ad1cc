"""The reference evaluator of expressions, exact with Python's numbers."""

from __future__ import annotations

from collections.abc import Mapping

import sympy

from fxwrap.errors import ExpressionError
from fxwrap.symbolic.construct import constant_value
from fxwrap.symbolic.functions import FUNCTION_BY_CLASS, RELATION_BY_CLASS, Number
from fxwrap.symbolic.printing import ordered_terms
from fxwrap.symbolic.symbols import Expression
from fxwrap.torch_compat import sympy_functions


def evaluate(expression: Expression, environment: Mapping[str, Number]) -> Number:
    """Returns the value of a canonical size or condition, given the values of its symbols by name.

    Integers are Python's; floats are IEEE doubles, added and multiplied in the printers' order. Raises
    `ExpressionError` for a symbol that `environment` lacks, and ZeroDivisionError, ValueError or OverflowError where
    Python does.
    """
    if type(expression) is int:
        return expression
    return _value(expression, environment)


def _value(node: sympy.Basic, environment: Mapping[str, Number]) -> Number:
    node_class = type(node)
    if node_class is sympy.Symbol:
        return _symbol_value(node.name, environment)
    if node_class is sympy.Add:
        total: Number = 0
        for term in ordered_terms(node):
            total += _value(term, environment)
        return total
    if node_class is sympy.Mul:
        product: Number = 1
        for factor in node.args:
            product *= _value(factor, environment)
        return product
    if node_class is sympy.Pow:
        base, exponent = node.args
        power: Number = _value(base, environment) ** int(exponent)
        return power
    spec = FUNCTION_BY_CLASS.get(node_class)
    if spec is not None:
        if node_class is sympy_functions.Where:
            chosen = node.args[1] if _value(node.args[0], environment) else node.args[2]
            return _value(chosen, environment)
        return spec.compute(*[_value(operand, environment) for operand in node.args])
    relation = RELATION_BY_CLASS.get(node_class)
    if relation is not None:
        return relation.compute(*[_value(operand, environment) for operand in node.args])
    return _constant(node)


def _symbol_value(name: str, environment: Mapping[str, Number]) -> Number:
    try:
        return environment[name]
    except KeyError:
        known = ", ".join(sorted(environment)) or "none"
        raise ExpressionError(f"symbol {name} has no value; symbols with one: {known}") from None


def _constant(node: sympy.Basic) -> Number:
    value = constant_value(node)
    if value is not None:
        return value
    if isinstance(node, sympy.Rational):
        quotient: float = node.p / node.q
        return quotient
    if isinstance(node, sympy.Number):
        return float(node)
    raise ExpressionError(f"the expression language has no {type(node).__name__} (in {node})")
