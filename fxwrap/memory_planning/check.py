"""Checks of a memory plan: live buffers never overlap and never exceed their pool."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from heapq import heappop, heappush

import torch

from fxwrap.errors import PlanningError
from fxwrap.memory_planning.plan import MemoryPlan, PoolPlan
from fxwrap.symbolic import Number, evaluate


def check_plan(
    plan: MemoryPlan, *, alignment: Callable[[torch.device], int], values: Mapping[str, Number] | None = None
) -> None:
    """Raises PlanningError for a plan whose buffers overlap, exceed their pool or are not aligned.

    Args:
        plan: the plan, possibly read from a file.
        alignment: bytes that offsets must be multiples of, by device.
        values: values of symbols by name, for symbolic sizes.
    """
    for block in plan.blocks:
        for pool in block.pools:
            _check_pool(pool, alignment(pool.device), dict(values or {}))


def _check_pool(pool: PoolPlan, step: int, values: dict[str, Number]) -> None:
    for name, term in pool.terms:
        values[name] = evaluate(term, values)
    pool_size = int(evaluate(pool.size, values))
    spans = []
    for allocation in pool.allocations:
        item, start = allocation.range, int(evaluate(allocation.offset, values))
        end = start + int(evaluate(item.size, values))
        buffer = f"%{item.name} at bytes {start} to {end} of {pool.name}"
        if start < 0 or end > pool_size:
            raise PlanningError(f"{buffer} exceeds the pool's {pool_size} bytes")
        if start % step:
            raise PlanningError(f"{buffer} is not aligned to {step} bytes, as memory on {pool.device} must be")
        if not pool.first <= item.first < item.end <= pool.end:
            raise PlanningError(
                f"{buffer} is live in lines {item.first} to {item.end}, beyond the live range of the pool"
            )
        if end > start:
            spans.append((item.first, item.end, start, end, buffer))
    _check_overlaps(spans)


def _check_overlaps(spans: list[tuple[int, int, int, int, str]]) -> None:
    """Checks each buffer against its neighbours by offset among the live ones."""
    live: list[tuple[int, int, str]] = []  # start and end in bytes, text
    ends: list[tuple[int, tuple[int, int, str]]] = []
    for first, last, start, end, buffer in sorted(spans):
        while ends and ends[0][0] <= first:
            del live[bisect_left(live, heappop(ends)[1])]
        item = (start, end, buffer)
        index = bisect_left(live, item)
        for other_start, other_end, other in live[max(index - 1, 0) : index + 1]:
            if start < other_end and other_start < end:
                raise PlanningError(f"{buffer} overlaps {other}, and both are live at line {first}")
        live.insert(index, item)
        heappush(ends, (last, item))
