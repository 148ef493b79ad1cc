"""Graphs without metadata whose sizes are read from tensors."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.converters.emission import emit

aten = torch.ops.aten


@pytest.mark.parametrize("emitter", ["python", "fx", "interpreter"])
def test_their_lengths_are_expressions_of_the_positions(emitter: str) -> None:
    """Not the length for a hint of the position, which torch would clamp to the dimension."""

    def function(x: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, ...]:
        end = position.item()
        return aten.slice.Tensor(x, 0, 0, end) * 2, aten.slice.Tensor(x, 0, end, -1, 2) + 1

    x = torch.arange(8.0)
    module = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(x, torch.tensor(3))
    for node in module.graph.nodes:
        if node.op == "call_function":
            node.meta.pop("val", None)
    entry = emit(fxwrap.from_fx(module), emitter)
    for position in range(-10, 12):
        torch.testing.assert_close(tuple(entry(x, torch.tensor(position))), (x[:position] * 2, x[position:-1:2] + 1))


UNBACKED = {
    "sizes": (
        lambda x, n: x[:, : 8 * torch.sym_min(n, 1)].view(torch.sym_min(n, 1), 8) * 1,
        lambda x, n: x[:n].clone(),
    ),
    "strides": (
        lambda x, n: aten._to_copy.default(x.view(4, 2)[:, :n], dtype=torch.float64),
        lambda x, n: x.view(4, 2)[:, :n].to(torch.float64),
    ),
}


@pytest.mark.parametrize("emitter", ["python", "fx", "interpreter"])
@pytest.mark.parametrize("name", UNBACKED)
def test_types_hold_for_any_value_of_an_unbacked_symbol(name: str, emitter: str) -> None:
    """Not those for a hint of it, for which a slice may be dense, or one size another."""
    traced, eager = UNBACKED[name]

    def function(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        n = count.item()
        torch._check(n >= 0)
        torch._check(n <= 2)
        return traced(x, n)

    module = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(torch.zeros(1, 8), torch.tensor(1))
    for node in module.graph.nodes:
        if node.op == "call_function":
            node.meta.pop("val", None)
    entry = emit(fxwrap.from_fx(module), emitter)
    x = torch.randn(1, 8)
    for count in range(3):
        (result,) = entry(x, torch.tensor(count))
        wanted = eager(x, count)
        torch.testing.assert_close(result, wanted)
        assert result.stride() == wanted.stride() or not wanted.numel()
