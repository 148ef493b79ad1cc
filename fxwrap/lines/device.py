"""Lines that set the current device and stream, and order the work of streams.

A stream is a number. Stream 0 is the stream that is current when the program is called; every other number is a side
stream of one device. `wrapper_ir/streams.py` defines the required order of work.
"""

from __future__ import annotations

from typing import ClassVar

from fxwrap.lines.operands import device_error
from fxwrap.wrapper_ir import UNKNOWN, Effect, EventStep, LineBase, Value, attribute, consume, define, line_class


@line_class("device.enter")
class EnterDevice(LineBase):
    """Makes a device, and unless it is 0 a stream, current until the matching `device.exit`.

    Example: `device.enter() device="cuda:1"`
    """

    bracket: ClassVar[tuple[str, int]] = ("device guard", 1)

    device: str = attribute()
    stream: int = attribute(default=0)

    def verify_self(self) -> str | None:
        return device_error(self.device)


@line_class("device.exit")
class ExitDevice(LineBase):
    """Restores the device and stream that were current before the matching `device.enter`.

    Example: `device.exit() device="cuda:1"`
    """

    bracket: ClassVar[tuple[str, int]] = ("device guard", -1)

    device: str = attribute()
    stream: int = attribute(default=0)


@line_class("device.record")
class RecordEvent(LineBase):
    """Records an event after the work queued so far on a stream.

    `event` is the index of an event that the model owns; 0 creates a new event.

    Example: `%done = device.record() device="cuda:0" stream=1 : opaque<Event>`
    """

    event_step: ClassVar[EventStep] = "record"

    result: Value = define()
    device: str = attribute()
    stream: int = attribute(default=0)
    event: int = attribute(default=0)

    def effects(self) -> tuple[Effect, ...]:
        return (UNKNOWN,)

    def verify_self(self) -> str | None:
        return device_error(self.device)


@line_class("device.wait")
class WaitEvent(LineBase):
    """Makes a stream wait for an event, which the line consumes.

    Example: `device.wait(%done) device="cuda:0" stream=0`
    """

    event_step: ClassVar[EventStep] = "wait"

    event: Value = consume()
    device: str = attribute()
    stream: int = attribute(default=0)

    def effects(self) -> tuple[Effect, ...]:
        return (UNKNOWN,)

    def verify_self(self) -> str | None:
        return device_error(self.device)
