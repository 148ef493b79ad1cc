"""Conversion between expressions and Python callables (`operator`, `math`, torch's symbolic functions)."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import sympy
import torch

from fxwrap import torch_compat
from fxwrap.caching import bounded_cache
from fxwrap.errors import ExpressionError
from fxwrap.symbolic.printing import ordered_terms
from fxwrap.symbolic.symbols import (
    FUNCTION_BY_CLASS,
    FUNCTION_BY_NAME,
    OPAQUE_FUNCTIONS,
    RELATION_BY_CLASS,
    Expression,
    Number,
    absolute,
    apply,
    compare,
    constant,
    constant_value,
    expression_kind,
    left_shift,
    power,
    right_shift,
)
from fxwrap.torch_compat import sympy_functions

NumberOrExpression: TypeAlias = Number | sympy.Basic
"""A constant number, or an expression."""

AnyCallable: TypeAlias = Callable[..., Any]

FUNCTION_CALLABLES: Mapping[str, AnyCallable] = {
    "floordiv": operator.floordiv,
    "cleandiv": operator.floordiv,
    "mod": operator.mod,
    "python_mod": operator.mod,
    "max": torch.sym_max,
    "min": torch.sym_min,
    "pow_by_natural": pow,
    "float_pow": pow,
    "int_true_div": operator.truediv,
    "float_true_div": operator.truediv,
    "to_float": torch.sym_float,
    "trunc_to_int": math.trunc,
    "floor_to_int": math.floor,
    "ceil_to_int": math.ceil,
    "round_to_int": round,
    "round_decimal": round,
    "bitwise_and": operator.and_,
    "bitwise_or": operator.or_,
    "bitwise_xor": operator.xor,
    "and": operator.and_,
    "or": operator.or_,
    "not": torch.sym_not,
}
"""The callables of functions, which accept plain and symbolic numbers.

Powers are the builtin's: torch.fx prints `operator.pow` of -2 and s0 as `-2 ** s0`, which is another number.
"""

RELATION_CALLABLES: Mapping[str, AnyCallable] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
"""The callables of comparisons."""

VARIADIC_CALLABLES: Mapping[AnyCallable, str] = {operator.add: "add", operator.mul: "mul"}
"""Binary callables of sums and products, which apply from left to right."""


def apply_callable(function: AnyCallable, operands: Sequence[NumberOrExpression]) -> NumberOrExpression:
    """Returns the result of a callable as a canonical expression or number.

    Sums and products accept any number of operands. Raises ExpressionError for an unknown callable.
    """
    rule = _RULES.get(function)
    if rule is None:
        name = getattr(function, "__name__", function)
        raise ExpressionError(f"the expression language has no function '{name}'")
    return _unwrap_constant(rule([_node(operand) for operand in operands]))


def normalize_arithmetic(expression: NumberOrExpression) -> NumberOrExpression:
    """Returns the expression that importing an expression's arithmetic yields.

    Its value is the same, but functions with one callable become one: exact and floor division, for example. Fractions
    are floats.
    """
    return _normalize_arithmetic(expression) if isinstance(expression, sympy.Basic) else expression


_ARITHMETIC: Mapping[type[sympy.Basic], AnyCallable] = {
    sympy.Add: operator.add,
    sympy.Mul: operator.mul,
    sympy.Pow: pow,
}


@bounded_cache(65536)
def _normalize_arithmetic(expression: sympy.Basic) -> NumberOrExpression:
    number = constant_value(expression)
    if number is not None or isinstance(expression, sympy.Symbol):
        return expression if number is None else number
    if isinstance(expression, sympy.Rational):
        return float(expression.p / expression.q)
    if not expression.args:
        return float(expression)
    operands = [normalize_arithmetic(operand) for operand in expression.args]
    function = _ARITHMETIC.get(type(expression))
    if function is not None:
        return apply_callable(function, operands)
    relation = RELATION_BY_CLASS.get(type(expression))
    if relation is not None:
        return apply_callable(RELATION_CALLABLES[relation.mark], operands)
    return _function(expression, operands)


def _function(expression: sympy.Basic, operands: Sequence[NumberOrExpression]) -> NumberOrExpression:
    spec = FUNCTION_BY_CLASS.get(type(expression))
    if spec is None:
        raise ExpressionError(f"the expression language has no {type(expression).__name__} (in {expression})")
    match spec.name:
        case "identity":
            return operands[0]
        case "modular_indexing":
            return apply_callable(operator.mod, [apply_callable(operator.floordiv, operands[:2]), operands[2]])
        case "trunc_to_float":
            return apply_callable(torch.sym_float, [apply_callable(math.trunc, operands)])
        case "where":
            return apply_callable(torch.sym_ite, operands)
        case "max" | "min" | "and" | "or":
            total = operands[0]
            for operand in operands[1:]:
                total = apply_callable(FUNCTION_CALLABLES[spec.name], [total, operand])
            return total
        case name:
            return apply_callable(FUNCTION_CALLABLES.get(name) or getattr(math, name), operands)


def _node(number: NumberOrExpression) -> sympy.Basic:
    return number if isinstance(number, sympy.Basic) else constant(number)


def _unwrap_constant(node: sympy.Basic) -> NumberOrExpression:
    number = constant_value(node)
    if number is not None:
        return number
    if isinstance(node, sympy.Number) and not isinstance(node, sympy.Rational):
        return float(node)
    return node


def _by_name(name: str) -> Callable[[Sequence[sympy.Basic]], sympy.Basic]:
    return lambda operands: apply(FUNCTION_BY_NAME[name], operands)


def _comparison(mark: str) -> Callable[[Sequence[sympy.Basic]], sympy.Basic]:
    return lambda operands: compare(mark, *operands)


def _rounding_rule(name: str) -> Callable[[Sequence[sympy.Basic]], sympy.Basic]:
    """A function from float to int; it returns an int unchanged."""
    return lambda operands: (
        operands[0] if expression_kind(operands[0]) == "int" else apply(FUNCTION_BY_NAME[name], operands)
    )


def _round(operands: Sequence[sympy.Basic]) -> sympy.Basic:
    if len(operands) == 2:
        return apply(FUNCTION_BY_NAME["round_decimal"], operands)
    return _rounding_rule("round_to_int")(operands)


def _logical(name: str) -> Callable[[Sequence[sympy.Basic]], sympy.Basic]:
    def rule(operands: Sequence[sympy.Basic]) -> sympy.Basic:
        are_bools = all(expression_kind(operand) == "bool" for operand in operands)
        return apply(FUNCTION_BY_NAME[name if are_bools else f"bitwise_{name}"], operands)

    return rule


def _quotient(operands: Sequence[sympy.Basic]) -> sympy.Basic:
    kinds = {expression_kind(operand) for operand in operands}
    return apply(FUNCTION_BY_NAME["float_true_div" if "float" in kinds else "int_true_div"], operands)


def _to_int(operands: Sequence[sympy.Basic]) -> sympy.Basic:
    (number,) = operands
    match expression_kind(number):
        case "bool":
            return apply(FUNCTION_BY_NAME["where"], (number, sympy.S.One, sympy.S.Zero))
        case "float":
            return apply(FUNCTION_BY_NAME["trunc_to_int"], operands)
        case _:
            return number


def _to_float(operands: Sequence[sympy.Basic]) -> sympy.Basic:
    is_float = expression_kind(operands[0]) == "float"
    return operands[0] if is_float else apply(FUNCTION_BY_NAME["to_float"], operands)


_RULES: Mapping[Callable[..., object], Callable[[Sequence[sympy.Basic]], sympy.Basic]] = {
    operator.add: lambda operands: sympy.Add(*operands),
    operator.sub: lambda operands: sympy.Add(operands[0], sympy.Mul(-1, operands[1])),
    operator.mul: lambda operands: sympy.Mul(*operands),
    operator.neg: lambda operands: sympy.Mul(-1, operands[0]),
    operator.pos: lambda operands: operands[0],
    operator.abs: absolute,
    abs: absolute,
    operator.floordiv: _by_name("floordiv"),
    operator.mod: _by_name("python_mod"),
    operator.truediv: _quotient,
    pow: lambda operands: power(operands[0], operands[1]),
    operator.pow: lambda operands: power(operands[0], operands[1]),
    operator.lshift: left_shift,
    operator.rshift: right_shift,
    operator.and_: _logical("and"),
    operator.or_: _logical("or"),
    operator.xor: _by_name("bitwise_xor"),
    operator.not_: _by_name("not"),
    torch.sym_not: _by_name("not"),
    torch.sym_max: _by_name("max"),
    torch.sym_min: _by_name("min"),
    max: _by_name("max"),
    min: _by_name("min"),
    torch.sym_ite: _by_name("where"),
    torch.sym_float: _to_float,
    float: _to_float,
    torch.sym_int: _to_int,
    int: _to_int,
    math.trunc: _rounding_rule("trunc_to_int"),
    math.floor: _rounding_rule("floor_to_int"),
    math.ceil: _rounding_rule("ceil_to_int"),
    round: _round,
    **{function: _comparison(mark) for mark, function in RELATION_CALLABLES.items()},
    **{getattr(math, name): _by_name(name) for name in OPAQUE_FUNCTIONS},
    **{function: _by_name(name) for name in OPAQUE_FUNCTIONS
       if (function := torch_compat.symbolic_function(name)) is not None},
}  # fmt: skip


def evaluate(expression: Expression, environment: Mapping[str, Number]) -> Number:
    """Returns the value of a canonical size or condition, given the values of its symbols by name.

    Integers are Python's; floats are IEEE doubles, added and multiplied in the printers' order. Raises
    `ExpressionError` for a symbol that `environment` lacks, and ZeroDivisionError, ValueError or OverflowError where
    Python does.
    """
    if type(expression) is int:
        return expression
    return _value(expression, environment)


def evaluate_size(size: Expression, environment: Mapping[str, Number]) -> int:
    """Returns the value of a size, stride or offset, given the values of its symbols by name. Raises as `evaluate`."""
    return int(evaluate(size, environment))


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
