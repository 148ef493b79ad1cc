"""What devices that compute much faster than they move bytes compute again, and keep; rows behind positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import fxwrap
from fxwrap import Options
from fxwrap.devices import CPU
from fxwrap.lines import Alloc, Launch
from tests.lowering.planned_programs import check_graph

FAST = dataclasses.replace(CPU, massively_parallel=True, instructions_per_byte=4)


def lowered(function: Callable[..., Any], *inputs: Tensor, fast: bool = True) -> fxwrap.Program:
    options = Options(devices=(FAST if fast else CPU,))
    return fxwrap.lower(make_fx(function, tracing_mode="fake")(*inputs), options=options)


def allocated(program: fxwrap.Program) -> list[tuple[Any, ...]]:
    return [line.result.tensor_type.sizes for line in program.body.lines if isinstance(line, Alloc)]


def test_expensive_values_with_many_reads_are_materialised() -> None:
    def function(x: Tensor, angles: Tensor) -> Tensor:
        return x * angles.sin()

    x, angles = torch.zeros(64, 32, 128), torch.zeros(32, 128)
    assert allocated(lowered(function, x, angles)) == [(32, 128), (64, 32, 128)]
    assert allocated(lowered(function, x, angles, fast=False)) == [(64, 32, 128)]
    few = x[:4]
    assert allocated(lowered(function, few, angles)) == [(4, 32, 128)]
    rounded = lowered(lambda x, angles: x * angles.sin().to(torch.bfloat16), x, angles)
    assert allocated(rounded) == [(32, 128), (64, 32, 128)]


def test_gates_of_rows_are_computed_in_the_kernel_that_reduces_the_rows() -> None:
    def gated(x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        return x * gate.sigmoid()[..., None], x.square().sum(-1)

    def squeezed(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.sum(-1) @ weight).sigmoid()[..., None]

    def launches(program: fxwrap.Program) -> list[str]:
        return [line.kernel for line in program.body.lines if isinstance(line, Launch)]

    x = torch.zeros(64, 32, 128)
    assert launches(lowered(gated, x, torch.zeros(64, 32))) == ["sigmoid_mul_pow_sum_0"]
    assert launches(lowered(squeezed, x, torch.zeros(32, 32))) == ["sum_0", "sigmoid_0", "mul_0"], "of an earlier sum"


def test_windows_whose_iterations_share_loads_are_not_computed_by_reductions() -> None:
    def pooled(x: Tensor) -> tuple[Tensor, Tensor]:
        pool = F.avg_pool2d(x, 3, 1, 1).relu()
        return pool, pool.sum((0, 2, 3))

    def averaged(x: Tensor) -> Tensor:
        return F.avg_pool2d(x, 3, 1, 1).relu().mean((2, 3))

    large, small = torch.zeros(32, 16, 64, 64), torch.zeros(2, 16, 64, 64)
    for function in (pooled, averaged):
        assert (32, 16, 64, 64) in allocated(lowered(function, large))
        assert len(lowered(function, small).kernels) < len(lowered(function, large).kernels)
        assert len(lowered(function, large, fast=False).kernels) == 1


def test_values_computed_from_few_inputs_are_recomputed_by_each_reader() -> None:
    """A gradient that is a number at one place of each row, divided and compared: read by rows and by columns."""

    def function(labels: Tensor, number: Tensor, total: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        number = torch.where(labels != -100, -number / total, 0.0)[:, None]
        at = torch.where(torch.arange(4096) == labels[:, None], number, 0.0)
        return (at * x).sum(0), (at + x).cumsum(1)

    inputs = torch.zeros(512, dtype=torch.int64), torch.ones(()), torch.ones(()), torch.zeros(512, 4096)
    assert allocated(lowered(function, *inputs)).count((512, 4096)) == 1
    assert allocated(lowered(function, *inputs, fast=False)).count((512, 4096)) == 2


def test_of_a_tensor_that_is_read_in_part_only_that_counts() -> None:
    """A product of a third of each row is computed again by both halves of a rotation, which read it there."""

    def rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        part, rest = x.split((32, 64), -1)
        first, second = (part * sine).chunk(2, -1)
        return torch.cat((part * cosine + torch.cat((second, -first), -1), rest), -1)

    inputs = torch.zeros(8, 1024, 96), torch.zeros(1024, 32), torch.zeros(1024, 32)
    assert (8, 1024, 32) not in allocated(lowered(rotated, *inputs))


def test_values_that_one_kernel_reads_are_computed_by_it() -> None:
    """Its iterations read the operands of neighbours from a cache, or each element of the value once."""

    def shifted(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        value = x * y * 1.25
        return value * weight + F.pad(value, (0, 0, 1, 0))[:, :-1] * (1 - weight)

    def gated(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        value = (x - y).erf() / (weight.abs() + 1e-5)
        return value[..., ::2].clamp(max=7.0) * torch.sigmoid(1.7 * value[..., ::2]) * (value[..., 1::2] + 1)

    def two_kernels(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        value = (x * y).erf() * weight
        return value - value.sum((0, 1))

    inputs = torch.zeros(8, 512, 96), torch.zeros(8, 512, 96), torch.zeros(96)
    for function in (shifted, gated):
        assert len(allocated(lowered(function, *inputs))) == 1, function.__name__
    assert (8, 512, 96) in allocated(lowered(two_kernels, *inputs))
    assert len(allocated(lowered(shifted, *inputs, fast=False))) == 2


def test_rows_at_indirect_indices_are_traversed_as_rows() -> None:
    """Not as columns, in parts: positions are adjacent, but the elements that are read there are not."""

    def function(words: Tensor, table: Tensor, weight: Tensor) -> Tensor:
        rows = F.embedding(words, table) + F.embedding(words[0], table)
        return F.layer_norm(rows, (768,), weight)

    inputs = torch.zeros(8, 512, dtype=torch.int64), torch.zeros(1000, 768), torch.ones(768)
    program = lowered(function, *inputs)
    assert len(program.kernels) == 1 and len(allocated(program)) == 1


def test_a_sum_of_scatters_is_one_kernel() -> None:
    """The gradient of a resized image: elements are added to neighbours, with a weight for the row and the column."""
    index_put = torch.ops.aten.index_put.default

    def function(x: Tensor, top: Tensor, bottom: Tensor, left: Tensor, right: Tensor, weight: Tensor) -> Tensor:
        scatters = []
        for rows, factor in ((top, weight), (bottom, 1 - weight)):
            weighted = x * factor[:, None]
            for columns in (left, right, left + 1):
                indices = [None, rows[:, None], columns]
                scatters.append(index_put(torch.zeros(3, 5, 7, dtype=x.dtype), indices, weighted * weight, True))
        return torch.relu(sum(scatters[1:], scatters[0]))

    positions = [torch.randint(high, (8,)) for high in (5, 5, 6, 6)]
    inputs = [torch.randn(3, 8, 8), *positions, torch.randn(8)]
    graph = make_fx(function)(*inputs)
    unordered = dataclasses.replace(FAST, cpu_rounding=False)
    planned = check_graph(graph, inputs, Options(devices=(unordered,), fallback="error"))
    assert allocated(planned.program) == [(3, 5, 7)] and len(planned.launches) == 3, planned.program
    integers = [torch.randint(9, (3, 8, 8)), *positions, torch.randint(9, (8,))]
    planned = check_graph(make_fx(function)(*integers), integers)
    assert len(planned.launches) == 3, "the order of integers does not matter"


def test_casts_of_a_materialised_tensor_are_not_in_memory() -> None:
    """Readers of its casts, which take more bytes, cast it again."""

    def function(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        rows = F.gelu(x.sin()).float()
        return rows.sum(0), (rows * (rows.sum(0) @ weight)).sum(1)

    program = lowered(function, torch.zeros(64, 96, dtype=torch.bfloat16), torch.zeros(96, 96))
    results = [line.result.tensor_type for line in program.body.lines if isinstance(line, Alloc)]
    assert [item.dtype for item in results if item.sizes == (64, 96)] == [torch.bfloat16]
