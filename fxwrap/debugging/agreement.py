"""Whether a result differs from eager's by more than rounding: errors against a float64 reference decide."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

NOISE = 3.0
"""How much larger than eager's largest error against float64 an error may be: where terms cancel, both are noise."""

MAX_CHANGED_FRACTION = 1e-3
"""The fraction of integers and truth values, computed from floats, that rounding may change."""

_EPSILON: Mapping[torch.dtype, float] = {
    torch.float64: 1e-12, torch.complex128: 1e-12,  # the reference rounds as much as eager does
    torch.float32: 2.0**-23, torch.complex64: 2.0**-23,
    torch.float16: 2.0**-10, torch.complex32: 2.0**-10, torch.bfloat16: 2.0**-7,
    torch.float8_e4m3fn: 2.0**-3, torch.float8_e5m2: 2.0**-2,
}  # fmt: skip
_ACCUMULATED = 2.0**-23
"""The rounding of the numbers in which narrower dtypes are computed."""


@dataclass(frozen=True)
class Agreement:
    """The comparison of a result with eager's and with a float64 reference.

    Fields:
        holds: whether rounding explains the difference.
        error: the largest error of an element against the reference.
        allowed: the error that rounding allows at that element.
        eager_error: eager's largest error.
        reason: the difference, if it is none of numbers; else "".
    """

    holds: bool
    error: float = 0.0
    allowed: float = 0.0
    eager_error: float = 0.0
    reason: str = ""

    def __str__(self) -> str:
        if self.holds:
            return "it agrees"
        return self.reason or (
            f"its error against float64 is {self.error:.2e}; rounding allows {self.allowed:.2e}, and eager's is "
            f"{self.eager_error:.2e}"
        )


def compare_results(result: Tensor, eager: Tensor, exact: Tensor, reduced: int = 1) -> Agreement:
    """Compares a result with eager's, given the float64 reference; all have the same number of elements.

    Floats may have `NOISE` times eager's largest error, and the rounding of their dtype, which grows with the square
    root of the number of elements `reduced` to one. Others are equal to eager's or to the reference, but for few.
    """
    result, eager, exact = (item.detach().reshape(-1) for item in (result, eager, exact))
    if result.dtype != eager.dtype:
        return Agreement(False, reason=f"its dtype is {result.dtype}, eager's is {eager.dtype}")
    if result.numel() != eager.numel():
        return Agreement(False, reason=f"it has {result.numel()} elements, eager's has {eager.numel()}")
    if not result.numel():
        return Agreement(True)
    if result.dtype not in _EPSILON:
        return _compare_exactly(result, eager, exact)
    dtype = result.dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64
    result, eager, exact = (item.to(wide) for item in (result, eager, exact.to(eager.device)))
    if (nonfinite := _compare_nonfinite(result, eager, exact)) is not None:
        return nonfinite
    usable = result.isfinite() & eager.isfinite() & exact.isfinite()
    if not usable.any():
        return Agreement(True)
    result, truth = result[usable], exact[usable]
    eager_error = float((eager[usable] - truth).abs().max())
    scale = truth.abs() + float(truth.abs().square().mean().sqrt())
    allowed = NOISE * eager_error + rounding(dtype, reduced) * scale
    error = (result - truth).abs()
    worst = int((error - allowed).argmax())
    return Agreement(bool((error <= allowed).all()), float(error[worst]), float(allowed[worst]), eager_error)


def rounding(dtype: torch.dtype, reduced: int = 1) -> float:
    """Returns the relative rounding of one operator with a result of this dtype that reduces so many elements."""
    return 2 * _EPSILON[dtype] + (8 + 2 * math.sqrt(reduced)) * min(_ACCUMULATED, _EPSILON[dtype])


def _compare_nonfinite(result: Tensor, eager: Tensor, exact: Tensor) -> Agreement | None:
    """Returns the disagreement of NaN and infinities, None without one. Those that float64 has not are rounding."""
    same = (result == eager) | (result.isnan() & eager.isnan())
    wrong = ~same & ((~result.isfinite() & exact.isfinite()) | (result.isfinite() & ~eager.isfinite()))
    wrong &= ~((result == exact) | (result.isnan() & exact.isnan()))
    if not wrong.any():
        return None
    position = int(wrong.int().argmax())
    reason = f"element {position} is {result[position].item()}, eager's is {eager[position].item()}"
    return Agreement(False, math.inf, 0.0, 0.0, f"{reason}; {int(wrong.sum())} of {wrong.numel()} elements like this")


def _compare_exactly(result: Tensor, eager: Tensor, exact: Tensor) -> Agreement:
    wrong = (result != eager) & (result != exact.to(result.device, result.dtype))
    count = int(wrong.sum())
    if count <= MAX_CHANGED_FRACTION * wrong.numel():
        return Agreement(True)
    position = int(wrong.int().argmax())
    reason = f"element {position} is {result[position].item()}, eager's is {eager[position].item()}"
    return Agreement(False, reason=f"{reason}; {count} of {wrong.numel()} elements differ")
