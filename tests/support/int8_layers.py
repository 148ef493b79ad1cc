"""Layers of int8 weights with dynamically quantised rows, as torchao's."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def quantised_linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Rows with a scale each, times int8 columns with a scale each."""
    step = x.abs().amax(-1, keepdim=True) / 127
    rows = (x / step).round().clamp(-128, 127).to(torch.int8)
    return torch._int_mm(rows, weight.t()).to(x.dtype) * step * scale.to(x.dtype)


class Int8Layers(nn.Module):
    """Two layers with an activation between them."""

    def __init__(self) -> None:
        super().__init__()
        for name, columns, width in (("first", 1024, 768), ("second", 768, 1024)):
            self.register_buffer(name, torch.randint(-128, 128, (columns, width), dtype=torch.int8))
            self.register_buffer(f"{name}_scale", torch.rand(columns) / width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.gelu(quantised_linear(x, self.first, self.first_scale))
        return quantised_linear(hidden, self.second, self.second_scale)
