"""The native counterpart of `explore`: equal results, step for step, in a small part of the time."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

from fxwrap.memory_planning.explore import Explore, Order, SearchLimits, SearchResult, SearchStatus, explore
from fxwrap.memory_planning.placement import Subproblem
from fxwrap.runtime.native.planning import load_planner

_OUTCOMES = (SearchStatus.SOLVED, SearchStatus.INFEASIBLE, SearchStatus.LIMIT_REACHED)

_MAX_CAPACITY = 1 << 61
"""Sums of two offsets below this have 64 bits."""

_FOREVER_S = 1e9


def native_explore() -> Explore | None:
    """Returns the native `explore`, built now unless it is in the cache; None where it cannot be built."""
    function = load_planner()
    return None if function is None else _adapted(function)


def _adapted(function: Callable[..., int]) -> Explore:
    def explore_natively(
        part: Subproblem, order: Order, ranks: list[int], weights: list[int], limits: SearchLimits
    ) -> SearchResult:
        if part.capacity >= _MAX_CAPACITY:
            return explore(part, order, ranks, weights, limits)
        count, sections = len(part.size), len(part.members)
        numbers = ctypes.c_int64 * count
        counted = (ctypes.c_int64 * sections)(*weights)
        offsets, steps = numbers(), (ctypes.c_int64 * 1)()
        outcome = _OUTCOMES[
            function(
                count, sections, part.capacity, numbers(*part.first), numbers(*part.last), numbers(*part.size),
                numbers(*part.twin_rank), numbers(*ranks), order.lowest_section, order.lowest_first, limits.steps,
                min(limits.deadline - time.monotonic(), _FOREVER_S), counted, offsets, steps,
            )
        ]  # fmt: skip
        weights[:] = counted
        return SearchResult(outcome, tuple(offsets) if outcome is SearchStatus.SOLVED else (), steps[0])

    return explore_natively
