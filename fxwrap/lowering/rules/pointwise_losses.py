"""Losses: a formula an element, reduced as asked, and their backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fxwrap.loop_ir import Scalar, compute_dtype
from fxwrap.lowering.definitions import Definition, Indices, Reader, pointwise, reduction
from fxwrap.lowering.rules.activations import log_sigmoid
from fxwrap.lowering.rules.pointwise import (
    Parameter,
    body_of,
    bound,
    broadcast_sizes,
    elementwise,
    promoted_dtype,
    refusal,
)
from fxwrap.lowering.rules.registry import Call, Result
from fxwrap.symbolic import Size, product

_NONE, _MEAN = 0, 1


def _loss(
    call: Call, operands: Sequence[Any], reduced: int, formula: Callable[..., Scalar], parameters: Sequence[Any] = ()
) -> Result | str:
    """Returns the loss of each element, their mean or their sum, summed in the compute dtype."""
    dtype = promoted_dtype(operands, "DEFAULT")
    sizes = broadcast_sizes(operands)
    reason = refusal(call, operands, dtype, "float")
    if reason is not None:
        return reason
    body = body_of(operands, dtype, formula, parameters=parameters)
    if reduced == _NONE or not sizes:
        return pointwise(call.sizes, call.dtype, call.device, body)
    computes = compute_dtype(dtype)
    (total,) = reduction(
        "sum", (), sizes, call.device, computes, lambda reader, _, indices: body(reader, indices), (computes,)
    )  # fmt: skip

    def result(reader: Reader, _: Indices) -> Scalar:
        value = reader.load(total, ())
        return value / reader.number(product(sizes), computes) if reduced == _MEAN else value

    return pointwise((), call.dtype, call.device, result)


def _loss_backward(
    call: Call, operands: Sequence[Any], reduced: int, x: Definition, formula: Callable[..., Scalar], *others: Any
) -> Result | str:
    """Returns a loss's gradient; the formula's first parameter is how many elements a mean is over, else 1."""
    count: Size = product(x.sizes) if reduced == _MEAN else 1
    return elementwise(call, operands, "DEFAULT", formula, accepts="float", parameters=(count or 1, *others))


# --- distances -------------------------------------------------------------------------------------------------------


def _squared(x: Scalar, y: Scalar) -> Scalar:
    difference = x - y
    return difference * difference


def _smooth_l1(x: Scalar, y: Scalar, beta: Parameter) -> Scalar:
    distance = abs(x - y)
    return (distance < beta).where(0.5 * distance * distance / beta, distance - 0.5 * beta)


def _huber(x: Scalar, y: Scalar, delta: Parameter) -> Scalar:
    distance = abs(x - y)
    return (distance <= delta).where(0.5 * distance * distance, delta * (distance - 0.5 * delta))


@bound("aten.mse_loss.default")
def _mse(call: Call, x: Definition, y: Definition, reduced: int) -> Result | str:
    return _loss(call, (x, y), reduced, _squared)


@bound("aten.l1_loss.default")
def _l1(call: Call, x: Definition, y: Definition, reduced: int) -> Result | str:
    return _loss(call, (x, y), reduced, lambda x, y: abs(x - y))


@bound("aten.smooth_l1_loss.default")
def _smooth_l1_rule(call: Call, x: Definition, y: Definition, reduced: int, beta: Any) -> Result | str:
    return _loss(call, (x, y), reduced, _smooth_l1, (beta,))


@bound("aten.huber_loss.default")
def _huber_rule(call: Call, x: Definition, y: Definition, reduced: int, delta: Any) -> Result | str:
    return _loss(call, (x, y), reduced, _huber, (delta,))


@bound("aten.mse_loss_backward.default")
def _mse_backward(call: Call, gradient: Definition, x: Definition, y: Definition, reduced: int) -> Result | str:
    def formula(gradient: Scalar, x: Scalar, y: Scalar, count: Parameter) -> Scalar:
        return (x - y) * (2.0 / count) * gradient

    return _loss_backward(call, (gradient, x, y), reduced, x, formula)


@bound("aten.smooth_l1_loss_backward.default")
def _smooth_l1_backward(call: Call, gradient: Any, x: Any, y: Any, reduced: int, beta: Any) -> Result | str:
    def formula(gradient: Scalar, x: Scalar, y: Scalar, count: Parameter, beta: Parameter) -> Scalar:
        difference = x - y
        slope = (difference <= -beta).where(-gradient, difference * gradient / beta)
        return (difference >= beta).where(gradient, slope) * (1.0 / count)

    return _loss_backward(call, (gradient, x, y), reduced, x, formula, beta)


@bound("aten.huber_loss_backward.default")
def _huber_backward(call: Call, gradient: Any, x: Any, y: Any, reduced: int, delta: Any) -> Result | str:
    def formula(gradient: Scalar, x: Scalar, y: Scalar, count: Parameter, delta: Parameter) -> Scalar:
        difference = x - y
        slope = (difference <= -delta).where(-gradient * delta, difference * gradient)
        return (difference >= delta).where(gradient * delta, slope) * (1.0 / count)

    return _loss_backward(call, (gradient, x, y), reduced, x, formula, delta)


# --- logarithmic -----------------------------------------------------------------------------------------------------


@bound("aten.binary_cross_entropy.default")
def _cross_entropy(call: Call, x: Any, y: Any, weight: Any, reduced: int) -> Result | str:
    if call.spec.raises:  # a kernel's requirement raises another class of error than eager
        return "eager raises for inputs that are not between 0 and 1"
    return _loss(call, (x, y, weight), reduced, _binary_cross_entropy)


def _binary_cross_entropy(x: Scalar, y: Scalar, weight: Scalar | None) -> Scalar:
    """Logarithms are bounded by -100, so that a certain and wrong answer costs no infinity."""
    x.body.require((x >= 0.0) & (x <= 1.0), "all elements of input should be between 0 and 1")
    loss = (y - 1.0) * (-x).apply("log1p").maximum(-100.0) - y * x.log().maximum(-100.0)
    return loss if weight is None else loss * weight


@bound("aten.binary_cross_entropy_backward.default")
def _cross_entropy_backward(call: Call, gradient: Any, x: Any, y: Any, weight: Any, reduced: int) -> Result | str:
    def formula(gradient: Scalar, x: Scalar, y: Scalar, weight: Scalar | None, count: Parameter) -> Scalar:
        slope = gradient * (x - y) / ((1.0 - x) * x).maximum(1e-12)
        slope = slope if weight is None else slope * weight
        return slope if isinstance(count, int) and count == 1 else slope / count

    return _loss_backward(call, (gradient, x, y, weight), reduced, x, formula)


@bound("aten.binary_cross_entropy_with_logits.default")
def _cross_entropy_with_logits(
    call: Call, x: Any, y: Any, weight: Any, positive_weight: Any, reduced: int
) -> Result | str:
    def formula(x: Scalar, y: Scalar, weight: Scalar | None, positive_weight: Scalar | None) -> Scalar:
        certain = log_sigmoid(x)
        if positive_weight is not None:
            certain = certain * ((positive_weight - 1.0) * y + 1.0)
        loss = (1.0 - y) * x - certain
        return loss if weight is None else loss * weight

    return _loss(call, (x, y, weight, positive_weight), reduced, formula)


@bound("aten.soft_margin_loss.default")
def _soft_margin(call: Call, x: Definition, y: Definition, reduced: int) -> Result | str:
    return _loss(call, (x, y), reduced, lambda x, y: (-x * y).exp().apply("log1p"))


@bound("aten.soft_margin_loss_backward.default")
def _soft_margin_backward(call: Call, gradient: Any, x: Any, y: Any, reduced: int) -> Result | str:
    def formula(gradient: Scalar, x: Scalar, y: Scalar, count: Parameter) -> Scalar:
        return y * gradient * ((y * x).sigmoid() - 1.0) * (1.0 / count)

    return _loss_backward(call, (gradient, x, y), reduced, x, formula)
