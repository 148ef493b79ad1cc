"""Reductions are as accurate as eager's, whatever they are fused with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import Options
from tests.lowering.accuracy import Case, draw_cases, excess_errors

SCANNED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "var": lambda x: x.var(),
    "norm": lambda x: x.norm(),
    "sum": lambda x: x.sum(),
    "mean_of_scan": lambda x: x.cumsum(0).mean(),
}


@pytest.mark.parametrize("emitter", ["python", "cpp"])
def test_a_long_sum_beside_a_scan_is_computed_in_parts(emitter: Literal["python", "cpp"]) -> None:
    def function(*inputs: torch.Tensor) -> list[torch.Tensor]:
        both = [(function(x), x.cumsum(0)) for function, x in zip(SCANNED.values(), inputs, strict=True)]
        return [item for pair in both for item in pair]

    generator = torch.Generator().manual_seed(0)
    inputs = [torch.rand(1 << 22, generator=generator) + 0.1 for _ in SCANNED]
    compiled = fxwrap.compile_graph(make_fx(function)(*inputs), inputs, options=Options(emitter=emitter))
    assert len(compiled.program.kernels) == len(SCANNED), "each reduction is fused with its scan"
    for actual, expected in zip(compiled(*inputs), function(*[item.double() for item in inputs]), strict=True):
        assert (actual - expected).norm() <= 1e-7 * expected.norm()


@pytest.mark.parametrize("case", [*draw_cases(seed=0, count=5, largest=1 << 18)], ids=str)
def test_random_reductions_are_as_accurate_as_eager(case: Case) -> None:
    assert not excess_errors(case, Options(fallback="error"))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*draw_cases(seed=0, count=30)], ids=str)
def test_random_reductions_on_a_gpu_are_as_accurate_as_eager(case: Case) -> None:
    assert not excess_errors(case, Options(fallback="error"), "cuda")


def check_equal_rows(options: Options, device: str = "cpu") -> None:
    """Checks norms of rows of equal elements, which a small standard deviation divides: they are the bias."""

    def function(x: torch.Tensor, bias: torch.Tensor) -> list[torch.Tensor]:
        variance, mean = torch.var_mean(x, 1, correction=0, keepdim=True)
        return [mean, variance, (x - mean) * (variance + 1e-5).rsqrt() + bias]

    for rows, count in ((8, 4190), (2, 40000)):
        generator = torch.Generator().manual_seed(0)
        element, bias = torch.randn(rows, 1, generator=generator), torch.randn(count, generator=generator)
        inputs = [element.expand(rows, count).contiguous().to(device), bias.to(device)]
        compiled = fxwrap.compile_graph(make_fx(function)(*inputs), inputs, options=options)
        mean, variance, normalized = compiled(*inputs)
        assert torch.equal(mean.cpu(), element)
        assert variance.max() <= 1e-18
        assert torch.equal(normalized.cpu(), bias.expand(rows, count))


@pytest.mark.parametrize("kernels", ["cpp", "triton"])
def test_rows_of_equal_elements_equal_their_mean(kernels: Literal["cpp", "triton"]) -> None:
    check_equal_rows(Options(cpu_kernels=kernels))


@pytest.mark.gpu
def test_rows_of_equal_elements_equal_their_mean_on_a_gpu() -> None:
    check_equal_rows(Options(fallback="error"), "cuda")
