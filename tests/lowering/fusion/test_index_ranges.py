"""Definitions share a kernel only where each computes all of its elements; those without elements compute none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fxwrap import compile_graph


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x[:, :4] * 2, x[:, 4:] * 3),
        lambda x: (x[1:] * 2, x[:-1] + 1),
        lambda x: (x * 2, x.flip(0) + 1),
        lambda x: (x * 2, x.diagonal()[:, None] * torch.ones_like(x)),
        lambda x: torch.ops.aten.max_pool2d_with_indices(x[None], [3], [1], 1),
    ],
)
def test_matches_eager(function: Callable[[torch.Tensor], Any]) -> None:
    x = torch.randn(8, 8)
    compiled = compile_graph(make_fx(function, tracing_mode="fake")(x), [x])
    for result, eager in zip(compiled(x), function(x), strict=True):
        assert torch.equal(result, eager)


@pytest.mark.parametrize("function", [lambda x: x.softmax(0), lambda x: x.sum(0), lambda x: x.softmax(1)])
def test_tensors_without_elements(function: Callable[[torch.Tensor], Any]) -> None:
    x = torch.randn(3, 0)
    compiled = compile_graph(make_fx(function, tracing_mode="fake")(x), [x])
    assert torch.equal(compiled(x)[0], function(x))
