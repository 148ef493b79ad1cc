"""Rules for normalisations and their backward, against eager mode and float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from fxwrap.devices import CUDA
from fxwrap.lowering.rules import norms
from fxwrap.lowering.rules.normalization import NormalizationSpace
from fxwrap.lowering.rules.norms import _reads_once_by_channels
from fxwrap.lowering.rules.registry import OperatorCall
from fxwrap.torch_compat import get_decompositions
from tests.lowering.evaluate_definitions import call_rule
from tests.lowering.rules.rule_checks import (
    FLOATS,
    OperatorWithReference,
    Sample,
    check,
    check_all,
    operand,
    rules_of,
    sample,
)

aten = torch.ops.aten
_MASKS = ([True, True, True], [True, False, False], [False, True, True])


def _parameters(dtype: torch.dtype, *sizes: int) -> Iterator[tuple[torch.Tensor | None, torch.Tensor | None]]:
    """Yields weights and biases."""
    weight, bias = operand(dtype, *sizes, seed=5), operand(dtype, *sizes, seed=6)
    yield weight, bias
    yield None, None
    yield weight, None


_LAYERS = (((3, 7), 1), ((2, 3, 4, 5), 2), ((2, 3, 5), 1), ((4,), 1), ((1, 1), 1), ((0, 4), 1), ((2, 3), 2))


def _layers(dtype: torch.dtype) -> Iterator[Sample]:
    for sizes, rank in _LAYERS:
        inner = sizes[len(sizes) - rank :]
        for weight, bias in _parameters(dtype, *inner):
            yield sample(operand(dtype, *sizes) * 3 + 1, inner, weight, bias, 1e-5)
    yield sample(operand(dtype, 5, 3).t(), [5], None, None, 0.1)
    unusual = torch.tensor([[1, math.nan, 2], [-1, 1, 2], [3, 3, 3]], dtype=dtype)
    yield sample(unusual, [3], None, None, 1e-5)
    if dtype in (torch.bfloat16, torch.float16):
        yield sample(operand(dtype, 3, 7), [7], *[operand(torch.float32, 7, seed=seed) for seed in (1, 2)], 1e-5)


def _layer_gradients(dtype: torch.dtype) -> Iterator[Sample]:
    for item in _layers(dtype):
        x, inner, weight, bias, _ = item.arguments
        _, mean, deviation = aten.native_layer_norm(*item.arguments)
        for mask in _MASKS:
            grad = operand(dtype, *x.shape, seed=9)
            if x.isfinite().all() and (weight is None or weight.dtype is dtype):
                wanted = [flag and (number == 0 or weight is not None) for number, flag in enumerate(mask)]
                yield sample(grad, x, inner, mean, deviation, weight, bias, wanted)


_GROUPS = (((2, 6, 5), 3), ((3, 4, 2, 3), 1), ((2, 4, 3), 4), ((2, 6), 2), ((1, 2, 1), 2))


def _groups(dtype: torch.dtype) -> Iterator[Sample]:
    for sizes, groups in _GROUPS:
        for weight, bias in _parameters(dtype, sizes[1]):
            yield sample(
                operand(dtype, *sizes) * 3 + 1, weight, bias, sizes[0], sizes[1], math.prod(sizes[2:]), groups, 1e-5
            )


def _group_gradients(dtype: torch.dtype) -> Iterator[Sample]:
    for item in _groups(dtype):
        x, weight, _, *numbers, _ = item.arguments
        _, mean, deviation = aten.native_group_norm(*item.arguments)
        for mask in _MASKS:
            yield sample(operand(dtype, *x.shape, seed=9), x, mean, deviation, weight, *numbers, mask)


_BATCHES = ((4, 3, 5), (2, 3, 4, 3), (5, 2), (2, 1, 2, 2, 2))


def _batches(*rest: Any, running: bool = True) -> Callable[[torch.dtype], Iterator[Sample]]:
    """Returns samples (x, weight, bias, running mean and variance if any, rest)."""

    def samples(dtype: torch.dtype) -> Iterator[Sample]:
        for sizes in _BATCHES:
            statistics = [operand(dtype, sizes[1], seed=3), operand(dtype, sizes[1], seed=4).abs() + 0.5]
            for weight, bias in _parameters(dtype, sizes[1]):
                yield sample(operand(dtype, *sizes) * 3 + 1, weight, bias, *(statistics if running else []), *rest)

    return samples


def _either(*makers: Callable[[torch.dtype], Iterator[Sample]]) -> Callable[[torch.dtype], Iterator[Sample]]:
    return lambda dtype: (item for maker in makers for item in maker(dtype))


def _without_statistics(*rest: Any) -> Callable[[torch.dtype], Iterator[Sample]]:
    return lambda dtype: (sample(*item.arguments[:3], None, None, *rest) for item in _batches(running=False)(dtype))


def _batch_gradients(dtype: torch.dtype) -> Iterator[Sample]:
    for item in _batches()(dtype):
        x, weight, _, mean, variance = item.arguments
        saved = aten._native_batch_norm_legit.no_stats(x, weight, None, True, 0.1, 1e-5)[1:]
        grad = operand(dtype, *x.shape, seed=9)
        for mask in _MASKS:
            wanted = [flag and (number != 1 or weight is not None) for number, flag in enumerate(mask)]
            yield sample(grad, x, weight, mean, variance, *saved, True, 1e-5, wanted)
            yield sample(grad, x, weight, mean, variance, *saved, False, 1e-5, wanted)


def _batch_gradients_with_reserve(dtype: torch.dtype) -> Iterator[Sample]:
    for item in _batch_gradients(dtype):
        if item.arguments[2] is not None:
            yield sample(*item.arguments, torch.empty(0, dtype=torch.uint8))


def _root_means(dtype: torch.dtype) -> Iterator[Sample]:
    for sizes, rank in _LAYERS:
        inner = sizes[len(sizes) - rank :]
        for weight in (None, operand(dtype, *inner, seed=5)):
            yield sample(operand(dtype, *sizes) * 3 + 1, inner, weight, 1e-5)
            yield sample(operand(dtype, *sizes), inner, weight, None)


def _root_mean_gradients(dtype: torch.dtype) -> Iterator[Sample]:
    for item in _root_means(dtype):
        x, inner, weight, _ = item.arguments
        _, deviation = aten._fused_rms_norm(*item.arguments)
        for mask in ([True, weight is not None], [True, False], [False, weight is not None]):
            yield sample(operand(dtype, *x.shape, seed=9), x, inner, deviation, weight, mask)


def _weights(dtype: torch.dtype) -> Iterator[Sample]:
    yield sample(operand(dtype, 4, 3, 2), operand(dtype, 4, 1, 1, seed=1), 0)
    yield sample(operand(dtype, 4, 3), operand(dtype, 1, 3, seed=1), 1)
    yield sample(operand(dtype, 4, 3), operand(dtype, 4, 1, seed=1))


def _weight_gradients(dtype: torch.dtype) -> Iterator[Sample]:
    for item in _weights(dtype):
        v, g, *dim = item.arguments
        _, norms = aten._weight_norm_interface(*item.arguments)
        yield sample(operand(dtype, *v.shape, seed=2), v, g, norms, *(dim or [0]))


SAMPLES: dict[str, Callable[[torch.dtype], Iterator[Sample]]] = {
    "aten.native_layer_norm.default": _layers,
    "aten.native_layer_norm_backward.default": _layer_gradients,
    "aten.native_group_norm.default": _groups,
    "aten.native_group_norm_backward.default": _group_gradients,
    "aten._native_batch_norm_legit.no_stats": _batches(True, 0.1, 1e-5, running=False),
    "aten._native_batch_norm_legit.default": _batches(False, 0.1, 1e-5),
    "aten._native_batch_norm_legit_no_training.default": _batches(0.1, 1e-5),
    "aten._native_batch_norm_legit_functional.default": _either(_batches(True, 0.1, 1e-5), _batches(False, 0.2, 1e-3)),
    "aten.native_batch_norm.default": _either(_batches(False, 0.1, 1e-5), _without_statistics(True, 0.1, 1e-5)),
    "aten._batch_norm_with_update_functional.default": _batches(0.1, 1e-5),
    "aten._batch_norm_no_update.default": _batches(0.1, 1e-5),
    "aten.native_batch_norm_backward.default": _batch_gradients,
    "aten.batch_norm_backward.default": _batch_gradients_with_reserve,
    "aten._fused_rms_norm.default": _root_means,
    "aten._fused_rms_norm_backward.default": _root_mean_gradients,
    "aten._weight_norm_interface.default": _weights,
    "aten._weight_norm_interface_backward.default": _weight_gradients,
}
DECLINED = {"aten._batch_norm_with_update.default"}

_OF_CUDA = "aten._fused_rms_norm_backward.default"
"""The operator that has no CPU kernel: torch's decomposition of it takes eager's place."""

_CASES = [(name, dtype) for name in SAMPLES if name != _OF_CUDA for dtype in FLOATS]


@pytest.mark.parametrize(("name", "dtype"), _CASES, ids=[f"{name[5:]}-{str(dtype)[6:]}" for name, dtype in _CASES])
def test_matches_eager(name: str, dtype: torch.dtype) -> None:
    check_all(name, SAMPLES[name](dtype))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", FLOATS)
def test_rms_norm_backward(dtype: torch.dtype) -> None:
    overload = aten._fused_rms_norm_backward.default
    instead = OperatorWithReference(overload, get_decompositions([overload])[overload])
    for item in SAMPLES[_OF_CUDA](dtype):
        assert check(_OF_CUDA, item, instead)


@pytest.mark.parametrize("dtype", FLOATS)
def test_sums_over_channels(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs, a group norm's backward sums channels of samples first; here, also of small operands."""
    chosen: list[bool] = []

    def by_channels(call: OperatorCall, space: NormalizationSpace) -> bool:
        chosen.append(_reads_once_by_channels(replace(call, spec=CUDA), space))
        return len(space.sizes) > 2

    monkeypatch.setattr(norms, "_MIN_ELEMENTS", 60)
    monkeypatch.setattr(norms, "_MIN_CHANNEL_ELEMENTS", 5)
    monkeypatch.setattr(norms, "_reads_once_by_channels", by_channels)
    check_all("aten.native_group_norm_backward.default", _group_gradients(dtype))
    assert {*chosen} == {True, False}


def test_every_rule_has_samples() -> None:
    assert rules_of("norms") == {*SAMPLES, *DECLINED}


@pytest.mark.parametrize("name", ["_batch_norm_with_update", "_native_batch_norm_legit", "native_batch_norm"])
def test_running_statistics_are_not_written(name: str) -> None:
    training = () if name.endswith("update") else (True,)
    x, one = torch.randn(4, 3, 5), torch.ones(3)
    reason = call_rule(getattr(aten, name).default, x, one, one, one.clone(), one.clone(), *training, 0.1, 1e-5)
    assert reason == "it writes running statistics in place"
