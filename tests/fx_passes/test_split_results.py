"""Parts of an activation are computed by themselves, where kernels read them and nothing reads the whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fxwrap import wrapper_ir as ir
from fxwrap.devices import CPU
from fxwrap.lines import Alloc
from tests.lowering.planned_programs import STRICT, Planned, check

DEVICE = dataclasses.replace(CPU, massively_parallel=True, instructions_per_byte=4)
OPTIONS = STRICT.replace(devices=(DEVICE,))


def _allocated(planned: Planned) -> list[tuple[Any, ...]]:
    return [line.result.tensor_type.sizes for line in planned.program.body.lines if isinstance(line, Alloc)]


def _gated(x: Tensor, weight: Tensor) -> Tensor:
    """The spatial gating unit of gMLP."""
    gate, values = F.gelu(x).clone().chunk(2, -1)
    return gate * (F.layer_norm(values, (24,)).transpose(-1, -2) @ weight).transpose(-1, -2)


def _of_three_sizes(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    one, two, three = F.silu(x).split([8, 8, 32], -1)
    return one + two, three.sum(-1), weight.cos()


def _of_a_middle_dimension(x: Tensor, weight: Tensor) -> Tensor:
    first, second = F.gelu(x.transpose(1, 2)).split(24, 1)
    return first * (second.sum(-2) @ weight.sin()).unsqueeze(1)


def _of_one_operand_twice(x: Tensor, weight: Tensor) -> Tensor:
    first, second = (x * x).clamp(max=2).chunk(2, -1)
    return first * (second.sum(-1) @ weight.sin()).unsqueeze(-1)


@pytest.mark.parametrize("function", [_gated, _of_one_operand_twice, _of_three_sizes, _of_a_middle_dimension])
def test_parts(function: Callable[..., Any]) -> None:
    planned = check(function, torch.randn(5, 6, 48), torch.randn(6, 6), options=OPTIONS)
    assert not {(5, 6, 48), (5, 48, 6)} & {*_allocated(planned)}, "the activation is not in memory"


def test_peak() -> None:
    """No part of the activation is in memory: the input, a norm of half its size and a product with it are."""
    x, weight = torch.randn(5, 6, 48), torch.randn(6, 6)
    planned = check(lambda x, weight: _gated(x * 2, weight), x, weight, options=OPTIONS)
    assert ir.live_bytes(planned.program).peak == 2 * x.nbytes + weight.nbytes


def _returned(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    gate, values = F.gelu(x).chunk(2, -1)
    return gate, values.sum(-1)


def _read_by_a_call(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    gate, values = F.gelu(x).chunk(2, -1)
    return gate.transpose(-1, -2) @ weight, values.sum(-1)


def _written_later(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    result = F.gelu(x)
    x.add_(weight[0, 0])
    gate, values = result.chunk(2, -1)
    return gate * 2, values.sum(-1)


@pytest.mark.parametrize("function", [_returned, _read_by_a_call, _written_later])
def test_others_are_computed_whole(function: Callable[..., Any]) -> None:
    planned = check(function, torch.randn(5, 6, 48), torch.randn(6, 6), options=OPTIONS)
    assert (5, 6, 48) in _allocated(planned)
