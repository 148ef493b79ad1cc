"""Sorts of indices of a topk, whose keys are as narrow as the number of indices allows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import Options
from fxwrap.devices import CPU
from fxwrap.lines import ExternCall

PARALLEL = dataclasses.replace(CPU, massively_parallel=True)


def flat(scores: Tensor) -> list[Tensor]:
    chosen = scores.topk(2, dim=-1)[1]
    return [*chosen.reshape(-1).sort(stable=True)]


def last_dimension(scores: Tensor) -> list[Tensor]:
    return [*scores.topk(3, 0)[1].t().sort(-1, descending=True)]


def of_inputs(scores: Tensor) -> list[Tensor]:
    return [*scores.long().view(-1).sort(stable=True)]


def written(scores: Tensor) -> list[Tensor]:
    chosen = scores.topk(2, dim=-1)[1]
    chosen += 300
    return [*chosen.view(-1).sort(stable=True)]


def keys(program: fxwrap.Compiled) -> list[torch.dtype]:
    """The dtypes of the operands of sorts."""
    lines = [line for line in program.program.lines() if isinstance(line, ExternCall) and "sort" in line.target]
    return [line.arguments[0].tensor_type.dtype for line in lines]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("function", "count", "dtype"),
    [
        (flat, 8, torch.uint8), (flat, 256, torch.uint8), (flat, 300, torch.int16), (last_dimension, 8, torch.uint8),
        (of_inputs, 8, torch.int64), (written, 8, torch.int64),
    ],
)  # fmt: skip
@pytest.mark.parametrize("device", [PARALLEL, CPU], ids=["parallel", "cpu"])
def test_keys_have_the_bits_that_indices_need(
    function: Callable[..., Any], count: int, dtype: torch.dtype, device: Any
) -> None:
    scores = torch.randn(12, count, generator=torch.Generator().manual_seed(0))
    graph = make_fx(function)(scores)
    program = fxwrap.compile_graph(graph, [scores], options=Options(devices=(device,), compile_cache=False))
    assert keys(program) == [dtype if device is PARALLEL else torch.int64]
    values, order = program(scores)
    expected = function(scores)
    torch.testing.assert_close(values, expected[0], rtol=0, atol=0)
    if function is not last_dimension:  # which is not stable
        torch.testing.assert_close(order, expected[1], rtol=0, atol=0)
