"""Gradients of maxima and minima: at least one element equals its maximum, whatever forward and backward fuse."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from tests.lowering.planned_programs import STRICT, plan
from tests.support.versions import fails_before

FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "amax": lambda x, y: (x * y).amax(-1),
    "amin of columns": lambda x, y: (x * y).amin(0),
    "whole maximum": lambda x, y: (x * y).max(),
    "infinity norm": lambda x, y: (x * y).norm(math.inf, dim=-1),
    "aminmax": lambda x, y: torch.stack(torch.aminmax(x * y, dim=-1)).sum(0),
    "scale": lambda x, y: ((x * y) / (x * y).abs().amax(-1, keepdim=True)).tanh(),
}


def _gradients(function: Callable[[Tensor, Tensor], Tensor], inputs: list[Tensor]) -> list[Tensor]:
    leaves = [item.clone().requires_grad_() for item in inputs]
    return list(torch.autograd.grad(function(*leaves).float().sum(), leaves))


_REFUSED = fails_before("2.12", "AOTAutograd has no derivative of aminmax", RuntimeError)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=_REFUSED if name == "aminmax" else ()) for name in FUNCTIONS]
)
def test_gradients(name: str, dtype: torch.dtype) -> None:
    """The forward stores a rounded maximum; the backward computes the elements again."""
    function, inputs = FUNCTIONS[name], [torch.randn(9, 40).to(dtype) for _ in range(2)]
    torch.compiler.reset()
    compiled = torch.compile(function, backend="fxwrap", options={"emitter": "interpreter"})
    for result, wanted in zip(_gradients(compiled, inputs), _gradients(function, inputs), strict=True):
        assert (result - wanted).norm() <= 1e-2 * wanted.norm()


def _two_kernels(x: Tensor, y: Tensor) -> Tensor:
    """The minimum of columns reads elements from memory, and the norm of rows those in registers."""
    centred = x - x.mean(-1, keepdim=True) + y
    bounded = torch.maximum(torch.tanh(torch.where(y > 0, centred * centred, y)), y)
    elements = torch.tanh(bounded) * y + torch.tanh(bounded)
    return centred.sum() + elements.amin(0).sum() + elements.norm(math.inf, dim=-1).sum()


def test_elements_that_the_backward_would_compute_from_others() -> None:
    inputs = [torch.randn(96, 48, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in range(2)]
    torch.compiler.reset()
    compiled = torch.compile(_two_kernels, backend="fxwrap", options={"emitter": "interpreter"})
    for result, wanted in zip(_gradients(compiled, inputs), _gradients(_two_kernels, inputs), strict=True):
        assert (result - wanted).norm() <= 0.1 * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_comparisons_of_rounded_elements(dtype: torch.dtype) -> None:
    """Half precision is compared as eager mode compares it, with tensors and numbers."""

    def compare(x: Tensor, y: Tensor) -> list[Tensor]:
        product = x * y
        return [product == functional.relu(y) * x, product >= 1 / 3, product.exp() < product + 1, product != x * y * 1]

    inputs = [torch.randn(50, 40).to(dtype) for _ in range(2)]
    planned = plan(make_fx(compare)(*inputs), inputs, STRICT)
    for result, wanted in zip(planned.run(inputs), compare(*inputs), strict=True):
        assert torch.equal(result, wanted)
