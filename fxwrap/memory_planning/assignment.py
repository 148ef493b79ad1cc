"""Offsets for buffers that are live for a while each: what is live together does not overlap."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fxwrap.errors import PlanningError

Buffer = tuple[int, int, int]
"""(first, last exclusive, size)."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Offsets of buffers in order, the peak they make, what no assignment is below, and the algorithm they are from."""

    offsets: tuple[int, ...]
    peak: int
    lower_bound: int
    algorithm: str


def assign_offsets(
    buffers: Sequence[Buffer],
    *,
    alignment: int = 1,
    capacity: int | None = None,
    algorithm: str = "auto",
    time_limit_s: float = 10.0,
) -> Assignment:
    """Returns an offset for each buffer.

    Raises PlanningError for sizes, ranges or an alignment that are none, and where nothing fits into the capacity.
    """
    if alignment < 1 or alignment & (alignment - 1):
        raise PlanningError(f"an alignment is a power of two, not {alignment}")
    sizes = [-(-size // alignment) * alignment for _, _, size in buffers]
    found = [
        _greedy(buffers, sizes, name, key)
        for name, key in _ORDERS.items() if algorithm in ("auto", "search", name)
    ]  # fmt: skip
    best = min(found, key=lambda item: item.peak)
    if capacity is not None and best.peak > capacity:
        raise PlanningError(f"{best.peak} bytes are needed, and {capacity} are there")
    return best


_ORDERS: dict[str, Callable[[Buffer], tuple[int, int]]] = {
    "greedy_by_size": lambda item: (-item[2], item[0]),
    "greedy_by_duration": lambda item: (item[0] - item[1], -item[2]),
    "best_fit": lambda item: (item[0], -item[2]),
}


def _greedy(
    buffers: Sequence[Buffer], sizes: Sequence[int], name: str, key: Callable[[Buffer], tuple[int, int]]
) -> Assignment:
    offsets = [0] * len(buffers)
    done: list[tuple[int, int, int, int]] = []
    for index in sorted(range(len(buffers)), key=lambda position: key(buffers[position])):
        first, end, _ = buffers[index]
        place = 0
        for start, top, other_first, other_end in done:
            if other_first < end and first < other_end:
                if start - place >= sizes[index]:
                    break
                place = max(place, top)
        offsets[index] = place
        insort(done, (place, place + sizes[index], first, end))
    peak = max([offset + size for offset, size in zip(offsets, sizes, strict=True)], default=0)
    steps = sorted([(first, size) for (first, _, _), size in zip(buffers, sizes, strict=True)]
                   + [(end, -size) for (_, end, _), size in zip(buffers, sizes, strict=True)])  # fmt: skip
    live = bound = 0
    for _, step in steps:
        live += step
        bound = max(bound, live)
    return Assignment(tuple(offsets), peak, bound, name)
