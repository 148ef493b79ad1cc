"""Offset assignment problems whose optimum is known: rectangles of time and bytes, cut into buffers.

The capacity is the height of the rectangle. All bytes of it are used at all times, unless a kind says otherwise.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

Buffer = tuple[int, int, int]
Rectangle = tuple[int, int, int, int]
"""First time, last time, lowest byte, highest byte; the second and fourth are exclusive."""


@dataclass(frozen=True)
class Kind:
    """How a rectangle is cut.

    `pinwheels` is the share of cuts into five rectangles around the one in the middle, which no straight cut separates;
    other cuts are straight. `instants` is the number of times for each buffer; with few, many buffers start together.
    `flatness` is the preference for cuts in time (above 1: short live ranges, below: long ones). `unaligned` subtracts
    up to 63 of 64 bytes from each size. `removed` is the share of buffers that are left out, and `shrunk` of those
    whose size is reduced by up to 2%, except at times of a twentieth of the range, which stays full.
    """

    pinwheels: float = 0.3
    instants: float = 4.0
    capacity: int = 1 << 20
    flatness: float = 1.0
    unaligned: bool = False
    removed: float = 0.0
    shrunk: float = 0.0


KINDS = {
    "straight cuts": Kind(pinwheels=0.0),
    "pinwheels": Kind(pinwheels=0.7),
    "long live ranges": Kind(flatness=0.15),
    "short live ranges": Kind(flatness=6.0),
    "unaligned": Kind(capacity=1 << 18, unaligned=True),
    "few times": Kind(instants=0.5),
    "few times and sizes": Kind(instants=0.2, capacity=256),
    "shrunk": Kind(shrunk=0.5),
    "gaps": Kind(removed=0.1, shrunk=0.3),
}


@dataclass(frozen=True)
class Problem:
    """Buffers that fit a capacity, which is the largest sum of sizes that are live at once."""

    buffers: list[Buffer]
    capacity: int
    alignment: int


def packed_problem(kind: Kind, count: int, seed: int) -> Problem:
    """Returns a problem of about `count` buffers."""
    generator = random.Random(seed)
    unit = 64 if kind.unaligned else 1
    times, height = max(40, int(count * kind.instants)), kind.capacity // unit
    rectangles: list[Rectangle] = []
    pending = [((0, times, 0, height), count)]
    while pending:
        rectangle, parts = pending.pop()
        pieces = _cut(rectangle, parts, kind, height / times * kind.flatness, generator)
        if len(pieces) == 1:
            rectangles.append(rectangle)
        else:
            pending += pieces
    full = generator.randrange(times * 19 // 20)
    buffers = []
    for first, last, low, high in rectangles:
        size = high - low
        if last <= full or first >= full + times // 20:
            if generator.random() < kind.removed:
                continue
            if generator.random() < kind.shrunk:
                size -= generator.randrange(1 + size // 50)
        buffers.append((first, last, size * unit - (generator.randrange(unit) if unit > 1 else 0)))
    generator.shuffle(buffers)
    return Problem(buffers, kind.capacity, unit)


def _cut(
    rectangle: Rectangle, parts: int, kind: Kind, flatness: float, generator: random.Random
) -> list[tuple[Rectangle, int]]:
    """Returns the pieces of a rectangle, each with the number of parts to cut it into; itself if it is not cut."""
    first, last, low, high = rectangle
    length, size = last - first, high - low
    if parts >= 5 and min(length, size) >= 3 and generator.random() < kind.pinwheels:
        return _shared(_pinwheel(rectangle, generator), parts)
    if parts < 2 or max(length, size) < 2:
        return [(rectangle, 1)]
    in_time = size < 2 or (length >= 2 and generator.random() < length * flatness / (length * flatness + size))
    extent = length if in_time else size
    at = generator.randint(1, extent - 1) if generator.random() < 0.3 else int(extent * generator.uniform(0.3, 0.7))
    at = min(max(at, 1), extent - 1)
    number = min(max(1, round(parts * at / extent)), parts - 1)
    if in_time:
        return [((first, first + at, low, high), number), ((first + at, last, low, high), parts - number)]
    return [((first, last, low, low + at), number), ((first, last, low + at, high), parts - number)]


def _pinwheel(rectangle: Rectangle, generator: random.Random) -> list[Rectangle]:
    first, last, low, high = rectangle
    left, below = generator.randint(first + 1, last - 2), generator.randint(low + 1, high - 2)
    right, above = generator.randint(left + 1, last - 1), generator.randint(below + 1, high - 1)
    pieces = [(first, right, low, below), (right, last, low, above), (left, last, above, high),
              (first, left, below, high), (left, right, below, above)]  # fmt: skip
    if generator.random() < 0.5:
        return pieces
    return [(first + last - end, first + last - begin, bottom, top) for begin, end, bottom, top in pieces]


def _shared(pieces: list[Rectangle], parts: int) -> list[tuple[Rectangle, int]]:
    areas = [(last - first) * (high - low) for first, last, low, high in pieces]
    return [(piece, max(1, parts * area // sum(areas))) for piece, area in zip(pieces, areas)]
