"""Depthwise convolutions and their gradients on a GPU: kernels where these are faster than the library."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.lines import ExternCall
from fxwrap.options import EMITTERS
from tests.support.agreement import assert_as_exact

pytestmark = pytest.mark.gpu

aten = torch.ops.aten
SHAPES = {  # batch, channels, side, kernel, stride
    "of 3": (16, 72, 56, 3, 1),
    "of 5": (32, 120, 28, 5, 1),
    "of 5 with steps": (8, 72, 56, 5, 2),
    "of 7": (8, 96, 28, 7, 1),
    "of images of 7": (32, 960, 7, 5, 1),
    "of odd channels": (8, 37, 30, 3, 2),
}


def check(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], emitter: str, calls: int) -> None:
    options = fxwrap.Options(emitter=emitter, fallback="error")
    graph = make_fx(function, tracing_mode="fake")(*inputs)
    compiled = fxwrap.compile_graph(graph, inputs, options=options)
    assert sum(isinstance(line, ExternCall) for line in compiled.program.body.lines) == calls
    (result,), eager = compiled(*inputs), function(*inputs)
    assert result.dtype == eager.dtype and result.stride() == eager.stride()
    assert_as_exact(result, eager, function(*[item.double() for item in inputs]))


@pytest.mark.parametrize("emitter", EMITTERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_convolutions(name: str, dtype: torch.dtype, emitter: str) -> None:
    batch, channels, side, kernel, stride = SHAPES[name]
    image, weight = torch.randn(batch, channels, side, side, device="cuda"), torch.randn(channels, 1, kernel, kernel)
    inputs = image.to(dtype).to(memory_format=torch.channels_last), (weight / kernel).to("cuda", dtype)
    options = ([stride] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], channels)
    gradient = torch.randn_like(aten.convolution(*inputs, None, *options))
    is_library = dtype is torch.bfloat16 and kernel == 7
    check(lambda x, w: aten.convolution(x, w, None, *options), inputs, emitter, int(is_library))
    for position in (0, 1):
        needed = [position == 0, position == 1, False]
        is_call = is_library or (dtype is torch.bfloat16 and position == 1)

        def backward(gradient: Tensor, image: Tensor, weight: Tensor) -> Tensor:
            return aten.convolution_backward(gradient, image, weight, None, *options, needed)[position]  # noqa: B023

        check(backward, (gradient, *inputs), emitter, int(is_call))


def test_training() -> None:
    """A block of a mobile network, whose library call computes the gradient of the weight alone."""
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(72, 72, 5, 2, 2, groups=72, bias=False),
        nn.BatchNorm2d(72),
        nn.Hardswish(),
        nn.Conv2d(72, 8, 1),
    ]
    model = nn.Sequential(*layers).to("cuda", torch.bfloat16, memory_format=torch.channels_last)
    image, results = torch.randn(16, 72, 56, 56, device="cuda", dtype=torch.bfloat16), []
    exact = copy.deepcopy(model).double()
    for run in (model, torch.compile(model, backend="fxwrap", fullgraph=True), exact):
        model.zero_grad(set_to_none=True)
        parameters = [*(exact if run is exact else model).parameters()]
        operand = image.to(parameters[0].dtype, memory_format=torch.channels_last).detach().requires_grad_()
        run(operand).square().mean().backward()
        results.append([operand.grad, *[item.grad for item in parameters]])
    for eager, result, expected in zip(*results, strict=True):
        assert eager is not None and result is not None and expected is not None
        assert_as_exact(result, eager, expected, slack=1e-3)
