"""Constructors of canonical expressions: the same operands always give the same tree.

Sums, products and natural powers are sympy's evaluated ones. Every other node is built without torch's own
simplification, which differs from release to release, costs milliseconds and trusts sign assumptions that our
symbols do not make; here are only folding of constants and a few exact rules that hold for every integer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import sympy
from sympy.core.sorting import ordered

from fxwrap import torch_compat
from fxwrap.errors import ExpressionError
from fxwrap.symbolic.functions import BY_NAME, RELATION_BY_MARK, FunctionSpec, Scalar
from fxwrap.symbolic.kinds import expression_kind

_LARGEST_FOLDED_EXPONENT = 1024
_DIVISIONS = (torch_compat.FloorDiv, torch_compat.CleanDiv)
_INTEGER_OPERANDS = frozenset(
    ["floordiv", "cleandiv", "modular_indexing", "mod", "python_mod", "pow_by_natural"]
    + ["bitwise_and", "bitwise_or", "bitwise_xor"]
)
_EXTREMES = {torch_compat.Max: max, torch_compat.Min: min}


def constant(value: Scalar) -> sympy.Basic:
    """The sympy constant of a Python scalar: exact for floats, infinities and nan included."""
    if isinstance(value, bool):
        return sympy.true if value else sympy.false
    if isinstance(value, int):
        return sympy.Integer(value)
    if math.isnan(value):
        return sympy.nan
    if math.isinf(value):
        return sympy.oo if value > 0 else -sympy.oo
    return sympy.Float(value)


def constant_value(node: sympy.Basic) -> Scalar | None:
    """The Python scalar of a finite integer, float or boolean constant, None for any other node."""
    if isinstance(node, sympy.Integer):
        return int(node)
    if isinstance(node, sympy.Float):
        return float(node)
    if node is sympy.true or node is sympy.false:
        return node is sympy.true
    return None


def power(base: sympy.Basic, exponent: sympy.Basic) -> sympy.Basic:
    """`base ** exponent`: sympy's power for integer constants, else a float power, root or natural power."""
    folds_huge = base.is_Number and exponent.is_Integer and abs(exponent) > _LARGEST_FOLDED_EXPONENT
    if isinstance(exponent, sympy.Integer) and not folds_huge:
        return sympy.Pow(base, exponent)
    if exponent == sympy.S.Half:
        return apply(BY_NAME["sqrt"], (base,))
    if isinstance(exponent, sympy.Rational):
        exponent = sympy.Float(float(exponent))
    joint_kinds = {expression_kind(base), expression_kind(exponent)}
    return apply(BY_NAME["float_pow" if "float" in joint_kinds else "pow_by_natural"], (base, exponent))


def compare(mark: str, left: sympy.Basic, right: sympy.Basic) -> sympy.Basic:
    """The comparison `left mark right`, folded if both are constants."""
    spec = RELATION_BY_MARK[mark]
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
    if node is torch_compat.Where and operands[0] in (sympy.true, sympy.false):
        return operands[1] if operands[0] is sympy.true else operands[2]
    if spec.name in ("mod", "python_mod", "modular_indexing") and operands[-1] == 1:
        return sympy.S.Zero
    return node(*operands, evaluate=False)


def ceiling_division(base: sympy.Basic, divisor: sympy.Basic) -> sympy.Basic:
    """`ceil(base / divisor)` for a positive divisor, as torch does: (base + divisor - 1) // divisor."""
    return apply(BY_NAME["floordiv"], (sympy.Add(base, divisor, -1), divisor))


def _fold(spec: FunctionSpec, operands: Sequence[sympy.Basic]) -> sympy.Basic | None:
    if spec.sympy_class is torch_compat.Identity:
        return None
    if spec.sympy_class is torch_compat.PowByNatural and constant_value(operands[1]) not in range(
        _LARGEST_FOLDED_EXPONENT
    ):
        return None
    values = []
    for operand in operands:
        value = constant_value(operand)
        if value is None:
            return None
        values.append(value)
    try:
        return constant(spec.compute(*values))
    except (ArithmeticError, ValueError, TypeError):
        return None  # the node stays, so that it raises where and when the program evaluates it


def _divide(spec: FunctionSpec, base: sympy.Basic, divisor: sympy.Basic) -> sympy.Basic:
    """Floor division; by a constant, whole multiples come out and common factors cancel, both exactly."""
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
    """Max or Min: nested ones flattened, duplicates dropped, finite constants folded into one."""
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
    """And or Or: nested ones flattened, duplicates and neutral constants dropped, inequalities not solved."""
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
    node = sympy.Basic.__new__(spec.sympy_class, *ordered(parts))
    node._argset = frozenset(parts)
    return node
