"""Checkpointed dropout draws the numbers of eager for the same seed, and again the same ones in the backward."""

from __future__ import annotations

import operator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fxwrap
from fxwrap.comparison import COMPARED_EMITTERS
from fxwrap.compile import emit
from fxwrap.errors import GraphError, InputError
from fxwrap.lines import ExchangeRngState
from fxwrap.passes.graph_capture import CaptureChecker
from fxwrap.passes.partition import partition
from tests.lowering.control.cases import DEVICES, random, to_device
from tests.lowering.control.graphs import build_graph
from tests.runtime.cuda_graphs.cpu_graph_capturer import cpu_with_graph_capture

aten = torch.ops.aten


def _checkpointed_block(x: Tensor, w: Tensor) -> Tensor:
    return torch.nn.functional.dropout((x @ w).sin(), 0.5)


def checkpointed(x: Tensor, w: Tensor) -> Tensor:
    y = checkpoint(_checkpointed_block, x, w, use_reentrant=False)
    return checkpoint(_checkpointed_block, y, w, use_reentrant=False) + torch.rand_like(x)


def _save_matmuls(context: Any, operator: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
    saved = operator in (aten.mm.default, aten.native_dropout.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def selectively_checkpointed(x: Tensor, w: Tensor) -> Tensor:
    contexts = partial(create_selective_checkpoint_contexts, _save_matmuls)
    y = checkpoint(_checkpointed_block, x, w, use_reentrant=False, context_fn=contexts)
    return checkpoint(_checkpointed_block, y, w, use_reentrant=False, context_fn=contexts) + torch.rand_like(x)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("function", [checkpointed, selectively_checkpointed])
def test_random_numbers_match_eager(function: Any, device: str) -> None:
    x, w = to_device((random(4, 8), random(8, 8, seed=1, gradient=True)), device)

    def run(called: Any) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(11)
        w.grad = None
        result = called(x, w)
        result.square().sum().backward()
        return result.detach(), w.grad, torch.rand(3, device=device)

    wanted = run(function)
    for emitter in COMPARED_EMITTERS:
        torch.compiler.reset()
        compiled = torch.compile(function, backend="fxwrap", fullgraph=True, options={"emitter": emitter})
        result, gradient, next_numbers = run(compiled)
        assert torch.equal(result == 0, wanted[0] == 0) and torch.equal(next_numbers, wanted[2]), emitter
        torch.testing.assert_close((result, gradient), wanted[:2], rtol=1e-4, atol=1e-5)


def checkpointed_layers(x: Tensor, w: Tensor) -> Tensor:
    def layer(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(((x @ w).sin() @ w).cos() @ w, 0.5) @ w

    for _ in range(2):
        x = checkpoint(layer, x, use_reentrant=False)
    return x


_ON_GPU = [pytest.param("cuda", emitter, marks=pytest.mark.gpu) for emitter in ("python", "cpp", "fx")]


@pytest.mark.parametrize(("device", "emitter"), [("cpu", "python"), *_ON_GPU])
def test_cuda_graph_replays_match_eager_random_numbers(device: str, emitter: str) -> None:
    x, w = to_device((random(4, 8), random(8, 8, seed=1, gradient=True)), device)
    with cpu_with_graph_capture() if device == "cpu" else nullcontext() as recorder:
        options = {"emitter": emitter, "cuda_graphs": True, "fuse": False}
        compiled = torch.compile(checkpointed_layers, backend="fxwrap", fullgraph=True, options=options)
        for seed in range(5):
            runs = []
            for called in (checkpointed_layers, compiled):
                torch.manual_seed(seed)
                w.grad = None
                result = called(x, w)
                result.square().sum().backward()
                runs.append((result.detach().clone(), w.grad.clone(), torch.rand(3, device=device)))
            torch.testing.assert_close(runs[1], runs[0], rtol=1e-4, atol=1e-5)
        assert recorder is None or recorder.replayed >= 8


def test_the_partitioner_preserves_the_default_generator() -> None:
    """On GPUs it would use generators of its own, which do not draw eager's numbers; the setting is restored."""
    from functorch.compile import config, default_partition

    seen: list[bool] = []

    def partition(*arguments: Any, **keywords: Any) -> Any:
        seen.append(config.graphsafe_rng_functionalization)
        return default_partition(*arguments, **keywords)

    options = {"partitioner": partition, "emitter": "interpreter", "fuse": False}
    torch.compile(checkpointed, backend="fxwrap", options=options)(random(4, 8), random(8, 8, gradient=True))
    assert seen == [False] and config.graphsafe_rng_functionalization


higher = torch.ops.higher_order


def graph_with_generator_inputs(device: str) -> tuple[GraphModule, tuple[Any, ...]]:
    """What AOTAutograd makes of checkpointed operators where it may: they draw from generators that are inputs."""

    def write(graph: Graph, x: Node, one: Node, other: Node) -> Any:
        drawn = torch._prims.rng_prims.graphsafe_run_with_rng_state
        first = graph.call_function(drawn, (aten.rand_like.default, x), {"rng_state": one})
        both = graph.call_function(drawn, (aten.native_dropout.default, x, 0.5, True), {"rng_state": other})
        dropped = graph.call_function(operator.getitem, (both, 0))
        again = graph.call_function(drawn, (aten.bernoulli.p, x), {"p": 0.5, "rng_state": one})
        own = graph.call_function(aten.rand_like.default, (x,))
        return tuple([graph.call_function(aten.add.Tensor, (item, x)) for item in (first, dropped, again, own)])

    generators = [torch.Generator(device).manual_seed(seed) for seed in (3, 4)]
    return build_graph(3, write), (random(4, 8).to(device), *generators)


def _eager_random_numbers(x: Tensor, one: torch.Generator, other: torch.Generator) -> tuple[Tensor, ...]:
    def drawn(generator: torch.Generator, function: Any, *arguments: Any) -> Any:
        devices = [x.device] if x.is_cuda else []
        with torch.random.fork_rng(devices):
            module = torch.cuda if x.is_cuda else torch.random
            module.set_rng_state(generator.get_state())
            result = function(*arguments)
            generator.set_state(module.get_rng_state())
            return result

    first = drawn(one, torch.rand_like, x)
    dropped = drawn(other, torch.native_dropout, x, 0.5, True)[0]
    again = drawn(one, torch.bernoulli, x, 0.5)
    return first + x, dropped + x, again + x, torch.rand_like(x) + x


@pytest.mark.parametrize("device", DEVICES)
def test_operators_use_generator_inputs(device: str, tmp_path: Path) -> None:
    graph, inputs = graph_with_generator_inputs(device)
    x = inputs[0]
    program = fxwrap.lower(graph, inputs)
    again = fxwrap.from_fx(fxwrap.to_fx(program).graph_module)
    fxwrap.save(program, tmp_path / "drawing.fxw")
    forms = {emitter: emit(program, emitter) for emitter in COMPARED_EMITTERS} | {"read back": emit(again, "python")}
    loaded = fxwrap.load(tmp_path / "drawing.fxw", emitter="fx")
    results = []
    for name, call in {"eager": _eager_random_numbers, **forms, "loaded": loaded}.items():
        torch.manual_seed(11)
        generators = [torch.Generator(device).manual_seed(seed) for seed in (3, 4)]
        drawn = [call(x, *generators) for _ in range(2)]  # the second call goes on where the first one ended
        following = [
            torch.rand(3, device=device),
            *[torch.rand(3, device=device, generator=item) for item in generators],
        ]
        results.append((name, [*drawn[0], *drawn[1], *following]))
    for name, numbers in results[1:]:
        assert all(map(torch.equal, numbers, results[0][1])), name
    assert str(fxwrap.parse(str(program))) == str(program)


def test_functions_receive_generators_as_arguments() -> None:
    """As AOTAutograd has it for compiled regions."""
    x = random(4, 8)

    def draw(graph: Graph, a: Node, generator: Node) -> Any:
        drawn = torch._prims.rng_prims.graphsafe_run_with_rng_state
        return (graph.call_function(drawn, (aten.rand_like.default, a), {"rng_state": generator}),)

    def write(graph: Graph, a: Node, one: Node, other: Node) -> Any:
        layer = graph.get_attr("layer")
        calls = [graph.call_function(higher.invoke_subgraph, (layer, "layer", a, item)) for item in (one, other, one)]
        return tuple([graph.call_function(operator.getitem, (call, 0)) for call in calls])

    generators = [torch.Generator().manual_seed(seed) for seed in (3, 4)]
    program = fxwrap.lower(build_graph(3, write, {"layer": build_graph(2, draw)}), [x, *generators])
    assert len(program.functions) == 1
    first, second = [torch.Generator().manual_seed(seed) for seed in (3, 4)]
    wanted = [torch.rand(4, 8, generator=item) for item in (first, second, first)]
    for emitter in COMPARED_EMITTERS:
        generators = [torch.Generator().manual_seed(seed) for seed in (3, 4)]
        assert all(map(torch.equal, emit(program, emitter)(x, *generators), wanted)), emitter


def test_a_non_generator_is_rejected() -> None:
    program = fxwrap.lower(*graph_with_generator_inputs("cpu"))
    x = random(4, 8)
    with pytest.raises(InputError, match=r"input 'x1': expected a torch.Generator, got NoneType"):
        emit(program, "cpp")(x, None, torch.Generator())
    drawn = torch._prims.rng_prims.graphsafe_run_with_rng_state
    graph = build_graph(
        1, lambda graph, a: graph.call_function(drawn, (aten.rand_like.default, a), {"rng_state": None})
    )
    with pytest.raises(GraphError, match=r"'rng_state' is not a generator\. Pass a placeholder for"):
        fxwrap.lower(graph, [x])


@pytest.mark.parametrize("emitter", ["python", "cpp", "fx"])
def test_random_operators_are_captured_but_state_exchange_is_not(emitter: str) -> None:
    """A recording draws from the default generator, whose state is another one's then."""
    graph, inputs = graph_with_generator_inputs("cpu")
    program = fxwrap.lower(graph, inputs, options=fxwrap.Options(fuse=False))
    can_capture = CaptureChecker(program, ["cpu"])
    verdicts = [can_capture(line) for line in program.body.lines if isinstance(line, ExchangeRngState)]
    assert verdicts == ["random.exchange runs on the host"] * 6
    ours, theirs = ([torch.Generator().manual_seed(seed) for seed in (3, 4)] for _ in range(2))
    with cpu_with_graph_capture() as recorder:
        call = emit(fxwrap.verify(partition(program, can_capture, min_calls=1)), emitter)
        for seed in range(4):
            x = random(4, 8, seed=seed)
            torch.manual_seed(seed)
            actual = call(x, *ours)
            torch.manual_seed(seed)
            assert all(map(torch.equal, actual, fxwrap.run(program, [x, *theirs])))
        assert recorder.replayed == 4 * 3  # four functions; the first call runs them as they are
