"""A sum of reduced tensors is reduced once: its collectives become one of the sum of their operands."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.lines import StartCollective
from fxwrap.options import EMITTERS, Options
from tests.support.jobs import single_rank_job

C10D = torch.ops._c10d_functional


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with single_rank_job() as name:
        assert name == "0"
        yield


def reduced(x: Tensor, reduction: str = "sum") -> Tensor:
    result: Tensor = C10D.wait_tensor(C10D.all_reduce(x, reduction, "0"))
    return result


def scattered(x: Tensor) -> Tensor:
    result: Tensor = C10D.wait_tensor(C10D.reduce_scatter_tensor(x, "sum", 1, "0"))
    return result


def collectives(function: Callable[..., object], dtype: torch.dtype = torch.float32, mode: str = "fake") -> int:
    """Returns the number of collectives of a function's program."""
    inputs = [torch.rand(4, 6).to(dtype) for _ in range(3)]
    program = fxwrap.lower(make_fx(function, tracing_mode=mode)(*inputs))
    return sum(isinstance(line, StartCollective) for line in program.lines())


MERGED = [
    lambda x, y, z: reduced(x.sin()) + reduced(y) + reduced(z.cos()),
    lambda x, y, z: reduced(x) + (reduced(y) + reduced(z)),
    lambda x, y, _z: reduced(x, "avg") + reduced(y, "avg"),
    lambda x, y, _z: scattered(x) + scattered(y),
    lambda x, y, z: z + reduced(x) + reduced(y),
    lambda x, y, z: reduced(x) + z + reduced(y) + z,
    lambda x, y, _z: (reduced(x) + reduced(y)).view(6, 4).t()[1:],
]


def test_terms_are_added_before_they_are_reduced() -> None:
    for function in MERGED:
        assert collectives(function) == collectives(function, torch.bfloat16) == 1
        assert collectives(function, mode="symbolic") == 1
    assert collectives(lambda x, y, z: reduced(x) + reduced(y) + reduced(z, "avg")) == 2


@pytest.mark.parametrize("emitter", EMITTERS)
def test_results_are_equal(emitter: str) -> None:
    def function(x: Tensor, y: Tensor, z: Tensor) -> list[Tensor]:
        return [case(x, y, z) for case in MERGED]

    inputs = [torch.randn(4, 6) for _ in range(3)]
    graph = make_fx(function, tracing_mode="fake")(*inputs)
    options = Options(emitter=emitter, compile_cache=False, bucket_collectives=False)
    compiled = fxwrap.compile_graph(graph, inputs, options=options)
    assert sum(isinstance(line, StartCollective) for line in compiled.program.lines()) == len(MERGED)
    torch.testing.assert_close(list(compiled(*inputs)), function(*inputs))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y, _z: reduced(x, "max") + reduced(y, "max"),
        lambda x, y, _z: reduced(x) + reduced(y, "avg"),
        lambda x, y, _z: reduced(x) + scattered(y),
        lambda x, y, _z: torch.add(reduced(x), reduced(y), alpha=2),
        lambda x, y, _z: reduced(x) + reduced(y[:1]),
        lambda x, y, _z: reduced(x.t()) + reduced(y.t()),
        lambda x, y, _z: reduced(x) - reduced(y),
        lambda x, y, _z: (lambda one, other: (one + other, one.sin()))(reduced(x), reduced(y)),
        lambda x, y, _z: (lambda one: one + reduced(y))(reduced(x).neg_()),
        lambda x, y, z: reduced(x) + reduced(y) * z,
    ],
)
def test_other_sums_stay(function: Callable[..., object]) -> None:
    assert collectives(function) == 2


def test_an_operand_that_is_written_after_its_start() -> None:
    def function(x: Tensor, y: Tensor, _z: Tensor) -> Tensor:
        copied = x.clone()
        first = reduced(copied)
        copied[1:].add_(1)
        return first + reduced(y) + copied

    assert collectives(function) == 2


def test_integers_stay() -> None:
    assert collectives(MERGED[1], torch.int64) == 3
