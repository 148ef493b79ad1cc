"""Whether a plan holds: nothing that is live at the same time overlaps, and everything lies inside its pool."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from heapq import heappop, heappush

import torch

from fxwrap.errors import PlanningError
from fxwrap.memory_planning.plan import MemoryPlan, PoolPlan
from fxwrap.symbolic import Scalar, Size, evaluate


def check_plan(
    plan: MemoryPlan, *, alignment: Callable[[torch.device], int], values: Mapping[str, Scalar] | None = None
) -> None:
    """Raises PlanningError for a plan whose memory overlaps, leaves its pool or is not aligned.

    Args:
        plan: the plan, also one that was read from a file.
        alignment: bytes that offsets must be multiples of, by device.
        values: what symbols are, by name; needed where sizes are symbolic.
    """
    for block in plan.blocks:
        for pool in block.pools:
            _check_pool(pool, alignment(pool.device), dict(values or {}))


def _check_pool(pool: PoolPlan, step: int, values: dict[str, Scalar]) -> None:
    for name, term in pool.terms:
        values[name] = _number(term, values)
    whole = _number(pool.size, values)
    spans = []
    for placed in pool.placed:
        item, start = placed.range, _number(placed.offset, values)
        end = start + _number(item.size, values)
        what = f"%{item.name} at bytes {start} to {end} of {pool.name}"
        if start < 0 or end > whole:
            raise PlanningError(f"{what} lies outside its {whole} bytes")
        if start % step:
            raise PlanningError(f"{what} is not at a multiple of {step} bytes, as memory on {pool.device} must be")
        if not pool.first <= item.first < item.end <= pool.end:
            raise PlanningError(f"{what} is live in lines {item.first} to {item.end}, the pool in fewer")
        if end > start:
            spans.append((item.first, item.end, start, end, what))
    _check_overlaps(spans)


def _check_overlaps(spans: list[tuple[int, int, int, int, str]]) -> None:
    """Walks the lines with what is live, sorted by offset: what overlaps anything overlaps a neighbour there."""
    live: list[tuple[int, int, str]] = []  # offset, end of bytes, what
    ends: list[tuple[int, tuple[int, int, str]]] = []
    for first, last, start, end, what in sorted(spans):
        while ends and ends[0][0] <= first:
            gone = heappop(ends)[1]
            del live[bisect_left(live, gone)]
        item = (start, end, what)
        place = bisect_left(live, item)
        for other_start, other_end, other in live[max(place - 1, 0) : place + 1]:
            if start < other_end and other_start < end:
                raise PlanningError(f"{what} overlaps {other}, and both are live at line {first}")
        live.insert(place, item)
        heappush(ends, (last, item))


def _number(size: Size, values: Mapping[str, Scalar]) -> int:
    return size if isinstance(size, int) else int(evaluate(size, values))
