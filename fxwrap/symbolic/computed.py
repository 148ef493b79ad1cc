"""Expressions as Python's arithmetic computes them: the functions that do, and back from these to an expression."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import sympy
import torch

from fxwrap import torch_compat
from fxwrap.errors import ExpressionError
from fxwrap.symbolic.construct import apply, compare, constant, constant_value, power
from fxwrap.symbolic.functions import BY_CLASS, BY_NAME, OPAQUE_FUNCTIONS, RELATION_BY_CLASS, Scalar
from fxwrap.symbolic.kinds import expression_kind

Number: TypeAlias = Scalar | sympy.Basic
"""A number that is known, or an expression."""

COMPUTED_BY: Mapping[str, Callable[..., Any]] = {
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
"""Functions of the expression language that a node can call on plain and on symbolic numbers alike.

Powers are the builtin's: torch.fx writes `operator.pow` of -2 and s0 as `-2 ** s0`, which is another number.
"""

COMPARED_BY: Mapping[str, Callable[..., Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
"""The comparisons, by their marks."""

CHAINED: Mapping[Callable[..., Any], str] = {
    operator.add: "add",
    operator.mul: "mul",
}
"""Functions of two numbers that compute a sum or product of many, from left to right."""


def computed(function: Callable[..., Any], operands: Sequence[Number]) -> Number:
    """Returns the number that a function of Python's, of `math` or of torch's symbolic numbers computes.

    A sum or product may have any number of operands. Raises ExpressionError for a function that no expression has.
    """
    rule = _RULES.get(function)
    if rule is None:
        name = getattr(function, "__name__", function)
        raise ExpressionError(f"no expression of the Wrapper IR computes '{name}'")
    return _plain(rule([_node(operand) for operand in operands]))


def as_computed(expression: Number) -> Number:
    """Returns the expression that is read back from the arithmetic that computes an expression.

    Its value is the same, but what Python computes in one way is one function: divisions that are exact and those that
    are rounded down, for example. Fractions are floats.
    """
    return _as_computed(expression) if isinstance(expression, sympy.Basic) else expression


@lru_cache(maxsize=65536)
def _as_computed(expression: sympy.Basic) -> Number:
    number = constant_value(expression)
    if number is not None or isinstance(expression, sympy.Symbol):
        return expression if number is None else number
    if isinstance(expression, sympy.Rational):
        return float(expression.p / expression.q)
    if not expression.args:
        return float(expression)
    operands = [as_computed(operand) for operand in expression.args]
    match expression:
        case sympy.Add():
            return computed(operator.add, operands)
        case sympy.Mul():
            return computed(operator.mul, operands)
        case sympy.Pow():
            return computed(pow, operands)
        case _:
            return _relation(expression, operands)


def _relation(expression: sympy.Basic, operands: Sequence[Number]) -> Number:
    relation = RELATION_BY_CLASS.get(type(expression))
    if relation is not None:
        return computed(COMPARED_BY[relation.mark], operands)
    return _function(expression, operands)


def _function(expression: sympy.Basic, operands: Sequence[Number]) -> Number:
    spec = BY_CLASS.get(type(expression))
    if spec is None:
        raise ExpressionError(f"the expression language has no {type(expression).__name__} (in {expression})")
    match spec.name:
        case "identity":
            return operands[0]
        case "modular_indexing":
            return computed(operator.mod, [computed(operator.floordiv, operands[:2]), operands[2]])
        case "trunc_to_float":
            return computed(torch.sym_float, [computed(math.trunc, operands)])
        case "where":
            return computed(torch.sym_ite, operands)
        case "max" | "min" | "and" | "or":
            total = operands[0]
            for operand in operands[1:]:
                total = computed(COMPUTED_BY[spec.name], [total, operand])
            return total
        case name:
            return computed(COMPUTED_BY.get(name) or getattr(math, name), operands)


def _node(number: Number) -> sympy.Basic:
    return number if isinstance(number, sympy.Basic) else constant(number)


def _plain(node: sympy.Basic) -> Number:
    number = constant_value(node)
    if number is not None:
        return number
    if isinstance(node, sympy.Number) and not isinstance(node, sympy.Rational):
        return float(node)
    return node


def _by_name(name: str) -> Callable[[Sequence[sympy.Basic]], sympy.Basic]:
    return lambda operands: apply(BY_NAME[name], operands)


def _comparison(mark: str) -> Callable[[Sequence[sympy.Basic]], sympy.Basic]:
    return lambda operands: compare(mark, *operands)


def _are_bools(operands: Sequence[sympy.Basic]) -> bool:
    return all(expression_kind(operand) == "bool" for operand in operands)


def _rounded(name: str) -> Callable[[Sequence[sympy.Basic]], sympy.Basic]:
    """A function of one float that gives an int; of an int it is the int itself."""
    return lambda operands: operands[0] if expression_kind(operands[0]) == "int" else apply(BY_NAME[name], operands)


def _round(operands: Sequence[sympy.Basic]) -> sympy.Basic:
    return apply(BY_NAME["round_decimal"], operands) if len(operands) == 2 else _rounded("round_to_int")(operands)


def _logical(name: str) -> Callable[[Sequence[sympy.Basic]], sympy.Basic]:
    return lambda operands: apply(BY_NAME[name if _are_bools(operands) else f"bitwise_{name}"], operands)


def _quotient(operands: Sequence[sympy.Basic]) -> sympy.Basic:
    kinds = {expression_kind(operand) for operand in operands}
    return apply(BY_NAME["float_true_div" if "float" in kinds else "int_true_div"], operands)


def _to_int(operands: Sequence[sympy.Basic]) -> sympy.Basic:
    (number,) = operands
    match expression_kind(number):
        case "bool":
            return apply(BY_NAME["where"], (number, sympy.S.One, sympy.S.Zero))
        case "float":
            return apply(BY_NAME["trunc_to_int"], operands)
        case _:
            return number


def _to_float(operands: Sequence[sympy.Basic]) -> sympy.Basic:
    is_float = expression_kind(operands[0]) == "float"
    return operands[0] if is_float else apply(BY_NAME["to_float"], operands)


def _absolute(operands: Sequence[sympy.Basic]) -> sympy.Basic:
    return apply(BY_NAME["max"], (operands[0], sympy.Mul(-1, operands[0])))


_RULES: Mapping[Callable[..., Any], Callable[[Sequence[sympy.Basic]], sympy.Basic]] = {
    operator.add: lambda operands: sympy.Add(*operands),
    operator.sub: lambda operands: sympy.Add(operands[0], sympy.Mul(-1, operands[1])),
    operator.mul: lambda operands: sympy.Mul(*operands),
    operator.neg: lambda operands: sympy.Mul(-1, operands[0]),
    operator.pos: lambda operands: operands[0],
    operator.abs: _absolute,
    abs: _absolute,
    operator.floordiv: _by_name("floordiv"),
    operator.mod: _by_name("python_mod"),
    operator.truediv: _quotient,
    pow: lambda operands: power(operands[0], operands[1]),
    operator.pow: lambda operands: power(operands[0], operands[1]),
    operator.lshift: lambda operands: sympy.Mul(operands[0], power(sympy.Integer(2), operands[1])),
    operator.rshift: lambda operands: apply(BY_NAME["floordiv"], (operands[0], power(sympy.Integer(2), operands[1]))),
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
    math.trunc: _rounded("trunc_to_int"),
    math.floor: _rounded("floor_to_int"),
    math.ceil: _rounded("ceil_to_int"),
    round: _round,
    **{function: _comparison(mark) for mark, function in COMPARED_BY.items()},
    **{getattr(math, name): _by_name(name) for name in OPAQUE_FUNCTIONS},
    **{function: _by_name(name) for name in OPAQUE_FUNCTIONS
       if (function := torch_compat.symbolic_function(name)) is not None},
}  # fmt: skip
