"""Pointwise losses, reduced to their mean or sum, and their backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fxwrap.loop_ir import Scalar, compute_dtype
from fxwrap.lowering.fusion.definitions import Definition, ElementReader, Indices, reduction
from fxwrap.lowering.rules.activations import log_sigmoid
from fxwrap.lowering.rules.indexing_common import broadcast_sizes
from fxwrap.lowering.rules.pointwise import (
    Operand,
    Parameter,
    check_operands,
    elementwise,
    elementwise_body,
    promoted_dtype,
)
from fxwrap.lowering.rules.registry import Declined, LoweringResult, NumberOrSymbol, OperatorCall, lowering_rule
from fxwrap.symbolic import product

_NONE, _MEAN = 0, 1


def _loss(
    call: OperatorCall,
    operands: Sequence[Definition | None],
    reduced: int,
    formula: Callable[..., Scalar],
    *parameters: NumberOrSymbol,
) -> LoweringResult:
    """Returns the loss of each element, their mean or their sum, computed in the compute dtype."""
    dtype = promoted_dtype(operands)
    sizes = broadcast_sizes([operand.sizes for operand in operands if operand is not None])
    check_operands(call, operands, dtype, "float")
    body = elementwise_body(operands, dtype, formula, parameters=parameters)
    if reduced == _NONE or not sizes:
        return call.define(body)
    computes = compute_dtype(dtype)
    (total,) = reduction(
        "sum", (), sizes, call.device, computes, lambda reader, _, indices: body(reader, indices), (computes,)
    )  # fmt: skip

    def result(reader: ElementReader, _: Indices) -> Scalar:
        value = reader.load(total, ())
        return value / reader.number(product(sizes), computes) if reduced == _MEAN else value

    return call.define(result)


def _loss_backward(
    call: OperatorCall,
    operands: Sequence[Operand],
    reduced: int,
    x: Definition,
    formula: Callable[..., Scalar],
    *others: NumberOrSymbol,
) -> LoweringResult:
    """Returns a loss's gradient. The formula's first parameter is the number of averaged elements, 1 without a mean."""
    count = product(x.sizes) if reduced == _MEAN else 1
    return elementwise(call, operands, formula, dtypes="float", parameters=(count or 1, *others))


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


def _smooth_l1_backward(gradient: Scalar, x: Scalar, y: Scalar, count: Parameter, beta: Parameter) -> Scalar:
    difference = x - y
    slope = (difference <= -beta).where(-gradient, difference * gradient / beta)
    return (difference >= beta).where(gradient, slope) * (1.0 / count)


def _huber_backward(gradient: Scalar, x: Scalar, y: Scalar, count: Parameter, delta: Parameter) -> Scalar:
    difference = x - y
    slope = (difference <= -delta).where(-gradient * delta, difference * gradient)
    return (difference >= delta).where(gradient * delta, slope) * (1.0 / count)


def _soft_margin_backward(gradient: Scalar, x: Scalar, y: Scalar, count: Parameter) -> Scalar:
    return -y * gradient * (1.0 - (y * x).sigmoid()) * (1.0 / count)


def _register_loss(operator: str, formula: Callable[..., Scalar], backward: Callable[..., Scalar]) -> None:
    """Registers a loss of (x, y, reduction, *parameters) and its backward, which takes the gradient first."""

    @lowering_rule(f"aten.{operator}.default", dtypes="float")
    def _forward_rule(
        call: OperatorCall, x: Definition, y: Definition, reduced: int, *parameters: NumberOrSymbol
    ) -> LoweringResult:
        return _loss(call, (x, y), reduced, formula, *parameters)

    @lowering_rule(f"aten.{operator}_backward.default", dtypes="equal float")
    def _backward_rule(
        call: OperatorCall, gradient: Definition, x: Definition, y: Definition, reduced: int, *others: NumberOrSymbol
    ) -> LoweringResult:
        return _loss_backward(call, (gradient, x, y), reduced, x, backward, *others)


_register_loss("mse_loss", _squared, lambda g, x, y, count: (x - y) * (2.0 / count) * g)
_register_loss("smooth_l1_loss", _smooth_l1, _smooth_l1_backward)
_register_loss("huber_loss", _huber, _huber_backward)
_register_loss("soft_margin_loss", lambda x, y: (-x * y).exp().apply("log1p"), _soft_margin_backward)


# --- binary cross entropy --------------------------------------------------------------------------------------------


@lowering_rule("aten.binary_cross_entropy.default", dtypes="equal float")
def _cross_entropy(
    call: OperatorCall, x: Definition, y: Definition, weight: Definition | None, reduced: int
) -> LoweringResult:
    if call.spec.asserts_raise:  # a device assertion raises another class of error than eager
        raise Declined("eager raises for inputs that are not between 0 and 1")
    return _loss(call, (x, y, weight), reduced, _binary_cross_entropy)


def _binary_cross_entropy(x: Scalar, y: Scalar, weight: Scalar | None) -> Scalar:
    """Logarithms are at least -100, so that a certain but wrong prediction has a finite loss."""
    x.body.device_assert((x >= 0.0) & (x <= 1.0), "all elements of input should be between 0 and 1")
    loss = (y - 1.0) * (-x).apply("log1p").maximum(-100.0) - y * x.log().maximum(-100.0)
    return loss if weight is None else loss * weight


@lowering_rule("aten.binary_cross_entropy_backward.default", dtypes="equal float")
def _cross_entropy_backward(
    call: OperatorCall, gradient: Definition, x: Definition, y: Definition, weight: Definition | None, reduced: int
) -> LoweringResult:
    def formula(gradient: Scalar, x: Scalar, y: Scalar, weight: Scalar | None, count: Parameter) -> Scalar:
        slope = gradient * (x - y) / ((1.0 - x) * x).maximum(1e-12)
        slope = slope if weight is None else slope * weight
        return slope if isinstance(count, int) and count == 1 else slope / count

    return _loss_backward(call, (gradient, x, y, weight), reduced, x, formula)


@lowering_rule("aten.binary_cross_entropy_with_logits.default", dtypes="float")
def _cross_entropy_with_logits(
    call: OperatorCall,
    x: Definition,
    y: Definition,
    weight: Definition | None,
    positive_weight: Definition | None,
    reduced: int,
) -> LoweringResult:
    def formula(x: Scalar, y: Scalar, weight: Scalar | None, positive_weight: Scalar | None) -> Scalar:
        log_probability = log_sigmoid(x)
        if positive_weight is not None:
            log_probability = log_probability * ((positive_weight - 1.0) * y + 1.0)
        loss = (1.0 - y) * x - log_probability
        return loss if weight is None else loss * weight

    return _loss(call, (x, y, weight, positive_weight), reduced, formula)
