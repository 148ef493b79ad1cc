"""Half-precision elements that others read with reductions of them: these are reductions of rounded elements."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from fxwrap.devices import CPU
from tests.lowering.planned_programs import STRICT, Planned, plan

GENERATED = STRICT.replace(matmul_kernels="generated")
GPU = GENERATED.replace(devices=[dataclasses.replace(CPU, massively_parallel=True, kernel_language="triton")])

Operands = tuple[Tensor, Tensor]


def operands(rows: int, width: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Operands:
    """Returns a matrix, and one of as many columns, whose elements differ much."""
    generator = torch.Generator().manual_seed(0)
    x, y = [torch.randn(size, width, generator=generator) * 4 for size in (rows, columns)]
    return x.to(dtype), y.to(dtype)


def planned_results(function: Callable[..., list[Tensor]], inputs: Operands) -> tuple[Planned, tuple[Tensor, ...]]:
    planned = plan(make_fx(function)(*inputs), inputs, GPU)
    return planned, planned.run(inputs)


def statistics(y: Tensor) -> list[Tensor]:
    """Weights, which add up to 1, and how many elements of a row are its largest."""
    return [y.float().softmax(-1), (y == y.amax(-1, keepdim=True)).sum(-1)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_long_rows_that_are_split(dtype: torch.dtype) -> None:
    inputs = operands(2, 600_000, 2, dtype)
    planned, (y, weights, largest) = planned_results(lambda x, other: [x * other, *statistics(x * other)], inputs)
    assert len(planned.launches) > 1
    torch.testing.assert_close(weights.double().sum(-1), torch.ones(2, dtype=torch.double), rtol=1e-5, atol=0)
    torch.testing.assert_close(largest, (y == y.amax(-1, keepdim=True)).sum(-1))


def test_rows_of_a_matmul_that_are_split() -> None:
    """The elements are of a later kernel, which reads the stored matmul."""
    inputs = operands(5, 64, 700)
    planned, (weights, largest) = planned_results(lambda x, w: statistics(functional.linear(x, w)), inputs)
    assert len(planned.launches) > 1 and not planned.calls
    torch.testing.assert_close(weights.sum(-1), torch.ones(5))
    assert largest.min() >= 1


def test_results_that_are_returned() -> None:
    """The backward, which another graph computes, reads logits and their log-sum-exp."""

    def statistics(x: Tensor, other: Tensor) -> list[Tensor]:
        y = x * other
        return [y, y.float().amax(-1), y.float().logsumexp(-1)]

    planned, (y, largest, logsumexp) = planned_results(statistics, operands(3, 40, 3))
    assert len(planned.launches) == 1
    assert torch.equal(largest, y.float().amax(-1))
    torch.testing.assert_close(logsumexp, y.float().logsumexp(-1), rtol=1e-6, atol=0)


def test_elements_that_one_kernel_reads_are_not_rounded() -> None:
    """They may be returned, with results of each element."""
    x, other = inputs = operands(3, 40, 3)
    planned, (_, weights) = planned_results(lambda x, other: [x * other, (x * other).float().softmax(-1)], inputs)
    assert len(planned.launches) == 1
    exact = (x.double() * other.double()).softmax(-1)
    assert (weights - exact).norm() < 1e-6 * exact.norm()
