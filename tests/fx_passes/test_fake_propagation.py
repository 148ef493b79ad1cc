"""Fake values of graphs whose metadata is of real tensors: in make_fx, each node has its own storage."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fxwrap.testing import assert_emitters_agree


def test_parts_of_a_tensor_are_views_of_it() -> None:
    def function(x: Tensor) -> Tensor:
        first, second, third = (x + 1).split(4, 1)
        return first.t() @ second + third.t() @ second

    x = torch.randn(4, 12, generator=torch.Generator().manual_seed(0))
    assert_emitters_agree(make_fx(function)(x), (x,))


def test_an_empty_dimension_has_one_part() -> None:
    for size in (0, 2):
        fx_graph = torch.fx.Graph()
        parts = fx_graph.call_function(torch.ops.aten.split.Tensor, (fx_graph.placeholder("x"), 1, -1))
        items = [fx_graph.call_function(operator.getitem, (parts, number)) for number in range(max(size, 1))]
        fx_graph.output(tuple([fx_graph.call_function(torch.ops.aten.add.Tensor, (part, 1)) for part in items]))
        assert_emitters_agree(torch.fx.GraphModule({}, fx_graph), (torch.rand(3, size),))


def test_a_gpu_that_is_not_there_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs for other machines are lowered from fake tensors alone."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with FakeTensorMode():
        x = torch.empty(8, device=f"cuda:{torch.accelerator.device_count() + 7}")
        assert (x + 1).device == x.device
