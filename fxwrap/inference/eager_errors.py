"""The errors of eager mode for calls that fail on fake tensors, whose rules raise other classes and words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fxwrap.torch_compat import OpOverload, tree_leaves, tree_map, without_fake_mode

_MOST_ELEMENTS = 1 << 16


def eager_error(target: object, arguments: Sequence[object], keywords: Mapping[str, object]) -> Exception | None:
    """Returns the error of eager mode for a call of an operator of torch on such tensors, None if it cannot be known.

    The operator is called on zeros on the CPU, if it is one of torch's own and the tensors are static and small.
    """
    if not isinstance(target, OpOverload) or target.namespace not in ("aten", "prims"):
        return None
    leaves = tree_leaves((tuple(arguments), dict(keywords)))
    tensors = [item for item in leaves if isinstance(item, torch.Tensor)]
    if any(isinstance(item, torch.SymInt | torch.SymFloat | torch.SymBool) for item in leaves):
        return None
    if not all(_is_static(item) for item in tensors) or sum([_extent(item) for item in tensors]) > _MOST_ELEMENTS:
        return None
    with without_fake_mode(), torch.random.fork_rng(devices=[]), torch.no_grad():
        real: Any = tree_map(_zeros, (list(arguments), dict(keywords)))
        try:
            target(*real[0], **real[1])
        except Exception as error:  # operators raise any class  # noqa: BLE001
            return error
    return None


def _is_static(tensor: torch.Tensor) -> bool:
    numbers = (*tensor.shape, *tensor.stride()) if tensor.layout is torch.strided else (None,)
    return all(isinstance(item, int) for item in numbers)


def _extent(tensor: torch.Tensor) -> int:
    """Returns the elements of memory from a tensor's first to its last, or those of its view, whichever is more."""
    last = sum([(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)])
    return max(last + 1, tensor.numel()) if tensor.numel() else 0


def _zeros(item: object) -> object:
    if isinstance(item, torch.device):
        return torch.device("cpu")
    if not isinstance(item, torch.Tensor):
        return item
    return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device="cpu").zero_()
