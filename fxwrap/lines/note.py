"""Lines for readers and profilers."""

from __future__ import annotations

from typing import ClassVar

from fxwrap.wrapper_ir import OUTPUT, Effect, LineBase, attribute, line_class


@line_class("note.comment")
class Comment(LineBase):
    """A comment, which converters copy to the emitted code.

    Example: `note.comment() text="attention block 3"`
    """

    text: str = attribute()


@line_class("note.enter_range")
class EnterRange(LineBase):
    """Opens a named profiler range.

    Example: `note.enter_range() name="attention"`
    """

    bracket: ClassVar[tuple[str, int]] = ("profile range", 1)

    name: str = attribute()

    def effects(self) -> tuple[Effect, ...]:
        return (OUTPUT,)


@line_class("note.exit_range")
class ExitRange(LineBase):
    """Closes the innermost profiler range.

    Example: `note.exit_range() name="attention"`
    """

    bracket: ClassVar[tuple[str, int]] = ("profile range", -1)

    name: str = attribute()

    def effects(self) -> tuple[Effect, ...]:
        return (OUTPUT,)
