"""Streams and device guards on GPUs: waits are real, results are eager's, and the caller's device and stream stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.comparison.driver import capture
from fxwrap.converters.emission import emit
from fxwrap.lines import EnterDevice, ExternCall, Launch, RecordEvent
from fxwrap.options import EMITTERS, Options
from tests.conftest import NO_SECOND_CUDA
from tests.lowering.streams.test_lowering import CURRENT, SIDE, Model

pytestmark = pytest.mark.gpu

FORMS = ("interpreter", *EMITTERS)
SIZE = 1536


def two_gpus(test: Any) -> Any:
    return pytest.mark.skipif(torch.cuda.device_count() < 2, reason=NO_SECOND_CUDA)(test)


@pytest.fixture(autouse=True)
def no_current_guard_after_test() -> Iterator[None]:
    before = torch.cuda.current_device(), torch.cuda.current_stream()
    yield
    assert (torch.cuda.current_device(), torch.cuda.current_stream()) == before


def random(*sizes: int, device: str = "cuda:0") -> torch.Tensor:
    return torch.randn(*sizes, device=device) / sizes[-1] ** 0.5


def close(result: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(result, wanted, rtol=2e-3, atol=2e-3)


# --- a graph with streams -------------------------------------------------------------------------------------------


def chain(x: torch.Tensor, count: int) -> torch.Tensor:
    for _ in range(count):
        x = torch.tanh(x @ x)
    return x


def side_chain(count: int) -> GraphModule:
    """A long chain of products on a side stream, whose end is read on the current one; no wait is in the graph."""
    aten = torch.ops.aten
    model = Model("cuda:0")
    model.inputs[0].meta["val"] = _fake(model, SIZE)
    y = model.inputs[0]
    for _ in range(count):
        y = model.call(aten.tanh.default, model.call(aten.mm.default, y, y, stream=SIDE), stream=SIDE)
    beside = model.call(aten.exp.default, model.inputs[0])
    return model.module(model.call(aten.add.Tensor, y, beside), beside)


def _fake(model: Model, size: int) -> torch.Tensor:
    with model.mode:
        return torch.empty(size, size, device="cuda:0")


@pytest.mark.usefixtures("empty_table")
@pytest.mark.parametrize("form", FORMS)
def test_side_stream_results_are_ready_when_read(form: str) -> None:
    compiled = fxwrap.compile_graph(side_chain(12), options=Options(emitter="python"))
    assert any(isinstance(line, RecordEvent) and line.stream == SIDE for line in compiled.program.lines())
    run = emit(compiled.program, form)
    for _ in range(8):
        x = random(SIZE, SIZE)
        y, beside = run(x)
        x_after = x.clone()
        del x  # its memory is free as soon as the program has run
        torch.empty(SIZE, SIZE, device="cuda:0").fill_(float("nan"))
        close(y, chain(x_after, 12) + x_after.exp())
        close(beside, x_after.exp())


@pytest.mark.usefixtures("empty_table")
@pytest.mark.parametrize("form", FORMS)
def test_freed_memory_waits_for_the_stream_that_reads_it(form: str) -> None:
    """The current stream fills new memory at once; the side stream is at a long chain, and still reads the old."""
    aten, streams = torch.ops.aten, torch.ops.streams
    model = Model("cuda:0")
    model.inputs[0].meta["val"] = _fake(model, SIZE)
    (x,) = model.inputs
    t = model.call(aten.add.Tensor, x, 1)
    model.call(streams.wait_stream.default, SIDE, CURRENT)
    slow = x
    for _ in range(12):
        slow = model.call(aten.mm.default, slow, x, stream=SIDE)
    late = model.call(aten.mm.default, t, slow, stream=SIDE)  # t is freed after this line is queued
    filled = model.call(aten.mm.default, x, x)
    again = model.call(aten.mm.default, filled, x)
    graph = model.module(late, again)
    run = emit(fxwrap.compile_graph(graph, options=Options(fuse=False)).program, form)
    for _ in range(8):
        x_ = random(SIZE, SIZE)
        late_, again_ = run(x_)
        slow_ = x_
        for _ in range(12):
            slow_ = slow_ @ x_
        close(late_, (x_ + 1) @ slow_)
        close(again_, x_ @ x_ @ x_)


# --- models under torch.compile -------------------------------------------------------------------------------------


def with_streams(side: torch.cuda.Stream) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            y = (x @ w).relu()
            for _ in range(6):
                y = torch.tanh(y @ w)
        z = (x + 1).sin() @ w
        current.wait_stream(side)
        return y + z

    return model


def with_events(side: torch.cuda.Stream) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        begun, done = torch.cuda.Event(), torch.cuda.Event()
        h = x.cos() @ w
        begun.record()
        with torch.cuda.stream(side):
            begun.wait()
            y = torch.tanh(h @ w).exp() @ w
            done.record()
        z = h.sin() @ w
        done.wait()
        return (y + z).relu()

    return model


def with_recorded_events(side: torch.cuda.Stream) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Events that `record_event` makes: torch 2.11 does not say which of them `wait` is for."""

    def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = x.cos() @ w
        side.wait_event(torch.cuda.current_stream().record_event())
        with torch.cuda.stream(side):
            y = torch.tanh(h @ w).exp() @ w
            done = side.record_event()
        z = h.sin() @ w
        done.wait()
        return (y + z).relu()

    return model


MAKERS = [with_streams, with_events, with_recorded_events]


@pytest.mark.parametrize("emitter", EMITTERS)
@pytest.mark.parametrize("make", MAKERS)
def test_a_model_with_streams_matches_eager(make: Any, emitter: str) -> None:
    side = torch.cuda.Stream()
    model = make(side)
    compiled = torch.compile(model, backend="fxwrap", options={"emitter": emitter})
    for seed in range(4):
        torch.manual_seed(seed)
        x, w = random(SIZE, SIZE), random(SIZE, SIZE)
        close(compiled(x, w), model(x, w))


@pytest.mark.parametrize("emitter", EMITTERS)
@pytest.mark.parametrize("make", MAKERS)
def test_gradients_through_streams_match_eager(make: Any, emitter: str) -> None:
    side = torch.cuda.Stream()
    model = make(side)
    compiled = torch.compile(model, backend="fxwrap", options={"emitter": emitter})
    x, w = random(SIZE, SIZE), random(SIZE, SIZE).requires_grad_()
    model(x, w).sum().backward()
    assert w.grad is not None
    wanted, w.grad = w.grad, None
    compiled(x, w).sum().backward()
    torch.testing.assert_close(w.grad, wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("emitter", EMITTERS)
def test_stream_calls_of_a_model_are_in_its_program(emitter: str) -> None:
    """Also those that no tensor of the program needs: what ran before it on the side stream is done when it reads."""
    side = torch.cuda.Stream()

    def model(x: torch.Tensor) -> torch.Tensor:
        torch.cuda.current_stream().wait_stream(side)
        return x + 1

    (graph,) = capture(model, (random(SIZE, SIZE),), options=Options(emitter=emitter))
    steps = [line.stream != 0 for line in graph.compiled.program.lines() if line.event_step]
    assert steps == [True, False]  # recorded on the side stream, waited for on the current one
    compiled = torch.compile(model, backend="fxwrap", options={"emitter": emitter})
    for _ in range(4):
        x = random(SIZE, SIZE)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = chain(x, 24)
        result = compiled(y)
        torch.cuda.synchronize()
        close(result, chain(x, 24) + 1)


@pytest.mark.parametrize("emitter", EMITTERS)
def test_host_synchronization_is_preserved(emitter: str) -> None:
    side = torch.cuda.Stream()

    def model(x: torch.Tensor) -> torch.Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = chain(x, 12).to("cpu", non_blocking=True)
        side.synchronize()
        return y + 1

    (graph,) = capture(model, (random(SIZE, SIZE),), options=Options(emitter=emitter))
    called = [line.target for line in graph.compiled.program.lines() if isinstance(line, ExternCall)]
    assert any("synchronize" in target for target in called)
    compiled = torch.compile(model, backend="fxwrap", options={"emitter": emitter})
    for _ in range(4):
        x = random(SIZE, SIZE)
        close(compiled(x), chain(x, 12).cpu() + 1)


@pytest.mark.parametrize("emitter", EMITTERS)
def test_a_program_runs_on_the_callers_current_stream(emitter: str) -> None:
    side = torch.cuda.Stream()
    compiled = torch.compile(lambda x: (chain(x, 8) + 1).sin(), backend="fxwrap", options={"emitter": emitter})
    x = random(SIZE, SIZE)
    compiled(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        y = random(SIZE, SIZE)
        result = compiled(y)
        wanted = (chain(y, 8) + 1).sin()
    side.synchronize()
    close(result, wanted)


# --- one GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_an_error_in_a_guard_restores_device_and_stream(form: str) -> None:
    text = """
program @p(%x: borrowed f32[4]@cuda:0) {
  %begun = device.record() device="cuda:0" : opaque<Event>
  device.wait(%begun) device="cuda:0" stream=1
  device.enter() device="cuda:0" stream=1
  %z = extern.call @aten.bitwise_not.default(%x) stream=1 : f32[4]@cuda:0
  device.exit() device="cuda:0" stream=1
  %done = device.record() device="cuda:0" stream=1 : opaque<Event>
  device.wait(%done) device="cuda:0"
  control.return(%z)
}
"""
    run = emit(fxwrap.verify(fxwrap.parse(text)), form)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="bitwise_not"):
            run(torch.zeros(4, device="cuda:0"))


# --- two GPUs -------------------------------------------------------------------------------------------------------


def graph_of(function: Callable[..., Any], *inputs: torch.Tensor) -> GraphModule:
    with torch.no_grad():
        return make_fx(function, tracing_mode="fake")(*inputs)


@two_gpus
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("current", [0, 1])
def test_a_model_runs_on_its_gpu_regardless_of_the_current_one(current: int, form: str) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.softmax((x @ w).sin() + 1, -1).sum(0).exp()

    x, w = random(64, 64, device="cuda:1"), random(64, 64, device="cuda:1")
    program = fxwrap.compile_graph(graph_of(function, x, w), (x, w), options=Options(fallback="error")).program
    assert sum(isinstance(line, EnterDevice) for line in program.lines()) == 1
    assert sum(isinstance(line, Launch) for line in program.lines()) >= 1
    run = emit(program, form)
    with torch.cuda.device(current):
        for _ in range(2):
            (result,) = run(x, w)
            assert torch.cuda.current_device() == current
    assert result.device == x.device
    close(result, function(x, w))


@two_gpus
@pytest.mark.parametrize("form", FORMS)
def test_a_program_has_tensors_on_two_gpus(form: str) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = (x.sin() + 1) * x.cos()
        second = (first.to("cuda:1") + y).relu() * 2
        third = torch.softmax(second.to("cuda:0") + first, -1)
        return second, third

    x, y = random(512, 512), random(512, 512, device="cuda:1")
    program = fxwrap.compile_graph(graph_of(function, x, y), (x, y), options=Options(fallback="error")).program
    entered = {line.device for line in program.lines() if isinstance(line, EnterDevice)}
    assert entered == {"cuda:0", "cuda:1"}
    run = emit(program, form)
    for _ in range(4):
        x, y = random(512, 512), random(512, 512, device="cuda:1")
        for result, wanted in zip(run(x, y), function(x, y), strict=True):
            assert result.device == wanted.device
            close(result, wanted)


@two_gpus
def test_a_graph_run_node_by_node_is_on_its_gpu() -> None:
    x = random(64, 64, device="cuda:1")
    compiled = fxwrap.compile_graph(graph_of(lambda x: (x.sin() + 1).exp(), x), (x,))
    (result,) = torch.fx.Interpreter(compiled.graph_module).run(x)
    close(result, (x.sin() + 1).exp())


@two_gpus
@pytest.mark.parametrize("emitter", EMITTERS)
def test_a_training_step_runs_on_the_second_gpu(emitter: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.LayerNorm(64)).to("cuda:1")
    x = random(32, 64, device="cuda:1")
    model(x).square().sum().backward()
    wanted = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    torch.compile(model, backend="fxwrap", options={"emitter": emitter})(x).square().sum().backward()
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        assert parameter.grad is not None and gradient is not None
        close(parameter.grad, gradient)
