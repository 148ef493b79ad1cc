"""Loops over experts, as models write them, become grouped matmuls."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule, Interpreter
from torch.nn import functional

from fxwrap import Options
from fxwrap.fx_passes import prepare_graph

EXPERTS, CHOSEN, WIDTH, INNER = 3, 2, 16, 24
_GROUPED = torch.ops.aten._grouped_mm.default

Rows = tuple[Any, ...]
"""The indices of an expert's rows: tokens and, where there are several choices, the positions among these."""


class Experts(nn.Module):
    """A layer of experts. The parameters choose how its loop is written."""

    def __init__(self, select: str = "where", weights: str = "stacked", store: str = "index_add") -> None:
        super().__init__()
        self.select, self.weights, self.store = select, weights, store
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 4)
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, tokens: Tensor, chosen: Tensor, factors: Tensor) -> Tensor:
        result = torch.zeros_like(tokens)
        pairs = list(zip(self.up, self.down, strict=True)) if self.weights == "unbind" else []
        mask = functional.one_hot(chosen, EXPERTS).permute(2, 1, 0) if self.select == "one_hot" else None
        for number in range(EXPERTS):
            rows, factor = self._rows(number, chosen, factors, mask)
            up, down = pairs[number] if pairs else (self.up[number], self.down[number])
            values = self._expert(tokens, rows[0], up, down, number) * factor
            result = self._store(result, rows[0], values.to(result.dtype))
        return result

    def _rows(self, number: int, chosen: Tensor, factors: Tensor, mask: Tensor | None) -> tuple[Rows, Tensor]:
        if mask is not None:
            position, token = torch.where(mask[number])
        elif self.select == "nonzero":
            token, position = (chosen == number).nonzero().unbind(1)
        elif self.select == "columns":
            found = torch.eq(chosen, number).nonzero()
            token, position = found[:, 0], found[:, 1]
        else:
            token, position = torch.where(chosen == number)
        return (token, position), factors[token, position, None]

    def _expert(self, tokens: Tensor, token: Tensor, up: Tensor, down: Tensor, number: int) -> Tensor:
        match self.weights:
            case "sliced":
                rows = tokens[token]
                gate, inner = functional.linear(rows, up[:INNER]), functional.linear(rows, up[INNER:])
            case "transposed":
                gate, inner = (tokens[token] @ up.t()).chunk(2, dim=-1)
            case "reshaped":
                rows = tokens[None, token].reshape(-1, WIDTH)
                gate, inner = functional.linear(rows, up).chunk(2, dim=-1)
            case _:
                gate, inner = functional.linear(tokens[token], up).chunk(2, dim=-1)
        values = functional.silu(gate) * inner
        if self.weights == "addmm":
            return functional.linear(values, down, self.bias[number])
        values = functional.linear(values, down)
        return values + self.bias[number] if self.weights == "bias" else values

    def _store(self, result: Tensor, token: Tensor, values: Tensor) -> Tensor:
        match self.store:
            case "assign":
                result[token] += values
                return result
            case "scatter_add":
                return result.scatter_add(0, token[:, None].expand(-1, WIDTH), values)
            case "index_put":
                return result.index_put((token,), values, accumulate=True)
            case _:
                return result.index_add(0, token, values)


def _routed(layer: Callable[..., Tensor], known: bool = True) -> Callable[..., Tensor]:
    """Returns the layer after a router; with `known`, the compiler knows that the router's indices are experts."""

    def run(tokens: Tensor, scores: Tensor) -> Tensor:
        factors, chosen = torch.topk(scores.softmax(-1), CHOSEN, dim=-1)
        return layer(tokens, chosen if known else chosen + scores.isnan().sum(), factors)

    return run


def _inputs(count: int, experts: int = EXPERTS, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    scores = torch.randn(count, experts)
    scores[:, 1] = -torch.inf  # an expert without tokens
    return torch.randn(count, WIDTH).to(dtype), scores


def _graph(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> tuple[Any, Callable]:
    """Returns the prepared graph of a function's calls, and the function that Dynamo traced."""
    prepared = []

    def compile_graph(module: GraphModule, _examples: list[Any]) -> Any:
        prepared.append(prepare_graph(module, None, Options()))
        return Interpreter(prepared[-1].graph_module).run

    backend = aot_autograd(fw_compiler=compile_graph)
    traced = torch.compile(function, backend=backend, fullgraph=True, dynamic=False)
    traced(*inputs)
    return prepared, traced


def _grouped(prepared: list[Any]) -> int:
    return sum(node.target is _GROUPED for graph in prepared for node in graph.nodes)


def _loops(prepared: list[Any]) -> int:
    return sum("nonzero" in str(node.target) for graph in prepared for node in graph.nodes)


def _check(traced: Callable[..., Tensor], layer: nn.Module, inputs: tuple[Tensor, ...], known: bool = True) -> None:
    """Checks that results are as near to those of float64 as eager's are."""
    exact = _routed(copy.deepcopy(layer).double(), known)(inputs[0].double(), inputs[1])
    results = traced(*inputs), _routed(layer, known)(*inputs)
    errors = [float((result.double() - exact).norm() / exact.norm()) for result in results]
    assert errors[0] <= 1.2 * errors[1] + 1e-6, errors


_FORMS = [
    ("where", "stacked", "index_add"), ("one_hot", "unbind", "assign"), ("nonzero", "sliced", "scatter_add"),
    ("columns", "transposed", "index_put"), ("where", "reshaped", "assign"), ("one_hot", "addmm", "index_add"),
    ("nonzero", "bias", "scatter_add"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _captured(fresh_dynamo: None) -> Any:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.no_grad():
        yield


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("select", "weights", "store"), _FORMS)
def test_a_loop_is_grouped_matmuls(select: str, weights: str, store: str) -> None:
    torch.manual_seed(0)
    layer = Experts(select, weights, store).bfloat16()
    prepared, traced = _graph(_routed(layer), _inputs(10))
    assert _grouped(prepared) == (3 if weights == "sliced" else 2) and not _loops(prepared)
    _check(traced, layer, _inputs(10))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("emitter", ["python", "cpp"])
def test_numbers_of_tokens(emitter: str) -> None:
    torch.manual_seed(0)
    layer = Experts("one_hot", "bias").bfloat16()
    options = {"emitter": emitter, "matmul_kernels": "generated" if emitter == "cpp" else "auto"}
    compiled = torch.compile(_routed(layer), backend="fxwrap", options=options, fullgraph=True, dynamic=True)
    for count in (10, 1, 33):
        _check(compiled, layer, _inputs(count))


def test_indices_that_are_no_expert() -> None:
    """As those of experts of other ranks: their rows are in no group, and change nothing."""
    torch.manual_seed(0)
    layer = Experts(store="scatter_add").bfloat16()
    prepared, traced = _graph(_routed(layer, known=False), _inputs(10, EXPERTS + 3))
    assert _grouped(prepared) == 2 and not _loops(prepared)
    _check(traced, layer, _inputs(10, EXPERTS + 3), known=False)


class MaskedWrites(nn.Module):
    """The loop of DeepSeek's training: each choice of an expert is a row, which a mask reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 4)
        self.shared = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor, chosen: Tensor, factors: Tensor) -> Tensor:
        rows = tokens.repeat_interleave(CHOSEN, dim=0)
        flat, results = chosen.view(-1), torch.full_like(rows, 7)
        for number in range(EXPERTS):
            inner = functional.relu(functional.linear(rows[flat == number], self.up[number]))
            results[flat == number] = functional.linear(inner, self.down[number])
        weighted = results.view(*factors.shape, -1) * factors.to(rows.dtype).unsqueeze(-1)
        return weighted.sum(dim=1) + self.shared(tokens)


@pytest.mark.parametrize("experts", [EXPERTS, EXPERTS + 3])
def test_masked_writes(experts: int) -> None:
    torch.manual_seed(0)
    layer = MaskedWrites().bfloat16()
    prepared, traced = _graph(_routed(layer, known=experts == EXPERTS), _inputs(10, experts))
    assert _grouped(prepared) == 2 and not _loops(prepared)
    _check(traced, layer, _inputs(10, experts), known=experts == EXPERTS)


def _changed(number: int) -> Callable[[Tensor, Tensor, Tensor, Experts], Tensor]:
    """Returns a function that looks like a loop over experts, but is none that grouped matmuls can compute."""

    def run(tokens: Tensor, chosen: Tensor, factors: Tensor, layer: Experts) -> Tensor:
        result = torch.zeros_like(tokens)
        chosen = chosen.byte() if number == 7 else chosen
        for expert in range(EXPERTS):
            token, position = torch.where(chosen == (expert if number != 0 else expert % 3 * 2))
            rows = functional.linear(tokens[token], layer.up[expert if number != 1 else 0 if expert else 1])
            rows = rows[:, :INNER].relu()
            if number == 2:
                rows = rows.cumsum(0)  # a row depends on others
            if number == 3 and expert == 2:
                rows = rows + 1
            if number == 4:
                rows = rows + result[token].sum()  # what other experts added
            values = functional.linear(rows, layer.down[expert]) * factors[token, position, None].to(tokens.dtype)
            result = result.index_add(0, token, values) if number != 5 else result.index_put((token,), values)
            if number == 6:
                result = result + 1
        return result

    return run


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", range(8))
def test_other_loops_stay(number: int) -> None:
    torch.manual_seed(0)
    layer, function = Experts().bfloat16(), _changed(number)
    run = _routed(lambda tokens, chosen, factors: function(tokens, chosen, factors, layer))
    prepared, traced = _graph(run, _inputs(10))
    assert not _grouped(prepared)
    inputs = _inputs(10)
    torch.testing.assert_close(traced(*inputs), run(*inputs))


def test_dtypes_without_grouped_matmuls() -> None:
    prepared, _ = _graph(_routed(Experts()), _inputs(10, dtype=torch.float32))
    assert not _grouped(prepared) and _loops(prepared) == EXPERTS
