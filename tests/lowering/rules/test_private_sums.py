"""GPUs add many values to few elements in private copies of these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.devices import CPU
from fxwrap.lines import Launch
from fxwrap.lowering.rules.private_sums import private_copies

GPU = replace(CPU, massively_parallel=True, cpu_rounding=False)

BINS, VALUES, COLUMNS = 5, 4096, 8


def histogram(number: Tensor, x: Tensor) -> Tensor:
    return torch.zeros(BINS, dtype=x.dtype).index_add(0, number, x[:, 0])


def added_to(number: Tensor, x: Tensor) -> Tensor:
    return x[:BINS, 0].index_add(0, number, x[:, 0] * 2)


def counts(number: Tensor, x: Tensor) -> Tensor:
    return torch.zeros(BINS, dtype=torch.int64).scatter_add(0, number, torch.ones_like(number))


def class_sums(number: Tensor, x: Tensor) -> Tensor:
    return torch.zeros(BINS, COLUMNS, dtype=x.dtype).index_add(0, number, x)


def columns_of_rows(number: Tensor, x: Tensor) -> Tensor:
    return torch.zeros(3, BINS, dtype=x.dtype).scatter_add(1, number.expand(3, -1), x.t()[:3])


def pairs(number: Tensor, x: Tensor) -> Tensor:
    indices = (number.view(64, -1), number.flip(0).view(64, -1))
    return torch.zeros(BINS, BINS, dtype=x.dtype).index_put(indices, x[:, 1].view(64, -1), accumulate=True)


def embedding_gradient(number: Tensor, x: Tensor) -> Tensor:
    return torch.ops.aten.embedding_dense_backward(x.view(64, -1, COLUMNS), number.view(64, -1), BINS, 1, False)


FUNCTIONS = (histogram, added_to, counts, class_sums, columns_of_rows, pairs, embedding_gradient)


def compiled(function: Callable[[Tensor, Tensor], Tensor], *inputs: Tensor) -> fxwrap.Compiled:
    options = fxwrap.Options(devices=(GPU,), cpu_kernels="triton", emitter="python")
    return fxwrap.compile_graph(make_fx(function)(*inputs), inputs, options=options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda item: item.__name__)
def test_values_are_added_to_copies(function: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> None:
    number, x = torch.randint(BINS, (VALUES,)), torch.randn(VALUES, COLUMNS).to(dtype)
    exact = function(number, x.double())
    result = compiled(function, number, x)(number, x)[0]
    assert result.dtype == function(number, x).dtype
    error = (result.double() - exact.double()).norm() / exact.double().norm()
    assert error < (1e-6 if dtype is torch.float32 else torch.finfo(dtype).eps)


def test_copies_need_many_values_of_few_elements() -> None:
    assert private_copies([10], [1 << 22]) == 8192
    assert private_copies([10, 512], [1 << 14, 512]) == 32
    assert private_copies([1 << 12], [1 << 18]) == 4
    assert private_copies([1 << 12], [(1 << 18) - 1]) == 1  # 63 values of an element
    assert private_copies([1 << 17], [1 << 24]) == 1
    assert private_copies([0], [5]) == private_copies([5], [0]) == 1


@pytest.mark.parametrize("function", [histogram, class_sums], ids=lambda item: item.__name__)
def test_copies_are_written_once_and_summed(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    number, x = torch.randint(BINS, (VALUES,)), torch.randn(VALUES, COLUMNS)
    program = compiled(function, number, x).program
    launches = [line for line in program.body.lines if isinstance(line, Launch)]
    copies = private_copies(function(number, x).shape, [VALUES, *function(number, x).shape[1:]])
    assert copies > 1
    assert len(launches) == 3
    assert [line.outs[0].tensor_type.sizes for line in launches][-1] == tuple(function(number, x).shape)
