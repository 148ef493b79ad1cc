"""Sorts of few integers, which count, and of indices of a topk, whose keys are as narrow as their number allows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import Options
from fxwrap.devices import CPU, CUDA
from fxwrap.lines import ExternCall, Launch

PARALLEL = dataclasses.replace(CPU, massively_parallel=True)
COUNT = 40
COUNTING = dataclasses.replace(PARALLEL, counted_sort_elements=2 * COUNT)


def flat(scores: Tensor) -> list[Tensor]:
    chosen = scores.topk(2, dim=-1)[1]
    return [*chosen.reshape(-1).sort(stable=True)]


def last_dimension(scores: Tensor) -> list[Tensor]:
    return [*scores.topk(3, 0)[1].t().sort(-1, descending=True)]


def of_inputs(scores: Tensor) -> list[Tensor]:
    return [*scores.long().view(-1).sort(stable=True)]


def written(scores: Tensor) -> list[Tensor]:
    chosen = scores.topk(2, dim=-1)[1]
    chosen += 300
    return [*chosen.view(-1).sort(stable=True)]


def compiled(
    function: Callable[..., Any], inputs: list[Tensor], device: Any, tracing: str = "real", preserve: Sequence[str] = ()
) -> fxwrap.Compiled:
    graph = make_fx(function, tracing_mode=tracing)(*inputs)
    options = Options(devices=(device,), compile_cache=False, preserve_ops=tuple(preserve))
    return fxwrap.compile_graph(graph, inputs, options=options)


def keys(program: fxwrap.Compiled) -> list[torch.dtype]:
    """The dtypes of the operands of sorts."""
    lines = [line for line in program.program.lines() if isinstance(line, ExternCall) and "sort" in line.target]
    return [line.arguments[0].tensor_type.dtype for line in lines]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("function", "count", "dtype"),
    [
        (flat, 8, torch.uint8), (flat, 256, torch.uint8), (flat, 300, torch.int16), (last_dimension, 8, torch.uint8),
        (of_inputs, 8, torch.int64), (written, 8, torch.int64),
    ],
)  # fmt: skip
@pytest.mark.parametrize("device", [PARALLEL, COUNTING, CPU], ids=["parallel", "counting", "cpu"])
def test_keys_have_the_bits_that_indices_need(
    function: Callable[..., Any], count: int, dtype: torch.dtype, device: Any
) -> None:
    scores = torch.randn(12, count, generator=torch.Generator().manual_seed(0))
    program = compiled(function, [scores], device)
    is_counted = device is COUNTING and function in (flat, written)
    assert keys(program) == ([] if is_counted else [torch.int64 if device is CPU else dtype])
    values, order = program(scores)
    expected = function(scores)
    torch.testing.assert_close(values, expected[0], rtol=0, atol=0)
    if function is not last_dimension:  # which is not stable
        torch.testing.assert_close(order, expected[1], rtol=0, atol=0)


def sorted_both_ways(numbers: Tensor) -> list[Tensor]:
    return [*numbers.sort(stable=True), *numbers.sort(stable=True, descending=True)]


@pytest.mark.parametrize("count", [1, COUNT])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_few_integers_of_any_range_are_sorted_by_counting(dtype: torch.dtype, count: int) -> None:
    limits = torch.iinfo(dtype)
    numbers = torch.tensor([limits.max, limits.min, 3, limits.max - 1, 3, 0, limits.min, 100], dtype=dtype)
    numbers = numbers.repeat(5)[:count]
    program = compiled(sorted_both_ways, [numbers], COUNTING)
    assert keys(program) == []
    torch.testing.assert_close([*program(numbers)], sorted_both_ways(numbers), rtol=0, atol=0)


def inverse(numbers: Tensor, form: str) -> Tensor:
    order = numbers.sort(stable=True)[1]
    match form:
        case "index_put":
            return torch.empty_like(order).index_put((order,), torch.arange(len(order)))
        case "scatter":
            return torch.zeros_like(order).scatter(0, order, torch.arange(0, len(order)))
        case _:
            return order.argsort()


@pytest.mark.parametrize("form", ["index_put", "scatter", "argsort"])
def test_positions_are_the_inverse_of_the_order(form: str) -> None:
    numbers = torch.randint(0, 5, (COUNT,), generator=torch.Generator().manual_seed(0))
    program = compiled(lambda numbers: inverse(numbers, form), [numbers], COUNTING)
    assert [type(line) for line in program.program.lines() if isinstance(line, Launch | ExternCall)] == [Launch]
    torch.testing.assert_close(program(numbers)[0], inverse(numbers, form), rtol=0, atol=0)


def with_written_inverse(numbers: Tensor) -> list[Tensor]:
    order = numbers.sort(stable=True)[1]
    places = torch.empty_like(order).index_put((order,), torch.arange(COUNT))
    copy = places + 0
    places += 7
    return [order, places, copy]


def with_written_numbers(numbers: Tensor) -> list[Tensor]:
    numbers = numbers + 0
    values, order = numbers.sort(stable=True)
    numbers += 7
    return [numbers, values, order]


def two_inverses(numbers: Tensor) -> list[Tensor]:
    """The second one has fewer positions: those of the first elements of a longer tensor."""
    order = numbers.sort(stable=True)[1]
    longer = torch.zeros(COUNT + 1, dtype=torch.int64).index_put((order,), torch.arange(COUNT))
    return [longer, order.sort(stable=True)[0], order.argsort(), inverse(numbers, "scatter")]


@pytest.mark.parametrize("function", [with_written_inverse, with_written_numbers, two_inverses])
def test_results_that_the_graph_writes_or_computes_twice(function: Callable[..., list[Tensor]]) -> None:
    numbers = torch.randint(0, 5, (COUNT,), generator=torch.Generator().manual_seed(0))
    program = compiled(function, [numbers], COUNTING)
    assert keys(program) == []
    torch.testing.assert_close([*program(numbers)], function(numbers), rtol=0, atol=0)


def test_other_sorts_are_calls() -> None:
    """Of too many elements, symbolic numbers of these, floats, operators that are calls, and of no elements."""
    numbers = torch.arange(COUNT).flip(0)
    preserved = ["aten.where.self"]
    for inputs, tracing, preserve in (
        ([torch.arange(2 * COUNT + 1)], "real", []), ([torch.arange(COUNT + 1).byte()], "real", []),
        ([numbers], "symbolic", []), ([numbers.float()], "real", []), ([numbers], "real", preserved),
        ([numbers[:0]], "real", []),
    ):  # fmt: skip
        program = compiled(sorted_both_ways, inputs, COUNTING, tracing, preserve)
        assert len(keys(program)) == 2
        torch.testing.assert_close([*program(*inputs)], sorted_both_ways(*inputs), rtol=0, atol=0)


def test_deterministic_algorithms_write_in_order() -> None:
    """Writes at positions are calls that sort these, too, where algorithms must be deterministic."""
    numbers = torch.arange(COUNT).flip(0)
    torch.use_deterministic_algorithms(True)
    try:
        assert len(keys(compiled(sorted_both_ways, [numbers], COUNTING))) == 2
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_sorts_of_a_gpu_count_up_to_its_limit(dtype: torch.dtype) -> None:
    limit = CUDA.counted_sort_elements if dtype.itemsize >= 4 else CUDA.counted_sort_elements // 2
    for count in (1, 2, 255, 257, 1000, limit - 1, limit, limit + 1):
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        several = torch.randint(0, 64, (count,), device="cuda").to(dtype)
        for numbers in (several, torch.randint(low, high, (count,), dtype=dtype, device="cuda")):
            program = compiled(sorted_both_ways, [numbers], CUDA)
            assert len(keys(program)) == (2 if count > limit else 0)
            torch.testing.assert_close([*program(numbers)], sorted_both_ways(numbers), rtol=0, atol=0)
            assert torch.equal(program(numbers)[1], program(numbers)[1])
