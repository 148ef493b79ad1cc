"""Arithmetic, division, powers, comparison, logic and bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import sympy
import torch

from fxwrap.loop_ir import INTEGERS, STORAGE_ONLY, Scalar
from fxwrap.lowering.definitions import Definition, Reader, pointwise
from fxwrap.lowering.rules.pointwise import (
    Numbers,
    bound,
    element,
    elementwise,
    numbers_are_exact,
    promoted_dtype,
    refusal,
    rounded,
    rounded_number,
    row,
)
from fxwrap.lowering.rules.registry import Call, Result

# --- sums and products -----------------------------------------------------------------------------------------------


def _scaled(y: Scalar, alpha: Any) -> Scalar:
    return y if not isinstance(alpha, Scalar) and alpha == 1 else y * alpha


def _add(x: Scalar, y: Scalar, alpha: Any) -> Scalar:
    if x.dtype is torch.bool:
        return x | (y & x.of(bool(alpha)) if alpha is not True and alpha != 1 else y)
    return x + _scaled(y, alpha)


def _sum_rule(formula: Callable[[Scalar, Scalar, Any], Scalar], accepts: Any) -> Callable[..., Result | str]:
    def lowered(call: Call, x: Any, y: Any, alpha: Any) -> Result | str:
        numbers: Numbers = "rounded on cpu"  # CUDA computes with the number as it is given
        dtype = promoted_dtype((x, y), "DEFAULT")
        reason = _alpha_refusal(alpha, dtype)
        if reason is not None:
            return reason
        if not numbers_are_exact(call, numbers):
            alpha = rounded_number(alpha, dtype)
        return elementwise(call, (x, y), "DEFAULT", formula, numbers=numbers, accepts=accepts, parameters=(alpha,))

    return lowered


def _alpha_refusal(alpha: Any, dtype: torch.dtype) -> str | None:
    if dtype is torch.bool and isinstance(alpha, sympy.Basic):
        return "alpha is a symbol and the operands are bool"
    if dtype in INTEGERS and isinstance(alpha, int) and not -(2**63) <= alpha < 2**63:
        return f"the number {alpha} is out of the range of {dtype}"
    return None


bound("aten.add.Tensor", "aten.add.Scalar")(_sum_rule(_add, "any"))
bound("aten.sub.Tensor", "aten.sub.Scalar")(_sum_rule(lambda x, y, alpha: x - _scaled(y, alpha), "number"))
bound("aten.rsub.Tensor", "aten.rsub.Scalar")(_sum_rule(lambda x, y, alpha: y - _scaled(x, alpha), "number"))


def _mul(x: Scalar, y: Scalar) -> Scalar:
    return x & y if x.dtype is torch.bool else x * y


def _larger(x: Scalar, y: Scalar) -> Scalar:
    return x | y if x.dtype is torch.bool else x.maximum(y)


def _smaller(x: Scalar, y: Scalar) -> Scalar:
    return x & y if x.dtype is torch.bool else x.minimum(y)


def _fmax(x: Scalar, y: Scalar) -> Scalar:
    return x.apply("fmax", y) if x.dtype.is_floating_point else _larger(x, y)


def _fmin(x: Scalar, y: Scalar) -> Scalar:
    return x.apply("fmin", y) if x.dtype.is_floating_point else _smaller(x, y)


def _clamp(x: Scalar, lower: Scalar | None, upper: Scalar | None) -> Scalar:
    x = x if lower is None else x.maximum(lower)
    return x if upper is None else x.minimum(upper)


def _copysign(x: Scalar, y: Scalar) -> Scalar:
    if y.constant is None:
        return x.apply("copysign", y)
    return -abs(x) if math.copysign(1.0, y.constant) < 0 else abs(x)


row(("aten.mul.Tensor", "aten.mul.Scalar"), _mul, operands=2, numbers="exact")
row(("aten.maximum.default", "aten.max.other"), _larger, operands=2)
row(("aten.minimum.default", "aten.min.other"), _smaller, operands=2)
row("aten.fmax.default", _fmax, operands=2)
row("aten.fmin.default", _fmin, operands=2)
row("aten.hypot.default", lambda x, y: x.apply("hypot", y), operands=2, accepts="float")
row("aten.atan2.default", lambda x, y: x.apply("atan2", y), "INT_TO_FLOAT", operands=2)
row(("aten.copysign.Tensor", "aten.copysign.Scalar"), _copysign, "INT_TO_FLOAT", operands=2)


@bound("aten.nextafter.default")
def _nextafter(call: Call, x: Definition, y: Definition) -> Result | str:
    if call.dtype in STORAGE_ONLY:
        return f"the neighbours of numbers of {call.dtype}, of which kernels compute in float32"
    return elementwise(call, (x, y), "DEFAULT", lambda x, y: x.apply("nextafter", y), accepts="float")


@bound("aten.clamp.default", "aten.clamp.Tensor", "aten.clip.default", "aten.clip.Tensor")
def _clamp_rule(call: Call, x: Definition, lower: Any, upper: Any) -> Result | str:
    if any(isinstance(limit, float) and math.isnan(limit) for limit in (lower, upper)):
        return "a limit that is no number: torch 2.11 leaves it out if it is the only one, later ones give NaN"
    return elementwise(call, (x, lower, upper), "DEFAULT", _clamp, accepts="number")


row(("aten.clamp_min.default", "aten.clamp_min.Tensor"), _larger, operands=2)
row(("aten.clamp_max.default", "aten.clamp_max.Tensor"), _smaller, operands=2)


@bound("aten.addcmul.default")
def _addcmul(call: Call, x: Definition, left: Definition, right: Definition, value: Any) -> Result | str:
    def formula(x: Scalar, left: Scalar, right: Scalar, value: Any) -> Scalar:
        return x + _scaled(left, value) * right

    return elementwise(call, (x, left, right), "DEFAULT", formula, accepts="number", parameters=(value,))


@bound("prims.fma.default")  # what Dynamo makes of the in-place forms of addcmul and addcdiv, since torch 2.13
def _fma(call: Call, left: Definition, right: Any, x: Definition) -> Result | str:
    return elementwise(call, (left, right, x), "DEFAULT", lambda left, right, x: left * right + x, accepts="float")


@bound("aten.addcdiv.default")
def _addcdiv(call: Call, x: Definition, left: Definition, right: Definition, value: Any) -> Result | str:
    def formula(x: Scalar, left: Scalar, right: Scalar, value: Any) -> Scalar:
        return x + _scaled(left, value) / right

    return elementwise(call, (x, left, right), "DEFAULT", formula, accepts="float", parameters=(value,))


def _lerp(start: Scalar, end: Scalar, weight: Scalar) -> Scalar:
    """Each half of the way from its own end, as torch does, so that weights 0 and 1 give the ends."""
    if weight.constant is not None:
        near = abs(weight.constant) < 0.5
        return (end - start) * (weight.constant if near else weight.constant - 1.0) + (start if near else end)
    small = abs(weight) < 0.5
    return small.where(weight, weight - 1.0) * (end - start) + small.where(start, end)


row(("aten.lerp.Tensor", "aten.lerp.Scalar"), _lerp, operands=3, numbers="exact", accepts="float")

# --- division --------------------------------------------------------------------------------------------------------


def _divisor_refusal(divisor: Any, dtype: torch.dtype) -> str | None:
    """Returns why integers are not divided in a kernel: the CPU traps, and eager raises, where a divisor is zero."""
    if dtype.is_floating_point:
        return None
    if dtype is torch.bool:
        return "its operands are of torch.bool"
    if isinstance(divisor, Definition | sympy.Basic):
        return "integer division by what may be zero, for which eager raises"
    return None if int(divisor) else "integer division by zero, for which eager raises"


def _is_minus_one(divisor: Scalar) -> bool:
    return divisor.constant == -1 and divisor.dtype in INTEGERS


def _rounded_division(name: str) -> Callable[[Scalar, Scalar], Scalar]:
    def formula(x: Scalar, y: Scalar) -> Scalar:
        return -x if _is_minus_one(y) else x.apply(name, y)  # the smallest integer over -1 traps on CPUs

    return formula


def _remainder_of(name: str) -> Callable[[Scalar, Scalar], Scalar]:
    def formula(x: Scalar, y: Scalar) -> Scalar:
        if _is_minus_one(y):
            return x - x
        return x.apply(name if x.dtype.is_floating_point else f"integer_{name}", y)

    return formula


def _divide(call: Call, x: Any, y: Any, formula: Callable[[Scalar, Scalar], Scalar], numbers: Numbers) -> Result | str:
    reason = _divisor_refusal(y, promoted_dtype((x, y), "DEFAULT"))
    return reason or elementwise(call, (x, y), "DEFAULT", formula, numbers=numbers)


_floored, _truncated = _rounded_division("floor_divide"), _rounded_division("trunc_divide")
_true_division_names = ("aten.div.Tensor", "aten.div.Scalar", "aten.true_divide.Tensor")


@bound(*_true_division_names)
def _true_division(call: Call, x: Any, y: Any) -> Result | str:
    return elementwise(call, (x, y), "INT_TO_FLOAT", lambda x, y: x / y, numbers="exact")


@bound("aten.div.Tensor_mode", "aten.div.Scalar_mode")
def _division(call: Call, x: Any, y: Any, mode: str | None) -> Result | str:
    """By a tensor of half precision, torch rounds the quotient before it truncates that."""
    if mode is None:
        return _true_division(call, x, y)
    if mode == "trunc" and call.dtype in STORAGE_ONLY and isinstance(y, Definition) and y.sizes:
        return elementwise(call, (x, y), "DEFAULT", lambda x, y: rounded(x / y, call.dtype).apply("trunc"))
    return _divide(call, x, y, _floored if mode == "floor" else _truncated, "exact")


@bound("aten.floor_divide.default", "aten.floor_divide.Scalar")
def _floor_division(call: Call, x: Any, y: Any) -> Result | str:
    return _divide(call, x, y, _floored, "exact")


@bound("aten.remainder.Tensor", "aten.remainder.Scalar", "aten.remainder.Scalar_Tensor")
def _remainder(call: Call, x: Any, y: Any) -> Result | str:
    return _divide(call, x, y, _remainder_of("remainder"), "rounded")


@bound("aten.fmod.Tensor", "aten.fmod.Scalar")
def _fmod(call: Call, x: Any, y: Any) -> Result | str:
    return _divide(call, x, y, _remainder_of("fmod"), "rounded")


# --- powers ----------------------------------------------------------------------------------------------------------


def _power(x: Scalar, exponent: Any) -> Scalar:
    """x to the power of a number, by multiplication where torch does, or where it is as accurate."""
    if exponent == 0:
        return x.of(1)
    if exponent in _SMALL_POWERS and (x.dtype.is_floating_point or exponent > 0):
        return _SMALL_POWERS[exponent](x)
    return x.apply("pow" if x.dtype.is_floating_point else "integer_pow", exponent)


_SMALL_POWERS: dict[Any, Callable[[Scalar], Scalar]] = {
    1: lambda x: x,
    2: lambda x: x * x,
    3: lambda x: x * x * x,
    4: lambda x: (x * x) * (x * x),
    0.5: lambda x: x.sqrt(),
    -0.5: lambda x: x.rsqrt(),
    -1: lambda x: x.apply("reciprocal"),
    -2: lambda x: (x * x).apply("reciprocal"),
}


def _power_refusal(exponent: Any, dtype: torch.dtype) -> str | None:
    if dtype is torch.bool:
        return "its operands are of torch.bool"
    if dtype in INTEGERS and isinstance(exponent, sympy.Basic):
        return "an integer to a symbolic power, for which eager raises when it is negative"
    if dtype in INTEGERS and not isinstance(exponent, Definition) and exponent < 0:
        return "an integer to a negative power, for which eager raises"
    return None


@bound("aten.pow.Tensor_Scalar")
def _pow_number(call: Call, x: Definition, exponent: Any) -> Result | str:
    dtype = promoted_dtype((x, exponent), "DEFAULT")
    reason = _power_refusal(exponent, dtype) or refusal(call, (x, exponent), dtype)
    if reason is not None:
        return reason
    exponent = exponent if exponent in _SMALL_POWERS else rounded_number(exponent, dtype)

    def body(reader: Reader, indices: Any) -> Scalar:
        value = element(reader, x, indices, dtype)
        power = reader.number(exponent, value.dtype) if isinstance(exponent, sympy.Basic) else exponent
        return _power(value, power)

    return pointwise(call.sizes, call.dtype, call.device, body)


@bound("aten.square.default")
def _square(call: Call, x: Definition) -> Result | str:
    return _pow_number(call, x, 2)


@bound("aten.pow.Tensor_Tensor")
def _pow_tensors(call: Call, x: Definition, exponent: Definition) -> Result | str:
    reason = _power_refusal(exponent, promoted_dtype((x, exponent), "DEFAULT"))
    return reason or elementwise(call, (x, exponent), "DEFAULT", _power_of_two_scalars)


@bound("aten.pow.Scalar")
def _pow_of_number(call: Call, base: Any, exponent: Definition) -> Result | str:
    dtype = promoted_dtype((base, exponent), "DEFAULT")
    reason = _power_refusal(exponent, dtype)
    if reason is not None:
        return reason
    formula = _power_of_two_scalars
    if base == 1:
        formula = lambda x, y: y.of(1)  # noqa: E731  # whatever the exponent is, NaN too
    elif base == 2 and dtype.is_floating_point:
        formula = lambda x, y: y.apply("exp2")  # noqa: E731
    return elementwise(call, (base, exponent), "DEFAULT", formula)


def _power_of_two_scalars(x: Scalar, y: Scalar) -> Scalar:
    return x.apply("pow" if x.dtype.is_floating_point else "integer_pow", y)


@bound("aten.float_power.Tensor_Tensor", "aten.float_power.Tensor_Scalar", "aten.float_power.Scalar")
def _float_power(call: Call, x: Any, exponent: Any) -> Result | str:
    reason = refusal(call, (x, exponent), torch.float64)
    if reason is not None:
        return reason

    def body(reader: Reader, indices: Any) -> Scalar:
        base = element(reader, x, indices, torch.float64)
        if isinstance(exponent, int | float):
            return _power(base, exponent)
        return base.apply("pow", element(reader, exponent, indices, torch.float64))

    return pointwise(call.sizes, call.dtype, call.device, body)


# --- comparison and logic --------------------------------------------------------------------------------------------


def _comparison(name: str) -> Callable[[Scalar, Scalar], Scalar]:
    def formula(x: Scalar, y: Scalar) -> Scalar:
        if x.dtype is torch.bool and name not in ("eq", "ne"):
            x, y = x.to(torch.uint8), y.to(torch.uint8)
        return x.apply(name, y)

    return formula


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    row((f"aten.{_name}.Tensor", f"aten.{_name}.Scalar"), _comparison(_name), "ALWAYS_BOOL", operands=2)


def _logical(name: str) -> None:
    @bound(f"aten.logical_{name}.default")
    def lowered(call: Call, *operands: Definition) -> Result | str:
        reason = refusal(call, operands, torch.bool)
        if reason is not None:
            return reason

        def body(reader: Reader, indices: Any) -> Scalar:
            values = [element(reader, operand, indices, torch.bool) for operand in operands]
            return values[0].apply(f"logical_{name}", *values[1:])

        return pointwise(call.sizes, call.dtype, call.device, body)


for _name in ("and", "or", "xor", "not"):
    _logical(_name)


def _bits(name: str) -> Callable[..., Scalar]:
    def formula(*values: Scalar) -> Scalar:
        kind = "logical" if values[0].dtype is torch.bool else "bitwise"
        return values[0].apply(f"{kind}_{name}", *values[1:])

    return formula


row("aten.bitwise_not.default", _bits("not"), accepts="bits")
for _name in ("and", "or", "xor"):
    _names = [f"aten.bitwise_{_name}.{overload}" for overload in ("Tensor", "Scalar", "Scalar_Tensor")]
    _names += [f"aten.__{_name}__.{overload}" for overload in ("Tensor", "Scalar")]
    row(_names, _bits(_name), operands=2, accepts="bits")

for _name, _short in (("bitwise_left_shift", "lshift"), ("bitwise_right_shift", "rshift")):
    _names = [f"aten.{_name}.{overload}" for overload in ("Tensor", "Tensor_Scalar", "Scalar_Tensor")]
    _names += [f"aten.__{_short}__.{overload}" for overload in ("Tensor", "Scalar")]

    def _shift(x: Scalar, y: Scalar, name: str = _name) -> Scalar:
        return x.apply(name, y)

    row(_names, _shift, operands=2, accepts="integer")
