"""Quick placements: by size, by duration, and best fit in the order of time.

All take buffers (first, last_exclusive, size) with sizes above zero and give an offset for each; equal inputs
give equal offsets. Buffers that live at the same time never overlap.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter

Buffer = tuple[int, int, int]  # first, last (exclusive), size

# Above this number of pairs that live together, neighbours are found again for each buffer instead of being kept.
_PAIRS_KEPT = 8_000_000


def greedy_by_size(buffers: Sequence[Buffer]) -> list[int]:
    """Place the largest buffers first, each in the smallest gap that holds it (Pisarchyk and Lee, 2020).

    Costs time in proportion to the pairs of buffers that live together.
    """
    return _place_in_order(buffers, _order(buffers, lambda first, last, size: (-size, first - last, first)))


def greedy_by_duration(buffers: Sequence[Buffer]) -> list[int]:
    """Place those that live longest first, each in the smallest gap that holds it; costs as `greedy_by_size` does."""
    return _place_in_order(buffers, _order(buffers, lambda first, last, size: (first - last, -size, first)))


def best_fit(buffers: Sequence[Buffer]) -> list[int]:
    """Place in the order of time, each in the smallest gap that is free then; n log n.

    Both directions of time are tried: a training forward, whose saved activations live to its end, packs better
    backwards, where all of them are born at once and can be stacked in the order in which they die.
    """
    forward = _fit_in_time(buffers)
    peak = _peak(buffers, forward)
    if peak == largest_live(buffers):
        return forward
    backward = _fit_in_time([(-last, -first, size) for first, last, size in buffers])
    return backward if _peak(buffers, backward) < peak else forward


def largest_live(buffers: Iterable[Buffer]) -> int:
    """The largest sum of sizes that are live at once: no placement needs less."""
    changes: dict[int, int] = {}
    for first, last, size in buffers:
        changes[first] = changes.get(first, 0) + size
        changes[last] = changes.get(last, 0) - size
    most = live = 0
    for instant in sorted(changes):
        live += changes[instant]
        if live > most:
            most = live
    return most


def count_pairs(buffers: Sequence[Buffer]) -> int:
    """How many pairs of buffers live at the same time."""
    births = sorted(first for first, _, _ in buffers)
    deaths = sorted(last for _, last, _ in buffers)
    pairs = ended = 0
    for born, birth in enumerate(births):
        while ended < len(deaths) and deaths[ended] <= birth:
            ended += 1
        pairs += born - ended
    return pairs


def _peak(buffers: Sequence[Buffer], offsets: Sequence[int]) -> int:
    return max((offset + size for offset, (_, _, size) in zip(offsets, buffers)), default=0)


def _order(buffers: Sequence[Buffer], key: Callable[[int, int, int], tuple[int, ...]]) -> list[int]:
    keys = [key(*buffer) for buffer in buffers]
    return sorted(range(len(buffers)), key=keys.__getitem__)


def _place_in_order(buffers: Sequence[Buffer], order: Sequence[int]) -> list[int]:
    offsets = [-1] * len(buffers)
    ends = [0] * len(buffers)
    neighbours = _neighbours(buffers)
    for index in order:
        size = buffers[index][2]
        # Pairs (offset, end) of what is placed and lives together with this buffer.
        taken = sorted([(offsets[other], ends[other]) for other in neighbours(index) if offsets[other] >= 0])
        offsets[index] = offset = _smallest_gap(taken, size)
        ends[index] = offset + size
    return offsets


def _smallest_gap(taken: Iterable[tuple[int, int]], size: int) -> int:
    """Where the smallest gap between taken stretches starts that holds `size`; the top of all where none does."""
    best, smallest = -1, 0
    top = 0
    for offset, end in taken:
        if offset > top:
            gap = offset - top
            if gap >= size and (best < 0 or gap < smallest):
                best, smallest = top, gap
        if end > top:
            top = end
    return best if best >= 0 else top


def _neighbours(buffers: Sequence[Buffer]) -> Callable[[int], Iterable[int]]:
    """A function from a buffer to those that live at the same time as it."""
    by_birth = sorted(range(len(buffers)), key=lambda index: (buffers[index][0], index))
    births = [buffers[index][0] for index in by_birth]
    if count_pairs(buffers) > _PAIRS_KEPT:
        return lambda index: _find_neighbours(buffers, by_birth, births, index)
    table: list[list[int]] = [[] for _ in buffers]
    live: list[int] = []
    for index in by_birth:
        first = buffers[index][0]
        live = [other for other in live if buffers[other][1] > first]
        table[index] += live
        for other in live:
            table[other].append(index)
        live.append(index)
    return table.__getitem__


def _find_neighbours(
    buffers: Sequence[Buffer], by_birth: Sequence[int], births: Sequence[int], index: int
) -> list[int]:
    first, last, _ = buffers[index]
    before, until = bisect_right(births, first), bisect_left(births, last)
    early = [other for other in by_birth[:before] if buffers[other][1] > first and other != index]
    return early + list(by_birth[before:until])


def _fit_in_time(buffers: Sequence[Buffer]) -> list[int]:
    """Best fit over a list of gaps: each birth takes the smallest that holds it, each death joins its neighbours."""
    offsets = [0] * len(buffers)
    gaps: list[tuple[int, int]] = []  # (size, start), in order
    size_at: dict[int, int] = {}  # a gap's size by its start
    start_before: dict[int, int] = {}  # a gap's start by its end
    top = 0  # above it all is free

    def drop(start: int) -> int:
        size = size_at.pop(start)
        del start_before[start + size]
        del gaps[bisect_left(gaps, (size, start))]
        return size

    def add(start: int, size: int) -> None:
        size_at[start] = size
        start_before[start + size] = start
        insort(gaps, (size, start))

    for _, kind, _, _, index in _events(buffers):
        size = buffers[index][2]
        if kind == 0:
            start, end = offsets[index], offsets[index] + size
            if end in size_at:
                end += drop(end)
            if start in start_before:
                start = start_before[start]
                drop(start)
            if end == top:
                top = start
            else:
                add(start, end - start)
            continue
        position = bisect_left(gaps, (size, 0))
        if position == len(gaps):
            offsets[index] = top
            top += size
            continue
        room, start = gaps[position]
        drop(start)
        offsets[index] = start
        if room > size:
            add(start + size, room - size)
    return offsets


def _events(buffers: Sequence[Buffer]) -> list[tuple[int, int, int, int, int]]:
    """Deaths (kind 0) and births (kind 1) in the order of time; at one instant the longest birth, then the largest."""
    events = [(last, 0, 0, 0, index) for index, (_, last, _) in enumerate(buffers)]
    events += [(first, 1, -last, -size, index) for index, (first, last, size) in enumerate(buffers)]
    events.sort(key=itemgetter(0, 1, 2, 3, 4))
    return events
