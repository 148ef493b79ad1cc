"""Layer norm, group norm, RMS norm and weight norm, each with its backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch

from fxwrap.loop_ir import Scalar, compute_dtype
from fxwrap.lowering.fusion.definitions import Definition, ElementReader, Indices, Pointwise
from fxwrap.lowering.rules.normalization import (
    NormalizationBackward,
    NormalizationSpace,
    RowStatistic,
    batch_norm_space,
    group_norm_space,
    layer_norm_space,
    load_row_statistic,
    moments,
    normalize,
    reciprocal_std,
    statistic_result,
)
from fxwrap.lowering.rules.reductions import outer_result, reduction_shape, sum_rows
from fxwrap.lowering.rules.registry import (
    Declined,
    ElementBody,
    LoweringResult,
    OperatorCall,
    check_dtype,
    check_equal_dtypes,
    lowering_rule,
)
from fxwrap.symbolic import Size, product


def _space(call: OperatorCall, x: Definition) -> NormalizationSpace:
    arguments = call.bind()
    if "group" in arguments:
        return group_norm_space(x.sizes, arguments["group"])
    return layer_norm_space(x.sizes, len(arguments["normalized_shape"]))


def _check_parameters(call: OperatorCall, x: Definition, parameters: Sequence[Definition | None]) -> None:
    """Declines parameters of dtypes that eager mode rejects: on a CPU alone, those of half precision may be float32."""
    is_half = x.dtype in (torch.bfloat16, torch.float16)
    are_float32 = all(item is not None and item.dtype is torch.float32 for item in parameters)
    if not (call.device.type == "cpu" and is_half and are_float32):
        check_equal_dtypes(x, *parameters)


@lowering_rule("aten.native_layer_norm.default", "aten.native_group_norm.default", dtypes="float")
def _forward(call: OperatorCall, x: Definition, *_: object) -> LoweringResult:
    arguments, space = call.bind(), _space(call, x)
    _check_parameters(call, x, [arguments[name] for name in ("weight", "bias")])
    result, mean_fake, rstd_fake = call.results
    mean, squares = moments(call, space, x)
    rstd = reciprocal_std(call, space, squares, arguments["eps"])
    mean_at, rstd_at = load_row_statistic(mean, mean.dtype, space), load_row_statistic(rstd, mean.dtype, space)
    return (
        normalize(call, result, space, x, mean_at, rstd_at, arguments["weight"], arguments["bias"]),
        statistic_result(call, mean_fake, mean_at, len(space.rows)),
        statistic_result(call, rstd_fake, rstd_at, len(space.rows)),
    )


@lowering_rule(
    "aten.native_layer_norm_backward.default", "aten.native_group_norm_backward.default",
    "aten._fused_rms_norm_backward.default",
)  # fmt: skip
def _backward(call: OperatorCall, grad: Definition, x: Definition, *_: object) -> LoweringResult:
    arguments, space, computes = call.bind(), _space(call, x), x.compute_dtype
    mean, weight, mask = arguments.get("mean"), arguments["weight"], arguments["output_mask"]
    check_dtype(x.dtype, "float")
    check_equal_dtypes(grad, x)
    check_equal_dtypes(mean, arguments["rstd"])
    if arguments["rstd"].dtype not in (x.dtype, x.compute_dtype):
        raise Declined(f"its statistics are {arguments['rstd'].dtype}")
    _check_parameters(call, x, [weight] if weight is not None else [])
    mean_at = None if mean is None else load_row_statistic(mean, computes, space)
    rstd_at = load_row_statistic(arguments["rstd"], computes, space)
    if call.operator == "_fused_rms_norm_backward":
        mask = (mask[0], mask[1] and weight is not None)
    sums_channels = any(mask[1:]) and _reads_once_by_channels(call, space)
    return NormalizationBackward(call, space, grad, x, mean_at, rstd_at, weight, sums_channels).gradients(mask)


_MIN_CHANNEL_ELEMENTS = 64  # of a sample, so that their sums are small, and
_MIN_ELEMENTS = 1 << 20  # in all, so that reading them again takes longer than another launch


def _reads_once_by_channels(call: OperatorCall, space: NormalizationSpace) -> bool:
    """Whether sums over rows and columns are computed faster from sums over the channels of each sample.

    On a CPU, the kernel of the input's gradient reads the elements of a row again from its cache.
    """
    if space.channels_per_row is None or not call.spec.massively_parallel:
        return False
    limits = ((space.channels_per_row[1], _MIN_CHANNEL_ELEMENTS), (product(space.sizes), _MIN_ELEMENTS))
    return not any(isinstance(size, int) and size < limit for size, limit in limits)


@lowering_rule("aten._fused_rms_norm.default")
def _rms_norm(
    call: OperatorCall, x: Definition, normalized: Sequence[Size], weight: Definition | None, epsilon: float | None
) -> LoweringResult:
    space, computes = _space(call, x), x.compute_dtype
    rows = reduction_shape(x, range(len(x.sizes) - len(normalized), len(x.sizes)))

    total = sum_rows(call, rows, computes, _square_of(x))
    root = reciprocal_std(call, space, total, torch.finfo(computes).eps if epsilon is None else epsilon)
    rstd = load_row_statistic(root, computes, space)
    result, rstd_fake = call.results
    return (
        normalize(call, result, space, x, None, rstd, weight),
        statistic_result(call, rstd_fake, rstd, len(space.rows)),
    )


def _square_of(operand: Definition) -> ElementBody:
    def square(reader: ElementReader, indices: Indices) -> Scalar:
        value = reader.load(operand, indices)
        return value * value

    return square


# --- weight norm -----------------------------------------------------------------------------------------------------


@lowering_rule("aten._weight_norm_interface.default")
def _weight_norm(call: OperatorCall, v: Definition, g: Definition, dim: int) -> LoweringResult:
    """Returns v * g / norm and the norm over all dimensions but one."""
    rank, computes = len(v.sizes), v.compute_dtype
    rows = reduction_shape(v, [other for other in range(rank) if other != dim % rank])

    total = sum_rows(call, rows, computes, _square_of(v))
    result, norm_fake = call.results

    def body(reader: ElementReader, indices: Indices) -> Scalar:
        numerator = reader.load(g, _indices_of_dim(indices, dim)).to(computes)
        scale = numerator / reader.load(total, rows.outer_indices(indices)).sqrt()
        return reader.load(v, indices) * scale

    norm = outer_result(call, norm_fake, rows, lambda reader, row: reader.load(total, row).sqrt())
    return call.define(body, result), norm


@lowering_rule("aten._weight_norm_interface_backward.default")
def _weight_norm_backward(
    call: OperatorCall, grad: Definition, v: Definition, g: Definition, norms: Definition, dim: int
) -> LoweringResult:
    rank, computes = len(v.sizes), v.compute_dtype
    rows = reduction_shape(v, [other for other in range(rank) if other != dim % rank])

    total = sum_rows(call, rows, computes, lambda reader, at: reader.load(grad, at).to(computes) * reader.load(v, at))
    v_fake, g_fake = call.results

    def of_v(reader: ElementReader, indices: Indices) -> Scalar:
        row = _indices_of_dim(indices, dim)
        norm = reader.load(norms, row).to(computes)
        projection = reader.load(v, indices) * (reader.load(total, rows.outer_indices(indices)) / (norm * norm))
        scale = reader.load(g, row).to(computes) / norm
        return (reader.load(grad, indices).to(computes) - projection) * scale

    def of_g(reader: ElementReader, indices: Indices) -> Scalar:
        norm = reader.load(norms, indices).to(computes)
        return reader.load(total, rows.outer_indices(indices)) / norm

    return call.define(of_v, v_fake), call.define(of_g, g_fake)


def _indices_of_dim(indices: Indices, dim: int) -> Indices:
    """Returns the indices with 0 in all dimensions but one, for a tensor of size 1 in the others."""
    return [index if other == dim % len(indices) else 0 for other, index in enumerate(indices)]


@lowering_rule(
    "aten._native_batch_norm_legit.no_stats", "aten._native_batch_norm_legit_no_training.default",
    "aten._native_batch_norm_legit_functional.default", "aten._native_batch_norm_legit.default",
    "aten.native_batch_norm.default", "aten._batch_norm_with_update_functional.default",
    "aten._batch_norm_no_update.default",
)  # fmt: skip
def _batch_norm(
    call: OperatorCall, x: Definition, weight: Definition | None, bias: Definition | None, *others: object
) -> LoweringResult:
    arguments = call.bind()
    mean, variance = arguments.get("running_mean"), arguments.get("running_var")
    if call.operator.startswith("_batch_norm") and _has_cudnn_reserve(call):
        raise Declined("its result reserves memory for cuDNN")
    if mean is None or variance is None:
        return _training_forward(call, x, weight, bias, None, None, 0.0, arguments["eps"])
    if not arguments.get("training", call.operator == "_batch_norm_with_update_functional"):
        return _eval_forward(call, x, weight, bias, mean, variance, arguments["eps"])
    if call.operator in ("_native_batch_norm_legit", "native_batch_norm"):
        raise Declined(_MUTATION_REASON)
    return _training_forward(call, x, weight, bias, mean, variance, arguments["momentum"], arguments["eps"])


_MUTATION_REASON = "it writes running statistics in place"


@lowering_rule("aten._batch_norm_with_update.default")
def _with_update(call: OperatorCall) -> NoReturn:
    raise Declined(_MUTATION_REASON)


def _has_cudnn_reserve(call: OperatorCall) -> bool:
    """Whether another library's backward may follow and read the fourth result, which only that library computes."""
    return call.spec.reserves_batch_norm_state or call.sizes_of(call.results[3]) != (0,)


def _eval_forward(
    call: OperatorCall,
    x: Definition,
    weight: Definition | None,
    bias: Definition | None,
    mean: Definition,
    variance: Definition,
    epsilon: float,
) -> LoweringResult:
    """Normalizes with running statistics. The saved results are mean and rstd, or empty."""
    space, computes = batch_norm_space(x.sizes), x.compute_dtype
    mean_at, rstd_at = load_row_statistic(mean, computes, space), _rstd_of_variance(variance, computes, epsilon)
    result, *others = call.results
    extra = [mean, variance] if len(others) >= 4 else []
    saved = others[: len(others) - len(extra)]
    return (
        normalize(call, result, space, x, mean_at, rstd_at, weight, bias),
        *_saved_statistics(call, saved, mean_at, rstd_at),
        *[_copy(call, fake, item) for fake, item in zip(others[len(saved) :], extra, strict=True)],
    )


def _training_forward(
    call: OperatorCall,
    x: Definition,
    weight: Definition | None,
    bias: Definition | None,
    running_mean: Definition | None,
    running_variance: Definition | None,
    momentum: float,
    epsilon: float,
) -> LoweringResult:
    """Normalizes with the batch's statistics; the last results are the new running statistics, if there are any."""
    if call.may_be_zero(product(x.sizes)):
        raise Declined("its input may be empty, for which eager raises")
    space = batch_norm_space(x.sizes)
    mean, squares = moments(call, space, x)
    rstd = reciprocal_std(call, space, squares, epsilon)
    mean_at, rstd_at = load_row_statistic(mean, mean.dtype, space), load_row_statistic(rstd, mean.dtype, space)
    result, *others = call.results
    running: tuple[Definition, ...] = ()

    def unbiased(reader: ElementReader, row: Indices) -> Scalar:
        return reader.load(squares, row) / (reader.number(space.count, squares.dtype) - 1.0)

    if running_mean is not None and running_variance is not None:
        others, (mean_fake, variance_fake) = others[:-2], others[-2:]
        running = (
            _update_running_statistic(call, mean_fake, running_mean, momentum, mean_at),
            _update_running_statistic(call, variance_fake, running_variance, momentum, unbiased),
        )
    return (
        normalize(call, result, space, x, mean_at, rstd_at, weight, bias),
        *_saved_statistics(call, others, mean_at, rstd_at),
        *running,
    )


def _saved_statistics(
    call: OperatorCall, fakes: list[torch.Tensor], mean: RowStatistic, rstd: RowStatistic
) -> list[Definition]:
    """Returns mean, rstd and an empty reserve as results, as many as there are fakes."""
    values = (mean, rstd, lambda reader, row: reader.number(0, torch.uint8))
    return [statistic_result(call, fake, value, 1) for fake, value in zip(fakes, values, strict=False)]


def _rstd_of_variance(variance: Definition, dtype: torch.dtype, epsilon: float) -> RowStatistic:
    return lambda reader, row: (reader.load(variance, row).to(dtype) + epsilon).rsqrt()


def _update_running_statistic(
    call: OperatorCall, fake: torch.Tensor, running: Definition, momentum: float, value: RowStatistic
) -> Pointwise:
    """Returns momentum * value + (1 - momentum) * running."""
    computes = compute_dtype(fake.dtype)

    def body(reader: ElementReader, row: Indices) -> Scalar:
        return value(reader, row).to(computes) * momentum + reader.load(running, row).to(computes) * (1.0 - momentum)

    return call.define(body, fake)


def _copy(call: OperatorCall, fake: torch.Tensor, source: Definition) -> Pointwise:
    return call.define(lambda reader, row: reader.load(source, row), fake)


# --- backward --------------------------------------------------------------------------------------------------------


@lowering_rule("aten.native_batch_norm_backward.default", "aten.batch_norm_backward.default")
def _batch_norm_backward(call: OperatorCall, grad: Definition, x: Definition, *_: object) -> LoweringResult:
    arguments, space, computes = call.bind(), batch_norm_space(x.sizes), x.compute_dtype
    reserve = arguments.get("reserve")
    if reserve is not None and (call.spec.reserves_batch_norm_state or reserve.sizes != (0,)):
        raise Declined("another library saved what its backward needs")
    training = arguments["train" if reserve is None else "update"]
    if training:
        mean, rstd = arguments["save_mean"], arguments["save_invstd" if reserve is None else "save_var"]
        if mean is None or rstd is None:
            raise Declined("it lacks the saved statistics")
        mean_at, rstd_at = load_row_statistic(mean, computes, space), load_row_statistic(rstd, computes, space)
    else:
        mean, variance = arguments["running_mean"], arguments["running_var"]
        if mean is None or variance is None:
            raise Declined("it lacks the running statistics")
        mean_at = load_row_statistic(mean, computes, space)
        rstd_at = _rstd_of_variance(variance, computes, arguments["eps"])
    backward = NormalizationBackward(call, space, grad, x, mean_at, rstd_at, arguments["weight"])
    return backward.gradients(arguments["output_mask"], training)
