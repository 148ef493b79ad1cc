"""CUDA graphs on a GPU: models beside eager and beside fxwrap without graphs, memory, random numbers, errors."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import Options
from fxwrap.errors import GraphCaptureWarning
from fxwrap.lines import CallFunction
from fxwrap.runtime.graph_capture.cuda_graphs import CudaGraphCapturer
from fxwrap.runtime.graph_capture.replay import GraphedFunction, GraphManager
from fxwrap.torch_compat import clear_cublas_workspaces

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
EMITTERS = ("python", "cpp", "fx")


class _Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projections, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.projections(self.first(x)).chunk(3, -1)
        q, k, v = [part.unflatten(-1, (4, -1)).transpose(1, 2) for part in parts]
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + self.dropout(self.out(mixed))
        return x + self.dropout(self.mlp(self.second(x)))


class _Gpt(nn.Module):
    """GPT-2's shape, small, with a buffer that each forward writes."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(100, 64), nn.Embedding(32, 64)
        self.blocks = nn.Sequential(*[_Block(64, dropout) for _ in range(3)])
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 100, bias=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


def _models(dropout: float = 0.0) -> tuple[_Gpt, _Gpt]:
    torch.manual_seed(0)
    model, twin = _Gpt(dropout).to(DEVICE), _Gpt(dropout).to(DEVICE)
    twin.load_state_dict(model.state_dict())
    return model, twin


def _tokens(seed: int, rows: int = 4, columns: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 100, (rows, columns), generator=generator).to(DEVICE)


def _compiled(model: nn.Module, **options: Any) -> Any:
    torch.compiler.reset()
    return torch.compile(model, backend="fxwrap", options={"cuda_graphs": True, **options})


def _loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    scores = model(tokens)
    return nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@pytest.fixture(autouse=True)
def no_replay_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error", GraphCaptureWarning)
        yield


@pytest.mark.parametrize("emitter", EMITTERS)
def test_forwards(emitter: str) -> None:
    model, twin = _models()
    compiled = _compiled(twin, emitter=emitter)
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    with torch.no_grad():
        for seed in range(8):
            pairs.append((compiled(_tokens(seed)), model(_tokens(seed))))
            for result, wanted in pairs:  # also those that are held from before
                torch.testing.assert_close(result, wanted, rtol=1e-3, atol=1e-3)
            del pairs[:-2]
    assert int(twin.calls) == int(model.calls) == 8


@pytest.mark.parametrize("emitter", EMITTERS)
def test_training_steps(emitter: str) -> None:
    model, twin = _models()
    compiled = _compiled(twin, emitter=emitter)
    optimizers = [torch.optim.SGD(item.parameters(), 0.05) for item in (model, twin)]
    for step in range(8):
        losses = [_loss(item, _tokens(step)) for item in (model, compiled)]
        if step == 5:  # two forwards before two backwards, and gradients that are added up
            losses = [one + _loss(item, _tokens(100)) for one, item in zip(losses, (model, compiled), strict=True)]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-4)
        for loss in losses:
            loss.backward()
        if step != 3:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        del losses, loss
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


def test_random_numbers_match_calls_without_graphs() -> None:
    """Forward and backward with dropout: losses and the generator's state agree, for replays too."""
    plain, replayed = [], []
    for graphs, outcomes in ((False, plain), (True, replayed)):
        _, model = _models(dropout=0.2)
        compiled = _compiled(model, cuda_graphs=graphs)
        torch.manual_seed(7)
        for seed in range(5):
            loss = _loss(compiled, _tokens(seed))
            loss.backward()
            outcomes.append((loss.detach().clone(), torch.cuda.get_rng_state().clone()))
            del loss
    for (one, state), (other, other_state) in zip(plain, replayed, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)
        assert torch.equal(state, other_state)


def test_sizes_and_parameters_that_change() -> None:
    model, twin = _models()
    compiled = torch.compile(twin, backend="fxwrap", dynamic=True, options={"cuda_graphs": True})
    with torch.no_grad():
        for step, rows in enumerate((2, 3, 2, 3, 5, 2, 3, 5, 5, 2)):
            if step == 6:  # parameters move: their graphs are captured again
                for item in (model, twin):
                    item.head.weight.data = item.head.weight.data.clone() * 2
            torch.testing.assert_close(compiled(_tokens(step, rows)), model(_tokens(step, rows)), rtol=1e-3, atol=1e-3)


def _graph(emitter: str, **options: Any) -> tuple[Any, torch.Tensor, torch.Tensor]:
    x, w = torch.randn(32, 32, device=DEVICE), torch.randn(32, 32, device=DEVICE)
    graph = make_fx(_chain)(x, w)
    return fxwrap.compile_graph(graph, (x, w), options=Options(emitter=emitter, **options), static_inputs=[1]), x, w


def _chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for _ in range(6):
        x = torch.tanh(x @ w) + x.sum(0)
    return x


@pytest.mark.parametrize("emitter", EMITTERS)
def test_many_replays_leak_nothing(emitter: str) -> None:
    compiled, x, w = _graph(emitter, cuda_graphs=True)
    assert any(isinstance(line, CallFunction) and line.max_captures for line in compiled.program.body.lines)
    inputs = [torch.randn_like(x) for _ in range(3)]
    for step in range(20):
        torch.testing.assert_close(compiled(inputs[step % 3], w)[0], _chain(inputs[step % 3], w), rtol=1e-3, atol=1e-3)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for step in range(10_000):
        compiled(inputs[step % 3], w)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_memory_is_released_with_the_compiled_function() -> None:
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    compiled, x, w = _graph("python", cuda_graphs=True)
    for _ in range(3):
        (held,) = compiled(x, w)
    wanted = held.clone()
    del compiled
    gc.collect()
    torch.testing.assert_close(held, wanted, rtol=0, atol=0)
    del held, wanted, x, w
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before


@pytest.mark.parametrize("emitter", EMITTERS)
def test_an_outer_capture_may_contain_a_compiled_function(emitter: str) -> None:
    compiled, x, w = _graph(emitter)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        compiled(x, w)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (result,) = compiled(x, w)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.testing.assert_close(result, _chain(x, w), rtol=1e-3, atol=1e-3)


def test_replay_is_disabled_during_an_outer_capture() -> None:
    compiled, x, w = _graph("python", cuda_graphs=True)
    for _ in range(3):
        compiled(x, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (result,) = compiled(x, w)
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.testing.assert_close(result, _chain(x, w), rtol=1e-3, atol=1e-3)


def test_synchronizing_operators_are_not_captured() -> None:
    def body(arguments: list[Any]) -> tuple[torch.Tensor, ...]:
        (x,) = arguments
        arguments.clear()
        return (x + x.sum().item(),)

    function = GraphedFunction(body, GraphManager(DEVICE), "partition_0", 8)
    x = torch.randn(4, device=DEVICE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphCaptureWarning)
        for _ in range(3):
            (result,) = function([x])
            torch.testing.assert_close(result, x + x.sum())
    assert function.capture_disabled


def test_nothing_is_captured_without_the_caching_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    model, twin = _models()
    # Only now: torch reads the variable once, when it first allocates, and would not cache in any later test either.
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    compiled = _compiled(model)
    with torch.no_grad(), pytest.warns(GraphCaptureWarning, match="caching allocator is off"):
        for seed in range(3):
            torch.testing.assert_close(compiled(_tokens(seed)), twin(_tokens(seed)), rtol=1e-3, atol=1e-3)


def test_a_failed_capture_has_no_side_effects() -> None:
    """The current stream, the generator, the freed memory, and the next capture, in another pool."""
    gc.collect()  # garbage of other tests must not be freed while memory is counted
    clear_cublas_workspaces()
    x = torch.randn(1000, device=DEVICE)
    recorder = CudaGraphCapturer(torch.device(DEVICE))
    stream = torch.cuda.current_stream()
    for error, fails in ((RuntimeError, lambda: x.sum().item()), (ValueError, lambda: int("no number"))):
        before = torch.cuda.memory_allocated()
        with pytest.raises(error):
            recorder.capture(lambda fails=fails: [x + fails() + torch.rand_like(x)], recorder.pool())  # type: ignore[misc]
        assert torch.cuda.current_stream() == stream
        torch.manual_seed(0)
        drawn = torch.randn(4, device=DEVICE)
        torch.manual_seed(0)
        assert torch.equal(drawn, torch.randn(4, device=DEVICE))
        del drawn
        assert torch.cuda.memory_allocated() == before
    replay, (result,) = recorder.capture(lambda: [x * 2 + torch.rand_like(x)], recorder.pool())
    for seed in range(3):
        torch.manual_seed(seed)
        replay()
        torch.manual_seed(seed)
        torch.testing.assert_close(result, x * 2 + torch.rand_like(x))


def test_replays_synchronize_with_other_streams() -> None:
    compiled, x, w = _graph("python", cuda_graphs=True)
    for _ in range(3):
        compiled(x, w)
    side = torch.cuda.Stream()
    for step in range(20):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side if step % 2 else torch.cuda.current_stream()):
            new = torch.randn(32, 32, device=DEVICE)
            (result,) = compiled(new, w)
            wanted = _chain(new, w)
        torch.cuda.current_stream().wait_stream(side)
        torch.testing.assert_close(result, wanted, rtol=1e-3, atol=1e-3)
        del result
