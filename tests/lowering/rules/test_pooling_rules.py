"""Rules for pooling and its backward, against eager mode and float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.lowering.evaluate_definitions import call_rule
from tests.lowering.rules.check_rules import run_rule
from tests.lowering.rules.rule_checks import FLOATS, Sample, check_all, compare, operand, rules_of, sample

aten = torch.ops.aten

# Kernel, stride, padding, ceil mode: apart, touching, overlapping, padded, with a last window that sticks out.
_WINDOWS_2D: tuple[tuple[Any, ...], ...] = (
    ([2, 2], [], 0, False),
    ([3, 3], [2, 2], [1, 1], False),
    ([2, 3], [3, 1], [1, 0], False),
    ([3, 3], [2, 2], [1, 1], True),
    ([3, 2], [2, 3], 0, True),
    ([1], [2], 0, False),
)
_WINDOWS_3D: tuple[tuple[Any, ...], ...] = (([2, 2, 2], [], 0, False), ([3, 2, 3], [2, 1, 2], [1, 0, 1], True))
_SIZES = {2: ((2, 3, 6, 8), (1, 7, 5), (1, 1, 3, 3), (2, 2, 8, 6)), 3: ((2, 2, 4, 5, 6), (1, 3, 4, 5))}


def _windows(rank: int) -> Iterator[tuple[tuple[int, ...], tuple[Any, ...]]]:
    for sizes in _SIZES[rank]:
        for windows in _WINDOWS_2D if rank == 2 else _WINDOWS_3D:
            yield sizes, windows


def _maxima(rank: int) -> Callable[[torch.dtype], Iterator[Sample]]:
    def samples(dtype: torch.dtype) -> Iterator[Sample]:
        for sizes, (kernel, stride, padding, ceil) in _windows(rank):
            x = operand(dtype, *sizes)
            yield sample(x, kernel, stride, padding, 1, ceil)
            yield sample(x, kernel, stride, padding, 2, ceil)
        if dtype.is_floating_point:
            x = operand(dtype, *_SIZES[rank][0])
            x.view(-1)[::5] = math.nan
            x.view(-1)[1::7] = -math.inf
            yield sample(x, [3], [1], 1)
            yield sample(torch.full_like(x, -math.inf), [3], [1], 1)

    return samples


def _maximum_gradients(rank: int, dtype: torch.dtype) -> Iterator[Sample]:
    for sizes, (kernel, stride, padding, ceil) in _windows(rank):
        x = operand(dtype, *sizes)
        for dilation in ([1], [2], range(1, rank + 1)):
            try:
                forward = getattr(aten, f"max_pool{rank}d_with_indices")
                values, positions = forward(x, kernel, stride, padding, [*dilation], ceil)
            except RuntimeError:  # no window fits
                continue
            grad = operand(dtype, *values.shape, seed=1)
            yield sample(grad, x, kernel, stride, padding, [*dilation], ceil, positions)


def _averages(rank: int) -> Callable[[torch.dtype], Iterator[Sample]]:
    def samples(dtype: torch.dtype) -> Iterator[Sample]:
        for sizes, windows in _windows(rank):
            for rest in ((), (False,), (True, 5)):
                yield sample(operand(dtype, *sizes), *windows, *rest)

    return samples


def _average_gradients(rank: int) -> Callable[[torch.dtype], Iterator[Sample]]:
    def samples(dtype: torch.dtype) -> Iterator[Sample]:
        for item in _averages(rank)(dtype):
            x, kernel, stride, padding, ceil, *rest = item.arguments
            try:
                forward = getattr(aten, f"avg_pool{rank}d")(x, kernel, stride, padding, ceil, *rest)
            except RuntimeError:  # no window fits
                continue
            counts, divisor, *_ = [*rest, True, None] if not rest else [*rest, None]
            grad = operand(dtype, *forward.shape, seed=1)
            yield sample(grad, x, kernel, stride, padding, ceil, counts, divisor)

    return samples


_ADAPTIVE = {
    2: (((2, 3, 6, 8), (3, 4)), ((1, 7, 5), (3, 2)), ((2, 2, 3, 4), (5, 4)), ((1, 4, 4), (1, 1)), ((3, 5, 7), (5, 7))),
    3: (((2, 2, 4, 5, 6), (2, 3, 6)), ((1, 3, 4, 3), (3, 2, 3))),
}  # fmt: skip


def _adaptive(rank: int) -> Callable[[torch.dtype], Iterator[Sample]]:
    return lambda dtype: (sample(operand(dtype, *sizes), wanted) for sizes, wanted in _ADAPTIVE[rank])


def _adaptive_gradients(rank: int) -> Callable[[torch.dtype], Iterator[Sample]]:
    return lambda dtype: (
        sample(operand(dtype, *sizes[:-rank], *wanted, seed=1), operand(dtype, *sizes))
        for sizes, wanted in _ADAPTIVE[rank]
    )


SAMPLES: dict[str, Callable[[torch.dtype], Iterator[Sample]]] = {
    "aten.max_pool2d_with_indices.default": _maxima(2),
    "aten.max_pool3d_with_indices.default": _maxima(3),
    "aten.avg_pool2d.default": _averages(2),
    "aten.avg_pool3d.default": _averages(3),
    "aten.avg_pool2d_backward.default": _average_gradients(2),
    "aten.avg_pool3d_backward.default": _average_gradients(3),
    "aten._adaptive_avg_pool2d.default": _adaptive(2),
    "aten._adaptive_avg_pool3d.default": _adaptive(3),
    "aten._adaptive_avg_pool2d_backward.default": _adaptive_gradients(2),
    "aten._adaptive_avg_pool3d_backward.default": _adaptive_gradients(3),
}
_MAXIMUM_BACKWARDS = {rank: f"aten.max_pool{rank}d_with_indices_backward.default" for rank in (2, 3)}

_ONLY_FULL = {"aten.avg_pool3d.default", "aten.avg_pool3d_backward.default"}
"""What eager has no half precision kernel for."""

_CASES = [(name, dtype) for name in SAMPLES for dtype in (FLOATS[:2] if name in _ONLY_FULL else FLOATS)]
_CASES.append(("aten.max_pool2d_with_indices.default", torch.int64))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "dtype"), _CASES, ids=[f"{name[5:]}-{str(dtype)[6:]}" for name, dtype in _CASES])
def test_matches_eager(name: str, dtype: torch.dtype) -> None:
    check_all(name, SAMPLES[name](dtype))


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("dtype", FLOATS)
def test_maximum_backward(dtype: torch.dtype, rank: int) -> None:
    """The rule for GPUs; on CPUs the operator stays an extern call."""
    eager = getattr(aten, f"max_pool{rank}d_with_indices_backward")
    for item in _maximum_gradients(rank, dtype):
        result = run_rule(_MAXIMUM_BACKWARDS[rank], item.arguments, "cuda")
        exact = eager(*[
            argument.double() if isinstance(argument, torch.Tensor) and argument.is_floating_point() else argument
            for argument in item.arguments
        ])  # fmt: skip
        compare(result, eager(*item.arguments), exact, lambda: str(item.arguments))  # noqa: B023


def test_every_rule_has_samples() -> None:
    assert rules_of("pooling") == {*SAMPLES, *_MAXIMUM_BACKWARDS.values()}


def test_declined_calls() -> None:
    x = torch.randn(1, 2, 12, 12)
    assert call_rule(aten.avg_pool2d.default, x, [6, 6]) == "its windows have 36 elements"
    assert call_rule(aten._adaptive_avg_pool2d.default, x, [2, 2]) == "its windows have up to 36 elements"
    whole = torch.ones(1, 2, 4, 4, dtype=torch.int64)
    assert call_rule(aten.avg_pool2d.default, whole, [2, 2]) == "its operands are of torch.int64"
    values, positions = aten.max_pool2d_with_indices(x, [2, 2], [2, 2])
    backward = aten.max_pool2d_with_indices_backward.default
    result = call_rule(backward, values, x, [2, 2], [2, 2], [0, 0], [1, 1], False, positions)
    assert result.startswith("on a CPU it is faster")
