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
from fxwrap.compare import COMPARED
from fxwrap.compiler import emit
from fxwrap.errors import GraphError, InputError
from fxwrap.lines import ExchangeState
from fxwrap.passes.partition import partition
from fxwrap.passes.recordable import Recordable
from tests.control.cases import DEVICES, random, to_device
from tests.control.graphs import written
from tests.cuda_graphs.recorder import cpu_that_records

aten = torch.ops.aten


def _part(x: Tensor, w: Tensor) -> Tensor:
    return torch.nn.functional.dropout((x @ w).sin(), 0.5)


def checkpointed(x: Tensor, w: Tensor) -> Tensor:
    y = checkpoint(_part, x, w, use_reentrant=False)
    return checkpoint(_part, y, w, use_reentrant=False) + torch.rand_like(x)


def _keep_products(context: Any, operator: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
    kept = operator in (aten.mm.default, aten.native_dropout.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def selectively_checkpointed(x: Tensor, w: Tensor) -> Tensor:
    contexts = partial(create_selective_checkpoint_contexts, _keep_products)
    y = checkpoint(_part, x, w, use_reentrant=False, context_fn=contexts)
    return checkpoint(_part, y, w, use_reentrant=False, context_fn=contexts) + torch.rand_like(x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("function", [checkpointed, selectively_checkpointed])
def test_random_numbers_are_those_of_eager(function: Any, device: str, fresh_dynamo: None) -> None:
    x, w = to_device((random(4, 8), random(8, 8, seed=1, gradient=True)), device)

    def run(called: Any) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(11)
        w.grad = None
        result = called(x, w)
        result.square().sum().backward()
        return result.detach(), w.grad, torch.rand(3, device=device)

    wanted = run(function)
    for emitter in COMPARED:
        torch.compiler.reset()
        compiled = torch.compile(function, backend="fxwrap", fullgraph=True, options={"emitter": emitter})
        result, gradient, next_numbers = run(compiled)
        assert torch.equal(result == 0, wanted[0] == 0) and torch.equal(next_numbers, wanted[2]), emitter
        torch.testing.assert_close((result, gradient), wanted[:2], rtol=1e-5, atol=1e-6)


def checkpointed_layers(x: Tensor, w: Tensor) -> Tensor:
    def layer(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(((x @ w).sin() @ w).cos() @ w, 0.5) @ w

    for _ in range(2):
        x = checkpoint(layer, x, use_reentrant=False)
    return x


_ON_GPU = [pytest.param("cuda", emitter, marks=pytest.mark.gpu) for emitter in ("python", "cpp", "fx")]


@pytest.mark.parametrize(("device", "emitter"), [("cpu", "python"), *_ON_GPU])
def test_recordings_draw_the_numbers_of_eager(device: str, emitter: str, fresh_dynamo: None) -> None:
    x, w = to_device((random(4, 8), random(8, 8, seed=1, gradient=True)), device)
    with cpu_that_records() if device == "cpu" else nullcontext() as recorder:
        options = {"emitter": emitter, "cuda_graphs": True, "fuse": False}
        compiled = torch.compile(checkpointed_layers, backend="fxwrap", fullgraph=True, options=options)
        for seed in range(5):
            found = []
            for called in (checkpointed_layers, compiled):
                torch.manual_seed(seed)
                w.grad = None
                result = called(x, w)
                result.square().sum().backward()
                found.append((result.detach().clone(), w.grad.clone(), torch.rand(3, device=device)))
            torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
        assert recorder is None or recorder.replayed >= 8


def test_the_partitioner_leaves_the_default_generator_in_use(fresh_dynamo: None) -> None:
    """On GPUs it would take generators of its own, which do not give eager's numbers; what is set comes back after."""
    from functorch.compile import config, default_partition

    seen: list[bool] = []

    def partition(*arguments: Any, **keywords: Any) -> Any:
        seen.append(config.graphsafe_rng_functionalization)
        return default_partition(*arguments, **keywords)

    options = {"partitioner": partition, "emitter": "interpreter", "fuse": False}
    torch.compile(checkpointed, backend="fxwrap", options=options)(random(4, 8), random(8, 8, gradient=True))
    assert seen == [False] and config.graphsafe_rng_functionalization


higher = torch.ops.higher_order


def drawing(device: str) -> tuple[GraphModule, tuple[Any, ...]]:
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
    return written(3, write), (random(4, 8).to(device), *generators)


def _drawn_in_eager(x: Tensor, one: torch.Generator, other: torch.Generator) -> tuple[Tensor, ...]:
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
def test_operators_draw_from_generators_that_are_inputs(device: str, tmp_path: Path) -> None:
    graph, inputs = drawing(device)
    x = inputs[0]
    program = fxwrap.lower(graph, inputs)
    again = fxwrap.from_fx(fxwrap.to_fx(program).graph_module)
    fxwrap.save(program, tmp_path / "drawing.fxw")
    forms = {emitter: emit(program, emitter) for emitter in COMPARED} | {"read back": emit(again, "python")}
    loaded = fxwrap.load(tmp_path / "drawing.fxw", emitter="fx")
    results = []
    for name, call in {"eager": _drawn_in_eager, **forms, "loaded": loaded}.items():
        torch.manual_seed(11)
        generators = [torch.Generator(device).manual_seed(seed) for seed in (3, 4)]
        drawn = [call(x, *generators) for _ in range(2)]  # the second call goes on where the first one ended
        left = [torch.rand(3, device=device), *[torch.rand(3, device=device, generator=item) for item in generators]]
        results.append((name, [*drawn[0], *drawn[1], *left]))
    for name, found in results[1:]:
        assert all(map(torch.equal, found, results[0][1])), name
    assert str(fxwrap.parse(str(program))) == str(program)


def test_a_function_takes_the_generator_that_each_call_passes() -> None:
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
    program = fxwrap.lower(written(3, write, {"layer": written(2, draw)}), [x, *generators])
    assert len(program.functions) == 1
    first, second = [torch.Generator().manual_seed(seed) for seed in (3, 4)]
    wanted = [torch.rand(4, 8, generator=item) for item in (first, second, first)]
    for emitter in COMPARED:
        generators = [torch.Generator().manual_seed(seed) for seed in (3, 4)]
        assert all(map(torch.equal, emit(program, emitter)(x, *generators), wanted)), emitter


def test_what_is_no_generator_is_refused() -> None:
    program = fxwrap.lower(*drawing("cpu"))
    x = random(4, 8)
    with pytest.raises(InputError, match=r"input 'x1': expected a torch.Generator, got NoneType"):
        emit(program, "cpp")(x, None, torch.Generator())
    drawn = torch._prims.rng_prims.graphsafe_run_with_rng_state
    graph = written(1, lambda graph, a: graph.call_function(drawn, (aten.rand_like.default, a), {"rng_state": None}))
    with pytest.raises(GraphError, match=r"'rng_state' is no generator\. Pass a placeholder that stands for"):
        fxwrap.lower(graph, [x])


@pytest.mark.parametrize("emitter", ["python", "cpp", "fx"])
def test_what_draws_is_recorded_and_the_exchange_around_it_is_not(emitter: str) -> None:
    """A recording draws from the default generator, whose state is another one's then."""
    graph, inputs = drawing("cpu")
    program = fxwrap.lower(graph, inputs, options=fxwrap.Options(fuse=False))
    judge = Recordable(program, ["cpu"])
    verdicts = [judge(line) for line in program.body.lines if isinstance(line, ExchangeState)]
    assert verdicts == ["random.exchange runs on the host"] * 6
    ours, theirs = ([torch.Generator().manual_seed(seed) for seed in (3, 4)] for _ in range(2))
    with cpu_that_records() as recorder:
        call = emit(fxwrap.verify(partition(program, judge, fewest=1)), emitter)
        for seed in range(4):
            x = random(4, 8, seed=seed)
            torch.manual_seed(seed)
            found = call(x, *ours)
            torch.manual_seed(seed)
            assert all(map(torch.equal, found, fxwrap.run(program, [x, *theirs])))
        assert recorder.replayed == 4 * 3  # four functions; the first call runs them as they are
