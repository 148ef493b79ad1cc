"""The runtime halves of device types: what was registered for one, torch's public functions else, and our own two."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

import torch

from fxwrap.device_registry import Allocate, DeviceRuntime, missing_function, runtime_of
from fxwrap.runtime.cuda_graphs import CudaGraphs
from fxwrap.runtime.kernels import CPP_KERNELS, TRITON_KERNELS
from fxwrap.torch_compat import allocator as torch_allocator
from fxwrap.torch_compat import external_object, external_stream


class NoGuard:
    """A guard where nothing is to be made current: there is one device of the type, or it has no streams."""

    __slots__ = ()

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


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


def on(device: str | torch.device, stream: int = 0) -> Callable[[], AbstractContextManager[Any]]:
    """Returns a function that gives what makes a device current until the end of a `with` block, and a stream of it.

    Stream 0 leaves the device's current stream alone. Raises DeviceError as `guard` does.
    """
    kind = torch.device(device)
    return _on(runtime_of(kind.type), kind, stream)


@cache
def _on(runtime: DeviceRuntime, device: torch.device, stream: int) -> Callable[[], AbstractContextManager[Any]]:
    if stream:
        return partial(torch_stream_guard if runtime.stream is None else runtime.stream, device, stream)
    if runtime.guard is None:
        return partial(_of_torch(device, "device", "guard"), device)
    return NoGuard if type(runtime.guard(device)) is NoGuard else partial(runtime.guard, device)


def stream_id(device: torch.device, stream: int) -> int:
    """Returns a stream's number in torch. Raises DeviceError as `guard` does."""
    own = runtime_of(device.type).stream_id
    found: int = torch_stream(device, stream).stream_id if own is None else own(device, stream)
    return found


def record_event(device: torch.device, stream: int, event: int = 0) -> Any:
    """Returns an event that is recorded after the work so far of a stream; `event` is one of the model's own, or 0.

    Raises DeviceError as `guard` does.
    """
    own = runtime_of(device.type).record_event
    return (torch_record_event if own is None else own)(device, stream, event)


def wait_event(event: Any, device: torch.device, stream: int) -> None:
    """Makes a stream wait for what `record_event` gave. Raises DeviceError as `guard` does."""
    own = runtime_of(device.type).wait_event
    (torch_wait_event if own is None else own)(event, device, stream)


def record_stream(tensor: torch.Tensor, device: torch.device, stream: int) -> None:
    """Keeps a tensor's memory, when it is freed, until the work so far of a stream is done. Raises as `guard` does."""
    own = runtime_of(device.type).record_stream
    (torch_record_stream if own is None else own)(tensor, device, stream)


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


# --- streams of torch's ---------------------------------------------------------------------------------------------


def torch_stream(device: torch.device, number: int) -> Any:
    """Returns a stream of torch's by its number in a program: the current one for 0, the model's own where it has one.

    Raises DeviceError where torch has no streams for the device.
    """
    if number == 0:
        return _of_torch(device, "current_stream", "stream")(device)
    given = external_stream(number)
    if given is not None and given.device == device:
        return given
    return _numbered_stream(device, number)


@cache
def _numbered_stream(device: torch.device, _number: int) -> Any:
    return _of_torch(device, "Stream", "stream")(device)


def torch_stream_guard(device: torch.device, number: int) -> AbstractContextManager[Any]:
    """Returns what makes a stream of torch's current, and its device. Raises DeviceError as `torch_stream` does."""
    found: AbstractContextManager[Any] = _of_torch(device, "stream", "stream")(torch_stream(device, number))
    return found


def torch_record_event(device: torch.device, stream: int, event: int) -> Any:
    """Returns an event of torch's that is recorded on a stream. Raises DeviceError as `torch_stream` does."""
    given = external_object(event) if event else None
    found = given if isinstance(given, torch.Event) else _of_torch(device, "Event", "record_event")()
    found.record(torch_stream(device, stream))
    return found


def torch_wait_event(event: Any, device: torch.device, stream: int) -> None:
    """Makes a stream of torch's wait for an event. Raises DeviceError as `torch_stream` does."""
    event.wait(torch_stream(device, stream))


def torch_record_stream(tensor: torch.Tensor, device: torch.device, stream: int) -> None:
    """Tells torch's allocator that a stream uses a tensor. Raises DeviceError as `torch_stream` does."""
    tensor.record_stream(torch_stream(device, stream))


# --- the CPU --------------------------------------------------------------------------------------------------------

CPU_RUNTIME = DeviceRuntime(
    kernels=CPP_KERNELS,
    allocator=lambda device: torch_allocator(str(device)),
    guard=lambda _device: NoGuard(),
    current_stream=lambda _device: 0,
    stream=lambda _device, _number: NoGuard(),  # what is called has run when the call returns, so all is in order
    stream_id=lambda _device, _number: 0,
    record_event=lambda _device, _stream, _event: None,
    wait_event=lambda _event, _device, _stream: None,
    record_stream=lambda _tensor, _device, _stream: None,
    random_state=lambda _device: torch.get_rng_state(),
    set_random_state=lambda _device, state: torch.set_rng_state(state),
)

# --- CUDA -----------------------------------------------------------------------------------------------------------


def _cuda_guard(device: torch.device) -> AbstractContextManager[Any]:
    return NoGuard() if _only_one_gpu() else torch.cuda.device(device.index)


@cache
def _only_one_gpu() -> bool:
    return torch.cuda.device_count() == 1


CUDA_RUNTIME = DeviceRuntime(
    kernels=TRITON_KERNELS,
    allocator=lambda device: torch_allocator(str(device)),
    guard=_cuda_guard,
    current_stream=lambda device: int(torch.cuda.current_stream(device).cuda_stream),
    random_state=torch.cuda.get_rng_state,
    set_random_state=lambda device, state: torch.cuda.set_rng_state(state, device),
    recorder=CudaGraphs,
)
