"""Calls that eager computes wrongly, found while eager runs and corrected."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxwrap.torch_compat import TorchDispatchMode

_MAX_ROUNDING = 1e-2
"""The relative difference of gradients, by norm, that rounding may cause."""


class CorrectedEager(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base class has no annotations
    """Replaces wrong results of eager's operators; `defects` describes each kind of call once.

    On a CPU, `native_batch_norm_backward` mixes up elements where the input is dense in a permuted layout and a batch
    of one, such as `h.permute(0, 2, 1).view(1, C, 2, 2)`, and the gradient is contiguous. It is right on contiguous
    copies, with which every call is compared.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets functions compile themselves in the mode, as FlexAttention does in eager mode."""
        return True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.defects: dict[str, None] = {}

    def __torch_dispatch__(
        self,
        function: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        results = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.native_batch_norm_backward.default:
            grad, x, *others = args
            if x.device.type == "cpu" and not (x.is_contiguous() and grad.is_contiguous()):
                correct = function(grad.contiguous(), x.contiguous(), *others, **(kwargs or {}))
                if any(_differ(actual, expected) for actual, expected in zip(results, correct, strict=True)):
                    self.defects[f"aten.native_batch_norm_backward on strides {x.stride()} and {grad.stride()}"] = None
                    for actual, expected in zip(results, correct, strict=True):
                        if actual is not None:
                            actual.copy_(expected)
        return results


def _differ(actual: Tensor | None, expected: Tensor | None) -> bool:
    if actual is None or expected is None:
        return False
    return bool((actual - expected).norm() > _MAX_ROUNDING * expected.norm())
