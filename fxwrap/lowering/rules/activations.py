"""Activations and their backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from fxwrap.loop_ir import Scalar, as_index
from fxwrap.lowering.definitions import Definition, Indices, Reader, pointwise
from fxwrap.lowering.rules.pointwise import (
    Parameter,
    body_of,
    bound,
    element,
    elementwise,
    promoted_dtype,
    refusal,
    rounded_number,
    row,
)
from fxwrap.lowering.rules.registry import Call, Result

# --- rectifiers, thresholds and shrinkage ----------------------------------------------------------------------------

row("aten.relu.default", lambda x: x.maximum(0), accepts="number")
row("aten.relu6.default", lambda x: x.maximum(0).minimum(6), accepts="number")


@bound("aten.hardtanh.default")
def _hardtanh(call: Call, x: Definition, lower: Any, upper: Any) -> Result | str:
    """torch clamps, with bounds converted to the operand's dtype."""
    dtype = x.dtype
    reason = refusal(call, (x, lower, upper), dtype, "number")
    if reason is not None:
        return reason

    def body(reader: Reader, indices: Indices) -> Scalar:
        value, low, high = [element(reader, item, indices, dtype) for item in (x, lower, upper)]
        return value.maximum(low).minimum(high)

    return pointwise(call.sizes, call.dtype, call.device, body)


def _hardtanh_backward(gradient: Scalar, x: Scalar, lower: Parameter, upper: Parameter) -> Scalar:
    return ((x > lower) & (x < upper)).where(gradient, 0.0)



@bound("aten.threshold.default")
def _threshold_rule(call: Call, x: Definition, limit: Any, value: Any) -> Result | str:
    reason = refusal(call, (x, limit, value), x.dtype, "number")
    if reason is not None:
        return reason

    def body(reader: Reader, indices: Indices) -> Scalar:
        item, threshold, other = [element(reader, part, indices, x.dtype, exact=True) for part in (x, limit, value)]
        return (item <= threshold).where(other, item)

    return pointwise(call.sizes, call.dtype, call.device, body)


@bound("aten.threshold_backward.default")
def _threshold_backward(call: Call, gradient: Definition, x: Definition, limit: Any) -> Result | str:
    dtype = promoted_dtype((gradient, x), "DEFAULT")
    reason = refusal(call, (gradient, x, limit), dtype, "number")
    if reason is not None:
        return reason

    def body(reader: Reader, indices: Indices) -> Scalar:
        slope, item, threshold = [element(reader, part, indices, dtype, exact=True) for part in (gradient, x, limit)]
        return (item <= threshold).where(0, slope)

    return pointwise(call.sizes, call.dtype, call.device, body)


@bound("aten.hardshrink.default")
def _hardshrink(call: Call, x: Definition, limit: Any) -> Result | str:
    limit = rounded_number(limit, x.dtype)
    formula: Callable[..., Scalar] = lambda x, limit: _within(x, limit).where(0.0, x)  # noqa: E731
    return elementwise(call, (x,), "DEFAULT", formula, accepts="float", parameters=(limit,))


def _softshrink(x: Scalar, limit: Parameter) -> Scalar:
    shrunk = (x > limit).where(x - limit, x + limit)
    return _within(x, limit).where(0.0, shrunk)


def _shrink_backward(gradient: Scalar, x: Scalar, limit: Parameter) -> Scalar:
    return ((x < -limit) | (x > limit)).where(gradient, 0.0)


def _within(x: Scalar, limit: Parameter) -> Scalar:
    return (x >= -limit) & (x <= limit)


row("aten.hardtanh_backward.default", _hardtanh_backward, operands=2, accepts="float")
row("aten.softshrink.default", _softshrink, accepts="float")
row(
    ("aten.hardshrink_backward.default", "aten.softshrink_backward.default"),
    _shrink_backward, operands=2, accepts="float",
)  # fmt: skip


def _leaky_relu(x: Scalar, slope: Parameter) -> Scalar:
    return (x > 0).where(x, x * slope)


def _leaky_relu_backward(gradient: Scalar, x: Scalar, slope: Parameter, _: bool) -> Scalar:
    return (x > 0).where(gradient, gradient * slope)


row("aten.leaky_relu.default", _leaky_relu, accepts="float")
row("aten.leaky_relu_backward.default", _leaky_relu_backward, operands=2, accepts="float")
row("aten._prelu_kernel.default", lambda x, w: (x > 0).where(x, w * x), operands=2, accepts="float")


@bound("aten._prelu_kernel_backward.default")
def _prelu_backward(call: Call, gradient: Definition, x: Definition, weight: Definition) -> Result | str:
    operands = (gradient, x, weight)
    dtype = promoted_dtype(operands, "DEFAULT")
    reason = refusal(call, operands, dtype, "float")
    if reason is not None:
        return reason
    of_x = body_of(operands, dtype, lambda g, x, w: (x > 0).where(g, w * g))
    of_weight = body_of(operands, dtype, lambda g, x, w: (x > 0).where(0.0, x * g))
    return tuple([
        pointwise(call.sizes_of(fake), fake.dtype, call.device, body)
        for fake, body in zip(call.fake, (of_x, of_weight), strict=True)
    ])  # fmt: skip


@bound("aten.prelu.default")
def _prelu(call: Call, x: Definition, weight: Definition) -> Result | str:
    """One weight a channel, which is dimension 1, or one in all."""
    reason = refusal(call, (x, weight), x.dtype, "float")
    if reason is not None:
        return reason
    single = not weight.sizes or weight.sizes[0] == 1

    def body(reader: Reader, indices: Indices) -> Scalar:
        value = reader.load(x, indices)
        channel = [0] * len(weight.sizes) if single else [indices[1] if len(indices) > 1 else indices[0]]
        return (value > 0).where(value, reader.load(weight, channel).to(value.dtype) * value)

    return pointwise(call.sizes, call.dtype, call.device, body)


@bound("aten.rrelu_with_noise_backward.default")
def _rrelu_backward(
    call: Call, gradient: Any, x: Any, noise: Any, lower: Any, upper: Any, training: bool, _: bool
) -> Result | str:
    if training and upper - lower > 1e-6:
        return elementwise(call, (gradient, noise), "DEFAULT", lambda g, n: g * n, accepts="float")
    slope = (lower + upper) / 2
    return elementwise(
        call, (gradient, x), "DEFAULT", _leaky_relu_backward, accepts="float", parameters=(slope, False)
    )  # fmt: skip


# --- exponential units -----------------------------------------------------------------------------------------------


def _elu(x: Scalar, alpha: Parameter, scale: Parameter, input_scale: Parameter) -> Scalar:
    negative = (x * input_scale).apply("expm1") * (alpha * scale)
    return (x < 0).where(negative, x * scale)


_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946

row("aten.elu.default", _elu, accepts="float")
row("aten.selu.default", lambda x: _elu(x, _SELU_ALPHA, _SELU_SCALE, 1.0), accepts="float")
row("aten.celu.default", lambda x, alpha: _elu(x, alpha, 1.0, 1.0 / alpha), accepts="float")


@bound("aten.elu_backward.default")
def _elu_backward(
    call: Call, gradient: Any, alpha: Any, scale: Any, input_scale: Any, is_result: bool, x: Any
) -> Result | str:
    def formula(gradient: Scalar, x: Scalar, alpha: Parameter, scale: Parameter, input_scale: Parameter) -> Scalar:
        grown = x + alpha * scale if is_result else (x * input_scale).exp() * (alpha * scale)
        return (x > 0).where(gradient * scale, gradient * input_scale * grown)

    return elementwise(
        call, (gradient, x), "DEFAULT", formula, accepts="float", parameters=(alpha, scale, input_scale)
    )  # fmt: skip


# --- gates -----------------------------------------------------------------------------------------------------------

_TANH_SCALE = math.sqrt(2 / math.pi)
_CUBIC = 0.044715


def _gelu(x: Scalar, approximate: str = "none") -> Scalar:
    if approximate == "tanh":
        return 0.5 * x * (1.0 + (_TANH_SCALE * (x + _CUBIC * x * x * x)).tanh())
    return 0.5 * x * (1.0 + (x * math.sqrt(0.5)).erf())


def _gelu_backward(gradient: Scalar, x: Scalar, approximate: str = "none") -> Scalar:
    if approximate == "tanh":
        square = x * x
        inner = (_TANH_SCALE * (x + _CUBIC * square * x)).tanh()
        slope = _TANH_SCALE * (1.0 + 3 * _CUBIC * square)
        return gradient * (0.5 * (1.0 + inner) + 0.5 * x * (1.0 - inner * inner) * slope)
    cumulative = 0.5 * (1.0 + (x * math.sqrt(0.5)).erf())
    density = (x * x * -0.5).exp() * (1 / math.sqrt(2 * math.pi))
    return gradient * (cumulative + x * density)


def _silu(x: Scalar) -> Scalar:
    return x / (1.0 + (-x).exp())


def _silu_backward(gradient: Scalar, x: Scalar) -> Scalar:
    gate = x.sigmoid()
    return gradient * gate * (1.0 + x * (1.0 - gate))


def _hard_gate(x: Scalar) -> Scalar:
    return (x + 3.0).maximum(0.0).minimum(6.0)


def _hardswish_backward(gradient: Scalar, x: Scalar) -> Scalar:
    middle = (x <= -3.0).where(0.0, gradient * (x / 3.0 + 0.5))
    return (x >= 3.0).where(gradient, middle)


def _hardsigmoid_backward(gradient: Scalar, x: Scalar) -> Scalar:
    return ((x > -3.0) & (x < 3.0)).where(gradient * (1.0 / 6.0), 0.0)


row("aten.gelu.default", _gelu, accepts="float")
row("aten.gelu_backward.default", _gelu_backward, operands=2, accepts="float")
row("aten.silu.default", _silu, accepts="float")
row("aten.silu_backward.default", _silu_backward, operands=2, accepts="float")
row("aten.hardswish.default", lambda x: x * _hard_gate(x) / 6.0, accepts="float")
row("aten.hardswish_backward.default", _hardswish_backward, operands=2, accepts="float")
row("aten.hardsigmoid.default", lambda x: _hard_gate(x) / 6.0, accepts="float")
row("aten.hardsigmoid_backward.default", _hardsigmoid_backward, operands=2, accepts="float")
row("aten.sigmoid_backward.default", lambda g, y: g * (1.0 - y) * y, operands=2, accepts="float")
row("aten.tanh_backward.default", lambda g, y: g * (1.0 - y * y), operands=2, accepts="float")

# --- softplus and its kin --------------------------------------------------------------------------------------------


def _softplus(x: Scalar, beta: Parameter, limit: Parameter) -> Scalar:
    scaled = x * beta
    return (scaled > limit).where(x, scaled.exp().apply("log1p") / beta)


def _softplus_backward(gradient: Scalar, x: Scalar, beta: Parameter, limit: Parameter) -> Scalar:
    scaled = x * beta
    grown = scaled.exp()
    return (scaled > limit).where(gradient, gradient * grown / (grown + 1.0))


def _mish(x: Scalar) -> Scalar:
    return x * x.exp().apply("log1p").tanh()


def _mish_backward(gradient: Scalar, x: Scalar) -> Scalar:
    gate, curve = x.sigmoid(), x.exp().apply("log1p").tanh()
    return gradient * (curve + x * gate * (1.0 - curve * curve))


def log_sigmoid(x: Scalar) -> Scalar:
    """Returns log(1 / (1 + exp(-x))) without overflow."""
    return x.minimum(0.0) - (-abs(x)).exp().apply("log1p")


row("aten.softplus.default", _softplus, accepts="float")
row("aten.softplus_backward.default", _softplus_backward, operands=2, accepts="float")
row("aten.mish.default", _mish, accepts="float")
row("aten.mish_backward.default", _mish_backward, operands=2, accepts="float")
row("aten.log_sigmoid.default", log_sigmoid, accepts="float")


@bound("aten.log_sigmoid_forward.default")
def _log_sigmoid_forward(call: Call, x: Definition) -> Result | str:
    """The second result is for the backward: exp(-|x|), or nothing on devices where torch computes it again."""
    reason = refusal(call, (x,), x.dtype, "float")
    if reason is not None:
        return reason
    result, kept = call.fake
    kept_sizes = call.sizes_of(kept)
    definition = pointwise(call.sizes_of(result), result.dtype, call.device, body_of((x,), x.dtype, log_sigmoid))
    if len(kept_sizes) != len(x.sizes) or (kept_sizes == (0,) and x.sizes != (0,)):
        return definition, pointwise(kept_sizes, kept.dtype, call.device, lambda r, _: r.number(0.0, x.dtype))
    body = body_of((x,), x.dtype, lambda x: (-abs(x)).exp())
    return definition, pointwise(kept_sizes, kept.dtype, call.device, body)


@bound("aten.log_sigmoid_backward.default")
def _log_sigmoid_backward(call: Call, gradient: Definition, x: Definition, _: Definition) -> Result | str:
    """exp(-|x|) is computed again, which is cheaper than reading it."""

    def formula(gradient: Scalar, x: Scalar) -> Scalar:
        grown = (-abs(x)).exp()
        rest = grown / (1.0 + grown)
        return gradient * (x < 0).where(1.0 - rest, rest)

    return elementwise(call, (gradient, x), "DEFAULT", formula, accepts="float")


# --- gated linear units ----------------------------------------------------------------------------------------------


@bound("aten.glu.default")
def _glu(call: Call, x: Definition, dim: int) -> Result | str:
    reason = refusal(call, (x,), x.dtype, "float")
    if reason is not None:
        return reason
    dim = dim % len(x.sizes)
    half = call.sizes[dim]

    def body(reader: Reader, indices: Indices) -> Scalar:
        second = list(indices)
        second[dim] = as_index(indices[dim]) + half
        return reader.load(x, indices) * reader.load(x, second).sigmoid()

    return pointwise(call.sizes, call.dtype, call.device, body)


@bound("aten.glu_backward.default")
def _glu_backward(call: Call, gradient: Definition, x: Definition, dim: int) -> Result | str:
    reason = refusal(call, (gradient, x), x.dtype, "float")
    if reason is not None:
        return reason
    dim = dim % len(x.sizes)
    half = gradient.sizes[dim]

    def body(reader: Reader, indices: Indices) -> Scalar:
        first, second = list(indices), list(indices)
        first[dim] = as_index(indices[dim]) % half
        second[dim] = as_index(indices[dim]) % half + half
        slope = reader.load(gradient, first)
        gate = reader.load(x, second).sigmoid()
        in_first = reader.body.index(indices[dim]) < reader.body.index(half)
        return in_first.where(gate * slope, (1.0 - gate) * gate * reader.load(x, first) * slope)

    return pointwise(call.sizes, call.dtype, call.device, body)
