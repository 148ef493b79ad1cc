"""Sums with a matmul as matmuls that add in place, on a device that is faster so."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import fxwrap
from fxwrap import Options
from fxwrap.devices import CPU
from fxwrap.lines import ExternCall, Mutate
from fxwrap.testing import assert_emitters_agree
from tests.support.agreement import assert_as_exact

DEVICE = dataclasses.replace(
    CPU, matmuls=dataclasses.replace(CPU.matmuls, accumulated_dtypes=frozenset({torch.float32, torch.bfloat16}))
)
OPTIONS = Options(devices=(DEVICE,), matmul_kernels="library")
Function = Callable[..., Any]


def gradients(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(x @ w + (2 * x) @ w + (3 * x) @ w)


def block(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """A residual, in three dimensions, that a norm reads before the matmul does."""
    hidden = x.view(2, 3, 6).sin()
    inner = functional.gelu(functional.linear(functional.layer_norm(hidden, (6,)), w))
    hidden = functional.linear(inner, w.t()) + hidden
    return hidden, hidden.exp()


def _targets(function: Function, *inputs: Tensor) -> list[str]:
    """The matmuls of a program, in order."""
    program = fxwrap.compile_graph(make_fx(function)(*inputs), inputs, options=OPTIONS).program
    calls = [line.target for line in program.lines() if isinstance(line, ExternCall | Mutate)]
    return [target.split(".")[1] for target in calls]


@pytest.mark.parametrize(("function", "targets"), [(gradients, ["mm", "addmm_", "addmm_"]), (block, ["mm", "addmm_"])])
def test_matmuls_add_in_place(function: Function, targets: list[str]) -> None:
    inputs = [torch.randn(6, 6), torch.randn(6, 6)]
    assert _targets(function, *inputs) == targets
    assert_emitters_agree(function, inputs, options=OPTIONS)


def test_sums_are_at_least_as_exact() -> None:
    inputs = [torch.randn(40, 40).bfloat16(), torch.randn(40, 40).bfloat16()]
    exact = gradients(*[item.double() for item in inputs])
    compiled = fxwrap.compile_graph(make_fx(gradients)(*inputs), inputs, options=OPTIONS)
    assert_as_exact(compiled(*inputs)[0], gradients(*inputs), exact)


def _read_later(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    other = x.sin()
    return other + x @ w, other.sum(0)


def _an_input(x: Tensor, w: Tensor) -> Tensor:
    return x + w @ w


def _returned(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    other = x.sin()
    return other + x @ w, other


def _broadcast(x: Tensor, w: Tensor) -> Tensor:
    return x.sum(0) + x @ w


def _another_layout(x: Tensor, w: Tensor) -> Tensor:
    return x.sin().t() + x @ w


@pytest.mark.parametrize("function", [_read_later, _an_input, _returned, _broadcast, _another_layout])
def test_other_sums_stay(function: Function) -> None:
    assert _targets(function, torch.randn(6, 6), torch.randn(6, 6)) == ["mm"]
