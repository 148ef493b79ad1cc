"""Activations and their backward."""

from __future__ import annotations

import math

from fxwrap.loop_ir import Scalar, as_index
from fxwrap.lowering.fusion.definitions import Definition, ElementReader, Indices
from fxwrap.lowering.rules.arithmetic import clamp
from fxwrap.lowering.rules.pointwise import (
    Parameter,
    check_operands,
    elementwise,
    elementwise_body,
    load_operand,
    promoted_dtype,
    register_elementwise,
    round_number,
)
from fxwrap.lowering.rules.registry import LoweringResult, NumberOrSymbol, OperatorCall, lowering_rule
from fxwrap.torch_compat import SOFTSHRINK_ROUNDS_LIMIT

# --- rectifiers, thresholds and shrinkage ----------------------------------------------------------------------------

register_elementwise("aten.relu.default", lambda x: clamp(x, 0), dtypes="number")


@lowering_rule("aten.hardtanh.default")
def _hardtanh(call: OperatorCall, x: Definition, lower: NumberOrSymbol, upper: NumberOrSymbol) -> LoweringResult:
    """torch converts the bounds to the operand's dtype."""
    dtype = x.dtype

    def body(reader: ElementReader, indices: Indices) -> Scalar:
        return clamp(*[load_operand(reader, item, indices, dtype) for item in (x, lower, upper)])

    check_operands(call, (x, lower, upper), dtype, "number")
    return call.define(body)


@lowering_rule("aten.threshold.default")
def _threshold(call: OperatorCall, x: Definition, limit: NumberOrSymbol, value: NumberOrSymbol) -> LoweringResult:
    def body(reader: ElementReader, indices: Indices) -> Scalar:
        operands = [load_operand(reader, operand, indices, x.dtype, exact=True) for operand in (x, limit, value)]
        return (operands[0] <= operands[1]).where(operands[2], operands[0])

    check_operands(call, (x, limit, value), x.dtype, "number")
    return call.define(body)


@lowering_rule("aten.threshold_backward.default")
def _threshold_backward(
    call: OperatorCall, gradient: Definition, x: Definition, limit: NumberOrSymbol
) -> LoweringResult:
    dtype = promoted_dtype((gradient, x))

    def body(reader: ElementReader, indices: Indices) -> Scalar:
        operands = [load_operand(reader, operand, indices, dtype, exact=True) for operand in (gradient, x, limit)]
        return (operands[1] <= operands[2]).where(0, operands[0])

    check_operands(call, (gradient, x, limit), dtype, "number")
    return call.define(body)


@lowering_rule("aten.hardshrink.default")
def _hardshrink(call: OperatorCall, x: Definition, limit: NumberOrSymbol) -> LoweringResult:
    def formula(x: Scalar, limit: Parameter) -> Scalar:
        return _within(x, limit).where(0.0, x)

    return elementwise(call, (x,), formula, dtypes="float", parameters=(round_number(limit, x.dtype),))


@lowering_rule("aten.softshrink.default")
def _softshrink(call: OperatorCall, x: Definition, limit: NumberOrSymbol) -> LoweringResult:
    def formula(x: Scalar, limit: Parameter) -> Scalar:
        shrunk = (x > limit).where(x - limit, x + limit)
        return _within(x, limit).where(0.0, shrunk)

    rounded = round_number(limit, x.dtype) if SOFTSHRINK_ROUNDS_LIMIT else limit
    return elementwise(call, (x,), formula, dtypes="float", parameters=(rounded,))


def _within(x: Scalar, limit: Parameter) -> Scalar:
    return (x >= -limit) & (x <= limit)


register_elementwise(
    "aten.hardtanh_backward.default",
    lambda g, x, lower, upper: ((x > lower) & (x < upper)).where(g, 0.0), operands=2, dtypes="float",
)  # fmt: skip
register_elementwise(
    ("aten.hardshrink_backward.default", "aten.softshrink_backward.default"),
    lambda g, x, limit: ((x < -limit) | (x > limit)).where(g, 0.0), operands=2, dtypes="float",
)  # fmt: skip


def _leaky_relu_backward(gradient: Scalar, x: Scalar, slope: Parameter, _: bool) -> Scalar:
    return (x > 0).where(gradient, gradient * slope)


register_elementwise("aten.leaky_relu.default", lambda x, slope: (x > 0).where(x, x * slope), dtypes="float")
register_elementwise("aten.leaky_relu_backward.default", _leaky_relu_backward, operands=2, dtypes="float")
register_elementwise(
    "aten._prelu_kernel.default", lambda x, w: (x > 0).where(x, w * x), operands=2, dtypes="equal float"
)


@lowering_rule("aten._prelu_kernel_backward.default", dtypes="equal float")
def _prelu_backward(call: OperatorCall, gradient: Definition, x: Definition, weight: Definition) -> LoweringResult:
    operands = (gradient, x, weight)
    dtype = promoted_dtype(operands)
    of_x = elementwise_body(operands, dtype, lambda g, x, w: (x > 0).where(g, w * g))
    of_weight = elementwise_body(operands, dtype, lambda g, x, w: (x > 0).where(0.0, x * g))
    return tuple([call.define(body, fake) for fake, body in zip(call.results, (of_x, of_weight), strict=True)])


@lowering_rule("aten.rrelu_with_noise_backward.default")
def _rrelu_backward(
    call: OperatorCall,
    gradient: Definition,
    x: Definition,
    noise: Definition,
    lower: float,
    upper: float,
    training: bool,
) -> LoweringResult:
    if training and upper - lower > 1e-6:
        return elementwise(call, (gradient, noise), lambda g, n: g * n, dtypes="float")
    return elementwise(
        call, (gradient, x), _leaky_relu_backward, dtypes="float", parameters=((lower + upper) / 2, False)
    )


# --- exponential units -----------------------------------------------------------------------------------------------


def _elu(x: Scalar, alpha: Parameter, scale: Parameter, input_scale: Parameter) -> Scalar:
    negative = (x * input_scale).apply("expm1") * (alpha * scale)
    return (x < 0).where(negative, x * scale)


register_elementwise("aten.elu.default", _elu, dtypes="float")
register_elementwise("aten.celu.default", lambda x, alpha: _elu(x, alpha, 1.0, 1.0 / alpha), dtypes="float")


@lowering_rule("aten.elu_backward.default")
def _elu_backward(
    call: OperatorCall,
    gradient: Definition,
    alpha: NumberOrSymbol,
    scale: NumberOrSymbol,
    input_scale: NumberOrSymbol,
    is_result: bool,
    x: Definition,
) -> LoweringResult:
    def formula(gradient: Scalar, x: Scalar, alpha: Parameter, scale: Parameter, input_scale: Parameter) -> Scalar:
        slope = x + alpha * scale if is_result else (x * input_scale).exp() * (alpha * scale)
        return (x > 0).where(gradient * scale, gradient * input_scale * slope)

    return elementwise(call, (gradient, x), formula, dtypes="float", parameters=(alpha, scale, input_scale))


# --- gates -----------------------------------------------------------------------------------------------------------

_TANH_SCALE = math.sqrt(2 / math.pi)
_CUBIC = 0.044715


def _gelu_tanh(x: Scalar, square: Scalar) -> Scalar:
    """One form in gelu and its backward: a kernel with both computes it once."""
    return (_TANH_SCALE * (x + _CUBIC * square * x)).tanh()


def _gelu(x: Scalar, approximate: str = "none") -> Scalar:
    if approximate == "tanh":
        return 0.5 * x * (1.0 + _gelu_tanh(x, x * x))
    return 0.5 * x * (1.0 + (x * math.sqrt(0.5)).erf())


def _gelu_backward(gradient: Scalar, x: Scalar, approximate: str = "none") -> Scalar:
    if approximate == "tanh":
        square = x * x
        inner = _gelu_tanh(x, square)
        slope = _TANH_SCALE * (1.0 + 3 * _CUBIC * square)
        return gradient * (0.5 * (1.0 + inner) + 0.5 * x * (1.0 - inner * inner) * slope)
    cumulative = 0.5 * (1.0 + (x * math.sqrt(0.5)).erf())
    density = (x * x * -0.5).exp() * (1 / math.sqrt(2 * math.pi))
    return gradient * (cumulative + x * density)


def _silu_backward(gradient: Scalar, x: Scalar) -> Scalar:
    gate = x.sigmoid()
    return gradient * gate * (1.0 + x * (1.0 - gate))


def _hard_gate(x: Scalar) -> Scalar:
    return (x + 3.0).maximum(0.0).minimum(6.0)


def _hardswish_backward(gradient: Scalar, x: Scalar) -> Scalar:
    middle = (x <= -3.0).where(0.0, gradient * (x * (1.0 / 3.0) + 0.5))
    return (x >= 3.0).where(gradient, middle)


def _hardsigmoid_backward(gradient: Scalar, x: Scalar) -> Scalar:
    return ((x > -3.0) & (x < 3.0)).where(gradient * (1.0 / 6.0), 0.0)


register_elementwise("aten.gelu.default", _gelu, dtypes="float")
register_elementwise("aten.gelu_backward.default", _gelu_backward, operands=2, dtypes="equal float")
register_elementwise("aten.silu.default", lambda x: x / (1.0 + (-x).exp()), dtypes="float")
register_elementwise("aten.silu_backward.default", _silu_backward, operands=2, dtypes="equal float")
register_elementwise("aten.hardswish.default", lambda x: x * _hard_gate(x) * (1.0 / 6.0), dtypes="float")
register_elementwise("aten.hardswish_backward.default", _hardswish_backward, operands=2, dtypes="float")
register_elementwise("aten.hardsigmoid.default", lambda x: _hard_gate(x) * (1.0 / 6.0), dtypes="float")
register_elementwise("aten.hardsigmoid_backward.default", _hardsigmoid_backward, operands=2, dtypes="float")
register_elementwise("aten.sigmoid_backward.default", lambda g, y: g * (1.0 - y) * y, operands=2, dtypes="float")
register_elementwise("aten.tanh_backward.default", lambda g, y: g * (1.0 - y * y), operands=2, dtypes="float")

# --- softplus and mish -----------------------------------------------------------------------------------------------


def _softplus(x: Scalar, beta: Parameter, limit: Parameter) -> Scalar:
    scaled = x * beta
    return (scaled > limit).where(x, scaled.exp().apply("log1p") / beta)


def _softplus_backward(gradient: Scalar, x: Scalar, beta: Parameter, limit: Parameter) -> Scalar:
    scaled = x * beta
    exponential = scaled.exp()
    return (scaled > limit).where(gradient, gradient * exponential / (exponential + 1.0))


def _tanh_of_softplus(x: Scalar) -> tuple[Scalar, Scalar, Scalar]:
    """Returns n, d and s: tanh(log(1 + exp(x))) is n / d, and its derivative is 4 * s / d**2.

    With a = 1 + exp(x) the quotient is (a*a - 1) / (a*a + 1), all terms of which are positive; for positive x they are
    divided by exp(x)**2. So one exponential is left, which does not overflow.
    """
    exponential, is_positive = (-abs(x)).exp(), x >= 0
    square = exponential * exponential
    double = exponential + exponential
    numerator = is_positive.where(1.0 + double, square + double)
    denominator = numerator + is_positive.where(square + square, 2.0)
    return numerator, denominator, is_positive.where(square, exponential) * (1.0 + exponential)


def _mish(x: Scalar) -> Scalar:
    numerator, denominator, _ = _tanh_of_softplus(x)
    return x * (numerator / denominator)


def _mish_backward(gradient: Scalar, x: Scalar) -> Scalar:
    numerator, denominator, derivative = _tanh_of_softplus(x)
    return gradient * ((numerator + x * (4.0 * derivative / denominator)) / denominator)


def log_sigmoid(x: Scalar) -> Scalar:
    """Returns log(1 / (1 + exp(-x))) without overflow."""
    return x.minimum(0.0) - (-abs(x)).exp().apply("log1p")


register_elementwise("aten.softplus.default", _softplus, dtypes="float")
register_elementwise("aten.softplus_backward.default", _softplus_backward, operands=2, dtypes="float")
register_elementwise("aten.mish.default", _mish, dtypes="float")
register_elementwise("aten.mish_backward.default", _mish_backward, operands=2, dtypes="equal float")


@lowering_rule("aten.log_sigmoid_forward.default", dtypes="float")
def _log_sigmoid_forward(call: OperatorCall, x: Definition) -> LoweringResult:
    """The second result is exp(-|x|) for the backward; it is empty on devices where torch recomputes it."""
    result, buffer = call.results
    sizes = call.sizes_of(buffer)
    definition = call.define(elementwise_body((x,), x.dtype, log_sigmoid), result)
    if len(sizes) != len(x.sizes) or (sizes == (0,) and x.sizes != (0,)):
        return definition, call.define(lambda reader, _: reader.number(0.0, x.dtype), buffer)
    return definition, call.define(elementwise_body((x,), x.dtype, lambda x: (-abs(x)).exp()), buffer)


def _log_sigmoid_backward(gradient: Scalar, x: Scalar, _: object) -> Scalar:
    """Recomputes exp(-|x|), which is cheaper than loading it."""
    exponential = (-abs(x)).exp()
    rest = exponential / (1.0 + exponential)
    return gradient * (x < 0).where(1.0 - rest, rest)


register_elementwise("aten.log_sigmoid_backward.default", _log_sigmoid_backward, operands=2, dtypes="equal float")


# --- gated linear units ----------------------------------------------------------------------------------------------


@lowering_rule("aten.glu.default", dtypes="float")
def _glu(call: OperatorCall, x: Definition, dim: int) -> LoweringResult:
    dim = dim % len(x.sizes)
    half = call.sizes[dim]

    def body(reader: ElementReader, indices: Indices) -> Scalar:
        second = list(indices)
        second[dim] = as_index(indices[dim]) + half
        return reader.load(x, indices) * reader.load(x, second).sigmoid()

    return call.define(body)


@lowering_rule("aten.glu_backward.default", dtypes="equal float")
def _glu_backward(call: OperatorCall, gradient: Definition, x: Definition, dim: int) -> LoweringResult:
    dim = dim % len(x.sizes)
    half = gradient.sizes[dim]

    def body(reader: ElementReader, indices: Indices) -> Scalar:
        first, second = list(indices), list(indices)
        first[dim] = as_index(indices[dim]) % half
        second[dim] = as_index(indices[dim]) % half + half
        slope = reader.load(gradient, first)
        gate = reader.load(x, second).sigmoid()
        in_first = reader.body.index(indices[dim]) < reader.body.index(half)
        return in_first.where(gate * slope, (1.0 - gate) * gate * reader.load(x, first) * slope)

    return call.define(body)
