"""The option `cuda_graphs` through torch.compile and compile_graph, on a CPU that records."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fxwrap
from fxwrap import Options
from fxwrap.lines import CallFunction
from fxwrap.wrapper_ir import Program
from tests.cuda_graphs.recorder import CpuRecorder, cpu_that_records


@pytest.fixture
def recorder() -> Iterator[CpuRecorder]:
    with cpu_that_records() as made:
        yield made


class _Model(nn.Module):
    """Linear layers, running statistics that each forward writes, dropout, an activation that is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 6)
        self.norm, self.dropout = nn.BatchNorm1d(16), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(self.dropout(torch.tanh(self.norm(self.first(x)))))
        return found


def _pair() -> tuple[_Model, _Model]:
    torch.manual_seed(0)
    model, twin = _Model(), _Model()
    twin.load_state_dict(model.state_dict())
    return model, twin


def _calls(program: Program) -> list[CallFunction]:
    return [line for line in program.body.lines if isinstance(line, CallFunction) and line.replay]


def _step(model: Any, x: torch.Tensor, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    result: torch.Tensor = model(x)
    result.square().mean().backward()
    return result.detach()


def _assert_alike(model: nn.Module, twin: nn.Module) -> None:
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=lambda text, name=name: f"{name}: {text}")
        torch.testing.assert_close(one.grad, other.grad, msg=lambda text, name=name: f"gradient of {name}: {text}")
    for one, other in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("emitter", ["python", "fx"])
def test_training(recorder: CpuRecorder, fresh_dynamo: None, emitter: str) -> None:
    """Steps with gradients that are dropped or added up, and two forwards before two backwards."""
    model, twin = _pair()
    compiled = torch.compile(twin, backend="fxwrap", mode=None, options={"cuda_graphs": True, "emitter": emitter})
    optimizers = [torch.optim.SGD(item.parameters(), 0.1) for item in (model, twin)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxwrap.errors.ReplayWarning)
        for step in range(8):
            x = torch.randn(5, 6)
            torch.testing.assert_close(_step(compiled, x, step), _step(model, x, step))
            if step % 3 == 1:
                losses = []
                for each in (model, compiled):
                    torch.manual_seed(step)
                    first, second = each(x), each(x + 1)
                    losses.append((first * second).sum())
                    losses[-1].backward()
                torch.testing.assert_close(*losses)
            _assert_alike(model, twin)
            if step != 4:  # gradients are added up once
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
    assert recorder.recorded >= 2 and recorder.replayed > 12


def test_inference_by_its_mode(recorder: CpuRecorder, fresh_dynamo: None) -> None:
    model, twin = _pair()
    model.eval(), twin.eval()
    compiled = torch.compile(twin, backend="fxwrap", mode="reduce-overhead")
    kept = []
    with torch.no_grad():
        for _ in range(6):
            x = torch.randn(5, 6)
            kept.append((compiled(x), model(x)))
            for result, wanted in kept[-2:]:
                torch.testing.assert_close(result, wanted)
            del kept[:-2]
    assert recorder.replayed >= 4


def test_sizes_that_change(recorder: CpuRecorder, fresh_dynamo: None) -> None:
    model, twin = _pair()
    model.eval(), twin.eval()
    compiled = torch.compile(twin, backend="fxwrap", dynamic=True, options={"cuda_graphs": True})
    with torch.no_grad():
        for rows in (3, 5, 3, 5, 7, 3, 5, 5, 3):
            x = torch.randn(rows, 6)
            torch.testing.assert_close(compiled(x), model(x))
    assert (recorder.recorded, recorder.replayed) == (2, 6)


def _graph(function: Any, *inputs: Any) -> Any:
    return torch.fx.experimental.proxy_tensor.make_fx(function)(*inputs)


def _waits_between(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for _ in range(4):
        x = torch.tanh(x @ w)
    x = x.bernoulli(0.5)
    for _ in range(4):
        x = torch.tanh(x @ w)
    return x


def test_operators_that_are_kept_out_cut_a_program(recorder: CpuRecorder) -> None:
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    graph = _graph(_waits_between, x, w)
    whole = fxwrap.compile_graph(graph, (x, w), options=Options(cuda_graphs=True))
    options = Options(cuda_graphs=True, keep_out_of_graphs=frozenset({"aten.bernoulli.p"}), cuda_graph_limit=3)
    cut = fxwrap.compile_graph(graph, (x, w), options=options, static_inputs=[1])
    assert len(_calls(whole.program)) == 1 and whole.stages[-1].made_by == "partition"
    first, second = _calls(cut.program)
    assert first.replay == second.replay == 3 and first.places(first.fixed) and second.places(second.fixed)
    for compiled in (whole, cut):
        for seed in range(4):
            torch.manual_seed(seed)
            wanted = _waits_between(x + seed, w)
            torch.manual_seed(seed)
            torch.testing.assert_close(compiled(x + seed, w)[0], wanted)


def test_programs_for_devices_that_record_nothing_stay_as_they_are() -> None:
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    graph = _graph(_waits_between, x, w)
    plain, asked = (fxwrap.compile_graph(graph, (x, w), options=Options(cuda_graphs=on)) for on in (False, True))
    assert plain.program.body == asked.program.body and not _calls(asked.program)
