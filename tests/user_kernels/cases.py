"""A test case of user kernels and operators: a function, which every emitter runs as eager does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fxwrap.testing import assert_emitters_agree


@dataclass(frozen=True)
class Case:
    """A function, the sizes of its inputs, and whether all are transposed, dynamic, differentiated, or long."""

    function: Callable[..., Any]
    sizes: tuple[tuple[int, ...], ...]
    dynamic: bool = False
    training: bool = False
    transposed: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    long: bool = False

    def check(self, device: str) -> None:
        options = {"fallback": "error", **self.options}
        inputs = self._inputs(device)
        assert_emitters_agree(self.function, inputs, options=options, training=self.training, dynamic=self.dynamic)

    def _inputs(self, device: str) -> tuple[Tensor, ...]:
        tensors = [torch.randn(sizes, device=device) for sizes in self.sizes]
        tensors = [x.t() for x in tensors] if self.transposed else tensors
        return tuple([x.requires_grad_(self.training) for x in tensors])

    def __str__(self) -> str:
        marks = [mark for mark in ("dynamic", "training", "transposed") if getattr(self, mark)]
        return "-".join([self.function.__name__, *marks, *self.options])
