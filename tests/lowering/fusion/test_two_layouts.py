"""Losses of tensors in two layouts: their sums share the parts of one kernel."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.lines import Launch


def dice(x: Tensor, y: Tensor) -> Tensor:
    """Computes a sigmoid once for two sums, of which one also reads targets in another layout."""
    p = torch.sigmoid(x)
    return 1 - 2 * (p * y).sum() / (torch.sigmoid(x).sum() + y.sum())


def test_sums_of_a_loss_are_parts_of_one_kernel() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        y = torch.empty(68, 64, 56, 56, dtype=torch.bfloat16, device="cuda")
        x = torch.empty_strided(y.shape, (200704, 1, 3584, 64), dtype=torch.bfloat16, device="cuda")
        graph = make_fx(dice, tracing_mode="real")(x, y)
    lines = fxwrap.lower(graph, options=fxwrap.Options(check_inputs=False)).body.lines
    assert sum(isinstance(line, Launch) for line in lines) == 2
