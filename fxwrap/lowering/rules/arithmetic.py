"""Arithmetic, division, powers, comparison, logic and bits."""

from __future__ import annotations

import math
from collections.abc import Callable

import sympy
import torch

from fxwrap.loop_ir import HALF_PRECISION, INTEGERS, STORAGE_ONLY, Scalar
from fxwrap.lowering.fusion.definitions import (
    Definition,
    ElementReader,
    Indices,
    RoundedScatter,
    Scattered,
    fills_a_copy,
    pointwise,
    rounded_scatter,
)
from fxwrap.lowering.rules.pointwise import (
    NumberRounding,
    Parameter,
    check_operands,
    elementwise,
    load_operand,
    numbers_are_exact,
    promoted_dtype,
    register_elementwise,
    round_number,
    round_to_dtype,
)
from fxwrap.lowering.rules.registry import (
    Declined,
    DtypeDomain,
    LoweringResult,
    NumberOrSymbol,
    OperatorCall,
    TensorOrNumber,
    lowering_rule,
)
from fxwrap.symbolic import Number

# --- sums and products -----------------------------------------------------------------------------------------------


def _scaled(y: Scalar, alpha: Parameter) -> Scalar:
    return y if not isinstance(alpha, Scalar) and alpha == 1 else y * alpha


def _add(x: Scalar, y: Scalar, alpha: Parameter) -> Scalar:
    if x.dtype is torch.bool:
        return x | (y if alpha == 1 else y & x.coerce(bool(alpha)))
    return x + _scaled(y, alpha)


def _scattered_sum(call: OperatorCall, x: TensorOrNumber, y: TensorOrNumber) -> Definition | None:
    """Returns the sum of two scatters that add over one index space, as one that adds the values of both.

    Gradients of a resampled image are sums of such scatters into zeros, one for each neighbour of an element, and so
    are those of nodes at both ends of edges. Where floats are rounded as on a CPU, eager's order of additions stays.
    """
    if not isinstance(x, Definition) or not isinstance(y, Definition) or not x.dtype == y.dtype == call.dtype:
        return None
    x, y = [item.scatter if isinstance(item, RoundedScatter) else item for item in (x, y)]
    if not fills_a_copy(x) or not fills_a_copy(y) or not x.mode == y.mode == "add" or x.space != y.space:
        return None
    if not x.sizes == y.sizes == call.sizes or x.dtype != y.dtype:
        return None
    if call.dtype.is_floating_point and call.spec.cpu_rounding:
        return None
    left, right = x.initial, y.initial
    first = pointwise(x.sizes, x.dtype, x.device, lambda reader, at: reader.load(left, at) + reader.load(right, at))
    scatter = Scattered(x.sizes, x.dtype, x.device, first, x.space, x.mode, (*x.bodies, *y.bodies))
    return rounded_scatter(scatter, call.dtype)


def _register_sum(operator: str, formula: Callable[[Scalar, Scalar, Parameter], Scalar], dtypes: DtypeDomain) -> None:
    @lowering_rule(f"aten.{operator}.Tensor", f"aten.{operator}.Scalar", dtypes=dtypes)
    def _sum(call: OperatorCall, x: TensorOrNumber, y: TensorOrNumber, alpha: NumberOrSymbol) -> LoweringResult:
        number_rounding: NumberRounding = "rounded on cpu"
        dtype = promoted_dtype((x, y))
        if dtype is torch.bool and isinstance(alpha, sympy.Basic):
            raise Declined("alpha is a symbol and the operands are bool")
        if not dtype.is_floating_point and promoted_dtype((x, y, alpha)).is_floating_point:
            raise Declined("alpha is a float and the operands are not")
        if dtype in INTEGERS and isinstance(alpha, int) and not -(2**63) <= alpha < 2**63:
            raise Declined(f"the number {alpha} is out of the range of {dtype}")
        scattered = _scattered_sum(call, x, y) if operator == "add" and alpha == 1 else None
        if scattered is not None:
            return scattered
        if not numbers_are_exact(call, number_rounding):
            alpha = round_number(alpha, dtype)
        return elementwise(call, (x, y), formula, number_rounding=number_rounding, dtypes=dtypes, parameters=(alpha,))


_register_sum("add", _add, "any")
_register_sum("sub", lambda x, y, alpha: x - _scaled(y, alpha), "number")
_register_sum("rsub", lambda x, y, alpha: y - _scaled(x, alpha), "number")


def _larger(x: Scalar, y: Scalar) -> Scalar:
    return x | y if x.dtype is torch.bool else x.maximum(y)


def _smaller(x: Scalar, y: Scalar) -> Scalar:
    return x & y if x.dtype is torch.bool else x.minimum(y)


def clamp(x: Scalar, lower: Scalar | Number | None, upper: Scalar | Number | None = None) -> Scalar:
    """Returns x between limits. Of equals, `maximum` and `minimum` return the second: -0.0 is not less than 0.0."""
    x = x if lower is None else x.coerce(lower).maximum(x)
    return x if upper is None else x.coerce(upper).minimum(x)


def _copysign(x: Scalar, y: Scalar) -> Scalar:
    if y.constant is None:
        return x.apply("copysign", y)
    return -abs(x) if math.copysign(1.0, y.constant) < 0 else abs(x)


def _lerp(start: Scalar, end: Scalar, weight: Scalar) -> Scalar:
    """Interpolates from the nearer end, as torch does, so that weights 0 and 1 return the ends."""
    if weight.constant is not None:
        near = abs(weight.constant) < 0.5
        return (end - start) * (weight.constant if near else weight.constant - 1.0) + (start if near else end)
    small = abs(weight) < 0.5
    return small.where(weight, weight - 1.0) * (end - start) + small.where(start, end)


register_elementwise(
    ("aten.mul.Tensor", "aten.mul.Scalar"),
    lambda x, y: x & y if x.dtype is torch.bool else x * y, operands=2, number_rounding="exact",
)  # fmt: skip
register_elementwise("aten.maximum.default", _larger, operands=2)
register_elementwise("aten.minimum.default", _smaller, operands=2)
register_elementwise("aten.hypot.default", lambda x, y: x.apply("hypot", y), operands=2, dtypes="float")
register_elementwise("aten.atan2.default", lambda x, y: x.apply("atan2", y), "INT_TO_FLOAT", operands=2)
register_elementwise(("aten.copysign.Tensor", "aten.copysign.Scalar"), _copysign, "INT_TO_FLOAT", operands=2)
register_elementwise("aten.clamp_min.Tensor", lambda x, lower: _larger(lower, x), operands=2)
register_elementwise("aten.clamp_max.Tensor", lambda x, upper: _smaller(upper, x), operands=2)
register_elementwise("aten.clamp_min.default", clamp, operands=2, dtypes="number")
register_elementwise("aten.clamp_max.default", lambda x, upper: clamp(x, None, upper), operands=2, dtypes="number")
register_elementwise(
    ("aten.lerp.Tensor", "aten.lerp.Scalar"), _lerp, operands=3, number_rounding="exact", dtypes="float"
)
register_elementwise(
    "aten.addcmul.default", lambda x, left, right, value: x + _scaled(left, value) * right, operands=3, dtypes="number"
)
register_elementwise(
    "aten.addcdiv.default", lambda x, left, right, value: x + _scaled(left, value) / right, operands=3, dtypes="float"
)
# Since torch 2.13, Dynamo captures in-place addcmul and addcdiv as this operator.
register_elementwise("prims.fma.default", lambda left, right, x: left * right + x, operands=3, dtypes="float")


@lowering_rule("aten.fmax.default", "aten.fmin.default")
def _extremum_but_nan(call: OperatorCall, x: Definition, y: Definition) -> LoweringResult:
    """Of zeros, eager returns the first, in bfloat16 the second."""
    if not call.dtype.is_floating_point:
        return elementwise(call, (x, y), _larger if call.operator == "fmax" else _smaller)
    operands = (y, x) if call.dtype is torch.bfloat16 else (x, y)
    return elementwise(call, operands, lambda x, y: x.apply(call.operator, y))


@lowering_rule("aten.nextafter.default")
def _nextafter(call: OperatorCall, x: Definition, y: Definition) -> LoweringResult:
    if call.dtype in STORAGE_ONLY:
        raise Declined(f"kernels compute in float32, which has other neighbours than {call.dtype}")
    return elementwise(call, (x, y), lambda x, y: x.apply("nextafter", y), dtypes="float")


@lowering_rule("aten.clamp.default", "aten.clamp.Tensor")
def _clamp_rule(
    call: OperatorCall, x: Definition, lower: TensorOrNumber | None, upper: TensorOrNumber | None
) -> LoweringResult:
    if any(isinstance(limit, float) and math.isnan(limit) for limit in (lower, upper)):
        raise Declined("a limit is NaN: torch 2.11 ignores it when it is the only one, later versions return NaN")
    return elementwise(call, (x, lower, upper), clamp, dtypes="number")


# --- division --------------------------------------------------------------------------------------------------------


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


def _divide(
    call: OperatorCall,
    x: TensorOrNumber,
    y: TensorOrNumber,
    formula: Callable[[Scalar, Scalar], Scalar],
    number_rounding: NumberRounding = "rounded",
) -> LoweringResult:
    """Divides, but no integers by a divisor that may be zero: eager raises for zero, and the CPU traps."""
    dtype = promoted_dtype((x, y))
    if not dtype.is_floating_point and dtype is not torch.bool:
        is_size = isinstance(y, sympy.Expr) and y.is_integer and not call.may_be_zero(y)
        if isinstance(y, Definition) or (isinstance(y, sympy.Basic) and not is_size):
            raise Declined("integer division by a divisor that may be zero, for which eager raises")
        if not is_size and not int(y):
            raise Declined("integer division by zero, for which eager raises")
    return elementwise(call, (x, y), formula, number_rounding=number_rounding, dtypes="number")


_floored, _truncated = _rounded_division("floor_divide"), _rounded_division("trunc_divide")


@lowering_rule("aten.div.Tensor", "aten.div.Scalar")
def _true_division(call: OperatorCall, x: TensorOrNumber, y: TensorOrNumber) -> LoweringResult:
    return elementwise(call, (x, y), lambda x, y: x / y, promotion="INT_TO_FLOAT", number_rounding="exact")


@lowering_rule("aten.div.Tensor_mode", "aten.div.Scalar_mode")
def _division(call: OperatorCall, x: TensorOrNumber, y: TensorOrNumber, rounding_mode: str | None) -> LoweringResult:
    """By a tensor of half precision, torch rounds the quotient before it truncates it."""
    if rounding_mode is None:
        return _true_division(call, x, y)
    if rounding_mode == "trunc" and call.dtype in STORAGE_ONLY and isinstance(y, Definition) and y.sizes:
        return elementwise(call, (x, y), lambda x, y: round_to_dtype(x / y, call.dtype).apply("trunc"))
    return _divide(call, x, y, _floored if rounding_mode == "floor" else _truncated, "exact")


@lowering_rule("aten.floor_divide.default", "aten.floor_divide.Scalar")
def _floor_division(call: OperatorCall, x: TensorOrNumber, y: TensorOrNumber) -> LoweringResult:
    return _divide(call, x, y, _floored, "exact")


@lowering_rule(
    "aten.remainder.Tensor", "aten.remainder.Scalar", "aten.remainder.Scalar_Tensor", "aten.fmod.Tensor",
    "aten.fmod.Scalar",
)  # fmt: skip
def _remainder(call: OperatorCall, x: TensorOrNumber, y: TensorOrNumber) -> LoweringResult:
    return _divide(call, x, y, _remainder_of(call.operator))


# --- powers ----------------------------------------------------------------------------------------------------------


def _power(x: Scalar, exponent: Scalar | Number) -> Scalar:
    """Returns x to a power, by multiplication where torch multiplies or where it is as accurate."""
    if exponent == 0:
        return x.coerce(1)
    if not isinstance(exponent, Scalar) and exponent in _SMALL_POWERS and (x.dtype.is_floating_point or exponent > 0):
        return _SMALL_POWERS[exponent](x)
    return x.apply("pow" if x.dtype.is_floating_point else "integer_pow", exponent)


_SMALL_POWERS: dict[Number, Callable[[Scalar], Scalar]] = {
    1: lambda x: x,
    2: lambda x: x * x,
    3: lambda x: x * x * x,
    4: lambda x: (x * x) * (x * x),
    0.5: lambda x: x.sqrt(),
    -0.5: lambda x: x.rsqrt(),
    -1: lambda x: x.apply("reciprocal"),
    -2: lambda x: (x * x).apply("reciprocal"),
}


_ROOT_POWERS: dict[Number, Callable[[Scalar], Scalar]] = {
    0.75: lambda x: _but_infinite(x, x.sqrt() * x.sqrt().sqrt()),
    1.5: lambda x: _but_infinite(x, x * x.sqrt()),
}
"""Powers by roots, whose error of a few units in the last place half precision hides."""


def _but_infinite(x: Scalar, power: Scalar) -> Scalar:
    """Returns a power computed by roots, and infinity for minus infinity, which has no root."""
    return x.apply("eq", -math.inf).where(math.inf, power)


def _check_exponent(exponent: TensorOrNumber, dtype: torch.dtype) -> None:
    if dtype is torch.bool:
        raise Declined("its operands are of torch.bool")
    if dtype in INTEGERS and isinstance(exponent, sympy.Basic):
        raise Declined("an integer to a symbolic power, for which eager raises when it is negative")
    if dtype in INTEGERS and not isinstance(exponent, Definition) and exponent < 0:
        raise Declined("an integer to a negative power, for which eager raises")


@lowering_rule("aten.pow.Tensor_Scalar")
def _pow_number(call: OperatorCall, x: Definition, exponent: NumberOrSymbol) -> LoweringResult:
    dtype = promoted_dtype((x, exponent))
    rounded = exponent if exponent in _SMALL_POWERS else round_number(exponent, dtype)

    def body(reader: ElementReader, indices: Indices) -> Scalar:
        value = load_operand(reader, x, indices, dtype)
        if dtype is torch.float16 and call.spec.cpu_rounding and abs(exponent) == 0.5:
            return value.apply("pow", exponent)  # eager computes no root: (-inf) ** 0.5 is inf
        if dtype in HALF_PRECISION and exponent in _ROOT_POWERS:
            return _ROOT_POWERS[exponent](value)
        return _power(value, reader.number(rounded, value.dtype) if isinstance(rounded, sympy.Basic) else rounded)

    _check_exponent(exponent, dtype)
    check_operands(call, (x, exponent), dtype)
    return call.define(body)


@lowering_rule("aten.pow.Tensor_Tensor")
def _pow_tensors(call: OperatorCall, x: Definition, exponent: Definition) -> LoweringResult:
    _check_exponent(exponent, promoted_dtype((x, exponent)))
    return elementwise(call, (x, exponent), _power_of_scalars)


@lowering_rule("aten.pow.Scalar")
def _pow_of_number(call: OperatorCall, base: NumberOrSymbol, exponent: Definition) -> LoweringResult:
    dtype = promoted_dtype((base, exponent))
    formula: Callable[[Scalar, Scalar], Scalar] = _power_of_scalars
    if base == 1:
        formula = lambda x, y: y.coerce(1)  # noqa: E731  # even where the exponent is NaN
    elif base == 2 and dtype.is_floating_point:
        formula = lambda x, y: y.apply("exp2")  # noqa: E731
    _check_exponent(exponent, dtype)
    return elementwise(call, (base, exponent), formula)


def _power_of_scalars(x: Scalar, y: Scalar) -> Scalar:
    return x.apply("pow" if x.dtype.is_floating_point else "integer_pow", y)


# --- comparison and logic --------------------------------------------------------------------------------------------

_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


@lowering_rule(*[f"aten.{name}.{kind}" for name in _COMPARISONS for kind in ("Tensor", "Scalar")])
def _compare(call: OperatorCall, x: TensorOrNumber, y: TensorOrNumber) -> LoweringResult:
    """Compares half precision as it is in memory: an element is its row's maximum although that was stored before."""
    dtype = promoted_dtype((x, y))

    def formula(*scalars: Scalar) -> Scalar:
        if dtype is torch.bool and call.operator not in ("eq", "ne"):
            scalars = tuple([scalar.to(torch.uint8) for scalar in scalars])
        one, other = [
            round_to_dtype(scalar, dtype) if isinstance(operand, Definition) else scalar
            for scalar, operand in zip(scalars, (x, y), strict=True)
        ]
        return one.apply(call.operator, other)

    return elementwise(call, (x, y), formula, promotion="ALWAYS_BOOL")


@lowering_rule(*[f"aten.logical_{_name}.default" for _name in ("and", "or", "xor", "not")])
def _logical(call: OperatorCall, *operands: Definition) -> LoweringResult:
    """Promotes before it tests, as torch does: an int16 256 of rank 0 beside an int8 is 0."""

    def formula(*scalars: Scalar) -> Scalar:
        x, *others = [scalar.to(torch.bool) for scalar in scalars]
        return x.apply(call.operator, *others)

    return elementwise(call, operands, formula, promotion="ALWAYS_BOOL")


def _bitwise(name: str) -> Callable[..., Scalar]:
    def formula(x: Scalar, *others: Scalar) -> Scalar:
        return x.apply(f"{'logical' if x.dtype is torch.bool else 'bitwise'}_{name}", *others)

    return formula


register_elementwise("aten.bitwise_not.default", _bitwise("not"), dtypes="bits")
for _name in ("and", "or", "xor"):
    _overloads = [f"aten.bitwise_{_name}.{overload}" for overload in ("Tensor", "Scalar", "Scalar_Tensor")]
    register_elementwise(_overloads, _bitwise(_name), operands=2, dtypes="bits")


def _shift(name: str) -> Callable[[Scalar, Scalar], Scalar]:
    return lambda x, y: x.apply(name, y)


for _name, _short in (("bitwise_left_shift", "lshift"), ("bitwise_right_shift", "rshift")):
    _overloads = [f"aten.{_name}.{overload}" for overload in ("Tensor", "Tensor_Scalar", "Scalar_Tensor")]
    _overloads += [f"aten.__{_short}__.{overload}" for overload in ("Tensor", "Scalar")]
    register_elementwise(_overloads, _shift(_name), operands=2, dtypes="integer")
