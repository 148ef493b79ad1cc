"""Kernels add the biases of convolutions and sum their gradients, where a library does so in passes of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from fxwrap.compile import compile_graph
from fxwrap.devices import CPU
from fxwrap.fx_passes.convolutions import biases
from tests.lowering.planned_programs import STRICT, check

DEVICE = dataclasses.replace(
    CPU,
    convolutions=dataclasses.replace(
        CPU.convolutions, unfused_bias_dtypes=frozenset({torch.float32}), channels_last_dtypes=frozenset()
    ),
)
UNFUSED = STRICT.replace(devices=(DEVICE,))
aten = torch.ops.aten


def _with_two_readers(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Returns an activation and the convolution, which a backward reads."""
    image = F.conv2d(x, weight, bias, padding=1, groups=2)
    return F.silu(image), image


def _of_a_sequence(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The kernel reads the result through views."""
    return torch.softmax(F.conv_transpose1d(x.flatten(2), weight.flatten(2), bias).transpose(1, 2), 2)


def _of_a_double(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.conv2d(x.double(), weight.double(), bias.double()).cos()


def _read_by_a_call(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.linalg.svdvals(F.conv2d(x, weight, bias, groups=2))


FORWARDS: dict[Callable[..., Any], int] = {_with_two_readers: 1, _of_a_sequence: 1, _of_a_double: 0, _read_by_a_call: 0}
"""Functions of an image, with the number of convolutions that lose their bias."""


@pytest.mark.parametrize("function", FORWARDS, ids=lambda item: item.__name__)
def test_biases(function: Callable[..., Any]) -> None:
    channels = 2 if function in (_with_two_readers, _read_by_a_call) else 4
    inputs = torch.randn(3, 4, 5, 6), torch.randn(4, channels, 3, 3), torch.randn(4)
    planned = check(function, *inputs, options=UNFUSED)
    convolutions = [line for line in str(planned.program).splitlines() if "aten.convolution.default" in line]
    assert len(convolutions) == 1 and convolutions[0].count("none") == FORWARDS[function]
    assert FORWARDS[function] == 0 or len(planned.launches) == 1, "the reading kernel adds the bias"


@pytest.mark.parametrize("needed", [(True, True, True), (False, True, True), (False, False, True), (True, True, False)])
def test_gradients(needed: Sequence[bool]) -> None:
    """A sum computes that of the bias, beside the elements of the gradient; the call computes the others."""

    def backward(gradient: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        results = aten.convolution_backward(
            gradient * 2, x, weight, [4], [1, 1], [1, 1], [1, 1], False, [0, 0], 2, [*needed]
        )
        return tuple([result for result, is_needed in zip(results, needed, strict=True) if is_needed])

    inputs = torch.randn(3, 4, 5, 6), torch.randn(3, 4, 5, 6), torch.randn(4, 2, 3, 3)
    planned = check(backward, *inputs, options=UNFUSED)
    calls = [line for line in str(planned.program).splitlines() if "aten.convolution_backward.default" in line]
    assert len(calls) == any(needed[:2]) and not any("true])" in line for line in calls)


@pytest.mark.parametrize(("size", "calls"), [(5, 0), (1, 2)])
def test_strides_of_sums_are_known(size: int, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's calls on fake tensors of a symbolic batch take milliseconds; dimensions of size 1 may have any stride."""
    counted: list[object] = []
    fake_call = biases.fake_call

    def count(*arguments: Any) -> Any:
        counted.append(arguments[0])
        return fake_call(*arguments)

    monkeypatch.setattr(biases, "fake_call", count)
    inputs = torch.randn(3, 4, size, 6), torch.randn(4, 4, 1, 1), torch.randn(4)
    graph = make_fx(lambda *operands: F.conv2d(*operands).sigmoid(), tracing_mode="symbolic")(*inputs)
    program = compile_graph(graph, options=UNFUSED.replace(compile_cache=False)).program
    assert str(program).count("aten.convolution.default") == 1 and len(counted) == calls
