"""What emitted Python does to tensors beyond calling ATen; `allocator` and `window` are the cheapest ways."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fxwrap.runtime import devices
from fxwrap.runtime.devices import allocator
from fxwrap.torch_compat import window

__all__ = [
    "allocator", "copy", "exchange_random_state", "follow", "random_state", "reinterpret", "scatter",
    "set_random_state", "window",
]  # fmt: skip


def reinterpret(
    memory: torch.Tensor, sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype, offset: int = 0
) -> torch.Tensor:
    """Returns a tensor of this type that begins `offset` bytes after the first element of `memory`.

    It is no view in autograd's sense: it has its own version counter and no base.
    """
    start = memory.storage_offset() * memory.dtype.itemsize + offset
    made = torch.empty(0, dtype=dtype, device=memory.device)
    return made.set_(memory.untyped_storage(), start // dtype.itemsize, sizes, strides)


def copy(item: Any) -> Any:
    """Returns a tensor's copy with the same strides; anything else itself."""
    return item.clone() if isinstance(item, torch.Tensor) else item


def scatter(
    target: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor | float, reduce: str, include_self: bool
) -> None:
    """Writes `source` into `target` at `index` along `dim`.

    It is `aten.scatter_` when `reduce` is "", "add" or "multiply", else `aten.scatter_reduce_`, for which a number as
    `source` is cast to the target's dtype.
    """
    if not reduce:
        target.scatter_(dim, index, source)
    elif reduce in ("add", "multiply"):
        target.scatter_(dim, index, source, reduce=reduce)
    else:
        if not isinstance(source, torch.Tensor):
            source = torch.full_like(index, source, dtype=target.dtype)
        target.scatter_reduce_(dim, index, source, reduce, include_self=include_self)


def follow(found: Any, step: str, argument: Any = 0) -> Any:
    """Takes one step of a key path: what it finds in an operator's result."""
    match step:
        case "size":
            return found.shape[argument]
        case "stride":
            return found.stride(argument)
        case "storage_offset":
            return found.storage_offset()
        case "element":
            return found[argument]
        case "divide":
            return found // argument
        case "truth":
            return int(bool(found))
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
