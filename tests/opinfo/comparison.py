"""The comparison of a compiled call with eager, and with the call in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxwrap.comparison import tensor_error

_ALLOWED = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""The relative error by norm that another summation order or another rounding may cause."""

_FLOOR = 1e-2
"""The smallest norm that errors are relative to: smaller results may be rounding of operands, which are about 1."""


def difference(
    results: Sequence[Any], eager: Sequence[Any], exact: Sequence[Any] | None = None, defined: bool = True
) -> str | None:
    """Returns how results differ from eager's by more than rounding, or None.

    `exact` are the results in float64, if any. If the results are not `defined`, only metadata is compared.
    """
    if len(results) != len(eager):
        return f"{len(results)} results, eager has {len(eager)}"
    if exact is None or len(exact) != len(eager):
        exact = [None] * len(eager)
    for number, (mine, theirs, reference) in enumerate(zip(results, eager, exact, strict=True)):
        text = _one(mine, theirs, reference) if defined else _metadata_difference(mine, theirs)
        if text is not None:
            return f"result {number}: {text}"
    return None


def metadata(item: Any) -> str:
    """Returns a result's dtype, sizes, device, and strides of dimensions with several elements."""
    if not isinstance(item, Tensor):
        return type(item).__name__
    text = f"{item.dtype} {list(item.shape)}" + ("" if item.device.type == "cpu" else f" on {item.device}")
    if item.layout is not torch.strided:
        return f"{text} {item.layout}"
    dense = 0 in item.shape
    strides = [0 if size == 1 or dense else stride for size, stride in zip(item.shape, item.stride(), strict=True)]
    return f"{text} strides {strides}"


def _metadata_difference(mine: Any, theirs: Any) -> str | None:
    own, expected = metadata(mine), metadata(theirs)
    return None if own == expected else f"{own}, eager has {expected}"


def _one(mine: Any, theirs: Any, reference: Any) -> str | None:
    if not isinstance(mine, Tensor) or not isinstance(theirs, Tensor):
        equal = type(mine) is type(theirs) and (mine == theirs or (mine != mine and theirs != theirs))
        return None if equal else f"{mine!r}, eager has {theirs!r}"
    mismatch = _metadata_difference(mine, theirs)
    if mismatch is not None:
        return mismatch
    if mine.layout is not torch.strided:
        mine, theirs = mine.to_dense(), theirs.to_dense()
    if not theirs.dtype.is_floating_point:
        return _inexact(mine, theirs) if theirs.dtype.is_complex else _unequal(mine, theirs)
    nonfinite = _nonfinite_difference(mine, theirs)
    if nonfinite is not None:
        return nonfinite
    finite = theirs.isfinite()
    if isinstance(reference, Tensor) and reference.dtype is torch.float64 and reference.shape == theirs.shape:
        finite = finite & reference.isfinite()
        truth = reference[finite]
    else:
        truth = theirs[finite].double()
    own, error = [tensor_error(item[finite], truth, _FLOOR).relative for item in (theirs, mine)]
    allowed = 2 * own + _ALLOWED[theirs.dtype]
    return (
        None
        if error <= allowed
        else f"relative error {error:.1e}, eager's {own:.1e}{_largest_difference(mine, theirs)}"
    )


def _inexact(mine: Tensor, theirs: Tensor) -> str | None:
    error = tensor_error(mine, theirs).relative
    return None if error <= _ALLOWED[torch.float32] else f"relative error {error:.1e}"


def _unequal(mine: Tensor, theirs: Tensor) -> str | None:
    return None if torch.equal(mine, theirs) else f"not equal to eager's{_largest_difference(mine, theirs)}"


def _nonfinite_difference(mine: Tensor, theirs: Tensor) -> str | None:
    """Returns how NaN and infinities differ, or None."""
    if not torch.equal(mine.isnan(), theirs.isnan()):
        return f"NaN at other elements than eager's{_largest_difference(mine, theirs)}"
    infinite = mine.isinf() | theirs.isinf()
    if not torch.equal(mine[infinite], theirs[infinite]):
        return f"infinite at other elements than eager's{_largest_difference(mine, theirs)}"
    return None


def _largest_difference(mine: Tensor, theirs: Tensor) -> str:
    """Returns the element that differs most, as text."""
    if mine.dtype is torch.bool or mine.dtype.is_complex:
        distance = (mine != theirs).double()
    else:
        same = (mine == theirs) | (mine.isnan() & theirs.isnan()) if mine.dtype.is_floating_point else mine == theirs
        distance = torch.where(same, 0.0, (mine.double() - theirs.double()).abs()).nan_to_num(torch.inf)
    if distance.numel() == 0:
        return ""
    index = tuple(int(item) for item in torch.unravel_index(distance.argmax(), distance.shape))
    return f": {mine[index].item()!r} at {list(index)}, eager has {theirs[index].item()!r}"
