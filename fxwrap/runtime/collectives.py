"""Coalesced collectives into existing tensors, such as slices of a memory pool, which torch does not have.

torch finds the work that a tensor waits for by the tensor's storage. A wait for one slice of a pool would wait for all
collectives in flight in the pool, so each result has a storage of its own over the slice's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from fxwrap import torch_compat


def all_gather_into_tensors(
    inputs: Sequence[torch.Tensor], group_size: int, group_name: Any, outs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Starts one all_gather of several tensors, and returns the memory of `outs`, in flight until `wait_tensor`."""
    results = [_with_own_storage(item) for item in outs]
    torch_compat.start_coalesced(_contents(results), _contents(inputs), None, group_name)
    return results


def reduce_scatter_into_tensors(
    inputs: Sequence[torch.Tensor], reduce_op: str, group_size: int, group_name: Any, outs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Starts one reduce_scatter of several tensors, and returns the memory of `outs`, in flight until `wait_tensor`."""
    results = [_with_own_storage(item) for item in outs]
    torch_compat.start_coalesced(_contents(results), _contents(inputs), reduce_op, group_name)
    return results


def into_tensors_fake(*arguments: Any) -> list[torch.Tensor]:
    """Returns the last argument, the results."""
    return list(arguments[-1])


def _contents(items: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns tensors in the form that process groups take: contiguous and real."""
    return [torch.view_as_real(item.contiguous()) if item.is_complex() else item.contiguous() for item in items]


def _with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous tensor with the memory of another one, which it keeps alive, and a storage of its own."""
    memory = from_dlpack(tensor.view(-1).view(torch.uint8))  # which has no float8
    return memory.view(tensor.dtype).view(tensor.shape)
