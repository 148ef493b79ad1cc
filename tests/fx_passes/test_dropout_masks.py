"""Dropout on CPUs: the mask is drawn with eager's numbers, and products by it fuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import fxwrap
from tests.lowering.planned_programs import STRICT, plan
from tests.support.agreement import assert_as_exact

_native = torch.ops.aten.native_dropout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_those_of_eager(dtype: torch.dtype) -> None:
    """One kernel computes what is before and after the products."""

    def run(x: Tensor, residual: Tensor) -> list[Tensor]:
        result, mask = _native(x.tanh(), 0.3, True)
        return [result + residual, mask]

    inputs = [torch.randn(4, 6).to(dtype) for _ in range(2)]
    planned = plan(make_fx(run)(*inputs), inputs)
    assert len(planned.launches) == 1
    torch.manual_seed(1)
    results, state = planned.run([item.clone() for item in inputs]), torch.get_rng_state()
    torch.manual_seed(1)
    expected, mask = run(*inputs)
    exact = inputs[0].double().tanh() * mask / 0.7 + inputs[1].double()
    assert_as_exact(results[0], expected, exact)
    assert torch.equal(results[1], mask)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("emitter", ["cpp", "python"])
def test_training(emitter: str) -> None:
    """Forward and backward, of symbolic sizes."""

    def run(x: Tensor) -> Tensor:
        return F.dropout(F.gelu(x), 0.25) * 2

    compiled = torch.compile(run, backend="fxwrap", options={"emitter": emitter}, dynamic=True)
    for rows in (5, 8):
        x = torch.randn(rows, 6, requires_grad=True)
        results = []
        for function in (compiled, run):
            torch.manual_seed(rows)
            output = function(x)
            results.append((output.detach(), *torch.autograd.grad(output.sum(), x)))
        torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    ("probability", "trains", "transposes", "options"),
    [
        (0.0, True, False, STRICT), (1.0, True, False, STRICT), (0.5, False, False, STRICT), (0.5, True, True, STRICT),
        (0.5, True, False, STRICT.replace(preserve_ops=("aten.native_dropout.default",))),
    ],
)  # fmt: skip
def test_calls_that_stay(probability: float, trains: bool, transposes: bool, options: fxwrap.Options) -> None:
    """Nothing or everything is dropped, `bernoulli` has another layout, or an option preserves the operator."""

    def run(x: Tensor) -> list[Tensor]:
        return [*_native(x.mT if transposes else x, probability, trains)]

    x = torch.randn(3, 5)
    planned = plan(make_fx(run)(x), [x], options)
    assert "@aten.native_dropout.default" in str(planned.program)
    assert "bernoulli" not in str(planned.program)


def _formula(x: Tensor, gradient: Tensor) -> list[Tensor]:
    """Dropout and its backward as `make_fx` traces them on a CPU."""
    noise, half = [torch.empty_like(x).bernoulli_(item).div_(item) for item in (0.7, 0.5)]
    return [x * noise, gradient * noise, x * half]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_products_with_random_numbers(dtype: torch.dtype) -> None:
    """Booleans are drawn instead, with the numbers of eager mode."""
    inputs = [torch.randn(4, 6).to(dtype) for _ in range(2)]
    planned = plan(make_fx(_formula)(*inputs), inputs)
    assert planned.calls.count("aten.bernoulli.p") == 2 and "aten.bernoulli_.float" not in planned.calls
    torch.manual_seed(1)
    results, state = planned.run([item.clone() for item in inputs]), torch.get_rng_state()
    torch.manual_seed(1)
    tolerance = 1e-2 if dtype is torch.bfloat16 else 1e-6
    torch.testing.assert_close(list(results), _formula(*inputs), rtol=tolerance, atol=0)
    assert torch.equal(torch.get_rng_state(), state)


def _returned(x: Tensor) -> list[Tensor]:
    noise = torch.empty_like(x).bernoulli_(0.7).div_(0.7)
    return [x * noise, noise]


def _squared(x: Tensor) -> Tensor:
    noise = torch.empty_like(x).bernoulli_(0.7).div_(0.7)
    return noise * noise + x


def _broadcast(x: Tensor) -> Tensor:
    return x * torch.empty_like(x[0]).bernoulli_(0.7).div_(0.7)


def _other_scale(x: Tensor) -> Tensor:
    return x * torch.empty_like(x).bernoulli_(0.7).div_(0.3)


def _later(x: Tensor) -> Tensor:
    noise = torch.empty_like(x).bernoulli_(0.7).div_(0.7)
    return (x + torch.rand_like(x)) * noise


@pytest.mark.parametrize("function", [_returned, _squared, _broadcast, _other_scale, _later])
def test_other_random_numbers_stay(function: Callable[[Tensor], object]) -> None:
    """They are read otherwise, are no dropout, or are drawn before the operand."""
    x = torch.randn(4, 6)
    planned = plan(make_fx(function)(x), [x])
    assert "aten.bernoulli_.float" in planned.calls
    torch.manual_seed(1)
    results = planned.run([x.clone()])
    torch.manual_seed(1)
    expected = function(x)
    torch.testing.assert_close(list(results), expected if isinstance(expected, list) else [expected])
