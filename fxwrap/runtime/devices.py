"""The runtime halves of device types: what was registered for one, torch's public functions else, and our own two."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

from fxwrap.device_registry import Allocate, DeviceRuntime, missing_function, runtime_of
from fxwrap.runtime.kernels import CPP_KERNELS, TRITON_KERNELS
from fxwrap.torch_compat import allocator as torch_allocator

# --- what programs call ---------------------------------------------------------------------------------------------


def allocator(device: str) -> Allocate:
    """Returns the cheapest function that makes an unwritten tensor on a device from sizes, strides and dtype."""
    kind = torch.device(device)
    own = runtime_of(kind.type).allocator
    return torch_allocator(device) if own is None else own(kind)


def guard(device: torch.device) -> AbstractContextManager[Any]:
    """Returns what makes a device the current one of its type until the end of a `with` block.

    Raises DeviceError where neither the device's registration nor torch has a function for that.
    """
    own = runtime_of(device.type).guard
    found: AbstractContextManager[Any] = _of_torch(device, "device", "guard")(device) if own is None else own(device)
    return found


def random_state(device: torch.device) -> torch.Tensor:
    """Returns the state of a device's default generator, a uint8 tensor on the CPU. Raises DeviceError as `guard`."""
    own = runtime_of(device.type).random_state
    state: torch.Tensor = _of_torch(device, "get_rng_state", "random_state")(device) if own is None else own(device)
    return state


def set_random_state(device: torch.device, state: torch.Tensor) -> None:
    """Sets the state of a device's default generator. Raises DeviceError as `guard` does."""
    own = runtime_of(device.type).set_random_state
    if own is None:
        _of_torch(device, "set_rng_state", "set_random_state")(state, device)
    else:
        own(device, state)


def _of_torch(device: torch.device, name: str, field: str) -> Callable[..., Any]:
    """Returns a function of torch's module for a device type. Raises DeviceError where there is none."""
    try:
        found: Callable[..., Any] | None = getattr(torch.get_device_module(device), name, None)
    except RuntimeError:  # torch has no module for the type
        found = None
    if found is None:
        raise missing_function(device.type, field)
    return found


# --- the CPU --------------------------------------------------------------------------------------------------------

CPU_RUNTIME = DeviceRuntime(
    kernels=CPP_KERNELS,
    allocator=lambda device: torch_allocator(str(device)),
    guard=lambda _device: nullcontext(),
    current_stream=lambda _device: 0,
    stream=lambda _device, _number: nullcontext(),  # what is called has run when the call returns
    random_state=lambda _device: torch.get_rng_state(),
    set_random_state=lambda _device, state: torch.set_rng_state(state),
)

# --- CUDA -----------------------------------------------------------------------------------------------------------


def _cuda_stream(device: torch.device, number: int) -> AbstractContextManager[Any]:
    return nullcontext() if number == 0 else torch.cuda.stream(_numbered_stream(device, number))


@cache
def _numbered_stream(device: torch.device, _number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


CUDA_RUNTIME = DeviceRuntime(
    kernels=TRITON_KERNELS,
    allocator=lambda device: torch_allocator(str(device)),
    guard=torch.cuda.device,
    current_stream=lambda device: int(torch.cuda.current_stream(device).cuda_stream),
    stream=_cuda_stream,
    random_state=torch.cuda.get_rng_state,
    set_random_state=lambda device, state: torch.cuda.set_rng_state(state, device),
)
