"""What a line does besides computing its results."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tag:
    """A name with arguments, `name("a", 1)` in the text: an effect, or a step of a key path."""

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
    """Returns the effect of communicating in a process group, by its name."""
    return Tag("communicate", (group,))


def effects_conflict(first: tuple[Tag, ...], second: tuple[Tag, ...]) -> bool:
    """Returns whether two lines with these effects must keep their order.

    They must when they share an effect, or when one of them is `unknown` and the other has any effect.
    """
    if not first or not second:
        return False
    return UNKNOWN in first or UNKNOWN in second or not set(first).isdisjoint(second)
