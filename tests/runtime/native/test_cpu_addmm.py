"""addmm on the CPU: the bias is written into the result; every other call is the operator's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import fxwrap

SIZES = ((4, 32, 96), (1, 8, 8), (5, 1, 3), (3, 7, 2), (2, 0, 4), (0, 3, 4), (3, 5, 1), (64, 64, 2048))
"""Rows, inner size and columns. The last result is larger than those that start from the bias."""

OPTIONS = fxwrap.Options(emitter="cpp", preserve_ops=("aten.addmm.default",))


def cases(dtype: torch.dtype) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Biases and matrices: contiguous, transposed, in wider rows; biases of one row, of all rows, and with gaps."""
    generator = torch.Generator().manual_seed(0)

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator).to(dtype)

    triples = [(random(n), random(m, k), random(k, n)) for m, k, n in SIZES]
    triples += [(random(6), random(3, 5).t().contiguous().t(), random(6, 5).t())]
    triples += [(random(6), random(3, 9)[:, 2:7], random(5, 12)[:, ::2]), (random(12)[::2], random(3, 5), random(5, 6))]
    triples += [(random(3, 6), random(3, 5), random(5, 6)), (random(1), random(3, 5), random(5, 6))]
    special = torch.tensor([float("nan"), float("inf"), -0.0, 1.0], dtype=dtype)
    return [*triples, (special, random(3, 5), random(5, 4)), (random(4), special.expand(3, 4), random(4, 4))]


class Addmms(torch.nn.Module):
    """Each triple's addmm, then the first one's with factors."""

    def __init__(self, beta: complex = 2) -> None:
        super().__init__()
        self.beta = beta

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        triples = [tensors[i : i + 3] for i in range(0, len(tensors), 3)]
        return [*[torch.addmm(*triple) for triple in triples], torch.addmm(*triples[0], beta=self.beta, alpha=0.5)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16))
def test_results_are_those_of_eager_bit_for_bit(dtype: torch.dtype) -> None:
    inputs = [tensor for triple in cases(dtype) for tensor in triple]
    program = torch.export.export(Addmms(), tuple(inputs))
    compiled = fxwrap.compile_graph(program, options=OPTIONS)
    versions = [tensor._version for tensor in inputs]
    with torch.no_grad():
        for result, expected in zip(compiled.flat(*inputs), Addmms()(*inputs), strict=True):
            assert result.dtype == dtype and result.stride() == expected.stride()
            assert torch.equal(result.nan_to_num(7), expected.nan_to_num(7)), (result, expected)
    assert versions == [tensor._version for tensor in inputs]


def test_small_biases_are_neither_expanded_nor_copied() -> None:
    bias, left, right = cases(torch.float32)[0]
    program = torch.export.export(Addmms(), (bias, left, right))
    compiled = fxwrap.compile_graph(program, options=OPTIONS)
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU]) as profiled:
        compiled.flat(bias, left, right)
    counts = {event.key: event.count for event in profiled.key_averages()}
    # The second call has factors, so the operator runs.
    assert counts["aten::addmm"] == 2 and counts.get("aten::copy_", 0) == 1 and counts.get("aten::expand", 0) == 1


def test_factors_may_be_complex() -> None:
    inputs = tuple([tensor.to(torch.complex64) for tensor in cases(torch.float32)[0]])
    program = torch.export.export(Addmms(beta=2j), inputs)
    compiled = fxwrap.compile_graph(program, options=OPTIONS)
    with torch.no_grad():
        for result, expected in zip(compiled.flat(*inputs), Addmms(beta=2j)(*inputs), strict=True):
            assert torch.equal(result, expected)
