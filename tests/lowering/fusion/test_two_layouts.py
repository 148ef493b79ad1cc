"""Losses of tensors in two layouts: their sums share the parts of one kernel."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

import fxwrap
from fxwrap.devices import CPU, CUDA
from fxwrap.lines import Launch

DEVICE = replace(CPU, massively_parallel=True, multiprocessors=CUDA.multiprocessors, instructions_per_byte=4)


def test_sums_of_a_loss_are_parts_of_one_kernel() -> None:
    """The Dice loss computes a sigmoid once for two sums, of which one also reads targets in another layout."""
    programs: list[fxwrap.Program] = []

    def collect(program: fxwrap.Program) -> fxwrap.Program:
        programs.append(program)
        return program

    def dice(x: Tensor, y: Tensor) -> Tensor:
        p = torch.sigmoid(x)
        return 1 - 2 * (p * y).sum() / (p.sum() + y.sum())

    x = torch.randn(8, 64, 56, 56, generator=torch.Generator().manual_seed(0)).to(memory_format=torch.channels_last)
    y = torch.rand(8, 64, 56, 56, generator=torch.Generator().manual_seed(1))
    options = {"passes": (collect,), "devices": [DEVICE]}
    result = torch.compile(dice, backend="fxwrap", fullgraph=True, options=options)(x, y)
    torch.testing.assert_close(result, dice(x.double(), y.double()).float(), rtol=1e-5, atol=1e-6)
    assert sum(isinstance(line, Launch) for line in programs[0].body.lines) == 2
