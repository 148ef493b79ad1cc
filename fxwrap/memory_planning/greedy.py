"""Heuristics of offset assignment: greedy by size and by duration, squeaky wheel, and best fit in the order of time.

All take buffers with sizes above zero and return an offset for each, deterministically. Live buffers never overlap.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import TypeAlias

Buffer: TypeAlias = tuple[int, int, int]
"""First time, last time (exclusive) and size in bytes."""

MAX_STORED_PAIRS = 8_000_000
"""Largest number of overlapping pairs to store; if there are more, neighbours are computed for each buffer."""


_MAX_ROUNDS = 20
_MAX_PAIR_VISITS = 120_000
"""Limits of the rounds of `squeaky_wheel`: their number, and its product with the number of overlapping pairs."""

_PROMOTION = 20
"""A buffer that ends too high moves up by this fraction of the order."""


def greedy_by_size(buffers: Sequence[Buffer], max_stored_pairs: int = MAX_STORED_PAIRS) -> list[int]:
    """Places the largest buffers first, each in the smallest gap that fits (Pisarchyk and Lee, 2020).

    Linear in the number of pairs of buffers with overlapping live ranges.
    """
    order = _order(buffers, lambda first, last, size: (-size, first - last, first))
    return _place_in_order(buffers, order, _neighbours(buffers, max_stored_pairs))


def greedy_by_duration(buffers: Sequence[Buffer], max_stored_pairs: int = MAX_STORED_PAIRS) -> list[int]:
    """Places the longest live ranges first, each in the smallest gap that fits, at the cost of `greedy_by_size`."""
    return _place_in_order(buffers, _order(buffers, _by_duration), _neighbours(buffers, max_stored_pairs))


def squeaky_wheel(buffers: Sequence[Buffer]) -> list[int]:
    """Returns the best of repeated placements by `greedy_by_duration` (Joslin and Clements, 1999).

    Buffers that ended above the lower bound come earlier in the next order. The number of rounds is limited by the
    number of overlapping pairs.
    """
    bound = max_live_bytes(buffers)
    neighbours = _neighbours(buffers, MAX_STORED_PAIRS)
    ranks = [0] * len(buffers)
    for rank, index in enumerate(_order(buffers, _by_duration)):
        ranks[index] = rank
    best: list[int] = []
    lowest = 0
    rounds = min(_MAX_ROUNDS, _MAX_PAIR_VISITS // max(1, count_overlapping_pairs(buffers)))
    for _ in range(max(1, rounds)):
        order = sorted(range(len(buffers)), key=lambda index: (ranks[index], index))
        offsets = _place_in_order(buffers, order, neighbours)
        peak = peak_of(buffers, offsets)
        if not best or peak < lowest:
            best, lowest = offsets, peak
        if peak <= bound:
            break
        for index, offset in enumerate(offsets):
            if offset + buffers[index][2] > bound:
                ranks[index] -= max(1, len(buffers) // _PROMOTION)
    return best


def best_fit(buffers: Sequence[Buffer]) -> list[int]:
    """Places buffers in the order of time, each in the smallest gap that fits, in n log n time.

    Returns the better of both directions of time: the forward of a training step, whose saved activations live to its
    end, packs better backwards.
    """
    forward = _best_fit_in_time(buffers)
    peak = peak_of(buffers, forward)
    if peak == max_live_bytes(buffers):
        return forward
    backward = _best_fit_in_time([(-last, -first, size) for first, last, size in buffers])
    return backward if peak_of(buffers, backward) < peak else forward


def max_live_bytes(buffers: Iterable[Buffer]) -> int:
    """Returns the largest sum of sizes that are live at once, a lower bound of the peak."""
    changes: dict[int, int] = {}
    for first, last, size in buffers:
        changes[first] = changes.get(first, 0) + size
        changes[last] = changes.get(last, 0) - size
    peak = live = 0
    for instant in sorted(changes):
        live += changes[instant]
        peak = max(peak, live)
    return peak


def count_overlapping_pairs(buffers: Sequence[Buffer]) -> int:
    """Returns the number of pairs of buffers with overlapping live ranges."""
    births = sorted(first for first, _, _ in buffers)
    deaths = sorted(last for _, last, _ in buffers)
    pairs = ended = 0
    for born, birth in enumerate(births):
        while ended < len(deaths) and deaths[ended] <= birth:
            ended += 1
        pairs += born - ended
    return pairs


def peak_of(buffers: Sequence[Buffer], offsets: Sequence[int]) -> int:
    """Returns the largest end of a buffer."""
    return max((offset + size for offset, (_, _, size) in zip(offsets, buffers)), default=0)


def _order(buffers: Sequence[Buffer], key: Callable[[int, int, int], tuple[int, ...]]) -> list[int]:
    keys = [key(*buffer) for buffer in buffers]
    return sorted(range(len(buffers)), key=keys.__getitem__)


def _by_duration(first: int, last: int, size: int) -> tuple[int, ...]:
    return first - last, -size, first


def _place_in_order(
    buffers: Sequence[Buffer], order: Sequence[int], neighbours: Callable[[int], Iterable[int]]
) -> list[int]:
    offsets = [-1] * len(buffers)
    ends = [0] * len(buffers)
    for index in order:
        size = buffers[index][2]
        placed = sorted([(offsets[other], ends[other]) for other in neighbours(index) if offsets[other] >= 0])
        offsets[index] = offset = _smallest_gap(placed, size)
        ends[index] = offset + size
    return offsets


def _smallest_gap(placed: Iterable[tuple[int, int]], size: int) -> int:
    """Returns the start of the smallest gap of at least `size` between sorted (offset, end) pairs, else their top."""
    best, smallest = -1, 0
    top = 0
    for offset, end in placed:
        if offset > top:
            gap = offset - top
            if gap >= size and (best < 0 or gap < smallest):
                best, smallest = top, gap
        if end > top:
            top = end
    return best if best >= 0 else top


def _neighbours(buffers: Sequence[Buffer], max_stored_pairs: int) -> Callable[[int], Iterable[int]]:
    """Returns a function from a buffer to those with overlapping live ranges."""
    by_birth = sorted(range(len(buffers)), key=lambda index: (buffers[index][0], index))
    births = [buffers[index][0] for index in by_birth]
    if count_overlapping_pairs(buffers) > max_stored_pairs:
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


def _best_fit_in_time(buffers: Sequence[Buffer]) -> list[int]:
    """Best fit over a list of gaps: a birth takes the smallest gap that fits, a death merges adjacent gaps."""
    offsets = [0] * len(buffers)
    gaps: list[tuple[int, int]] = []  # (size, start), in order
    size_at: dict[int, int] = {}  # a gap's size by its start
    start_before: dict[int, int] = {}  # a gap's start by its end
    top = 0

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
    """Returns deaths (kind 0) and births (kind 1) by time, and births of one time by end and size."""
    events = [(last, 0, 0, 0, index) for index, (_, last, _) in enumerate(buffers)]
    events += [(first, 1, -last, -size, index) for index, (first, last, size) in enumerate(buffers)]
    events.sort(key=itemgetter(0, 1, 2, 3, 4))
    return events
