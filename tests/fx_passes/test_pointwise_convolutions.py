"""Pointwise convolutions of sequences are batches of matmuls on devices where these are faster."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from fxwrap.compile.backend import make_backend
from fxwrap.devices import CPU
from tests.lowering.planned_programs import STRICT, Planned, check, plan

DEVICE = dataclasses.replace(
    CPU, convolutions=dataclasses.replace(CPU.convolutions, pointwise_matmul_dtypes=frozenset({torch.float32}))
)
MATMULS = STRICT.replace(devices=(DEVICE,))
aten = torch.ops.aten


def _sequence(items: int, channels: int, length: int, has_rows: bool) -> Tensor:
    """Draws a tensor (items, channels, length), contiguous or a transposed view of rows of channels."""
    if has_rows:
        return torch.randn(items, length, channels).transpose(1, 2)
    return torch.randn(items, channels, length)


def _calls(planned: Planned, operator: str) -> list[str]:
    return [line for line in str(planned.program).splitlines() if f"aten.{operator}.default" in line]


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("items", [1, 4])
@pytest.mark.parametrize("has_rows", [False, True], ids=["items", "rows"])
@pytest.mark.parametrize("length", [20, 21], ids=["aligned", "ragged"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
def test_forward(groups: int, items: int, has_rows: bool, length: int, has_bias: bool) -> None:
    """A sequence is read as it is, unless its layout has matrices of neither rows nor items that are aligned."""

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.silu(F.conv1d(x, weight, bias if has_bias else None, groups=groups)) * 2

    inputs = _sequence(items, 48, length, has_rows), torch.randn(96, 48 // groups, 1), torch.randn(96)
    planned = check(function, *inputs, options=MATMULS)
    is_ragged = length == 21 and items == 4
    is_rewritten = groups > 1 or has_rows or is_ragged
    assert len(_calls(planned, "convolution")) == (not is_rewritten)
    assert len(_calls(planned, "bmm")) == is_rewritten
    copies = not has_rows and (is_ragged or (groups > 1 and items > 1))
    assert not is_rewritten or len(planned.launches) == 1 + copies


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("items", [1, 4])
@pytest.mark.parametrize("rows", [(False, False), (False, True), (True, False), (True, True)], ids=str)
@pytest.mark.parametrize("length", [7, 152])
def test_backward(groups: int, items: int, rows: Sequence[bool], length: int) -> None:
    """The gradient of the weight is one matmul of rows, or a sum of one for each item."""

    def backward(gradient: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        numbers: Any = [48], [1], [0], [1], False, [0], groups, [True, True, True]
        return tuple(aten.convolution_backward(gradient, x, weight, *numbers))

    inputs = (
        _sequence(items, 48, length, rows[0]), _sequence(items, 96, length, rows[1]),
        torch.randn(48, 96 // groups, 1),
    )  # fmt: skip
    planned = check(backward, *inputs, options=MATMULS)
    is_rewritten = groups > 1 or any(rows) or (items > 1 and length == 7)
    assert len(_calls(planned, "convolution_backward")) == (not is_rewritten)
    assert len(_calls(planned, "bmm")) == 2 * is_rewritten


@pytest.mark.parametrize("needed", [(True, False, False), (False, True, False), (False, True, True)])
def test_some_gradients(needed: Sequence[bool]) -> None:
    def backward(gradient: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        numbers: Any = [48], [1], [0], [1], False, [0], 3, [*needed]
        results = aten.convolution_backward(gradient, x, weight, *numbers)
        return tuple([result for result, is_needed in zip(results, needed, strict=True) if is_needed])

    planned = check(backward, torch.randn(2, 48, 8), torch.randn(2, 96, 8), torch.randn(48, 32, 1), options=MATMULS)
    assert len(_calls(planned, "bmm")) == sum(needed[:2])


def test_products_of_half_precision_are_summed_in_float32() -> None:
    """No CPU has the operator: the plan is not run."""

    def backward(gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        numbers: Any = [48], [1], [0], [1], False, [0], 3, [False, True, False]
        return aten.convolution_backward(gradient, x, weight, *numbers)[1]

    inputs = [item.bfloat16() for item in (torch.randn(2, 48, 40), torch.randn(2, 96, 40), torch.randn(48, 32, 1))]
    traits = dataclasses.replace(CPU.convolutions, pointwise_matmul_dtypes=frozenset({torch.bfloat16}))
    options = STRICT.replace(devices=(dataclasses.replace(CPU, convolutions=traits),))
    text = str(plan(make_fx(backward)(*inputs), inputs, options).program)
    assert "aten.bmm.dtype" in text and "f32[6, 16, 32]" in text


@pytest.mark.parametrize("has_rows", [False, True], ids=["items", "rows"])
def test_symbolic_sizes(has_rows: bool) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Conv1d(48, 96, 1, groups=3)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.inner(x.transpose(1, 2) if has_rows else x))

    def inputs(items: int, length: int) -> Tensor:
        return (
            _sequence(items, 48, length, False).transpose(1, 2).contiguous()
            if has_rows
            else torch.randn(items, 48, length)
        )

    model = Model()
    compiled = torch.compile(model, backend=make_backend(MATMULS), dynamic=True, fullgraph=True)
    for sizes in ((4, 20), (3, 9)):
        x = inputs(*sizes)
        torch.testing.assert_close(compiled(x), model(x))
        gradients = [torch.autograd.grad(run(x).square().sum(), [*model.parameters()]) for run in (compiled, model)]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-3)


def _strided(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv1d(x, weight, stride=2)


def _padded(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv1d(x, weight, padding=1)


def _of_windows(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv1d(x, weight.expand(-1, -1, 2))


def _of_images(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(x.unsqueeze(-1), weight.unsqueeze(-1))


def _of_few_channels(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv1d(x, weight[:, :8], groups=6)


def _of_doubles(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv1d(x.double(), weight.double())


@pytest.mark.parametrize("function", [_strided, _padded, _of_windows, _of_images, _of_few_channels, _of_doubles])
def test_others_stay(function: Any) -> None:
    planned = check(function, torch.randn(2, 48, 20), torch.randn(96, 48, 1), options=MATMULS)
    assert len(_calls(planned, "convolution")) == 1 and not _calls(planned, "bmm")
