"""Slices of graphs without metadata, at positions that are read from tensors."""

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
