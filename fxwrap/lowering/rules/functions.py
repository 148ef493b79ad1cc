"""Unary functions, rounding, tests for special values, and compositions of logarithms and exponentials."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from fxwrap.loop_ir import Scalar
from fxwrap.lowering.fusion.definitions import Definition, ElementReader, Indices
from fxwrap.lowering.rules.pointwise import (
    Parameter,
    check_operands,
    convert_element,
    elementwise,
    load_operand,
    register_elementwise,
    round_to_dtype,
)
from fxwrap.lowering.rules.registry import Declined, LoweringResult, OperatorCall, lowering_rule

# --- operations of the loop IR ---------------------------------------------------------------------------------------


def _operation(name: str) -> Callable[[Scalar], Scalar]:
    return lambda x: x.apply(name)


for _name in (
    "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "sin", "sinh", "tan", "tanh", "exp", "exp2",
    "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal", "sigmoid", "erf", "erfc", "erfinv",
    "lgamma", "digamma",
):  # fmt: skip
    register_elementwise(f"aten.{_name}.default", _operation(_name), "INT_TO_FLOAT")

# --- signs and rounding ----------------------------------------------------------------------------------------------


def _float_only(name: str) -> Callable[[Scalar], Scalar]:
    return lambda x: x.apply(name) if x.dtype.is_floating_point else x


register_elementwise("aten.abs.default", _operation("abs"), dtypes="number")
register_elementwise(
    ("aten.sign.default", "aten.sgn.default"), lambda x: x if x.dtype is torch.bool else x.apply("sign")
)
register_elementwise("aten.neg.default", _operation("neg"), dtypes="number")
register_elementwise("aten._conj_physical.default", lambda x: x)
for _name in ("floor", "ceil", "round", "trunc"):
    register_elementwise(f"aten.{_name}.default", _float_only(_name), dtypes="number")
register_elementwise("aten.frac.default", lambda x: x - x.apply("trunc"), dtypes="float")
register_elementwise("aten.deg2rad.default", lambda x: x * (math.pi / 180), "INT_TO_FLOAT")
register_elementwise("aten.rad2deg.default", lambda x: x * (180 / math.pi), "INT_TO_FLOAT")


@lowering_rule("aten.round.decimals")
def _round_decimals(call: OperatorCall, x: Definition, decimals: int) -> LoweringResult:
    if not x.dtype.is_floating_point:
        raise Declined("an integer rounded to decimals")
    if decimals == 0:
        return elementwise(call, (x,), _operation("round"))
    scale = float(f"1e{abs(decimals)}")

    def formula(x: Scalar) -> Scalar:
        return (x * scale).apply("round") / scale if decimals > 0 else (x / scale).apply("round") * scale

    return elementwise(call, (x,), formula)


# --- special values --------------------------------------------------------------------------------------------------


def _false(x: Scalar) -> Scalar:
    return x.body.constant(False, torch.bool)


def _float_test(formula: Callable[[Scalar], Scalar]) -> Callable[[Scalar], Scalar]:
    return lambda x: formula(x) if x.dtype.is_floating_point else _false(x)


def _signbit(x: Scalar) -> Scalar:
    if x.dtype is torch.bool:
        return _false(x)
    return x.apply("signbit") if x.dtype.is_floating_point else x < 0


register_elementwise("aten.isnan.default", _float_test(_operation("isnan")), "ALWAYS_BOOL")
register_elementwise("aten.isinf.default", _float_test(_operation("isinf")), "ALWAYS_BOOL")
register_elementwise("aten.isposinf.default", _float_test(lambda x: x.equals(math.inf)), "ALWAYS_BOOL")
register_elementwise("aten.isneginf.default", _float_test(lambda x: x.equals(-math.inf)), "ALWAYS_BOOL")
register_elementwise("aten.signbit.default", _signbit, "ALWAYS_BOOL")


@lowering_rule("aten.nan_to_num.default")
def _nan_to_num(
    call: OperatorCall, x: Definition, nan: float | None, largest: float | None, smallest: float | None
) -> LoweringResult:
    if not x.dtype.is_floating_point:
        return elementwise(call, (x,), lambda x: x)
    limits = torch.finfo(x.dtype)
    replacements = (
        0.0 if nan is None else nan,
        limits.max if largest is None else largest,
        limits.min if smallest is None else smallest,
    )

    def formula(x: Scalar, nan: Scalar, largest: Scalar, smallest: Scalar) -> Scalar:
        bounded = x.equals(math.inf).where(largest, x.equals(-math.inf).where(smallest, x))
        return x.apply("isnan").where(nan, bounded)

    return elementwise(call, (x, *replacements), formula)


def _heaviside(x: Scalar, at_zero: Scalar) -> Scalar:
    if x.dtype is torch.bool:
        return x | at_zero
    return x.equals(0).where(at_zero, (x > 0).to(x.dtype))


register_elementwise("aten.heaviside.default", _heaviside, operands=2, dtypes="equal")
register_elementwise(
    "aten.angle.default",
    lambda x: x.apply("isnan").where(x, (x < 0).where(x.coerce(math.pi), 0.0)), "INT_TO_FLOAT",
)  # fmt: skip

# --- logarithms, exponentials and sines ------------------------------------------------------------------------------


def _xlogy(name: str) -> Callable[[Scalar, Scalar], Scalar]:
    def formula(x: Scalar, y: Scalar) -> Scalar:
        result = x.equals(0).where(0.0, x * y.apply(name))
        return y.apply("isnan").where(y, result)

    return formula


register_elementwise(
    ("aten.xlogy.Tensor", "aten.xlogy.Scalar_Other", "aten.xlogy.Scalar_Self"),
    _xlogy("log"), "INT_TO_FLOAT", operands=2,
)  # fmt: skip
register_elementwise(
    [f"aten.special_xlog1py.{overload}" for overload in ("default", "other_scalar", "self_scalar")],
    _xlogy("log1p"), "INT_TO_FLOAT", operands=2,
)  # fmt: skip


def _entropy(x: Scalar) -> Scalar:
    """Returns -x log x, 0 at 0, -inf below 0, NaN for NaN."""
    positive = (x > 0).where(-x * x.log(), x.equals(0).where(x.coerce(0.0), -math.inf))
    return x.apply("isnan").where(x, positive)


register_elementwise("aten.special_entr.default", _entropy, "INT_TO_FLOAT")


def _logaddexp(exponential: str, factor: float) -> Callable[[Scalar, Scalar], Scalar]:
    def formula(x: Scalar, y: Scalar) -> Scalar:
        """Adds to the larger operand the logarithm of the sum relative to it; equal infinities have no difference."""
        rest = (-abs(x - y)).apply(exponential).apply("log1p")
        equal_infinities = x.apply("isinf") & x.equals(y)
        return equal_infinities.where(x, x.maximum(y) + (rest if factor == 1.0 else rest * factor))

    return formula


register_elementwise("aten.logaddexp.default", _logaddexp("exp", 1.0), operands=2, dtypes="float")
register_elementwise("aten.logaddexp2.default", _logaddexp("exp2", 1 / math.log(2)), operands=2, dtypes="float")


def _logit(x: Scalar, epsilon: Parameter | None) -> Scalar:
    if epsilon is not None:
        upper = x.coerce(1.0) - epsilon  # torch rounds the difference too
        x = (x < epsilon).where(epsilon, (x > upper).where(upper, x))
    return (x / (1.0 - x)).log()


register_elementwise("aten.logit.default", _logit, "INT_TO_FLOAT")


def _logit_backward(gradient: Scalar, x: Scalar, epsilon: Parameter | None) -> Scalar:
    lower = 0.0 if epsilon is None else epsilon
    inside = (x >= lower) & (x <= x.coerce(1.0) - lower)
    outside = math.nan if epsilon is None else 0.0
    return inside.where(gradient / (x * (1.0 - x)), outside)


register_elementwise("aten.logit_backward.default", _logit_backward, operands=2, dtypes="float")


def _sinc(x: Scalar) -> Scalar:
    angle = x * math.pi
    return x.equals(0).where(1.0, angle.apply("sin") / angle)


register_elementwise("aten.sinc.default", _sinc, "INT_TO_FLOAT")


@lowering_rule("aten.ldexp.Tensor", dtypes="number")
def _ldexp(call: OperatorCall, x: Definition, exponent: Definition) -> LoweringResult:
    """torch computes powers of two in the exponents' dtype, float32 for integers, and multiplies by them."""
    powers = exponent.dtype if exponent.dtype.is_floating_point else torch.float32

    def body(reader: ElementReader, indices: Indices) -> Scalar:
        power = load_operand(reader, exponent, indices, powers).apply("exp2")
        return load_operand(reader, x, indices, call.dtype) * convert_element(
            round_to_dtype(power, powers), powers, call.dtype
        )

    check_operands(call, (x, exponent), call.dtype)
    return call.define(body)


@lowering_rule("aten.polygamma.default")
def _polygamma(call: OperatorCall, order: int, x: Definition) -> LoweringResult:
    if order != 0:
        raise Declined("kernels have no polygamma functions above the digamma function")
    return elementwise(call, (x,), _operation("digamma"), promotion="INT_TO_FLOAT")


@lowering_rule("aten.mvlgamma.default", dtypes="number")
def _mvlgamma(call: OperatorCall, x: Definition, dimension: int) -> LoweringResult:
    def formula(x: Scalar) -> Scalar:
        total = x.apply("lgamma")
        for step in range(1, dimension):
            total = total + (x - step / 2).apply("lgamma")
        return total + dimension * (dimension - 1) / 4 * math.log(math.pi)

    return elementwise(call, (x,), formula, promotion="INT_TO_FLOAT")
