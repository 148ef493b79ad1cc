"""Calls without derivatives: a backward through their results, and forward-mode derivatives, raise FxwrapError."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from fxwrap.errors import FxwrapError
from fxwrap.torch_compat import SingleLevelFunction, any_requires_grad, is_forward_mode_active, single_level_functions


def run_without_gradient(run: Callable[[], list[torch.Tensor]], operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the new tensors that a function computes from operands, without recording its operators.

    Recorded, the parts of a launch that are operators (copies) would give wrong gradients in silence.
    """
    if is_forward_mode_active() or (torch.is_grad_enabled() and any_requires_grad(*operands)):
        with single_level_functions():
            return list(_WithoutGradient.apply(run, *operands))
    return run()


class _WithoutGradient(SingleLevelFunction):  # type: ignore[misc]
    """A call whose derivatives raise FxwrapError."""

    @staticmethod
    def forward(_context: object, run: Callable[[], list[torch.Tensor]], *_operands: torch.Tensor) -> Any:
        return tuple(run())

    @staticmethod
    def backward(_context: object, *_gradients: object) -> NoReturn:
        raise_without_gradient()

    @staticmethod
    def jvp(_context: object, *_tangents: object) -> NoReturn:
        raise_without_gradient()


def raise_without_gradient() -> NoReturn:
    """Raises the error of derivatives of launched kernels."""
    raise FxwrapError(
        "a launched kernel has no gradient; to train the model, compile it with "
        "torch.compile(model, backend='fxwrap'), and call a graph that launches kernels under torch.no_grad()"
    )
