"""What a compiled call has to agree in with eager, and how near it has to be to the call in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxwrap.compare import tensor_error

_ALLOWED = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""The relative error by norm that other orders of summation and other roundings of functions may have."""

_FLOOR = 1e-2
"""The least norm that errors are relative to: what is smaller may be the rounding of operands, which are about 1."""


def difference(
    found: Sequence[Any], eager: Sequence[Any], exact: Sequence[Any] | None = None, defined: bool = True
) -> str | None:
    """Returns how results differ from eager's by more than rounding, or None. `exact` are those in float64, if any.

    Where they are not `defined`, only what they are counts, not their elements.
    """
    if len(found) != len(eager):
        return f"{len(found)} results, eager has {len(eager)}"
    if exact is None or len(exact) != len(eager):
        exact = [None] * len(eager)
    for number, (mine, theirs, reference) in enumerate(zip(found, eager, exact, strict=True)):
        text = _one(mine, theirs, reference) if defined else _unlike(mine, theirs)
        if text is not None:
            return f"result {number}: {text}"
    return None


def metadata(item: Any) -> str:
    """Returns a result's dtype, sizes, device, and strides where they matter."""
    if not isinstance(item, Tensor):
        return type(item).__name__
    text = f"{item.dtype} {list(item.shape)}" + ("" if item.device.type == "cpu" else f" on {item.device}")
    if item.layout is not torch.strided:
        return f"{text} {item.layout}"
    dense = 0 in item.shape
    strides = [0 if size == 1 or dense else stride for size, stride in zip(item.shape, item.stride(), strict=True)]
    return f"{text} strides {strides}"


def _unlike(mine: Any, theirs: Any) -> str | None:
    given, wanted = metadata(mine), metadata(theirs)
    return None if given == wanted else f"{given}, eager has {wanted}"


def _one(mine: Any, theirs: Any, reference: Any) -> str | None:
    if not isinstance(mine, Tensor) or not isinstance(theirs, Tensor):
        equal = type(mine) is type(theirs) and (mine == theirs or (mine != mine and theirs != theirs))
        return None if equal else f"{mine!r}, eager has {theirs!r}"
    unlike = _unlike(mine, theirs)
    if unlike is not None:
        return unlike
    if mine.layout is not torch.strided:
        mine, theirs = mine.to_dense(), theirs.to_dense()
    if not theirs.dtype.is_floating_point:
        return _inexact(mine, theirs) if theirs.dtype.is_complex else _unequal(mine, theirs)
    unusual = _unequal_outside_numbers(mine, theirs)
    if unusual is not None:
        return unusual
    numbers = theirs.isfinite()
    if isinstance(reference, Tensor) and reference.dtype is torch.float64 and reference.shape == theirs.shape:
        numbers = numbers & reference.isfinite()
        truth = reference[numbers]
    else:
        truth = theirs[numbers].double()
    own, error = [tensor_error(item[numbers], truth, _FLOOR).relative for item in (theirs, mine)]
    allowed = 2 * own + _ALLOWED[theirs.dtype]
    return None if error <= allowed else f"relative error {error:.1e}, eager's {own:.1e}{_worst(mine, theirs)}"


def _inexact(mine: Tensor, theirs: Tensor) -> str | None:
    error = tensor_error(mine, theirs).relative
    return None if error <= _ALLOWED[torch.float32] else f"relative error {error:.1e}"


def _unequal(mine: Tensor, theirs: Tensor) -> str | None:
    return None if torch.equal(mine, theirs) else f"not equal to eager's{_worst(mine, theirs)}"


def _unequal_outside_numbers(mine: Tensor, theirs: Tensor) -> str | None:
    """Returns how NaN and infinities differ, or None."""
    if not torch.equal(mine.isnan(), theirs.isnan()):
        return f"NaN elsewhere than eager's{_worst(mine, theirs)}"
    infinite = mine.isinf() | theirs.isinf()
    if not torch.equal(mine[infinite], theirs[infinite]):
        return f"infinite elsewhere than eager's{_worst(mine, theirs)}"
    return None


def _worst(mine: Tensor, theirs: Tensor) -> str:
    """Returns the element that differs most, for people."""
    if mine.dtype is torch.bool or mine.dtype.is_complex:
        apart = (mine != theirs).double()
    else:
        same = (mine == theirs) | (mine.isnan() & theirs.isnan()) if mine.dtype.is_floating_point else mine == theirs
        apart = torch.where(same, 0.0, (mine.double() - theirs.double()).abs()).nan_to_num(torch.inf)
    if apart.numel() == 0:
        return ""
    index = tuple(int(item) for item in torch.unravel_index(apart.argmax(), apart.shape))
    return f": {mine[index].item()!r} at {list(index)}, eager has {theirs[index].item()!r}"
