"""Maxima of large windows, which are taken along each dimension."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import fxwrap
from fxwrap import Options
from fxwrap.devices import CPU
from fxwrap.lines import ExternCall, Launch

PARALLEL = dataclasses.replace(CPU, massively_parallel=True)
POOL = "aten.max_pool2d_with_indices.default"


def compiled(function: Any, x: Tensor, options: Options) -> tuple[Any, int, int]:
    """The result, and the numbers of launches and of calls of the library's pooling."""
    program = fxwrap.compile_graph(make_fx(function)(x), [x], options=options)
    lines = [*program.program.lines()]
    launches = sum(isinstance(line, Launch) for line in lines)
    results = program(x)
    return (
        results[0] if len(results) == 1 else results,
        launches,
        sum(isinstance(line, ExternCall) and "max_pool" in line.target for line in lines),
    )


def values(dtype: torch.dtype, shape: tuple[int, ...], channels_last: bool = False) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3)).mul(9).to(dtype)
    if dtype.is_floating_point:
        x.view(-1)[5], x.view(-1)[77] = float("nan"), -float("inf")
        x.view(-1)[200:330] = -float("inf")
    return x.contiguous(memory_format=torch.channels_last) if channels_last else x


def options(spec: Any = CPU, **keywords: Any) -> Options:
    return Options(devices=(spec,), compile_cache=False, **keywords)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64], ids=str)
@pytest.mark.parametrize(
    "pool", [(7, 1, 3), (7, 7, 0), (5, 1, 2), ((9, 4), (2, 1), (4, 0)), (6, 2, 3, 2, True), ((1, 40), 1, 0)], ids=str
)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.sampled(2)
def test_maxima_equal_those_of_eager(dtype: torch.dtype, pool: Any, channels_last: bool) -> None:
    x = values(dtype, (2, 3, 23, 45), channels_last)

    def function(x: Tensor) -> Tensor:
        return functional.max_pool2d(x, *pool) * 2

    result, launches, calls = compiled(function, x, options())
    expected = function(x)
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
    assert result.stride() == expected.stride()
    is_separated = pool[0] != (1, 40)
    assert (launches, calls) == ((2, 0) if is_separated else (1, 1))


def test_volumes_are_pooled_along_three_dimensions() -> None:
    x = values(torch.float32, (2, 3, 9, 11, 13))
    result, launches, calls = compiled(lambda x: functional.max_pool3d(x, 4, 1, 1), x, options())
    torch.testing.assert_close(result, functional.max_pool3d(x, 4, 1, 1), rtol=0, atol=0, equal_nan=True)
    assert (launches, calls) == (3, 0)


@pytest.mark.parametrize("pool", [(3, 1, 1), (5, 5, 0), (3, 2, 1)], ids=str)
def test_few_comparisons_are_those_of_one_kernel(pool: tuple[int, ...]) -> None:
    x = values(torch.float32, (2, 3, 20, 21))
    assert compiled(lambda x: functional.max_pool2d(x, *pool), x, options())[1:] == (1, 0)


def test_pools_stay_whose_positions_are_read_or_that_are_preserved() -> None:
    x = values(torch.float32, (2, 3, 20, 21))

    def positions(x: Tensor) -> list[Tensor]:
        return [*functional.max_pool2d(x, 7, 1, 3, return_indices=True)]

    result, _, calls = compiled(positions, x, options())
    torch.testing.assert_close([*result], positions(x), rtol=0, atol=0, equal_nan=True)
    assert calls == 1
    pooled = lambda x: functional.max_pool2d(x, 7, 1, 3)  # noqa: E731
    assert compiled(pooled, x, options(preserve_ops=(POOL,)))[2] == 1


def test_massively_parallel_devices_call_the_library() -> None:
    x = values(torch.float32, (2, 3, 20, 21))
    assert compiled(lambda x: functional.max_pool2d(x, 7, 1, 3), x, options(PARALLEL))[2] == 1
