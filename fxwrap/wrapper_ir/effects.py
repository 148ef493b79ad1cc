"""Effects of lines besides computing their results."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tag:
    """An effect or a step of a key path, in the text `name("a", 1)`."""

    name: str
    arguments: tuple[str | int, ...] = ()


Effect = Tag
"""An effect of a line: `random(device)`, `communicate(group)`, `assert`, `output`, `unknown`."""

ASSERT = Tag("assert")
OUTPUT = Tag("output")
UNKNOWN = Tag("unknown")


def random_effect(device: str) -> Tag:
    """Returns the effect of drawing random numbers from a device's default generator, e.g. `random("cuda:0")`."""
    return Tag("random", (device,))


def communication_effect(group: str) -> Tag:
    """Returns the effect of communicating in a process group, by the group's name."""
    return Tag("communicate", (group,))


def effects_conflict(first: tuple[Tag, ...], second: tuple[Tag, ...]) -> bool:
    """Returns whether lines with these effects must keep their order.

    They must if they share an effect, or if one has the effect `unknown` and the other has any effect.
    """
    if not first or not second:
        return False
    return UNKNOWN in first or UNKNOWN in second or not set(first).isdisjoint(second)
