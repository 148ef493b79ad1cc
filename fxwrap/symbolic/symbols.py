"""Symbols. The prefix of a name determines its kind and its sympy assumptions."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import sympy

from fxwrap import torch_compat
from fxwrap.caching import bounded_cache
from fxwrap.errors import ExpressionError
from fxwrap.torch_compat import sympy_functions, unevaluated_boolean

ScalarKind: TypeAlias = Literal["int", "float", "bool"]
"""The run-time kind of an expression: `int64_t`, `double` or `bool` in C++, the type of the same name in Python."""

Size: TypeAlias = int | sympy.Expr
"""A size, stride, offset or scalar: a constant integer is a plain int, anything else a sympy expression."""

Expression: TypeAlias = int | sympy.Basic
"""A size or a condition (a comparison, `and`, `or`, `not`, `true`, `false`)."""

PREFIX_KINDS: dict[str, ScalarKind] = {"s": "int", "u": "int", "n": "int", "f": "float", "uf": "float", "b": "bool"}
"""Kind by prefix: `s` sizes, `u` unbacked integers, `n` lets, `f` and unbacked `uf` floats, `b` booleans."""

_NAME = re.compile(rf"({'|'.join(PREFIX_KINDS)})(\d+)")


@bounded_cache(65536)
def symbol_kind(name: str) -> ScalarKind:
    """Returns the kind of a symbol's name: "int", "float" or "bool".

    Raises `ExpressionError` if `name` is not a known prefix followed by digits.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        known = ", ".join(f"{prefix}0 ({kind})" for prefix, kind in PREFIX_KINDS.items())
        raise ExpressionError(f"'{name}' is not a symbol; symbols look like {known}")
    return PREFIX_KINDS[match[1]]


def is_symbol_name(name: str) -> bool:
    """Whether `name` is a known prefix followed by digits."""
    return _NAME.fullmatch(name) is not None


def depends_on_data(number: object) -> bool:
    """Whether an expression has an unbacked symbol: a number that only a run brings."""
    return isinstance(number, sympy.Basic) and any(symbol.name.startswith("u") for symbol in number.free_symbols)


@bounded_cache(65536)
def make_symbol(name: str) -> sympy.Symbol:
    """Returns the symbol of a name. Integers are assumed integer (of any sign), floats real, booleans nothing.

    Raises `ExpressionError` if `name` is not a known prefix followed by digits.
    """
    kind = symbol_kind(name)
    if kind == "int":
        return sympy.Symbol(name, integer=True)
    if kind == "float":
        return sympy.Symbol(name, real=True)
    return sympy.Symbol(name)


Number: TypeAlias = int | float | bool
ResultKind: TypeAlias = Literal["int", "float", "bool", "promoted"]

OPAQUE_FUNCTIONS = (
    "acos", "asin", "asinh", "atan", "cos", "cosh", "exp", "log", "log2", "sin", "sinh", "sqrt", "tan", "tanh",
)  # fmt: skip
"""Functions of one float, OpaqueUnaryFn_* in torch, which Python's math and C++'s std have too."""


@dataclass(frozen=True, slots=True)
class FunctionSpec:
    """A function of the expression language.

    `arity` None means one or more operands. `result` is the kind of the value; "promoted" is float if an operand is,
    else int, else bool. `compute` is the reference on Python numbers and may raise ZeroDivisionError, ValueError or
    OverflowError.
    """

    name: str
    sympy_class: type[sympy.Basic]
    arity: int | None
    result: ResultKind
    compute: Callable[..., Number]


def _natural_power(base: int, exponent: int) -> int:
    return operator.index(base**exponent)  # a negative exponent makes a float: TypeError


FUNCTIONS: tuple[FunctionSpec, ...] = (
    FunctionSpec("floordiv", sympy_functions.FloorDiv, 2, "int", operator.floordiv),
    FunctionSpec("cleandiv", sympy_functions.CleanDiv, 2, "int", operator.floordiv),
    FunctionSpec(
        "modular_indexing",
        sympy_functions.ModularIndexing,
        3,
        "int",
        lambda base, divisor, modulus: base // divisor % modulus,
    ),
    FunctionSpec("mod", sympy_functions.Mod, 2, "int", operator.mod),
    FunctionSpec("python_mod", sympy_functions.PythonMod, 2, "int", operator.mod),
    FunctionSpec("max", sympy_functions.Max, None, "promoted", lambda *operands: max(operands)),
    FunctionSpec("min", sympy_functions.Min, None, "promoted", lambda *operands: min(operands)),
    FunctionSpec("pow_by_natural", sympy_functions.PowByNatural, 2, "int", _natural_power),
    FunctionSpec("float_pow", sympy_functions.FloatPow, 2, "float", math.pow),
    FunctionSpec("int_true_div", sympy_functions.IntTrueDiv, 2, "float", operator.truediv),
    FunctionSpec("float_true_div", sympy_functions.FloatTrueDiv, 2, "float", operator.truediv),
    FunctionSpec("to_float", sympy_functions.ToFloat, 1, "float", float),
    FunctionSpec("trunc_to_float", sympy_functions.TruncToFloat, 1, "float", lambda x: float(math.trunc(x))),
    FunctionSpec("trunc_to_int", sympy_functions.TruncToInt, 1, "int", math.trunc),
    FunctionSpec("floor_to_int", sympy_functions.FloorToInt, 1, "int", math.floor),
    FunctionSpec("ceil_to_int", sympy_functions.CeilToInt, 1, "int", math.ceil),
    FunctionSpec("round_to_int", sympy_functions.RoundToInt, 1, "int", lambda x: round(x)),
    FunctionSpec("round_decimal", sympy_functions.RoundDecimal, 2, "float", lambda x, n: round(float(x), n)),
    FunctionSpec(
        "where", sympy_functions.Where, 3, "promoted", lambda condition, then, other: then if condition else other
    ),
    FunctionSpec("identity", sympy_functions.Identity, 1, "promoted", lambda operand: operand),
    FunctionSpec("bitwise_and", sympy_functions.BitwiseFn_bitwise_and, 2, "promoted", operator.and_),
    FunctionSpec("bitwise_or", sympy_functions.BitwiseFn_bitwise_or, 2, "promoted", operator.or_),
    FunctionSpec("bitwise_xor", sympy_functions.BitwiseFn_bitwise_xor, 2, "promoted", operator.xor),
    FunctionSpec("and", sympy.And, None, "bool", lambda *operands: all(operands)),
    FunctionSpec("or", sympy.Or, None, "bool", lambda *operands: any(operands)),
    FunctionSpec("not", sympy.Not, 1, "bool", operator.not_),
    *(
        FunctionSpec(name, getattr(sympy_functions, f"OpaqueUnaryFn_{name}"), 1, "float", getattr(math, name))
        for name in OPAQUE_FUNCTIONS
    ),
)

FUNCTION_BY_NAME: dict[str, FunctionSpec] = {spec.name: spec for spec in FUNCTIONS}
FUNCTION_NAMES: frozenset[str] = frozenset(FUNCTION_BY_NAME)
"""The names of functions in IR text."""

FUNCTION_BY_CLASS: dict[type[sympy.Basic], FunctionSpec] = {spec.sympy_class: spec for spec in FUNCTIONS}


@dataclass(frozen=True, slots=True)
class RelationSpec:
    """A comparison: its `mark` in IR text, its sympy class and its reference on Python numbers."""

    mark: str
    sympy_class: type[sympy.Basic]
    compute: Callable[[Number, Number], bool]


RELATIONS: tuple[RelationSpec, ...] = (
    RelationSpec("==", sympy.Eq, operator.eq),
    RelationSpec("!=", sympy.Ne, operator.ne),
    RelationSpec("<", sympy.Lt, operator.lt),
    RelationSpec("<=", sympy.Le, operator.le),
    RelationSpec(">", sympy.Gt, operator.gt),
    RelationSpec(">=", sympy.Ge, operator.ge),
)
RELATION_BY_OPERATOR: dict[str, RelationSpec] = {spec.mark: spec for spec in RELATIONS}
RELATION_BY_CLASS: dict[type[sympy.Basic], RelationSpec] = {spec.sympy_class: spec for spec in RELATIONS}


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


_LARGEST_FOLDED_EXPONENT = 1024
_DIVISIONS = (sympy_functions.FloorDiv, sympy_functions.CleanDiv)
_INTEGER_OPERANDS = frozenset(
    ["floordiv", "cleandiv", "modular_indexing", "mod", "python_mod", "pow_by_natural"]
    + ["bitwise_and", "bitwise_or", "bitwise_xor"]
)
_EXTREMES = {sympy_functions.Max: max, sympy_functions.Min: min}


def constant(value: Number) -> sympy.Basic:
    """Returns the sympy constant of a number, exact for floats, infinities and nan."""
    if isinstance(value, bool):
        return sympy.true if value else sympy.false
    if isinstance(value, int):
        return sympy.Integer(value)
    if math.isnan(value):
        return sympy.nan
    if math.isinf(value):
        return sympy.oo if value > 0 else -sympy.oo
    return sympy.Float(value)


def constant_value(node: sympy.Basic) -> Number | None:
    """Returns the number of a finite integer, float or boolean constant, None for any other node."""
    if isinstance(node, sympy.Integer):
        return int(node)
    if isinstance(node, sympy.Float):
        return float(node)
    if node is sympy.true or node is sympy.false:
        return node is sympy.true
    return None


def power(base: sympy.Basic, exponent: sympy.Basic) -> sympy.Basic:
    """Returns `base ** exponent`: sympy's power for constant integer exponents, else a function."""
    folds_huge = base.is_Number and exponent.is_Integer and abs(exponent) > _LARGEST_FOLDED_EXPONENT
    if isinstance(exponent, sympy.Integer) and not folds_huge:
        return sympy.Pow(base, exponent)
    if exponent == sympy.S.Half:
        return apply(FUNCTION_BY_NAME["sqrt"], (base,))
    if isinstance(exponent, sympy.Rational):
        exponent = sympy.Float(float(exponent))
    joint_kinds = {expression_kind(base), expression_kind(exponent)}
    return apply(FUNCTION_BY_NAME["float_pow" if "float" in joint_kinds else "pow_by_natural"], (base, exponent))


def compare(mark: str, left: sympy.Basic, right: sympy.Basic) -> sympy.Basic:
    """Returns the comparison `left mark right`, folded if both are constants."""
    spec = RELATION_BY_OPERATOR[mark]
    left_value, right_value = constant_value(left), constant_value(right)
    if left_value is not None and right_value is not None:
        return constant(spec.compute(left_value, right_value))
    return spec.sympy_class(left, right, evaluate=False)


def apply(spec: FunctionSpec, operands: Sequence[sympy.Basic]) -> sympy.Basic:
    """The canonical node of a function on canonical operands; constants fold unless that raises.

    Raises `ExpressionError` for a float operand of a function that is defined on integers only.
    """
    if spec.name in _INTEGER_OPERANDS:
        for operand in operands:
            if expression_kind(operand) == "float":
                raise ExpressionError(f"{spec.name} is defined on integers; its operand {operand} is a float")
    folded = _fold(spec, operands)
    if folded is not None:
        return folded
    node = spec.sympy_class
    if node in _DIVISIONS:
        return _divide(spec, operands[0], operands[1])
    if node in _EXTREMES:
        return _extreme(spec, operands)
    if node is sympy.And or node is sympy.Or:
        return _connective(spec, operands)
    if node is sympy.Not and isinstance(operands[0], sympy.Not):
        return operands[0].args[0]
    if node is sympy_functions.Where and operands[0] in (sympy.true, sympy.false):
        return operands[1] if operands[0] is sympy.true else operands[2]
    if spec.name in ("mod", "python_mod", "modular_indexing") and operands[-1] == 1:
        return sympy.S.Zero
    return node(*operands, evaluate=False)


def absolute(operands: Sequence[sympy.Basic]) -> sympy.Basic:
    """Returns the absolute value of an operand."""
    return apply(FUNCTION_BY_NAME["max"], (operands[0], sympy.Mul(-1, operands[0])))


def left_shift(operands: Sequence[sympy.Basic]) -> sympy.Basic:
    """Returns the first operand shifted left by the second."""
    return sympy.Mul(operands[0], power(sympy.Integer(2), operands[1]))


def right_shift(operands: Sequence[sympy.Basic]) -> sympy.Basic:
    """Returns the first operand shifted right by the second."""
    return apply(FUNCTION_BY_NAME["floordiv"], (operands[0], power(sympy.Integer(2), operands[1])))


def ceiling_division(base: sympy.Basic, divisor: sympy.Basic) -> sympy.Basic:
    """Returns ceil(base / divisor) for a positive divisor, in torch's form (base + divisor - 1) // divisor."""
    return apply(FUNCTION_BY_NAME["floordiv"], (sympy.Add(base, divisor, -1), divisor))


def _fold(spec: FunctionSpec, operands: Sequence[sympy.Basic]) -> sympy.Basic | None:
    if spec.sympy_class is sympy_functions.Identity:
        return None
    if spec.sympy_class is sympy_functions.PowByNatural and constant_value(operands[1]) not in range(
        _LARGEST_FOLDED_EXPONENT
    ):
        return None
    values = [constant_value(operand) for operand in operands]
    if None in values:
        return None
    try:
        return constant(spec.compute(*values))
    except (ArithmeticError, ValueError, TypeError):
        return None  # the node raises when the program evaluates it


def _divide(spec: FunctionSpec, base: sympy.Basic, divisor: sympy.Basic) -> sympy.Basic:
    """Returns a floor division. By a constant, multiples of it are divided exactly and common factors cancel."""
    if not isinstance(divisor, sympy.Integer) or divisor == 0 or expression_kind(base) != "int":
        return spec.sympy_class(base, divisor, evaluate=False)
    number = int(divisor)
    quotients: list[sympy.Basic] = []
    remaining: list[tuple[int, sympy.Basic]] = []
    for term in sympy.Add.make_args(base):
        coefficient, rest = _integer_coefficient(term)
        if coefficient % number == 0:
            quotients.append(sympy.Mul(coefficient // number, rest))
        else:
            remaining.append((coefficient, rest))
    if not remaining:
        return sympy.Add(*quotients)
    common = math.gcd(number, *(coefficient for coefficient, _ in remaining))
    reduced = sympy.Add(*(sympy.Mul(coefficient // common, rest) for coefficient, rest in remaining))
    reduced_divisor = sympy.Integer(number // common)
    if quotients or common != 1:
        return sympy.Add(*quotients, apply(spec, (reduced, reduced_divisor)))
    return spec.sympy_class(reduced, reduced_divisor, evaluate=False)


def _integer_coefficient(term: sympy.Basic) -> tuple[int, sympy.Basic]:
    coefficient, rest = term.as_coeff_Mul()
    return (int(coefficient), rest) if isinstance(coefficient, sympy.Integer) else (1, term)


def _extreme(spec: FunctionSpec, operands: Sequence[sympy.Basic]) -> sympy.Basic:
    """Returns Max or Min, flattened, without duplicates, with finite constants folded."""
    choose = _EXTREMES[spec.sympy_class]
    symbolic: dict[sympy.Basic, None] = {}
    constants: list[sympy.Basic] = []
    for operand in operands:
        for part in operand.args if isinstance(operand, spec.sympy_class) else (operand,):
            if constant_value(part) is None:
                symbolic[part] = None
            else:
                constants.append(part)
    parts = list(symbolic)
    if constants:
        parts.append(choose(constants, key=float))
    return parts[0] if len(parts) == 1 else spec.sympy_class(*parts, evaluate=False)


def _connective(spec: FunctionSpec, operands: Sequence[sympy.Basic]) -> sympy.Basic:
    """Returns And or Or, flattened, without duplicates and neutral constants; inequalities are not solved."""
    neutral = sympy.true if spec.sympy_class is sympy.And else sympy.false
    deciding = sympy.false if spec.sympy_class is sympy.And else sympy.true
    parts: dict[sympy.Basic, None] = {}
    for operand in operands:
        for part in operand.args if isinstance(operand, spec.sympy_class) else (operand,):
            if part is deciding:
                return deciding
            if part is not neutral:
                parts[part] = None
    if len(parts) < 2:
        return next(iter(parts), neutral)
    return unevaluated_boolean(spec.sympy_class, parts)
