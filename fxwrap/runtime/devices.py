"""Device operations of running programs: registered functions of the device type, or torch's public ones."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any, TypeAlias

import torch

from fxwrap.caching import bounded_cache
from fxwrap.devices import AllocateFunction, DeviceRuntime, device_runtime, missing_function_error
from fxwrap.runtime.graph_capture.cuda_graphs import CudaGraphCapturer
from fxwrap.runtime.kernels import CPP_KERNELS, TRITON_KERNELS
from fxwrap.torch_compat import allocator as torch_allocator
from fxwrap.torch_compat import external_object, external_stream

Guard: TypeAlias = AbstractContextManager[object]


class NoGuard:
    """A guard for device types with one device or without streams; it does nothing."""

    __slots__ = ()

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


# --- operations of programs -----------------------------------------------------------------------------------------


def allocator(device: str) -> AllocateFunction:
    """Returns the fastest `allocate(sizes, strides, dtype)` of uninitialised tensors on a device."""
    kind = torch.device(device)
    own = device_runtime(kind.type).allocator
    return torch_allocator(device) if own is None else own(kind)


def guard(device: torch.device) -> Guard:
    """Returns a context manager that makes a device current.

    Raises DeviceError where neither the device's runtime nor torch has a function for it.
    """
    make_guard = device_runtime(device.type).guard or _torch_device_function(device, "device", "guard")
    return make_guard(device)


def device_context(device: str | torch.device, stream: int = 0) -> Callable[[], Guard]:
    """Returns a function that returns a context manager, which makes a device and a stream current.

    Stream 0 keeps the current stream. Raises DeviceError as `guard` does.
    """
    kind = torch.device(device)
    return _device_context(device_runtime(kind.type), kind, stream)


@bounded_cache(256)
def _device_context(runtime: DeviceRuntime, device: torch.device, stream: int) -> Callable[[], Guard]:
    if stream:
        return partial(torch_stream_guard if runtime.stream is None else runtime.stream, device, stream)
    if runtime.guard is None:
        return partial(_torch_device_function(device, "device", "guard"), device)
    return NoGuard if type(runtime.guard(device)) is NoGuard else partial(runtime.guard, device)


def stream_id(device: torch.device, stream: int) -> int:
    """Returns torch's id of a stream. Raises DeviceError as `guard` does."""
    own = device_runtime(device.type).stream_id
    number: int = torch_stream(device, stream).stream_id if own is None else own(device, stream)
    return number


def record_event(device: torch.device, stream: int, event: int = 0) -> object:
    """Returns an event recorded on a stream; `event` is the number of the model's event, or 0 for a new one.

    Raises DeviceError as `guard` does.
    """
    own = device_runtime(device.type).record_event
    return (torch_record_event if own is None else own)(device, stream, event)


def wait_event(event: object, device: torch.device, stream: int) -> None:
    """Makes a stream wait for an event of `record_event`. Raises DeviceError as `guard` does."""
    own = device_runtime(device.type).wait_event
    (torch_wait_event if own is None else own)(event, device, stream)


def record_stream(tensor: torch.Tensor, device: torch.device, stream: int) -> None:
    """Delays the reuse of a freed tensor's memory until a stream's present work is done. Raises as `guard` does."""
    own = device_runtime(device.type).record_stream
    (torch_record_stream if own is None else own)(tensor, device, stream)


def random_state(device: torch.device) -> torch.Tensor:
    """Returns the state of a device's default generator, a uint8 tensor on the CPU. Raises DeviceError as `guard`."""
    own = device_runtime(device.type).random_state
    state: torch.Tensor = (
        _torch_device_function(device, "get_rng_state", "random_state")(device) if own is None else own(device)
    )
    return state


def set_random_state(device: torch.device, state: torch.Tensor) -> None:
    """Sets the state of a device's default generator. Raises DeviceError as `guard` does."""
    own = device_runtime(device.type).set_random_state
    if own is None:
        _torch_device_function(device, "set_rng_state", "set_random_state")(state, device)
    else:
        own(device, state)


def _torch_device_function(device: torch.device, name: str, field: str) -> Callable[..., Any]:
    """Returns a function of torch's module for a device type. Raises DeviceError without one."""
    try:
        function: Callable[..., object] | None = getattr(torch.get_device_module(device), name, None)
    except RuntimeError:  # torch has no module for the type
        function = None
    if function is None:
        raise missing_function_error(device.type, field)
    return function


# --- torch's streams ------------------------------------------------------------------------------------------------


def torch_stream(device: torch.device, number: int) -> torch.Stream:
    """Returns a torch stream by its number in a program: the current one for 0, or the model's own stream.

    Raises DeviceError where torch has no streams for the device.
    """
    if number == 0:
        current: torch.Stream = _torch_device_function(device, "current_stream", "stream")(device)
        return current
    own = external_stream(number)
    if own is not None and own.device == device:
        return own
    return _numbered_stream(device, number)


@cache  # not bounded: all programs of a process share the stream of a number
def _numbered_stream(device: torch.device, _number: int) -> torch.Stream:
    stream: torch.Stream = _torch_device_function(device, "Stream", "stream")(device)
    return stream


def torch_stream_guard(device: torch.device, number: int) -> Guard:
    """Returns a context manager that makes a torch stream and its device current. Raises as `torch_stream` does."""
    guard: Guard = _torch_device_function(device, "stream", "stream")(torch_stream(device, number))
    return guard


def torch_record_event(device: torch.device, stream: int, event: int) -> object:
    """Returns a torch event recorded on a stream. Raises DeviceError as `torch_stream` does."""
    own = external_object(event) if event else None
    recorded = own if isinstance(own, torch.Event) else _torch_device_function(device, "Event", "record_event")()
    recorded.record(torch_stream(device, stream))
    return recorded


def torch_wait_event(event: Any, device: torch.device, stream: int) -> None:
    """Makes a torch stream wait for an event. Raises DeviceError as `torch_stream` does."""
    event.wait(torch_stream(device, stream))


def torch_record_stream(tensor: torch.Tensor, device: torch.device, stream: int) -> None:
    """Makes torch's allocator track the use of a tensor on a stream. Raises DeviceError as `torch_stream` does."""
    tensor.record_stream(torch_stream(device, stream))


# --- the CPU --------------------------------------------------------------------------------------------------------

CPU_RUNTIME = DeviceRuntime(
    kernels=CPP_KERNELS,
    allocator=lambda device: torch_allocator(str(device)),
    guard=lambda _device: NoGuard(),
    current_stream=lambda _device: 0,
    stream=lambda _device, _number: NoGuard(),  # CPU calls are synchronous
    stream_id=lambda _device, _number: 0,
    record_event=lambda _device, _stream, _event: None,
    wait_event=lambda _event, _device, _stream: None,
    record_stream=lambda _tensor, _device, _stream: None,
    random_state=lambda _device: torch.get_rng_state(),
    set_random_state=lambda _device, state: torch.set_rng_state(state),
)

# --- CUDA -----------------------------------------------------------------------------------------------------------


@cache
def _only_one_gpu() -> bool:
    return torch.cuda.device_count() == 1


def gpu_properties(device: torch.device) -> Any:
    """Returns torch's properties of a GPU; a fake tensor may be on one that the machine lacks: then of its first."""
    is_here = device.index in (None, *range(torch.cuda.device_count()))  # without an index, the current GPU
    return torch.cuda.get_device_properties(device if is_here else 0)


def _gpu_limits(device: torch.device) -> dict[str, int]:
    if not torch.cuda.is_available():
        return {}
    gpu = gpu_properties(device)
    shared = getattr(gpu, "shared_memory_per_block_optin", None)  # some builds of torch for AMD's GPUs lack it
    limits = {"multiprocessors": gpu.multi_processor_count, **({"shared_memory_bytes": shared} if shared else {})}
    return {**limits, "supports_tensor_descriptors": torch.version.hip is None and gpu.major >= 9}


CUDA_RUNTIME = DeviceRuntime(
    kernels=TRITON_KERNELS,
    allocator=lambda device: torch_allocator(str(device)),
    guard=lambda device: NoGuard() if _only_one_gpu() else torch.cuda.device(device.index),
    current_stream=lambda device: int(torch.cuda.current_stream(device).cuda_stream),
    random_state=torch.cuda.get_rng_state,
    set_random_state=lambda device, state: torch.cuda.set_rng_state(state, device),
    graph_capturer=CudaGraphCapturer,
    read_limits=_gpu_limits,
)
