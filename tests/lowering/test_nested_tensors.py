"""Jagged nested tensors under torch.compile: their ragged size is an object that programs pass through."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxwrap.options import EMITTERS
from tests.support.long_form import long_only


def rows(*lengths: int, requires_grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(length, 8, generator=generator) for length in lengths]
    return torch.nested.nested_tensor(tensors, layout=torch.jagged, requires_grad=requires_grad)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    assert actual.is_nested == expected.is_nested and type(actual) is type(expected)
    if expected.is_nested:
        assert actual._ragged_idx == expected._ragged_idx
        torch.testing.assert_close(actual.offsets(), expected.offsets())
        actual, expected = actual.values(), expected.values()
    torch.testing.assert_close(actual, expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("emitter", EMITTERS)
def test_forward(emitter: str) -> None:
    def function(x: Tensor, values: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
        built = torch.nested.nested_tensor_from_jagged(values, offsets).cos()
        padded = torch.nested.to_padded_tensor(x.sin(), 0.5)
        return x.softmax(-1) * x, x.transpose(1, 2) * 2, x.sum(), x.values() + 1, built, padded

    compiled = torch.compile(function, backend="fxwrap", options={"emitter": emitter}, fullgraph=True)
    with torch.no_grad():
        for lengths in ((2, 5, 3), (4, 1, 6, 2)):
            x, other = rows(*lengths), rows(*lengths[::-1])
            inputs = (x, other.values(), other.offsets())
            for actual, expected in zip(compiled(*inputs), function(*inputs), strict=True):
                assert_same(actual, expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("emitter", ["python", "cpp", long_only("fx"), long_only("interpreter")])
def test_training(emitter: str) -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))

    def gradients(run: Any, lengths: tuple[int, ...]) -> list[Tensor]:
        model.zero_grad()
        x = rows(*lengths, requires_grad=True)
        result = run(x)
        result.values().square().mean().backward()
        return [result.detach(), x.grad, *[parameter.grad for parameter in model.parameters()]]

    compiled = torch.compile(model, backend="fxwrap", options={"emitter": emitter}, fullgraph=True)
    for lengths in ((2, 5, 3), (4, 1, 6, 2)):
        for actual, expected in zip(gradients(compiled, lengths), gradients(model, lengths), strict=True):
            assert_same(actual, expected)
