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
    """Returns the effect of communicating in a process group, by the group's name; "" is any group."""
    return Tag("communicate", (group,))


ANY_COMMUNICATION = communication_effect("")
"""The effect of communicating in a group that the line does not name."""
