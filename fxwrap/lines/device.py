"""Lines that set the current device and stream, and order the work of streams.

A stream is a number: 0 is the one that is current when the program is called, others are streams of their own, each of
one device. `wrapper_ir/streams.py` says which orders of work a program must have.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from fxwrap.wrapper_ir import UNKNOWN, Effect, LineBase, Value, attribute, consume, define, line_class


@line_class("device.enter")
class EnterDevice(LineBase):
    """Makes a device current until the matching `device.exit`, and of its streams this one; 0 leaves the stream alone.

    Example: `device.enter() device="cuda:1"`
    """

    bracket: ClassVar[tuple[str, int]] = ("device guard", 1)

    device: str = attribute()
    stream: int = attribute(default=0)


@line_class("device.exit")
class ExitDevice(LineBase):
    """Makes the device and the stream current again that were so before the matching `device.enter`.

    Example: `device.exit() device="cuda:1"`
    """

    bracket: ClassVar[tuple[str, int]] = ("device guard", -1)

    device: str = attribute()
    stream: int = attribute(default=0)


@line_class("device.record")
class RecordEvent(LineBase):
    """Records an event after the work queued so far on a stream.

    `event` is the number of an event of the model's own, which is recorded then; with 0 it is one of the program's.

    Example: `%done = device.record() device="cuda:0" stream=1 : opaque<Event>`
    """

    event_step: ClassVar[Literal["", "record", "wait"]] = "record"

    result: Value = define()
    device: str = attribute()
    stream: int = attribute(default=0)
    event: int = attribute(default=0)

    def effects(self) -> tuple[Effect, ...]:
        return (UNKNOWN,)


@line_class("device.wait")
class WaitEvent(LineBase):
    """Makes a stream wait for an event, and takes the event.

    Example: `device.wait(%done) device="cuda:0" stream=0`
    """

    event_step: ClassVar[Literal["", "record", "wait"]] = "wait"

    event: Value = consume()
    device: str = attribute()
    stream: int = attribute(default=0)

    def effects(self) -> tuple[Effect, ...]:
        return (UNKNOWN,)
