"""Matmuls with weights that are converted to the library's layout at their first call: `fxwrap::prepacked_linear`.

The converted weights are cached by the weight: its tensor, its memory and the version of its content. So a write into a
weight converts it again, unless the write evades torch's version counter (`weight.data.add_(1)`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import MutableMapping
from dataclasses import dataclass, field

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fxwrap.torch_compat import prepack_linear_weight, version_of
from fxwrap.torch_compat import prepacked_linear as library_linear

_MOST_ROWS = 4
"""Numbers of rows for which a weight is converted at a time."""


@dataclass
class _Prepacked:
    """The converted forms of a weight, by number of rows; None where the library has none."""

    content: tuple[int, int]
    by_rows: OrderedDict[int, torch.Tensor | None] = field(default_factory=OrderedDict)


_lock = threading.Lock()
_cache: MutableMapping[torch.Tensor, _Prepacked] = WeakTensorKeyDictionary()


def prepacked_linear(
    left: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool
) -> torch.Tensor:
    """Returns `left @ weight + bias`, of `weight.t()` if `transposed`: contiguous matrices, and a vector or None."""
    packed = _prepacked(weight, left.shape[0], transposed)
    with torch.no_grad():
        if packed is not None:
            return library_linear(left, packed, weight if transposed else weight.t(), bias)
        right = weight.t() if transposed else weight
        return left @ right if bias is None else torch.addmm(bias, left, right)


def prepacked_linear_fake(
    left: torch.Tensor, weight: torch.Tensor, _bias: torch.Tensor | None, transposed: bool
) -> torch.Tensor:
    """The fake implementation: a contiguous matrix."""
    return left.new_empty(left.shape[0], weight.shape[0 if transposed else 1])


def _prepacked(weight: torch.Tensor, rows: int, transposed: bool) -> torch.Tensor | None:
    """Returns the converted form of a weight for a number of rows, converted now if it is not cached."""
    content = (weight.data_ptr(), 0 if weight.is_inference() else version_of(weight))
    with _lock:
        entry = _cache.get(weight)
        if entry is None or entry.content != content:
            entry = _cache[weight] = _Prepacked(content)
        if rows in entry.by_rows:
            return entry.by_rows[rows]
        with torch.no_grad():
            packed = prepack_linear_weight(weight if transposed else weight.t(), rows)
        entry.by_rows[rows] = packed
        if len(entry.by_rows) > _MOST_ROWS:
            entry.by_rows.popitem(last=False)
        return packed
