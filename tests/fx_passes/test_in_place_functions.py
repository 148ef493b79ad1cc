"""In-place activations and arithmetic of Dynamo's graphs return results where nothing else sees the write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import functional

from fxwrap import Options
from fxwrap.fx_passes import find_known_results, replace_in_place_functions
from fxwrap.fx_passes.effects import fake_of

Function = Callable[[Tensor, Tensor], object]


def _activation(x: Tensor, w: Tensor) -> Tensor:
    return functional.hardswish(x @ w, True)


def _by_keyword(x: Tensor, w: Tensor) -> Tensor:
    return functional.leaky_relu(x @ w, 0.2, inplace=True)


def _chain(x: Tensor, w: Tensor) -> Tensor:
    y = functional.relu6(x @ w, inplace=True)
    y += w.exp()
    y *= 3
    return functional.hardtanh(y, 0.5, 20.0, True)


def _read_before(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    z = y.sin()
    y -= z
    return y * z


def _twice(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    y += y
    return y


def _read_after(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    z = functional.silu(y, inplace=True)
    return y + z


def _input(x: Tensor, w: Tensor) -> Tensor:
    return functional.relu(x, inplace=True) @ w


def _view(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ w
    z = y[1:]
    return functional.relu(y, inplace=True), z


def _of_a_part(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    functional.relu(y[1], inplace=True)
    return y


def _returned_before(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ w
    return y, functional.elu(y, inplace=True)


def _wider(x: Tensor, w: Tensor) -> Tensor:
    y = (x @ w).bfloat16()
    y += w.exp()
    return y


def _broadcast(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    y += w[0]
    return y


def _other_layout(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    y += w.t()
    return y


def _integers(x: Tensor, w: Tensor) -> Tensor:
    y = (x @ w).long()
    y += 2
    return y


def _without_gradients(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    with torch.no_grad():
        functional.relu(y, inplace=True)
    return y


REPLACED: dict[Function, int] = {_activation: 1, _by_keyword: 1, _chain: 4, _read_before: 1, _twice: 1}
UNCHANGED: tuple[Function, ...] = (
    _read_after, _input, _view, _of_a_part, _returned_before, _wider, _broadcast, _other_layout, _integers,
    _without_gradients,
)  # fmt: skip


def _inputs(size: int) -> list[Tensor]:
    return [torch.randn(size, size), torch.randn(size, size)]


def _has_gradient(function: Function) -> bool:
    """Whether eager mode computes gradients: not of integers, nor where a write destroys what was saved for them."""
    return function not in (_integers, _read_before)


def _changed_calls(function: Function) -> int:
    """The calls of Dynamo's graph that the pass replaces."""
    changed: list[int] = []

    def backend(graph_module: GraphModule, _inputs: Any) -> Any:
        rewritten = replace_in_place_functions(graph_module, Options())
        pairs = zip(graph_module.graph.nodes, rewritten.graph.nodes, strict=True)
        texts = [[str((node.target, node.args, node.kwargs)) for node in pair] for pair in pairs]
        changed.append(sum(before != after for before, after in texts))
        return graph_module

    torch._dynamo.reset()
    x, w = _inputs(5)
    torch.compile(function, backend=backend, fullgraph=True)(x, w.requires_grad_(_has_gradient(function)))
    return sum(changed)


def test_replaced_calls_are_repeatable() -> None:
    """Nothing writes their example values, of which the trace of a model's layers makes copies."""
    graphs: list[GraphModule] = []

    def backend(graph_module: GraphModule, _inputs: Any) -> Any:
        graphs.extend((graph_module, replace_in_place_functions(graph_module, Options())))
        return graph_module

    torch._dynamo.reset()
    x, w = _inputs(5)
    torch.compile(_chain, backend=backend, fullgraph=True)(x, w.requires_grad_())
    counts = []
    for graph_module in graphs:
        calls = [node for node in graph_module.graph.nodes if node.op.startswith("call_")]
        results = find_known_results(graph_module.graph, fake_of(calls[0]).fake_mode)
        assert results is not None
        assert all(fake_of(node).requires_grad for node in calls)
        counts.append(len(results.repeatable.intersection(calls)) / len(calls))
    assert counts[0] < counts[1] == 1


def _results(function: Function, backend: str, dynamic: bool, size: int) -> list[Tensor]:
    """Results, the first input afterwards, and the gradient of the second one."""
    torch.manual_seed(size)
    x, w = _inputs(size)
    w.requires_grad_(_has_gradient(function))
    result = torch.compile(function, backend=backend, dynamic=dynamic)(x, w)
    results = list(result) if isinstance(result, tuple) else [result]
    if not w.requires_grad:
        return [*results, x]
    loss = torch.stack([item.float().square().sum() for item in results]).sum()
    return [*results, x, *torch.autograd.grad(loss, w)]


@pytest.mark.parametrize("function", [*REPLACED, *UNCHANGED], ids=lambda function: function.__name__.strip("_"))
def test_calls_are_replaced_where_nothing_else_sees_the_write(function: Function) -> None:
    assert _changed_calls(function) == REPLACED.get(function, 0)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [*REPLACED, *UNCHANGED], ids=lambda function: function.__name__.strip("_"))
def test_results_mutations_and_gradients_are_those_of_functionalisation(function: Function, dynamic: bool) -> None:
    torch._dynamo.reset()
    for size in (5, 7) if dynamic else (5,):
        results = _results(function, "fxwrap", dynamic, size)
        torch.testing.assert_close(results, _results(function, "aot_eager", dynamic, size))
