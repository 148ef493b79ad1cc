"""Batch norm in torch's many spellings: with and without running statistics, for training and not; and its backward.

Spellings that write running statistics in place stay operator calls; AOTAutograd makes functional ones of them.
"""

from __future__ import annotations

from typing import Any

import torch

from fxwrap.loop_ir import Scalar, compute_dtype
from fxwrap.lowering.definitions import Definition, Indices, Pointwise, Reader, pointwise
from fxwrap.lowering.rules.normalization import (
    Gradients,
    RowValue,
    Space,
    batch_space,
    moments,
    normalised,
    reciprocal_deviation,
    row_value,
    statistic,
)
from fxwrap.lowering.rules.registry import Call, Result
from fxwrap.lowering.rules.rows import kernel_rule

_MUTATES = "it writes running statistics in place"
_Parameter = Definition | None


@kernel_rule("aten._native_batch_norm_legit.no_stats")
def _without_running(
    call: Call, x: Definition, weight: _Parameter, bias: _Parameter, training: bool, momentum: Any, epsilon: float
) -> Result:
    return _training(call, x, weight, bias, None, None, 0.0, epsilon)


@kernel_rule("aten._native_batch_norm_legit_no_training.default")
def _no_training(
    call: Call,
    x: Definition,
    weight: _Parameter,
    bias: _Parameter,
    mean: Definition,
    variance: Definition,
    momentum: float,
    epsilon: float,
) -> Result:
    return _evaluation(call, x, weight, bias, mean, variance, epsilon)


@kernel_rule("aten._native_batch_norm_legit_functional.default")
def _functional(
    call: Call,
    x: Definition,
    weight: _Parameter,
    bias: _Parameter,
    mean: Definition,
    variance: Definition,
    training: bool,
    momentum: float,
    epsilon: float,
) -> Result:
    if training:
        return _training(call, x, weight, bias, mean, variance, momentum, epsilon)
    return _evaluation(call, x, weight, bias, mean, variance, epsilon)


@kernel_rule("aten._native_batch_norm_legit.default", "aten.native_batch_norm.default")
def _maybe_mutating(
    call: Call,
    x: Definition,
    weight: _Parameter,
    bias: _Parameter,
    mean: _Parameter,
    variance: _Parameter,
    training: bool,
    momentum: float,
    epsilon: float,
) -> Result | str:
    if mean is None or variance is None:
        return _training(call, x, weight, bias, None, None, 0.0, epsilon)
    return _MUTATES if training else _evaluation(call, x, weight, bias, mean, variance, epsilon)


@kernel_rule("aten._batch_norm_with_update.default")
def _with_update(call: Call, *_: Any) -> str:
    return _MUTATES


@kernel_rule("aten._batch_norm_with_update_functional.default")
def _with_update_functional(
    call: Call,
    x: Definition,
    weight: _Parameter,
    bias: _Parameter,
    mean: Definition,
    variance: Definition,
    momentum: float,
    epsilon: float,
) -> Result | str:
    if _reserves(call):
        return "its result keeps memory for cuDNN"
    return _training(call, x, weight, bias, mean, variance, momentum, epsilon)


@kernel_rule("aten._batch_norm_no_update.default")
def _no_update(
    call: Call,
    x: Definition,
    weight: _Parameter,
    bias: _Parameter,
    mean: _Parameter,
    variance: _Parameter,
    momentum: float,
    epsilon: float,
) -> Result | str:
    if _reserves(call):
        return "its result keeps memory for cuDNN"
    if mean is None or variance is None:
        return _training(call, x, weight, bias, None, None, 0.0, epsilon)
    return _evaluation(call, x, weight, bias, mean, variance, epsilon)


def _reserves(call: Call) -> bool:
    """Whether a backward that another library does may follow: then the fourth result is not for us to give."""
    return call.spec.saves_batch_norm or call.sizes_of(call.fake[3]) != (0,)


def _evaluation(
    call: Call,
    x: Definition,
    weight: _Parameter,
    bias: _Parameter,
    mean: Definition,
    variance: Definition,
    epsilon: float,
) -> Result:
    """Normalises with running statistics. Saved ones are mean and deviation, or empty, as the operator has it."""
    space, computes = batch_space(x.sizes), x.compute_dtype
    mean_at, deviation_at = row_value(mean, computes, space), _deviation_of(variance, computes, epsilon)
    result, *others = call.fake
    extra = [mean, variance] if len(others) >= 4 else []
    saved = others[: len(others) - len(extra)]
    return (
        normalised(call, result, space, x, mean_at, deviation_at, weight, bias),
        *_saved(call, saved, mean_at, deviation_at),
        *[_copy(call, fake, item) for fake, item in zip(others[len(saved) :], extra, strict=True)],
    )


def _training(
    call: Call,
    x: Definition,
    weight: _Parameter,
    bias: _Parameter,
    running_mean: _Parameter,
    running_variance: _Parameter,
    momentum: float,
    epsilon: float,
) -> Result:
    """Normalises with the batch's statistics; the last results are new running ones, if there are any."""
    space = batch_space(x.sizes)
    mean, squares = moments(call, space, x)
    deviation = reciprocal_deviation(call, space, squares, epsilon)
    mean_at, deviation_at = row_value(mean, mean.dtype, space), row_value(deviation, mean.dtype, space)
    result, *others = call.fake
    running: tuple[Definition, ...] = ()
    if running_mean is not None and running_variance is not None:
        others, (mean_fake, variance_fake) = others[:-2], others[-2:]
        running = (
            _updated(call, mean_fake, running_mean, momentum, mean_at),
            _updated(call, variance_fake, running_variance, momentum, _unbiased(squares, space)),
        )
    return (
        normalised(call, result, space, x, mean_at, deviation_at, weight, bias),
        *_saved(call, others, mean_at, deviation_at),
        *running,
    )


def _saved(call: Call, fakes: list[torch.Tensor], mean: RowValue, deviation: RowValue) -> list[Definition]:
    """Returns mean and deviation as results, and an empty reserve; where they are empty nothing is computed."""
    values = (mean, deviation, lambda reader, row: reader.number(0, torch.uint8))
    return [statistic(call, fake, value, 1) for fake, value in zip(fakes, values, strict=False)]


def _deviation_of(variance: Definition, dtype: torch.dtype, epsilon: float) -> RowValue:
    return lambda reader, row: (reader.load(variance, row).to(dtype) + epsilon).rsqrt()


def _unbiased(squares: Definition, space: Space) -> RowValue:
    def value(reader: Reader, row: Indices) -> Scalar:
        return reader.load(squares, row) / (reader.number(space.count, squares.dtype) - 1.0)

    return value


def _updated(call: Call, fake: torch.Tensor, running: Definition, momentum: float, value: RowValue) -> Pointwise:
    """Returns momentum * value + (1 - momentum) * running."""
    computes = compute_dtype(fake.dtype)

    def body(reader: Reader, row: Indices) -> Scalar:
        return value(reader, row).to(computes) * momentum + reader.load(running, row).to(computes) * (1.0 - momentum)

    return pointwise(call.sizes_of(fake), fake.dtype, call.device, body)


def _copy(call: Call, fake: torch.Tensor, source: Definition) -> Pointwise:
    return pointwise(call.sizes_of(fake), fake.dtype, call.device, lambda reader, row: reader.load(source, row))


# --- backward -----------------------------------------------------------------------------------------------------


@kernel_rule("aten.native_batch_norm_backward.default")
def _backward(
    call: Call,
    grad: Definition,
    x: Definition,
    weight: _Parameter,
    running_mean: _Parameter,
    running_variance: _Parameter,
    mean: _Parameter,
    deviation: _Parameter,
    training: bool,
    epsilon: float,
    mask: Any,
) -> Result | str:
    space, computes = batch_space(x.sizes), x.compute_dtype
    if training:
        if mean is None or deviation is None:
            return "it lacks the saved statistics"
        mean_at, deviation_at = row_value(mean, computes, space), row_value(deviation, computes, space)
    else:
        if running_mean is None or running_variance is None:
            return "it lacks the running statistics"
        mean_at = row_value(running_mean, computes, space)
        deviation_at = _deviation_of(running_variance, computes, epsilon)
    gradients = Gradients(call, space, grad, x, mean_at, deviation_at, weight)
    makers = (
        gradients.of_input if training else gradients.of_constant_statistics,
        gradients.of_weight,
        gradients.of_bias,
    )
    return tuple([make(fake) if wanted else None for make, fake, wanted in zip(makers, call.fake, mask, strict=True)])


@kernel_rule("aten.batch_norm_backward.default")
def _backward_with_reserve(call: Call, *arguments: Any) -> Result | str:
    if call.spec.saves_batch_norm or arguments[-1].sizes != (0,):
        return "another library saved what it needs"
    return _backward(call, *arguments[:-1])
