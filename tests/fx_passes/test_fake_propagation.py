"""Fake values of graphs whose metadata is of real tensors: in make_fx, each node has its own storage."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fxwrap.testing import assert_emitters_agree


def test_parts_of_a_tensor_are_views_of_it() -> None:
    def function(x: Tensor) -> Tensor:
        first, second, third = (x + 1).split(4, 1)
        return first.t() @ second + third.t() @ second

    x = torch.randn(4, 12, generator=torch.Generator().manual_seed(0))
    assert_emitters_agree(make_fx(function)(x), (x,))
