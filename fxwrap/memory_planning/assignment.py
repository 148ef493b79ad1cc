"""The public face of planning: offsets for buffers with known sizes and live ranges, by a choice of algorithms."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fxwrap.errors import OptionError, PlanningError
from fxwrap.memory_planning.greedy import best_fit, count_pairs, greedy_by_duration, greedy_by_size, largest_live
from fxwrap.memory_planning.search import Limits, Outcome, search

Buffer = tuple[int, int, int]  # first, last (exclusive), size

CHEAP: Mapping[str, Callable[[Sequence[Buffer]], list[int]]] = {
    "greedy_by_size": greedy_by_size,
    "best_fit": best_fit,
    "greedy_by_duration": greedy_by_duration,
}
ALGORITHMS = (*CHEAP, "search", "auto")

_LARGEST = 2**63 - 1

# "auto" keeps to n log n: it leaves out the algorithms that look at pairs where buffers share their lives with very
# many, unless the pairs are few altogether.
_PAIRS_ANYWAY = 100_000
_PAIRS_A_BUFFER = 6
_SEARCHED_BUFFERS = 400


# Steps of a search for the best peak: a few seconds at most, since "auto" is part of every compile. A search that is
# asked for by name goes on with twice as many, and so on until its time is over.
_BOUND_STEPS = 6_500
_STEPS = 2_000
_TRIES = 4
_CAPACITY_STEPS = 1_000_000


@dataclass(frozen=True)
class Assignment:
    """Where each buffer lies.

    `offsets` are in bytes, in the order of the buffers, multiples of the alignment; `peak` is the largest end of a
    buffer, sizes rounded up to the alignment; `lower_bound` is the largest sum of such sizes that are live at
    once; `algorithm` is the one that gave the offsets.
    """

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
    """Give each buffer an offset such that no two that live at the same time overlap.

    `buffers` are (first, last_exclusive, size): times in any unit, sizes in bytes. A buffer of size 0 lies at 0.
    `algorithm` is one of:

    - "greedy_by_size", "greedy_by_duration": the largest, or the longest-lived, first, each in the smallest gap that
      holds it; time in proportion to the pairs of buffers that live together.
    - "best_fit": in the order of time, forwards and backwards; n log n.
    - "search": depth-first search (see `search.py`), after the quick ones.
    - "auto": the quick ones (those that look at pairs only where these are few), and a short search where the
      best is above the lower bound, or above `capacity` where one is given, and there are at most 400 buffers. Without
      a capacity it has a fixed number of steps, which take at most a few seconds.

    With `capacity` in bytes, the first plan that fits is taken, and a search goes on until there is one or
    `time_limit_s` seconds (of wall time) are over. Results are the same on every run, unless the time limit cuts a
    search.

    Raises PlanningError for negative sizes, empty live ranges, an alignment that is no power of two, sums that exceed
    64 bits, or when nothing fits in `capacity`; OptionError for an unknown algorithm or a negative limit.
    """
    _check_options(alignment, capacity, algorithm, time_limit_s)
    aligned = [_aligned(position, buffer, alignment) for position, buffer in enumerate(buffers)]
    kept = [position for position, (_, _, size) in enumerate(aligned) if size]
    chosen = [aligned[position] for position in kept]
    bound = largest_live(chosen)
    if bound > _LARGEST:
        raise PlanningError(f"the buffers live at once have {bound} bytes, more than 64 bits hold: check their sizes")
    planner = _Planner(chosen, bound, alignment, capacity, time.monotonic() + time_limit_s)
    name, found = planner.plan(algorithm)
    offsets = [0] * len(aligned)
    for position, offset in zip(kept, found):
        offsets[position] = offset
    result = Assignment(tuple(offsets), _peak(chosen, found), bound, name)
    _check_result(result, capacity)
    return result


@dataclass(frozen=True)
class _Planner:
    """A problem with its sizes aligned, none of them zero."""

    buffers: list[Buffer]
    lower_bound: int
    alignment: int
    capacity: int | None
    deadline: float

    @property
    def target(self) -> int:
        """A peak that cannot, or need not, be improved."""
        return self.lower_bound if self.capacity is None else max(self.lower_bound, self.capacity)

    def plan(self, algorithm: str) -> tuple[str, Sequence[int]]:
        """The name of the algorithm that gave the best offsets, and these."""
        if algorithm in CHEAP:
            return algorithm, CHEAP[algorithm](self.buffers)
        thorough = algorithm == "search"
        name, offsets = self._cheapest(thorough)
        peak = _peak(self.buffers, offsets)
        impossible = self.capacity is not None and self.capacity < self.lower_bound
        if peak <= self.target or impossible or not (thorough or len(self.buffers) <= _SEARCHED_BUFFERS):
            return name, offsets
        better = self._search(peak, thorough)
        return ("search", better) if better else (name, offsets)

    def _cheapest(self, thorough: bool) -> tuple[str, Sequence[int]]:
        """The best of the quick algorithms, of which the later ones are tried while there is something to gain."""
        count = len(self.buffers)
        limit = max(_PAIRS_ANYWAY, _PAIRS_A_BUFFER * count)
        names = tuple(CHEAP) if thorough or count_pairs(self.buffers) <= limit else ("best_fit",)
        best = ""
        offsets: Sequence[int] = ()
        for name in names:
            found = CHEAP[name](self.buffers)
            if not best or _peak(self.buffers, found) < _peak(self.buffers, offsets):
                best, offsets = name, found
            if _peak(self.buffers, offsets) <= self.target:
                break
        return best, offsets

    def _search(self, peak: int, thorough: bool) -> Sequence[int]:
        """Offsets with a peak below this one; () for none.

        Without a capacity the lower bound is tried first, then the middle between what was reached and what was not.
        """
        if self.capacity is not None:
            return search(self.buffers, self.capacity, Limits(_CAPACITY_STEPS, self.deadline)).offsets
        best: Sequence[int] = ()
        proved = self.lower_bound - 1  # no plan has this peak or a lower one
        effort = 1
        while True:
            found, proved = self._narrow(proved, peak, effort)
            if found:
                best, peak = found, _peak(self.buffers, found)
            if not thorough or self._is_over() or peak - proved <= max(self._close, self.alignment):
                return best
            effort *= 2

    def _narrow(self, proved: int, peak: int, effort: int) -> tuple[Sequence[int], int]:
        """The best offsets of a few searches between these peaks, and the highest peak that is proved impossible."""
        best: Sequence[int] = ()
        low = proved  # this peak was proved impossible, or given up
        for _ in range(_TRIES + 1):
            at_bound = low < self.lower_bound
            tried = self.lower_bound if at_bound else (low + peak) // 2 // self.alignment * self.alignment
            if not low < tried < peak or (not at_bound and peak - low <= self._close) or self._is_over():
                break
            steps = effort * (_BOUND_STEPS if at_bound else _STEPS)
            result = search(self.buffers, tried, Limits(steps, self.deadline))
            match result.outcome:
                case Outcome.SOLVED:
                    best, peak = result.offsets, _peak(self.buffers, result.offsets)
                case Outcome.IMPOSSIBLE:
                    low = proved = tried
                case Outcome.GAVE_UP:
                    low = tried
        return best, proved

    @property
    def _close(self) -> int:
        """A difference of peaks that is not worth another search."""
        return self.lower_bound // 1000

    def _is_over(self) -> bool:
        return time.monotonic() > self.deadline


def _check_options(alignment: object, capacity: object, algorithm: str, time_limit_s: float) -> None:
    if algorithm not in ALGORITHMS:
        raise OptionError(f"algorithm must be one of {', '.join(ALGORITHMS)}, not {algorithm!r}")
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise PlanningError(f"an alignment is a power of two, not {alignment!r}")
    if capacity is not None and (not isinstance(capacity, int) or capacity < 0):
        raise PlanningError(f"a capacity is a number of bytes, 0 or more, not {capacity!r}")
    if not time_limit_s >= 0:
        raise OptionError(f"time_limit_s must be 0 or more seconds, not {time_limit_s!r}")


def _aligned(position: int, buffer: Sequence[int], alignment: int) -> Buffer:
    """A buffer with its size rounded up; PlanningError where it is none."""
    try:
        first, last, size = map(operator.index, buffer)
    except (TypeError, ValueError):
        raise PlanningError(
            f"buffer {position} is {buffer!r}; it must be three integers: first, last (exclusive), size"
        ) from None
    if first >= last:
        raise PlanningError(f"buffer {position} lives from {first} to {last}, which is empty: the end must be later")
    if size < 0:
        raise PlanningError(f"buffer {position} has the negative size {size}")
    if size > _LARGEST - alignment:
        raise PlanningError(f"buffer {position} has {size} bytes, more than 64 bits hold: check its size")
    return first, last, -(-size // alignment) * alignment


def _check_result(result: Assignment, capacity: int | None) -> None:
    if result.peak > _LARGEST:
        raise PlanningError(
            f"the plan ends at byte {result.peak}, more than 64 bits hold", result.peak, result.lower_bound
        )
    if capacity is None or result.peak <= capacity:
        return
    if result.lower_bound > capacity:
        why = f"{result.lower_bound} bytes are live at once: no plan can fit"
    else:
        why = f"{result.lower_bound} bytes are live at once, so that a longer search may still find one"
    raise PlanningError(
        f"the best plan found needs {result.peak} bytes and the capacity is {capacity}; {why}",
        result.peak,
        result.lower_bound,
    )


def _peak(buffers: Sequence[Buffer], offsets: Sequence[int]) -> int:
    return max((offset + size for offset, (_, _, size) in zip(offsets, buffers)), default=0)
