"""Compiled functions called with fake tensors return fake tensors with the metadata that eager returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.errors import InputError
from fxwrap.options import EMITTERS, Options

every_emitter = pytest.mark.parametrize("emitter", EMITTERS)


def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return torch.relu(x @ w).softmax(-1).t(), x.sum(0)


def metadata(outputs: Sequence[Tensor | None]) -> list[Any]:
    assert all(type(item) is FakeTensor for item in outputs)
    return [(item.shape, item.stride(), item.dtype, item.device, item.requires_grad) for item in outputs]


def check(run: Callable[..., Sequence[Tensor]], reference: Callable[..., Sequence[Tensor]], rows: int = 3) -> None:
    mode = FakeTensorMode()
    with mode:
        inputs = torch.empty(rows, 8), torch.empty(8, 5)
        expected = metadata(reference(*inputs))
        assert metadata(run(*inputs)) == expected
    assert metadata(run(*inputs)) == expected  # also outside the mode


@every_emitter
def test_a_compiled_function(fresh_dynamo: None, emitter: str) -> None:
    compiled = torch.compile(function, backend="fxwrap", options={"emitter": emitter}, fullgraph=True)
    x, w = torch.rand(3, 8), torch.rand(8, 5)
    check(compiled, function)  # compiles under the mode
    torch.testing.assert_close(compiled(x, w), function(x, w))
    check(compiled, function)
    check(compiled, function, rows=7)
    torch.testing.assert_close(compiled(x, w), function(x, w))


@every_emitter
def test_a_compiled_graph_checks_layouts(emitter: str) -> None:
    x, w = torch.rand(3, 8), torch.rand(8, 5)
    compiled = fxwrap.compile_graph(make_fx(function)(x, w), (x, w), options=Options(emitter=emitter))
    check(compiled, function)
    with FakeTensorMode(), pytest.raises(InputError, match=r"expected f32\[3, 8\] .*, got f32\[2, 8\]"):
        compiled(torch.empty(2, 8), torch.empty(8, 5))
    with pytest.raises(InputError, match="got None"):
        compiled(None, w)
    torch.testing.assert_close(compiled(x, w), function(x, w))


@every_emitter
def test_constants_parameters_and_training(fresh_dynamo: None, emitter: str) -> None:
    constant = torch.arange(4.0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))
    run = torch.compile(lambda x: model(x) + constant, backend="fxwrap", options={"emitter": emitter}, fullgraph=True)
    run(torch.rand(3, 8)).sum().backward()
    with FakeTensorMode(allow_non_fake_inputs=True):  # the parameters and the constant are real
        result = run(torch.empty(3, 8, requires_grad=True))
        assert metadata([result]) == [((3, 4), (4, 1), torch.float32, torch.device("cpu"), True)]
    with FakeTensorMode():
        fake = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))
        compiled = torch.compile(fake, backend="fxwrap", options={"emitter": emitter}, fullgraph=True)
        compiled(torch.empty(3, 8)).sum().backward()
        gradients = [parameter.grad for parameter in fake.parameters()]
        assert [shape for shape, *_ in metadata(gradients)] == [parameter.shape for parameter in model.parameters()]


@every_emitter
def test_a_function_without_inputs(fresh_dynamo: None, emitter: str) -> None:
    def factory() -> tuple[Tensor, Tensor]:
        return torch.ones(3) * 2, torch.arange(4).float().sin()

    compiled = torch.compile(factory, backend="fxwrap", options={"emitter": emitter}, fullgraph=True)
    torch.testing.assert_close(compiled(), factory())
    with FakeTensorMode():
        assert metadata(compiled()) == metadata(factory())
    torch.testing.assert_close(compiled(), factory())
