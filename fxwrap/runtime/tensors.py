"""Tensor operations of emitted Python beyond ATen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fxwrap.runtime import devices
from fxwrap.runtime.devices import allocator
from fxwrap.torch_compat import increment_versions, strided_view

__all__ = [
    "allocator", "copy", "copy_with_strides", "exchange_random_state", "follow_key_step", "increment_versions",
    "random_state", "reinterpret", "scatter", "set_random_state", "strided_view",
]  # fmt: skip


def reinterpret(
    memory: torch.Tensor, sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype, offset: int = 0
) -> torch.Tensor:
    """Returns a tensor of this dtype that starts `offset` bytes after the first element of `memory`.

    It is not a view for autograd: it has its own version counter and no base.
    """
    start = memory.storage_offset() * memory.dtype.itemsize + offset
    return torch.empty(0, dtype=dtype, device=memory.device).set_(
        memory.untyped_storage(), start // dtype.itemsize, sizes, strides
    )


def copy(item: object) -> object:
    """Returns a copy of a tensor with the same strides; other items unchanged."""
    return item.clone() if isinstance(item, torch.Tensor) else item


def copy_with_strides(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a tensor with the same strides, also if they leave gaps."""
    copied = tensor.clone()
    if copied.stride() == tensor.stride():
        return copied
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def scatter(
    target: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor | float, reduce: str, include_self: bool
) -> None:
    """Writes `source` into `target` at `index` along `dim`.

    For `reduce` "", "add" and "multiply" it is `aten.scatter_`, else `aten.scatter_reduce_`, which casts a scalar
    `source` to the target's dtype.
    """
    if not reduce:
        target.scatter_(dim, index, source)
    elif reduce in ("add", "multiply"):
        target.scatter_(dim, index, source, reduce=reduce)
    else:
        if not isinstance(source, torch.Tensor):
            source = torch.full_like(index, source, dtype=target.dtype)
        target.scatter_reduce_(dim, index, source, reduce, include_self=include_self)


def follow_key_step(item: Any, step: str, argument: Any = 0) -> Any:
    """Returns the item that one step of a key path selects in an operator's result."""
    match step:
        case "size":
            return item.shape[argument]
        case "stride":
            return item.stride(argument)
        case "storage_offset":
            return item.storage_offset()
        case "element":
            return item[argument]
        case "divide":
            return item // argument
        case "truth":
            return int(bool(item))
        case _:
            raise ValueError(f"a key path has no step '{step}'")


def random_state(device: str) -> torch.Tensor:
    """Returns the state of a device's default generator, a uint8 tensor on the CPU."""
    return devices.random_state(torch.device(device))


def set_random_state(device: str, state: torch.Tensor) -> None:
    """Sets the state of a device's default generator."""
    devices.set_random_state(torch.device(device), state)


def exchange_random_state(device: str, generator: torch.Generator) -> None:
    """Exchanges the states of a device's default generator and another generator."""
    state = random_state(device)
    set_random_state(device, generator.get_state())
    generator.set_state(state)
