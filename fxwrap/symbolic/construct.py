"""Constructors of canonical expressions: equal operands yield equal trees.

Sums, products and natural powers are sympy's evaluated ones. Other nodes skip torch's simplification, which differs
between releases, is slow, and relies on sign assumptions that fxwrap's symbols do not make. The constructors only fold
constants and apply a few rules that are exact for all integers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import sympy

from fxwrap.errors import ExpressionError
from fxwrap.symbolic.symbols import FUNCTION_BY_NAME, RELATION_BY_OPERATOR, FunctionSpec, Number, expression_kind
from fxwrap.torch_compat import sympy_functions, unevaluated_boolean

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
