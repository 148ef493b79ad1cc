"""Loops over experts, as models write them, become grouped matmuls."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx import Graph, GraphModule, Interpreter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from fxwrap import Options
from fxwrap.devices import CPU
from fxwrap.fx_passes import prepare_graph
from fxwrap.fx_passes.experts.conditions import are_in_range
from fxwrap.fx_passes.experts.writes import simplify_gradients_of_writes
from fxwrap.lines import ExternCall
from tests.fx_passes.expert_layers import (
    EXPERTS,
    INNER,
    SORTING,
    WIDTH,
    Experts,
    MaskedWrites,
    Switch,
    inputs_of,
    routed,
)
from tests.support.agreement import assert_as_exact

_GROUPED = torch.ops.aten._grouped_mm.default
_ON_HOST = torch.ops.fxwrap.grouped_matmul.default


def _graph(
    function: Callable[..., Any], inputs: tuple[Tensor, ...], options: Options | None = None
) -> tuple[Any, Callable]:
    """Returns the prepared graph of a function's calls, and the function that Dynamo traced."""
    prepared = []

    def compile_graph(module: GraphModule, _examples: list[Any]) -> Any:
        prepared.append(prepare_graph(module, None, options or Options()))
        return Interpreter(prepared[-1].graph_module).run

    backend = aot_autograd(fw_compiler=compile_graph)
    traced = torch.compile(function, backend=backend, fullgraph=True, dynamic=False)
    traced(*inputs)
    return prepared, traced


def _grouped(prepared: list[Any], target: object = _GROUPED) -> int:
    return sum(node.target is target for graph in prepared for node in graph.nodes)


def _loops(prepared: list[Any]) -> int:
    return sum("nonzero" in str(node.target) for graph in prepared for node in graph.nodes)


def _check(traced: Callable[..., Tensor], layer: nn.Module, inputs: tuple[Tensor, ...], known: bool = True) -> None:
    """Checks that results are as near to those of float64 as eager's are."""
    exact = routed(copy.deepcopy(layer).double(), known)(inputs[0].double(), inputs[1])
    assert_as_exact(traced(*inputs), routed(layer, known)(*inputs), exact, slack=1e-6)


_FORMS = [
    ("where", "stacked", "index_add"), ("one_hot", "unbind", "assign"), ("nonzero", "sliced", "scatter_add"),
    ("columns", "transposed", "index_put"), ("where", "reshaped", "assign"), ("one_hot", "addmm", "index_add"),
    ("nonzero", "bias", "scatter_add"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _captured() -> Any:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.no_grad():
        yield


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("select", "weights", "store"), _FORMS)
def test_a_loop_is_grouped_matmuls(select: str, weights: str, store: str) -> None:
    torch.manual_seed(0)
    layer = Experts(select, weights, store).bfloat16()
    prepared, traced = _graph(routed(layer), inputs_of(10))
    assert _grouped(prepared) == (3 if weights == "sliced" else 2) and not _loops(prepared)
    _check(traced, layer, inputs_of(10))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("emitter", ["python", "cpp"])
def test_numbers_of_tokens(emitter: str) -> None:
    torch.manual_seed(0)
    layer = Experts("one_hot", "bias").bfloat16()
    options = {"emitter": emitter, "matmul_kernels": "generated" if emitter == "cpp" else "auto"}
    compiled = torch.compile(routed(layer), backend="fxwrap", options=options, fullgraph=True, dynamic=True)
    for count in (10, 1, 33):
        _check(compiled, layer, inputs_of(count))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("emitter", ["python", "cpp", "fx"])
def test_numbers_of_tokens_of_modules(emitter: str) -> None:
    torch.manual_seed(0)
    layer = Experts("where", "biased modules")
    compiled = torch.compile(
        routed(layer), backend="fxwrap", options={"emitter": emitter, "devices": (SORTING,)}, fullgraph=True,
        dynamic=emitter == "python",
    )  # fmt: skip
    for count in (10, 33) if emitter == "python" else (10,):
        _check(compiled, layer, inputs_of(count, dtype=torch.float32))


def test_indices_that_are_no_expert() -> None:
    """As those of experts of other ranks: their rows are in no group, and change nothing."""
    torch.manual_seed(0)
    layer = Experts(store="scatter_add").bfloat16()
    prepared, traced = _graph(routed(layer, known=False), inputs_of(10, EXPERTS + 3))
    assert _grouped(prepared) == 2 and not _loops(prepared)
    _check(traced, layer, inputs_of(10, EXPERTS + 3), known=False)


@pytest.mark.parametrize("experts", [EXPERTS, EXPERTS + 3])
def test_masked_writes(experts: int) -> None:
    torch.manual_seed(0)
    layer = MaskedWrites().bfloat16()
    prepared, traced = _graph(routed(layer, known=experts == EXPERTS), inputs_of(10, experts))
    assert _grouped(prepared) == 2 and not _loops(prepared)
    _check(traced, layer, inputs_of(10, experts), known=experts == EXPERTS)


def test_writes_into_a_copy_of_the_tokens() -> None:
    """The first expert reads the tensor that it writes, as others read the tokens."""
    torch.manual_seed(0)
    layer = Switch()
    prepared, traced = _graph(routed(layer), inputs_of(10, dtype=torch.float32), Options(devices=(SORTING,)))
    assert _grouped(prepared, _ON_HOST) == 3 and not _loops(prepared)
    _check(traced, layer, inputs_of(10, dtype=torch.float32))


@pytest.mark.parametrize("numbers", [range(EXPERTS), (1, 2)])
def test_zeros_in_rows_of_experts(numbers: Sequence[int]) -> None:
    """The gradient of the tensor before a loop that writes rows is one call, and not one for each expert."""

    def zeroed(tokens: Tensor, scores: Tensor) -> Tensor:
        chosen, result = scores.argmax(-1), tokens
        for number in numbers:
            result = result.index_put((chosen == number,), torch.zeros_like(tokens[chosen == number]))
        return result

    tokens = torch.randn(2, 5, WIDTH), torch.randn(2, 5, EXPERTS)
    graph = make_fx(zeroed, tracing_mode="real")(*tokens)
    prepared = simplify_gradients_of_writes(prepare_graph(graph, tokens, Options(fuse=False)))
    assert not [node for node in prepared.nodes if "index_put" in str(node.target)]
    torch.testing.assert_close(prepared.graph_module(*tokens), zeroed(*tokens))


def test_indices_of_argmax_are_experts() -> None:
    graph = Graph()
    scores = graph.placeholder("scores")
    graph.output((graph.call_function(torch.ops.aten.argmax.default, (scores, -1)),))
    prepared = prepare_graph(GraphModule({}, graph), [torch.zeros(4, 3)], Options())
    scores, indices, _ = prepared.nodes
    ranges = [are_in_range(node, count, prepared.fakes) for node, count in ((indices, 3), (indices, 2), (scores, 3))]
    assert ranges == [True, False, False]


def _changed(number: int) -> Callable[[Tensor, Tensor, Tensor, Experts], Tensor]:
    """Returns a function that looks like a loop over experts, but is none that grouped matmuls can compute."""

    def run(tokens: Tensor, chosen: Tensor, factors: Tensor, layer: Experts) -> Tensor:
        result = torch.zeros_like(tokens)
        chosen = chosen.byte() if number == 7 else chosen
        for expert in range(EXPERTS):
            token, position = torch.where(chosen == (expert if number != 0 else expert % 3 * 2))
            rows = functional.linear(tokens[token], layer.up[expert])[:, :INNER].relu()
            if number == 1:
                rows = rows - rows.sum(0)
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
    run = routed(lambda tokens, chosen, factors: function(tokens, chosen, factors, layer))
    prepared, traced = _graph(run, inputs_of(10))
    assert _loops(prepared) == EXPERTS
    inputs = inputs_of(10)
    torch.testing.assert_close(traced(*inputs), run(*inputs))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weights", ["addmm", "sliced", "modules", "biased modules"])
def test_matmuls_of_each_expert_on_sorted_rows(weights: str, dtype: torch.dtype) -> None:
    """Without a grouped matmul of the library: for other dtypes, and for weights of each expert's own."""
    torch.manual_seed(0)
    layer = Experts("one_hot", weights, "assign").to(dtype)
    prepared, traced = _graph(routed(layer), inputs_of(10, dtype=dtype), Options(devices=(SORTING,)))
    is_library = dtype is torch.bfloat16 and "modules" not in weights
    assert _grouped(prepared, _GROUPED if is_library else _ON_HOST) == (2 if weights == "addmm" else 3)
    assert not _loops(prepared)
    _check(traced, layer, inputs_of(10, dtype=dtype))


@pytest.mark.parametrize(("limit", "stacks"), [(3 * 2 * INNER * WIDTH, 3), (3 * 2 * INNER * WIDTH - 1, 0)])
def test_small_weights_of_modules_are_stacked(limit: int, stacks: int) -> None:
    torch.manual_seed(0)
    layer = Experts("one_hot", "modules").bfloat16()
    spec = dataclasses.replace(CPU, matmuls=dataclasses.replace(CPU.matmuls, stacked_expert_bytes=limit))
    prepared, traced = _graph(routed(layer), inputs_of(10), Options(devices=(spec,)))
    assert _grouped(prepared) == _grouped(prepared, torch.ops.aten.stack.default) == stacks
    assert _loops(prepared) == (0 if stacks else EXPERTS)
    _check(traced, layer, inputs_of(10))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("emitter", ["python", "cpp"])
def test_frozen_weights_of_modules_are_stacked_once(emitter: str) -> None:
    """The stack follows writes into a weight. Weights so small that each call could stack them are stacked once too."""
    torch.manual_seed(0)
    layer, programs = Experts("one_hot", "biased modules").bfloat16(), []
    spec = (
        SORTING
        if emitter == "cpp"
        else dataclasses.replace(SORTING, matmuls=dataclasses.replace(SORTING.matmuls, stacked_expert_bytes=1 << 20))
    )
    options = {
        "freeze": True, "emitter": emitter, "devices": (spec,),
        "passes": (lambda program: programs.append(program) or program,),
    }  # fmt: skip
    compiled = torch.compile(routed(layer), backend="fxwrap", options=options, fullgraph=True)
    _check(compiled, layer, inputs_of(10))
    layer.experts[1].down.weight.mul_(-3)  # type: ignore[union-attr]
    _check(compiled, layer, inputs_of(10))
    targets = [line.target for line in programs[0].lines() if isinstance(line, ExternCall)]
    assert targets.count("fxwrap.frozen_grouped_mm.default") == 3


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("form", ["stack", "matrices", "transposed"])
def test_the_operators_of_groups(form: str, has_bias: bool) -> None:
    """Groups may be empty; rows beyond the last group are in none."""
    torch.manual_seed(0)
    rows, weights, ends = torch.randn(9, 4), torch.randn(3, 4, 5), torch.tensor([2, 2, 7], dtype=torch.int32)
    bias = torch.randn(3, 5) if has_bias else None
    matrices = {"stack": [weights], "matrices": [*weights], "transposed": [item.t() for item in weights]}[form]
    result = torch.ops.fxwrap.grouped_matmul(rows, matrices, form == "transposed", bias, ends)
    groups = [0, 0, 2, 2, 2, 2, 2]
    expected = torch.einsum("rk,rkn->rn", rows[:7], weights[groups]) + (0 if bias is None else bias[groups])
    torch.testing.assert_close(result[:7], expected)
    products = torch.ops.fxwrap.grouped_products(rows.t(), result, ends)
    sums = [rows[:2].t() @ result[:2], torch.zeros(4, 5), rows[2:7].t() @ result[2:7]]
    torch.testing.assert_close(products, torch.stack(sums))


def test_a_saved_index_is_no_call() -> None:
    """A backward has placeholders named after the calls of the forward whose results it reads."""
    graph = Graph()
    saved = graph.placeholder("index")
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (saved, 2)),))
    prepared = prepare_graph(GraphModule({}, graph), [torch.ones(2)], Options())
    assert [node.op for node in prepared.nodes] == ["placeholder", "call_function", "output"]
