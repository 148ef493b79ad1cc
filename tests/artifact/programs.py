"""Small compiled programs to save: with constants that share memory, with symbols, and with fused kernels."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import fxwrap


class Small(nn.Module):
    """A bias and an activation after a product, a product with the same weight again, and a count of its calls."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(16, 16, generator=generator))
        self.bias = nn.Parameter(torch.randn(16, generator=generator))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return nn.functional.gelu(x @ self.weight + self.bias) @ self.weight.t() + self.calls


@cache
def exported(dynamic: bool) -> torch.export.ExportedProgram:
    """The model exported by torch.export, for batches of 4 or of any size."""
    shapes = {"x": {0: torch.export.Dim("batch", min=2, max=64)}} if dynamic else None
    return torch.export.export(Small(), (torch.randn(4, 16),), dynamic_shapes=shapes)


@cache
def compiled(emitter: str = "python", dynamic: bool = False, **options: Any) -> fxwrap.Compiled:
    """The model compiled; its count of calls goes on from test to test."""
    chosen = fxwrap.Options(emitter=emitter, **options)
    return fxwrap.compile_graph(exported(dynamic), name="small", options=chosen)


def batch(size: int = 4) -> Tensor:
    """An input for the model."""
    return torch.randn(size, 16, generator=torch.Generator().manual_seed(size))
