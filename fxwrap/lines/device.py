"""Lines that set the current device and order the work of streams."""

from __future__ import annotations

from typing import ClassVar

from fxwrap.wrapper_ir import UNKNOWN, Effect, LineBase, Value, attribute, consume, define, line_class


@line_class("device.enter")
class EnterDevice(LineBase):
    """Makes a device current until the matching `device.exit`.

    Example: `device.enter() device="cuda:1"`
    """

    bracket: ClassVar[tuple[str, int]] = ("device guard", 1)

    device: str = attribute()


@line_class("device.exit")
class ExitDevice(LineBase):
    """Makes the device current again that was so before the matching `device.enter`.

    Example: `device.exit() device="cuda:1"`
    """

    bracket: ClassVar[tuple[str, int]] = ("device guard", -1)

    device: str = attribute()


@line_class("device.record")
class RecordEvent(LineBase):
    """Records an event after the work queued so far on a stream.

    Example: `%done = device.record() device="cuda:0" stream=1 : opaque<Event>`
    """

    result: Value = define()
    device: str = attribute()
    stream: int = attribute(default=0)

    def effects(self) -> tuple[Effect, ...]:
        return (UNKNOWN,)


@line_class("device.wait")
class WaitEvent(LineBase):
    """Makes a stream wait for an event, and takes the event.

    Example: `device.wait(%done) device="cuda:0" stream=0`
    """

    event: Value = consume()
    device: str = attribute()
    stream: int = attribute(default=0)

    def effects(self) -> tuple[Effect, ...]:
        return (UNKNOWN,)
