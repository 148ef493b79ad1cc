"""The operators for random states, device guards, streams and events in emitted FX graphs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from fxwrap import torch_compat
from fxwrap.devices import missing_function_error, registered_spec
from fxwrap.runtime import devices, tensors


def random_state_fake(device: torch.device) -> torch.Tensor:
    """The fake of a generator's state: uint8 on the CPU. Raises DeviceError where its size is not known."""
    spec = registered_spec(device.type)
    if spec is None or spec.random_state_bytes is None:
        raise missing_function_error(device.type, "random_state")
    return torch.empty([spec.random_state_bytes], dtype=torch.uint8, device="cpu")


def set_random_state(state: torch.Tensor, device: torch.device) -> None:
    """Sets the state of a device's default generator: uint8 on the CPU."""
    tensors.set_random_state(str(device), state)


def exchange_random_state(generator: torch.Generator, device: torch.device) -> None:
    """Exchanges the states of a generator and of a device's default one."""
    tensors.exchange_random_state(str(device), generator)


class _DeviceGuardStack(threading.local):
    """The device guards that a thread has entered and not exited."""

    def __init__(self) -> None:
        self.guards: list[AbstractContextManager[object]] = []


_DEVICE_GUARDS = _DeviceGuardStack()


def enter_device(device: torch.device, stream: int = 0) -> None:
    """Makes a device and one of its streams current on this thread, until `exit_device`."""
    make_enter_device(device, stream)()


def make_enter_device(device: torch.device, stream: int = 0) -> Callable[[], None]:
    """Returns `fxwrap::enter_device` for a fixed device and stream."""
    make_guard = devices.device_context(device, stream)

    def enter() -> None:
        guard = make_guard()
        guard.__enter__()
        _DEVICE_GUARDS.guards.append(guard)

    return enter


def exit_device(_device: torch.device, _stream: int = 0) -> None:
    """Makes what was current before the last `enter_device` of this thread current again."""
    _DEVICE_GUARDS.guards.pop().__exit__(None, None, None)


@contextmanager
def exit_devices_on_error() -> Iterator[None]:
    """Exits, when a `with` block raises, the devices that were entered and not exited in it."""
    depth = len(_DEVICE_GUARDS.guards)
    try:
        yield
    except BaseException:
        while len(_DEVICE_GUARDS.guards) > depth:
            _DEVICE_GUARDS.guards.pop().__exit__(None, None, None)
        raise


def record_event(device: torch.device, stream: int, event: int = 0) -> torch.Tensor:
    """Returns an empty tensor with the event as an attribute: graphs pass only tensors."""
    token: Any = torch.empty([0], dtype=torch.int64)
    token.event = devices.record_event(device, stream, event)
    return token  # type: ignore[no-any-return]


def record_event_fake(_device: torch.device, _stream: int, _event: int = 0) -> torch.Tensor:
    """The fake of an event: an empty tensor."""
    return torch.empty([0], dtype=torch.int64, device="cpu")


def wait_event(event: torch.Tensor, device: torch.device, stream: int) -> None:
    """Lets a stream wait for an event of `record_event`."""
    devices.wait_event(event.event, device, stream)  # type: ignore[attr-defined]


def synchronize(place: int) -> None:
    """Waits for the stream or event at an index of Dynamo's table."""
    torch_compat.get_external_object()(place).synchronize()


def synchronize_device(device: torch.device | None = None) -> None:
    """Waits for all streams of a device, by default of the current one."""
    torch.accelerator.synchronize(device)
