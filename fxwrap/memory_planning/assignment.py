"""Offset assignment for buffers with known sizes and live ranges, with a choice of algorithms."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from fxwrap.errors import OptionError, PlanningError
from fxwrap.memory_planning import greedy
from fxwrap.memory_planning.explore import SearchLimits, SearchStatus
from fxwrap.memory_planning.search import compile_search, search

HEURISTICS: Mapping[str, Callable[[Sequence[greedy.Buffer]], list[int]]] = {
    "greedy_by_size": greedy.greedy_by_size,
    "best_fit": greedy.best_fit,
    "greedy_by_duration": greedy.greedy_by_duration,
    "squeaky_wheel": greedy.squeaky_wheel,
}
ALGORITHMS = (*HEURISTICS, "search", "auto")

_INT64_MAX = 2**63 - 1

# "auto" takes n log n time: it skips the algorithms over overlapping pairs of buffers unless there are few pairs.
_MIN_PAIR_BUDGET = 100_000
_PAIRS_PER_BUFFER = 6

# Search steps of "auto", which is part of every compile: at most a few seconds. "search" doubles them until its time
# limit. The time of a step grows with the number of overlapping pairs.
_BOUND_STEPS = 6_500
_STEPS = 2_000
_FULL_STEPS_PAIRS = 5_000
_TRIES = 4
_CAPACITY_STEPS = 10_000_000


@dataclass(frozen=True)
class Assignment:
    """The offsets of buffers.

    `offsets` are in bytes, in the order of the buffers, multiples of the alignment; `peak` is the largest end of a
    buffer, with sizes rounded up to the alignment; `lower_bound` is the largest sum of sizes that are live at once;
    `algorithm` is the one that computed the offsets.
    """

    offsets: tuple[int, ...]
    peak: int
    lower_bound: int
    algorithm: str


def assign_offsets(
    buffers: Sequence[greedy.Buffer],
    *,
    alignment: int = 1,
    capacity: int | None = None,
    algorithm: str = "auto",
    time_limit_s: float = 10.0,
) -> Assignment:
    """Assigns offsets to buffers such that live buffers never overlap.

    Args:
        buffers: (first, last_exclusive, size) of each: times in any unit, sizes in bytes. Empty buffers have offset 0.
        alignment: bytes that offsets are multiples of, a power of two.
        capacity: the size in bytes to fit into; the first assignment that fits is returned.
        algorithm: "greedy_by_size" or "greedy_by_duration" (in the smallest gaps; linear in the number of overlapping
            pairs), "squeaky_wheel" (repeats the latter in better orders), "best_fit" (in the order of time, both ways;
            n log n), "search" (the heuristics, then depth-first search, see `search.py`), or "auto" (the
            heuristics, except those over pairs if there are many, then a search if the result exceeds the capacity, or
            a short one if it exceeds the lower bound and the limit of steps permits to place all buffers twice).
        time_limit_s: limit of a search, in seconds of wall time, without those that compile the native search.
            "auto" without a capacity only counts steps.

    Results are deterministic unless the time limit stops a search. Raises PlanningError for negative sizes, empty live
    ranges, an alignment that is no power of two, sums beyond 64 bits, and if nothing fits `capacity`; OptionError for
    an unknown algorithm or a negative limit.
    """
    _check_options(alignment, capacity, algorithm, time_limit_s)
    aligned = [_aligned(position, buffer, alignment) for position, buffer in enumerate(buffers)]
    nonempty = [position for position, (_, _, size) in enumerate(aligned) if size]
    chosen = [aligned[position] for position in nonempty]
    bound = greedy.max_live_bytes(chosen)
    if bound > _INT64_MAX:
        raise PlanningError(f"{bound} bytes are live at once, which exceeds 64 bits: check the sizes of buffers")
    is_timed = algorithm == "search" or capacity is not None
    planner = _OffsetPlanner(chosen, bound, alignment, capacity, time_limit_s if is_timed else math.inf)
    name, assigned = planner.plan(algorithm)
    offsets = [0] * len(aligned)
    for position, offset in zip(nonempty, assigned):
        offsets[position] = offset
    result = Assignment(tuple(offsets), greedy.peak_of(chosen, assigned), bound, name)
    _check_result(result, capacity)
    return result


@dataclass(frozen=True)
class _OffsetPlanner:
    """An assignment problem with aligned, non-zero sizes. A search starts its time, which ends at `deadline`."""

    buffers: list[greedy.Buffer]
    lower_bound: int
    alignment: int
    capacity: int | None
    time_limit_s: float
    deadline: float = math.inf

    @property
    def target(self) -> int:
        """The peak at which the planner stops."""
        return self.lower_bound if self.capacity is None else max(self.lower_bound, self.capacity)

    def plan(self, algorithm: str) -> tuple[str, Sequence[int]]:
        """Returns the name of the best algorithm and its offsets."""
        if algorithm in HEURISTICS:
            return algorithm, HEURISTICS[algorithm](self.buffers)
        thorough = algorithm == "search"
        name, offsets = self._best_heuristic(thorough)
        peak = greedy.peak_of(self.buffers, offsets)
        impossible = self.capacity is not None and self.capacity < self.lower_bound
        is_searched = thorough or self.capacity is not None or self._scaled(_BOUND_STEPS) >= 2 * len(self.buffers)
        if peak <= self.target or impossible or not is_searched:
            return name, offsets
        better = self._started()._search(peak, thorough)
        return ("search", better) if better else (name, offsets)

    def _started(self) -> _OffsetPlanner:
        """Returns the planner with its time running. The native search is compiled before, which may take longer."""
        if self.time_limit_s < math.inf:
            compile_search(self.buffers)
        return replace(self, deadline=time.monotonic() + self.time_limit_s)

    def _best_heuristic(self, thorough: bool) -> tuple[str, Sequence[int]]:
        """Returns the name and offsets of the best heuristic, tried in order until the target is reached."""
        count = len(self.buffers)
        limit = max(_MIN_PAIR_BUDGET, _PAIRS_PER_BUFFER * count)
        names = (
            tuple(HEURISTICS) if thorough or greedy.count_overlapping_pairs(self.buffers) <= limit else ("best_fit",)
        )
        best = ""
        offsets: Sequence[int] = ()
        for name in names:
            candidate = HEURISTICS[name](self.buffers)
            if not best or greedy.peak_of(self.buffers, candidate) < greedy.peak_of(self.buffers, offsets):
                best, offsets = name, candidate
            if greedy.peak_of(self.buffers, offsets) <= self.target:
                break
        return best, offsets

    def _search(self, peak: int, thorough: bool) -> Sequence[int]:
        """Returns offsets with a lower peak; () for none.

        Without a capacity, a bisection between the lower bound and the peak.
        """
        if self.capacity is not None:
            return search(self.buffers, self.capacity, SearchLimits(_CAPACITY_STEPS, self.deadline)).offsets
        best: Sequence[int] = ()
        proved = self.lower_bound - 1  # no plan has this peak or a lower one
        effort = 1
        while True:
            offsets, proved = self._narrow(proved, peak, effort)
            if offsets:
                best, peak = offsets, greedy.peak_of(self.buffers, offsets)
            if not thorough or self._is_over() or peak - proved <= max(self._tolerance, self.alignment):
                return best
            effort *= 2

    def _narrow(self, proved: int, peak: int, effort: int) -> tuple[Sequence[int], int]:
        """Returns the best offsets of a few searches between two peaks, and the highest peak proved impossible."""
        best: Sequence[int] = ()
        low = proved  # proved impossible, or beyond the limits
        for _ in range(_TRIES + 1):
            at_bound = low < self.lower_bound
            tried = self.lower_bound if at_bound else (low + peak) // 2 // self.alignment * self.alignment
            if not low < tried < peak or (not at_bound and peak - low <= self._tolerance) or self._is_over():
                break
            steps = self._scaled(effort * (_BOUND_STEPS if at_bound else _STEPS))
            result = search(self.buffers, tried, SearchLimits(steps, self.deadline))
            match result.outcome:
                case SearchStatus.SOLVED:
                    best, peak = result.offsets, greedy.peak_of(self.buffers, result.offsets)
                case SearchStatus.INFEASIBLE:
                    low = proved = tried
                case SearchStatus.LIMIT_REACHED:
                    low = tried
        return best, proved

    @property
    def _tolerance(self) -> int:
        """The difference of peaks at which the search stops."""
        return self.lower_bound // 1000

    def _scaled(self, steps: int) -> int:
        """Returns the number of steps that take about as long as `steps` in a small problem."""
        return max(1, steps * _FULL_STEPS_PAIRS // max(_FULL_STEPS_PAIRS, greedy.count_overlapping_pairs(self.buffers)))

    def _is_over(self) -> bool:
        return time.monotonic() > self.deadline


def _check_options(alignment: object, capacity: object, algorithm: str, time_limit_s: float) -> None:
    if algorithm not in ALGORITHMS:
        raise OptionError(f"algorithm must be one of {', '.join(ALGORITHMS)}, not {algorithm!r}")
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise PlanningError(f"alignment must be a power of two, not {alignment!r}")
    if capacity is not None and (not isinstance(capacity, int) or capacity < 0):
        raise PlanningError(f"capacity must be 0 or more bytes, not {capacity!r}")
    if not time_limit_s >= 0:
        raise OptionError(f"time_limit_s must be 0 or more seconds, not {time_limit_s!r}")


def _aligned(position: int, buffer: Sequence[int], alignment: int) -> greedy.Buffer:
    """Returns a buffer with its size rounded up. Raises PlanningError for an invalid one."""
    try:
        first, last, size = map(operator.index, buffer)
    except (TypeError, ValueError):
        raise PlanningError(
            f"buffer {position} is {buffer!r}; it must be three integers: first, last (exclusive), size"
        ) from None
    if first >= last:
        raise PlanningError(f"buffer {position} is live from {first} to {last}, which is empty: the end must be later")
    if size < 0:
        raise PlanningError(f"buffer {position} has the negative size {size}")
    if size > _INT64_MAX - alignment:
        raise PlanningError(f"buffer {position} has {size} bytes, which exceeds 64 bits: check its size")
    return first, last, -(-size // alignment) * alignment


def _check_result(result: Assignment, capacity: int | None) -> None:
    if result.peak > _INT64_MAX:
        message = f"the assignment ends at byte {result.peak}, which exceeds 64 bits"
        raise PlanningError(message, result.peak, result.lower_bound)
    if capacity is None or result.peak <= capacity:
        return
    advice = "no plan can fit" if result.lower_bound > capacity else "a longer time limit may find a plan that fits"
    message = f"the best plan found needs {result.peak} bytes and the capacity is {capacity}"
    reason = f"{result.lower_bound} bytes are live at once: {advice}"
    raise PlanningError(f"{message}; {reason}", result.peak, result.lower_bound)
