"""The functions an expression may apply: one table of name, sympy class, arity, result and exact meaning."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import sympy

from fxwrap import torch_compat

Scalar: TypeAlias = int | float | bool
ResultKind: TypeAlias = Literal["int", "float", "bool", "joint"]

OPAQUE_FUNCTIONS = (
    "acos",
    "asin",
    "asinh",
    "atan",
    "cos",
    "cosh",
    "exp",
    "log",
    "log2",
    "sin",
    "sinh",
    "sqrt",
    "tan",
    "tanh",
)
"""Functions of one float that torch names OpaqueUnaryFn_*; Python's math and C++'s std have all of them."""


@dataclass(frozen=True, slots=True)
class FunctionSpec:
    """One function of the expression language.

    Fields: `name` in the text form, `sympy_class` its node, `arity` the number of operands (None: one or
    more), `result` the kind of its value ("joint": float if an operand is, else int, else bool), `compute`
    its exact meaning on Python scalars, which may raise ZeroDivisionError, ValueError or OverflowError as
    Python does.
    """

    name: str
    sympy_class: type[sympy.Basic]
    arity: int | None
    result: ResultKind
    compute: Callable[..., Scalar]


def _where(condition: Scalar, then: Scalar, otherwise: Scalar) -> Scalar:
    return then if condition else otherwise


def _modular_indexing(base: int, divisor: int, modulus: int) -> int:
    return base // divisor % modulus


def _natural_power(base: int, exponent: int) -> int:
    return operator.index(base**exponent)  # a negative exponent gives a float, which is a TypeError here


def _exactly_rounded(number: float) -> int:
    return round(number)


def _opaque(name: str) -> FunctionSpec:
    node = getattr(torch_compat, f"OpaqueUnaryFn_{name}")
    return FunctionSpec(name, node, 1, "float", getattr(math, name))


FUNCTIONS: tuple[FunctionSpec, ...] = (
    FunctionSpec("floordiv", torch_compat.FloorDiv, 2, "int", operator.floordiv),
    FunctionSpec("cleandiv", torch_compat.CleanDiv, 2, "int", operator.floordiv),
    FunctionSpec("modular_indexing", torch_compat.ModularIndexing, 3, "int", _modular_indexing),
    FunctionSpec("mod", torch_compat.Mod, 2, "int", operator.mod),
    FunctionSpec("python_mod", torch_compat.PythonMod, 2, "int", operator.mod),
    FunctionSpec("max", torch_compat.Max, None, "joint", lambda *operands: max(operands)),
    FunctionSpec("min", torch_compat.Min, None, "joint", lambda *operands: min(operands)),
    FunctionSpec("pow_by_natural", torch_compat.PowByNatural, 2, "int", _natural_power),
    FunctionSpec("float_pow", torch_compat.FloatPow, 2, "float", math.pow),
    FunctionSpec("int_true_div", torch_compat.IntTrueDiv, 2, "float", operator.truediv),
    FunctionSpec("float_true_div", torch_compat.FloatTrueDiv, 2, "float", operator.truediv),
    FunctionSpec("to_float", torch_compat.ToFloat, 1, "float", float),
    FunctionSpec("trunc_to_float", torch_compat.TruncToFloat, 1, "float", lambda x: float(math.trunc(x))),
    FunctionSpec("trunc_to_int", torch_compat.TruncToInt, 1, "int", math.trunc),
    FunctionSpec("floor_to_int", torch_compat.FloorToInt, 1, "int", math.floor),
    FunctionSpec("ceil_to_int", torch_compat.CeilToInt, 1, "int", math.ceil),
    FunctionSpec("round_to_int", torch_compat.RoundToInt, 1, "int", _exactly_rounded),
    FunctionSpec("round_decimal", torch_compat.RoundDecimal, 2, "float", lambda x, n: round(float(x), n)),
    FunctionSpec("where", torch_compat.Where, 3, "joint", _where),
    FunctionSpec("identity", torch_compat.Identity, 1, "joint", lambda operand: operand),
    FunctionSpec("bitwise_and", torch_compat.BitwiseFn_bitwise_and, 2, "joint", operator.and_),
    FunctionSpec("bitwise_or", torch_compat.BitwiseFn_bitwise_or, 2, "joint", operator.or_),
    FunctionSpec("bitwise_xor", torch_compat.BitwiseFn_bitwise_xor, 2, "joint", operator.xor),
    FunctionSpec("and", sympy.And, None, "bool", lambda *operands: all(operands)),
    FunctionSpec("or", sympy.Or, None, "bool", lambda *operands: any(operands)),
    FunctionSpec("not", sympy.Not, 1, "bool", operator.not_),
    *(_opaque(name) for name in OPAQUE_FUNCTIONS),
)

BY_NAME: dict[str, FunctionSpec] = {spec.name: spec for spec in FUNCTIONS}
FUNCTION_NAMES: frozenset[str] = frozenset(BY_NAME)
"""The names that the text form gives a meaning when parentheses follow."""

BY_CLASS: dict[type[sympy.Basic], FunctionSpec] = {spec.sympy_class: spec for spec in FUNCTIONS}


@dataclass(frozen=True, slots=True)
class RelationSpec:
    """One comparison: its `mark` in the text, its sympy class and its meaning on Python scalars."""

    mark: str
    sympy_class: type[sympy.Basic]
    compute: Callable[[Scalar, Scalar], bool]


RELATIONS: tuple[RelationSpec, ...] = (
    RelationSpec("==", sympy.Eq, operator.eq),
    RelationSpec("!=", sympy.Ne, operator.ne),
    RelationSpec("<", sympy.Lt, operator.lt),
    RelationSpec("<=", sympy.Le, operator.le),
    RelationSpec(">", sympy.Gt, operator.gt),
    RelationSpec(">=", sympy.Ge, operator.ge),
)
RELATION_BY_MARK: dict[str, RelationSpec] = {spec.mark: spec for spec in RELATIONS}
RELATION_BY_CLASS: dict[type[sympy.Basic], RelationSpec] = {spec.sympy_class: spec for spec in RELATIONS}
