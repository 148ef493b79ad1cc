"""Calls without a gradient: their results require gradients where operands do, and a backward through them raises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from fxwrap.errors import FxwrapError


def run_without_gradient(run: Callable[[], list[torch.Tensor]], operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the new tensors that a function computes from operands, without recording its operators.

    Recorded, the parts of a launch that are operators (copies) would give wrong gradients in silence.
    """
    if not torch.is_grad_enabled() or not any(operand.requires_grad for operand in operands):
        return run()
    return list(_WithoutGradient.apply(run, *operands))  # type: ignore[no-untyped-call]


class _WithoutGradient(torch.autograd.Function):
    """A call whose backward raises FxwrapError."""

    @staticmethod
    def forward(_context: object, run: Callable[[], list[torch.Tensor]], *_operands: torch.Tensor) -> Any:
        return tuple(run())

    @staticmethod
    def backward(_context: object, *_gradients: object) -> NoReturn:
        raise FxwrapError(
            "a launched kernel has no gradient; to train the model, compile it with "
            "torch.compile(model, backend='fxwrap'), and call a graph that launches kernels under torch.no_grad()"
        )
