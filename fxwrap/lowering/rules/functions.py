"""Functions of one number, rounding, tests for special values, and functions made of logarithms."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from fxwrap.loop_ir import Scalar
from fxwrap.lowering.definitions import Definition, Indices, Reader, pointwise
from fxwrap.lowering.rules.pointwise import bound, converted, element, elementwise, refusal, rounded, row
from fxwrap.lowering.rules.registry import Call, Result

# --- operations of the loop IR, by name ------------------------------------------------------------------------------


def _operation(name: str) -> Callable[[Scalar], Scalar]:
    return lambda x: x.apply(name)


for _name in (
    "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "sin", "sinh", "tan", "tanh", "exp", "exp2",
    "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal", "sigmoid", "erf", "erfc", "erfinv",
    "lgamma", "digamma",
):  # fmt: skip
    row(f"aten.{_name}.default", _operation(_name), "INT_TO_FLOAT")

# --- signs and rounding ----------------------------------------------------------------------------------------------


def _unless_bool(name: str) -> Callable[[Scalar], Scalar]:
    return lambda x: x if x.dtype is torch.bool else x.apply(name)


def _float_only(name: str) -> Callable[[Scalar], Scalar]:
    return lambda x: x.apply(name) if x.dtype.is_floating_point else x


row("aten.abs.default", _unless_bool("abs"))
row(("aten.sign.default", "aten.sgn.default"), _unless_bool("sign"))
row("aten.neg.default", _operation("neg"), accepts="number")
row(("aten.conj_physical.default", "aten._conj_physical.default", "aten.positive.default"), lambda x: x)
for _name in ("floor", "ceil", "round", "trunc"):
    row(f"aten.{_name}.default", _float_only(_name), accepts="number")
row("aten.fix.default", _float_only("trunc"), accepts="number")
row("aten.frac.default", lambda x: x - x.apply("trunc"), accepts="float")
row("aten.deg2rad.default", lambda x: x * (math.pi / 180), "INT_TO_FLOAT")
row("aten.rad2deg.default", lambda x: x * (180 / math.pi), "INT_TO_FLOAT")


@bound("aten.round.decimals")
def _round_decimals(call: Call, x: Definition, decimals: int) -> Result | str:
    if decimals == 0:
        return elementwise(call, (x,), "DEFAULT", _float_only("round"), accepts="number")
    if not x.dtype.is_floating_point:
        return "an integer rounded to decimals"
    scale = float(f"1e{abs(decimals)}")

    def formula(x: Scalar) -> Scalar:
        return (x * scale).apply("round") / scale if decimals > 0 else (x / scale).apply("round") * scale

    return elementwise(call, (x,), "DEFAULT", formula)


# --- special values --------------------------------------------------------------------------------------------------


def _false(x: Scalar) -> Scalar:
    return x.body.constant(False, torch.bool)


def _float_test(formula: Callable[[Scalar], Scalar]) -> Callable[[Scalar], Scalar]:
    return lambda x: formula(x) if x.dtype.is_floating_point else _false(x)


def _isfinite(x: Scalar) -> Scalar:
    return abs(x) < math.inf if x.dtype.is_floating_point else ~_false(x)


def _signbit(x: Scalar) -> Scalar:
    if x.dtype is torch.bool:
        return _false(x)
    return x.apply("signbit") if x.dtype.is_floating_point else x < 0


row("aten.isnan.default", _float_test(_operation("isnan")), "ALWAYS_BOOL")
row("aten.isinf.default", _float_test(_operation("isinf")), "ALWAYS_BOOL")
row("aten.isposinf.default", _float_test(lambda x: x.equals(math.inf)), "ALWAYS_BOOL")
row("aten.isneginf.default", _float_test(lambda x: x.equals(-math.inf)), "ALWAYS_BOOL")
row("aten.isfinite.default", _isfinite, "ALWAYS_BOOL")
row("aten.signbit.default", _signbit, "ALWAYS_BOOL")


@bound("aten.nan_to_num.default")
def _nan_to_num(call: Call, x: Definition, nan: Any, largest: Any, smallest: Any) -> Result | str:
    if not x.dtype.is_floating_point:
        return elementwise(call, (x,), "DEFAULT", lambda x: x)
    limits = torch.finfo(x.dtype)
    numbers = (0.0 if nan is None else nan, limits.max if largest is None else largest,
               limits.min if smallest is None else smallest)  # fmt: skip

    def formula(x: Scalar, nan: Scalar, largest: Scalar, smallest: Scalar) -> Scalar:
        bounded = x.equals(math.inf).where(largest, x.equals(-math.inf).where(smallest, x))
        return x.apply("isnan").where(nan, bounded)

    return elementwise(call, (x, *numbers), "DEFAULT", formula)


def _heaviside(x: Scalar, at_zero: Scalar) -> Scalar:
    if x.dtype is torch.bool:
        return x | at_zero
    return x.equals(0).where(at_zero, (x > 0).to(x.dtype))


row("aten.heaviside.default", _heaviside, operands=2)


def _angle(x: Scalar) -> Scalar:
    return x.apply("isnan").where(x, (x < 0).where(x.of(math.pi), 0.0))


row("aten.angle.default", _angle, "INT_TO_FLOAT")

# --- made of logarithms, exponentials and sines ----------------------------------------------------------------------


def _xlogy(name: str) -> Callable[[Scalar, Scalar], Scalar]:
    def formula(x: Scalar, y: Scalar) -> Scalar:
        product = x.equals(0).where(0.0, x * y.apply(name))
        return y.apply("isnan").where(y, product)

    return formula


row(
    ("aten.xlogy.Tensor", "aten.xlogy.Scalar_Other", "aten.xlogy.Scalar_Self"),
    _xlogy("log"), "INT_TO_FLOAT", operands=2,
)  # fmt: skip
row(
    [f"aten.special_xlog1py.{overload}" for overload in ("default", "other_scalar", "self_scalar")],
    _xlogy("log1p"), "INT_TO_FLOAT", operands=2,
)  # fmt: skip


def _entropy(x: Scalar) -> Scalar:
    """-x log x, 0 at 0, -inf below it; NaN stays."""
    positive = (x > 0).where(-x * x.log(), x.equals(0).where(x.of(0.0), -math.inf))
    return x.apply("isnan").where(x, positive)


row("aten.special_entr.default", _entropy, "INT_TO_FLOAT")


def _log_of_sum(exponential: str, factor: float) -> Callable[[Scalar, Scalar], Scalar]:
    def formula(x: Scalar, y: Scalar) -> Scalar:
        """The larger, and the rest of the sum relative to it; equal infinities have no difference."""
        rest = (-abs(x - y)).apply(exponential).apply("log1p")
        equal_infinities = x.apply("isinf") & x.equals(y)
        return equal_infinities.where(x, x.maximum(y) + (rest if factor == 1.0 else rest * factor))

    return formula


row("aten.logaddexp.default", _log_of_sum("exp", 1.0), operands=2, accepts="float")
row("aten.logaddexp2.default", _log_of_sum("exp2", 1 / math.log(2)), operands=2, accepts="float")


def _logit(x: Scalar, epsilon: Any) -> Scalar:
    if epsilon is not None:
        upper = x.of(1.0) - epsilon  # as torch does: the difference is rounded
        x = (x < epsilon).where(epsilon, (x > upper).where(upper, x))
    return (x / (1.0 - x)).log()


row("aten.logit.default", _logit, "INT_TO_FLOAT")


def _logit_backward(gradient: Scalar, x: Scalar, epsilon: Any) -> Scalar:
    lower = 0.0 if epsilon is None else epsilon
    inside = (x >= lower) & (x <= x.of(1.0) - lower)
    outside = math.nan if epsilon is None else 0.0
    return inside.where(gradient / (x * (1.0 - x)), outside)


row("aten.logit_backward.default", _logit_backward, operands=2, accepts="float")


def _sinc(x: Scalar) -> Scalar:
    angle = x * math.pi
    return x.equals(0).where(1.0, angle.apply("sin") / angle)


row("aten.sinc.default", _sinc, "INT_TO_FLOAT")


@bound("aten.ldexp.Tensor")
def _ldexp(call: Call, x: Definition, exponent: Definition) -> Result | str:
    """torch makes powers of two in the exponents' dtype, float32 for integers, and multiplies by them."""
    powers = exponent.dtype if exponent.dtype.is_floating_point else torch.float32
    reason = refusal(call, (x, exponent), call.dtype)
    if reason is not None:
        return reason

    def body(reader: Reader, indices: Indices) -> Scalar:
        power = element(reader, exponent, indices, powers).apply("exp2")
        return element(reader, x, indices, call.dtype) * converted(rounded(power, powers), powers, call.dtype)

    return pointwise(call.sizes, call.dtype, call.device, body)


@bound("aten.polygamma.default")
def _polygamma(call: Call, order: Any, x: Definition) -> Result | str:
    if order != 0:
        return "kernels have no polygamma functions above the digamma function"
    return elementwise(call, (x,), "INT_TO_FLOAT", _operation("digamma"))


@bound("aten.mvlgamma.default")
def _mvlgamma(call: Call, x: Definition, dimension: int) -> Result | str:
    def formula(x: Scalar) -> Scalar:
        total = x.apply("lgamma")
        for step in range(1, dimension):
            total = total + (x - step / 2).apply("lgamma")
        return total + dimension * (dimension - 1) / 4 * math.log(math.pi)

    return elementwise(call, (x,), "INT_TO_FLOAT", formula)
