"""Sizes that are symbols: one program for all of them, through every emitter, forward and backward."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import Options
from fxwrap.comparison import COMPARED_EMITTERS, CompiledFunction
from fxwrap.comparison.driver import capture
from fxwrap.compile import compile_graph
from fxwrap.lines import Alloc, SizeOf
from fxwrap.symbolic import SymbolInfo
from fxwrap.testing import assert_emitters_agree
from tests.lowering.control.cases import DEVICES, Case, Cases, random
from tests.lowering.symbols.check_sizes import check_all_sizes
from tests.support.models import MODELS

CASES = Cases()
X = random(4, 6)
GRADIENT = random(4, 6, gradient=True)


@CASES.add((X,), dynamic=True)
def sizes_and_numbers_of_them(x: Tensor) -> Any:
    return x.sin() + 1, x.sum(0), x.shape[0] * 2, x.numel()


@CASES.add((GRADIENT, random(6, 5, gradient=True)), training=True, dynamic=True)
def a_matmul_and_a_softmax(x: Tensor, w: Tensor) -> Any:
    return (torch.softmax(x @ w, -1) * x.shape[0]).sum(0)


@CASES.add((GRADIENT,), training=True, dynamic=True, long=True)
def the_backward_receives_half_a_size(x: Tensor) -> Any:
    return torch.cat([x[:, : x.shape[1] // 2], x * 2], 1).relu()


@CASES.add((random(4, 6, 8, gradient=True),), training=True, dynamic=True)
def the_backward_receives_a_product_of_sizes(x: Tensor) -> Any:
    return (x.view(-1, x.shape[2]).t()[1:] * 2).exp()


@CASES.add((GRADIENT,), training=True, dynamic=True, long=True)
def a_size_and_a_constant(x: Tensor) -> Any:
    return nn.functional.pad(x, (0, 448))[:, 1:].sin()


@CASES.add((GRADIENT,), training=True, dynamic=True, long=True)
def rows_are_normalised(x: Tensor) -> Any:
    return nn.functional.gelu(nn.functional.layer_norm(x, (x.shape[-1],)))


@CASES.add((random(3, 6),), dynamic=True)
def half_a_size_is_one(x: Tensor) -> Any:
    """What is broadcast is one element in all runs, although its size is an expression."""
    return x[: x.shape[0] // 2].sin() + x, x.diagonal(x.shape[1] - 1).cos() * x


@CASES.add((X, 3), dynamic=True)
def a_number_is_an_input(x: Tensor, n: int) -> Any:
    return x + n, x[:n].sum(0) * n, n + 1


@CASES.add((X, 2.5), dynamic=True)
def a_float_is_an_input(x: Tensor, n: float) -> Any:
    return x * n + 1, n * 2


@CASES.add((random(9, 4), 2), dynamic=True)
def a_view_begins_at_a_number(x: Tensor, n: int) -> Any:
    return x[n:], x[n:].sin()


@CASES.add((random(4, 10)[:, :6],), (random(6, 4).t(),), dynamic=True)
def strides_are_symbols(x: Tensor) -> Any:
    return x.sin() @ x.t()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES.parameters)
def test_every_emitter_matches_eager(case: Case, device: str) -> None:
    case.check(device)


def test_one_program_covers_all_sizes() -> None:
    def function(x: Tensor) -> Any:
        half = x[:, : x.shape[1] // 2]
        return x.reshape(-1, x.shape[1] // 2) * x.shape[0], half.mean(0), nn.functional.pad(half, (1, x.shape[0]))

    graphs = check_all_sizes(function, [(random(*sizes),) for sizes in ((4, 6), (5, 10), (7, 8), (33, 64), (2, 4))])
    assert len(graphs) == 1


def test_one_training_program_covers_all_sizes() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.softmax((x @ w).view(-1, 2, w.shape[1]), -1).sum(1) * x.shape[0]

    calls = [(random(*sizes, 6, gradient=True), random(6, 8, gradient=True)) for sizes in ((2, 4), (3, 6), (5, 8))]
    assert len(check_all_sizes(function, calls, training=True)) == 2


@pytest.mark.long
def test_gpt2_is_compiled_once_for_batch_and_length() -> None:
    """Four sizes, forward and backward, without another compile; the benchmark of dynamic sizes takes twenty."""
    model = MODELS["gpt2"].build(0, layers=1)
    generator = torch.Generator().manual_seed(0)

    def loss(tokens: Tensor) -> Tensor:
        logits = model(input_ids=tokens, use_cache=False)["logits"]
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    subject = CompiledFunction(loss, Options(), dynamic=True)
    torch.compiler.reset()
    for number in range(4):
        batch, length = [int(torch.randint(3, most, (), generator=generator)) for most in (7, 30)]
        tokens = torch.randint(2, 100, (batch, length), generator=generator)
        wanted, gradient = _gradient(model, loss, tokens)
        for emitter in COMPARED_EMITTERS if number == 1 else ("python", "cpp")[number % 2 :][:1]:
            actual, own = _gradient(model, subject.call(emitter), tokens)
            torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(own, gradient, rtol=1e-3, atol=1e-5)
    assert [graph.name for graph in subject.graphs] == ["forward", "backward"]


def _gradient(model: nn.Module, loss: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    model.zero_grad(set_to_none=True)
    value = loss(tokens)
    value.backward()
    return value.detach(), next(iter(model.parameters())).grad.clone()


def test_lowering_adds_no_guard() -> None:
    """What Dynamo did not ask for is not asked for: the ShapeEnv is as before, of forward and backward."""
    seen = []

    def watched(graph: Any, inputs: Any, **chosen: Any) -> Any:
        shape_env = next(item for item in inputs if isinstance(item, torch.SymInt)).node.shape_env
        before = _state(shape_env, shape_env.var_to_range)
        compiled = compile_graph(graph, inputs, **chosen)
        _ = compiled.graph_module
        assert _state(shape_env, before[2]) == before
        seen.append(chosen["name"])
        return compiled

    def function(x: Tensor, w: Tensor, n: int) -> Tensor:
        y = torch.cat([x[:, : x.shape[1] // 2], x], 1) @ w
        y = y.view(-1, w.shape[1] // 2).t().softmax(-1).transpose(0, 1).reshape(x.shape[0], -1)
        y = nn.functional.pad(y, (0, n)).index_select(0, torch.arange(x.shape[0]))
        return torch.where(y > 0.1, y, 0.0).cumsum(1)[:, 1:].mean(0) + y.expand(2, *y.shape).sum((0, 1))[1:]

    backend = fxwrap.compile.backend.make_backend(Options(), watched)
    inputs = random(4, 6, gradient=True), random(9, 8, gradient=True), 3
    torch.compile(function, backend=backend, dynamic=True)(*inputs).sum().backward()
    assert seen == ["forward", "backward"]


def _state(shape_env: Any, symbols: Any) -> Any:
    guards = [str(guard.expr) for guard in shape_env.guards]
    deferred = shape_env.deferred_runtime_asserts.items()
    asserts = {str(symbol): [str(item.expr) for item in items] for symbol, items in deferred}
    return guards, dict(shape_env.replacements), {symbol: shape_env.var_to_range[symbol] for symbol in symbols}, asserts


class Exported(nn.Module):
    """Sizes of the inputs are solved from: `2*h` for one, `2*b` for the other."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return x.reshape(-1, x.shape[1] // 2).sin(), y + x.shape[0]


SIZES = ({0: Dim("b", min=2, max=50), 1: 2 * Dim("h", min=2, max=64)}, {0: 2 * Dim("b", min=2, max=50)})


def test_an_exported_program_solves_its_symbols() -> None:
    exported = torch.export.export(Exported(), (random(4, 6), random(8, 3)), dynamic_shapes=SIZES)
    assert_emitters_agree(exported, (random(4, 6), random(8, 3)))
    compiled = fxwrap.compile_graph(exported)
    for b, h in ((2, 2), (50, 64), (7, 5)):
        x, y = random(b, 2 * h), random(2 * b, 3)
        torch.testing.assert_close(compiled(x, y), Exported()(x, y))


def test_automatic_dimensions_of_an_exported_program() -> None:
    automatic = {0: Dim.AUTO, 1: Dim.AUTO}
    exported = torch.export.export(Exported(), (random(4, 6), random(8, 3)), dynamic_shapes=(automatic, {0: Dim.AUTO}))
    compiled = fxwrap.compile_graph(exported)
    x, y = random(9, 10), random(18, 3)
    torch.testing.assert_close(compiled(x, y), Exported()(x, y))


def test_one_dimension_is_marked() -> None:
    def function(x: Tensor) -> Tensor:
        return x.softmax(0) * x.shape[0]

    subject = CompiledFunction(function, Options(), dynamic=None)
    torch.compiler.reset()
    for size in (5, 9, 40):
        x = random(size, 8)
        torch._dynamo.mark_dynamic(x, 0, min=4, max=64)
        for emitter in COMPARED_EMITTERS:
            torch.testing.assert_close(subject.call(emitter)(x), function(x))
    (graph,) = subject.graphs
    program = graph.compiled.program
    (symbol,) = [  # an input of its own, or read off the tensor, as AOTAutograd passes it
        *[item.value for item in program.inputs if isinstance(item.value, SymbolInfo)],
        *[line.symbol for line in program.body.lines if isinstance(line, SizeOf) and line.dim == 0],
    ]
    assert (symbol.lower, symbol.upper) == (4, 64)


def test_a_kernel_reuses_dead_buffers_of_any_size() -> None:
    """The extent of a dense tensor of symbolic sizes equals its number of elements."""
    with torch.no_grad():
        (dynamic,), (static,) = (
            capture(lambda x, w: torch.relu(x @ w) + 1, (random(3, 4, 6), random(6, 8)), dynamic=dynamic)
            for dynamic in (True, False)
        )
    allocated = [
        [line.result.name for line in graph.compiled.program.body.lines if isinstance(line, Alloc)]
        for graph in (dynamic, static)
    ]
    assert allocated == [[], []]


@pytest.mark.parametrize("emitter", COMPARED_EMITTERS)
def test_lists_of_sizes(emitter: str) -> None:
    """`make_fx` records `aten.size.default` before torch 2.15; the dispatcher lacks it. Its sizes are fixed."""

    def function(x: Tensor) -> Tensor:
        return torch.take_along_dim(x, x.sum(0, keepdim=True).argsort(1), 1)

    module = make_fx(function, tracing_mode="symbolic")(X)
    recorded = module.graph.find_nodes(op="call_function", target=torch.ops.aten.size.default)
    (placeholder,), output = module.graph.find_nodes(op="placeholder"), module.graph.output_node()
    with module.graph.inserting_before(output):
        sizes = recorded[0] if recorded else module.graph.call_function(torch.ops.aten.size.default, (placeholder,))
        full = module.graph.call_function(torch.ops.aten.full.default, (sizes, 3.0))
        rows = module.graph.call_function(operator.getitem, (sizes, 0))
    output.args = ((output.args[0], full, rows),)
    module.recompile()
    selected, full, rows = compile_graph(module, options=Options(emitter=emitter))(X)
    torch.testing.assert_close((selected, full), (function(X), torch.full((4, 6), 3.0)))
    assert rows == 4
