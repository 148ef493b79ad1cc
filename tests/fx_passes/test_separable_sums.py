"""Gradients of interpolations: sums over corners become sums along one dimension after the other, at known indices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F

import fxwrap
from fxwrap.fx_passes.decompositions import decomposition_table
from fxwrap.fx_passes.training.joint_graph import partitioner

INTERPOLATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "nearest": partial(F.interpolate, scale_factor=2, mode="nearest"),
    "bilinear": partial(F.interpolate, scale_factor=2, mode="bilinear"),
    "aligned": partial(F.interpolate, size=(13, 17), mode="bilinear", align_corners=True),
    "uneven": partial(F.interpolate, size=(12, 14), mode="bilinear"),
    "smaller": partial(F.interpolate, size=(4, 5), mode="bilinear"),
    "bicubic": partial(F.interpolate, scale_factor=2, mode="bicubic"),
    "activated": lambda x: F.interpolate(x.sigmoid(), scale_factor=2, mode="bilinear").tanh(),
}


def trained(
    function: Callable[[Tensor], Tensor], options: fxwrap.Options | None = None
) -> tuple[list[Any], list[Any], Callable[[Tensor], Tensor]]:
    """Returns a function's graphs and their programs, filled at its first step, and the function compiled."""
    options = options or fxwrap.Options()
    graphs: list[Any] = []
    programs: list[Any] = []

    def compile_graph(graph: torch.fx.GraphModule, examples: list[Any]) -> Any:
        compiled = fxwrap.compile_graph(graph, examples, options=options)
        graphs.append(graph)
        programs.append(compiled.program)
        return lambda *arguments: compiled(*arguments)

    backend = aot_autograd(
        fw_compiler=compile_graph, partition_fn=partitioner(options), decompositions=decomposition_table(options)
    )
    return graphs, programs, torch.compile(function, backend=backend, fullgraph=True, dynamic=False)


def gradient(function: Callable[[Tensor], Tensor], x: Tensor, dynamic: Sequence[int] = ()) -> Tensor:
    """Returns the gradient of a function's input, for a gradient of its result that differs everywhere.

    The sizes of `dynamic` dimensions are symbols.
    """
    x = x.detach().clone().requires_grad_()
    for dim in dynamic:
        torch._dynamo.mark_dynamic(x, dim)
    result = function(x)
    factors = torch.linspace(-1, 2, result.numel(), dtype=result.dtype).view(result.shape)
    result.backward(factors)
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("name", INTERPOLATIONS)
def test_gradients_of_interpolations_are_gathered(name: str) -> None:
    graphs, programs, compiled = trained(INTERPOLATIONS[name])
    x = torch.randn(2, 3, 8, 10)
    result, expected = gradient(compiled, x), gradient(INTERPOLATIONS[name], x.double())
    assert (result - expected).norm() / expected.norm() < 1e-6
    puts = [node for node in graphs[1].graph.nodes if "index_put" in str(node.target)]
    assert all(name == "nearest" or sum(item is not None for item in node.args[1]) == 1 for node in puts)
    assert puts
    assert "update(" not in str(programs[1]), "values are read where they are summed"


def test_an_interpolation_is_read_again_from_its_operand() -> None:
    """The backward of what follows a nearest interpolation reads the smaller tensor; other corners are saved."""
    x = torch.randn(2, 3, 8, 10)
    for mode, saved in (("nearest", x.numel()), ("bilinear", 4 * x.numel())):
        graphs, _, compiled = trained(lambda x, mode=mode: F.interpolate(x, scale_factor=2, mode=mode).sin())  # type: ignore[misc]
        gradient(compiled, x)
        inputs = [node.meta["val"] for node in graphs[1].graph.find_nodes(op="placeholder")]
        assert sorted(item.numel() for item in inputs if item.dim() == 4) == sorted([saved, 4 * x.numel()])


def weighted(x: Tensor, weights: Tensor, rows: Tensor) -> Tensor:
    """Reads rows, weighted by them and by 1 minus them."""
    read = x[:, rows]
    return torch.cat([read * weights, read * (1 - weights)], 1)


@pytest.mark.parametrize("corners", [1, 3])
def test_sums_that_are_not_over_all_corners_stay(corners: int) -> None:
    rows, columns = torch.arange(8).div(2, rounding_mode="floor"), torch.arange(6).div(2, rounding_mode="floor")
    pairs = [(rows[:, None], columns), (rows[:, None], 2 - columns), (3 - rows[:, None], columns)][:corners]

    def function(x: Tensor) -> Tensor:
        return sum((x[:, row, column] * (number + 1) for number, (row, column) in enumerate(pairs)), x.new_zeros(()))

    x = torch.randn(2, 4, 3)
    _, _, compiled = trained(function)
    torch.testing.assert_close(gradient(compiled, x), gradient(function, x))


def test_indices_of_inputs_are_not_copied() -> None:
    rows = torch.randint(4, (8,))
    weights = torch.rand(8, 1)
    x = torch.randn(2, 4, 3)
    _, programs, compiled = trained(lambda x: weighted(x, weights, rows))
    torch.testing.assert_close(gradient(compiled, x), gradient(lambda x: weighted(x, weights, rows), x))
    assert "update(" in str(programs[1]), "values are added to the elements that the indices name"
