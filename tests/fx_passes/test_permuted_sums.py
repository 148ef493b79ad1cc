"""Gradients of rows that a permutation gathers: sums at its places, which become gathers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.fx import GraphModule, Interpreter

from fxwrap import Options
from fxwrap.fx_passes.training.joint_graph import partitioner

TOKENS, CHOSEN, WIDTH = 12, 3, 8


def inverse_of(order: Tensor, form: str) -> Tensor:
    """Returns the inverse of a permutation, as models compute it."""
    match form:
        case "index_put":
            inverse = torch.empty_like(order)
            inverse[order] = torch.arange(len(order))
            return inverse
        case "scatter":
            return torch.zeros_like(order).scatter(0, order, torch.arange(0, len(order)))
        case _:
            return order.argsort()


def routed(x: Tensor, numbers: Tensor, factors: Tensor, form: str, stable: bool) -> Tensor:
    """Gathers the tokens of sorted experts, weighs them, and adds those of a token."""
    order = numbers.sort(stable=stable)[1] if stable else numbers.argsort()
    rows = torch.tanh(x[order // CHOSEN]) * factors[order][:, None]
    if form == "index_add":
        return torch.zeros_like(x).index_add(0, order // CHOSEN, rows)
    return rows[inverse_of(order, form)].view(TOKENS, CHOSEN, WIDTH).sum(1)


def traced(function: Callable[..., Tensor], **options: Any) -> tuple[list[GraphModule], Callable[..., Tensor]]:
    """Returns the forward and backward graphs of a function, filled at its first step, and the function."""
    graphs: list[GraphModule] = []

    def compile_graph(module: GraphModule, _examples: list[Any]) -> Any:
        graphs.append(module)
        return make_boxed_func(Interpreter(module).run)

    backend = aot_autograd(fw_compiler=compile_graph, partition_fn=partitioner(Options(**options)))
    return graphs, torch.compile(function, backend=backend, fullgraph=True, dynamic=False)


def gradients(function: Callable[..., Tensor], numbers: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Returns the result and the gradients of rows and factors."""
    x, factors = [item.detach().clone().requires_grad_() for item in inputs]
    result = function(x, numbers, factors)
    result.backward(torch.ones_like(result).cumsum(0))
    assert x.grad is not None and factors.grad is not None
    return [result.detach(), x.grad, factors.grad]


def sums(graphs: list[GraphModule]) -> int:
    """Returns the number of calls that add rows at indices."""
    nodes = [node for graph in graphs for node in graph.graph.nodes]
    puts = [node for node in nodes if node.target is torch.ops.aten.index_put.default and node.args[-1] is True]
    return len(puts) + sum(node.target is torch.ops.aten.index_add.default for node in nodes)


@pytest.mark.parametrize("form", ["index_put", "scatter", "argsort", "index_add"])
@pytest.mark.parametrize("stable", [True, False])
def test_sums_at_the_places_of_a_permutation_are_gathers(form: str, stable: bool) -> None:
    torch.manual_seed(0)
    numbers, inputs = torch.randint(0, 4, (TOKENS * CHOSEN,)), [torch.randn(TOKENS, WIDTH), torch.randn(36)]

    def function(x: Tensor, numbers: Tensor, factors: Tensor) -> Tensor:
        return routed(x, numbers, factors, form, stable)

    graphs, compiled = traced(function)
    exact = gradients(function, numbers, [item.double() for item in inputs])
    for result, reference in zip(gradients(compiled, numbers, inputs), exact, strict=True):
        torch.testing.assert_close(result.double(), reference, atol=1e-4, rtol=1e-5)
    assert len(graphs) == 2 and sums(graphs) == 0


def by_other_numbers(x: Tensor, numbers: Tensor, factors: Tensor) -> Tensor:
    """Gathers rows at indices that are no permutation."""
    return x[numbers] * factors[numbers][:, None]


def of_fewer_rows(x: Tensor, numbers: Tensor, factors: Tensor) -> Tensor:
    """Gathers the first row of three, from a tensor with more rows than the quotients of the permutation."""
    order = numbers.argsort()
    return x[order // 6] * factors[order][:, None]


@pytest.mark.parametrize(("function", "count"), [(by_other_numbers, 2), (of_fewer_rows, 1)])
def test_other_sums_stay(function: Callable[..., Tensor], count: int) -> None:
    torch.manual_seed(0)
    numbers, inputs = torch.randint(0, 4, (TOKENS * CHOSEN,)), [torch.randn(TOKENS, WIDTH), torch.randn(36)]
    graphs, compiled = traced(function)
    exact = gradients(function, numbers, [item.double() for item in inputs])
    for result, reference in zip(gradients(compiled, numbers, inputs), exact, strict=True):
        torch.testing.assert_close(result.double(), reference, atol=1e-4, rtol=1e-5)
    assert sums(graphs) == count


def test_preserved_operators_stay() -> None:
    numbers, inputs = torch.randint(0, 4, (TOKENS * CHOSEN,)), [torch.randn(TOKENS, WIDTH), torch.randn(36)]

    def function(x: Tensor, numbers: Tensor, factors: Tensor) -> Tensor:
        return routed(x, numbers, factors, "scatter", True)

    graphs, compiled = traced(function, preserve_ops=("aten.index_put.default",))
    gradients(compiled, numbers, inputs)
    assert sums(graphs) == 3
