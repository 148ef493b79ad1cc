"""Depthwise convolutions and their gradients as kernels, on a GPU whose traits ask for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.devices import CUDA
from fxwrap.lines import ExternCall
from fxwrap.options import EMITTERS
from tests.support.agreement import assert_as_exact

pytestmark = pytest.mark.gpu

aten = torch.ops.aten
LIMITS = ((torch.bfloat16, (25, 25, 0)), (torch.float32, (49, 49, 49)))
DEVICE = dataclasses.replace(CUDA, convolutions=dataclasses.replace(CUDA.convolutions, depthwise_windows=LIMITS))
SHAPES = {  # batch, channels, side, kernel, stride
    "of 3": (16, 72, 56, 3, 1),
    "of 5": (32, 120, 28, 5, 1),
    "of 5 with steps": (8, 72, 56, 5, 2),
    "of 7": (8, 96, 28, 7, 1),
    "of images of 7": (32, 960, 7, 5, 1),
    "of odd channels": (8, 37, 30, 3, 2),
}


def check(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], emitter: str, calls: int) -> None:
    options = fxwrap.Options(emitter=emitter, fallback="error", devices=(DEVICE,))
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
