"""The option `cuda_graphs` through torch.compile and compile_graph, on a CPU with graph capture."""

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
from tests.runtime.cuda_graphs.cpu_graph_capturer import CpuGraphCapturer, cpu_with_graph_capture


@pytest.fixture
def recorder() -> Iterator[CpuGraphCapturer]:
    with cpu_with_graph_capture() as capturer:
        yield capturer


class _Model(nn.Module):
    """Linear layers, running statistics that each forward writes, dropout, an activation that is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 6)
        self.norm, self.dropout = nn.BatchNorm1d(16), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.dropout(torch.tanh(self.norm(self.first(x)))))
        return result


def _pair() -> tuple[_Model, _Model]:
    torch.manual_seed(0)
    model, twin = _Model(), _Model()
    twin.load_state_dict(model.state_dict())
    return model, twin


def _calls(program: Program) -> list[CallFunction]:
    return [line for line in program.body.lines if isinstance(line, CallFunction) and line.max_captures]


def _step(model: Any, x: torch.Tensor, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    result: torch.Tensor = model(x)
    result.square().mean().backward()
    return result.detach()


def _assert_alike(model: nn.Module, twin: nn.Module) -> None:
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        for kind, left, right in (("parameter", one, other), ("gradient of", one.grad, other.grad)):
            torch.testing.assert_close(
                left, right, rtol=1e-5, atol=1e-4, msg=lambda text, kind=kind, name=name: f"{kind} {name}: {text}"
            )
    for one, other in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("emitter", ["python", "fx"])
def test_training(recorder: CpuGraphCapturer, emitter: str) -> None:
    """Steps with gradients that are dropped or added up, and two forwards before two backwards."""
    model, twin = _pair()
    compiled = torch.compile(twin, backend="fxwrap", mode=None, options={"cuda_graphs": True, "emitter": emitter})
    optimizers = [torch.optim.SGD(item.parameters(), 0.1) for item in (model, twin)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxwrap.errors.GraphCaptureWarning)
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


def test_inference_by_mode(recorder: CpuGraphCapturer) -> None:
    model, twin = _pair()
    model.eval(), twin.eval()
    compiled = torch.compile(twin, backend="fxwrap", mode="reduce-overhead")
    pairs = []
    with torch.no_grad():
        for _ in range(6):
            x = torch.randn(5, 6)
            pairs.append((compiled(x), model(x)))
            for result, wanted in pairs[-2:]:
                torch.testing.assert_close(result, wanted)
            del pairs[:-2]
    assert recorder.replayed >= 4


def test_symbolic_sizes(recorder: CpuGraphCapturer) -> None:
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


def test_excluded_operators_split_a_program(recorder: CpuGraphCapturer) -> None:
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    graph = _graph(_waits_between, x, w)
    whole = fxwrap.compile_graph(graph, (x, w), options=Options(cuda_graphs=True))
    options = Options(cuda_graphs=True, cuda_graph_exclude=frozenset({"aten.bernoulli.p"}), cuda_graph_limit=3)
    cut = fxwrap.compile_graph(graph, (x, w), options=options, static_inputs=[1])
    assert len(_calls(whole.program)) == 1 and whole.stages[-1].pass_name == "partition"
    first, second = _calls(cut.program)
    assert (
        first.max_captures == second.max_captures == 3
        and first.operand_positions(first.static_operands)
        and second.operand_positions(second.static_operands)
    )
    for compiled in (whole, cut):
        for seed in range(4):
            torch.manual_seed(seed)
            wanted = _waits_between(x + seed, w)
            torch.manual_seed(seed)
            torch.testing.assert_close(compiled(x + seed, w)[0], wanted)


def test_devices_without_graph_capture_are_unchanged() -> None:
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    graph = _graph(_waits_between, x, w)
    plain, asked = (fxwrap.compile_graph(graph, (x, w), options=Options(cuda_graphs=on)) for on in (False, True))
    assert plain.program.body == asked.program.body and not _calls(asked.program)
