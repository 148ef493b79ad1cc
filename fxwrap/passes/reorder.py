"""Reordering of a program's lines for lower peak memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TypeAlias

from fxwrap.passes.scheduling import SchedulingRegions, SchedulingUnit
from fxwrap.symbolic import Number
from fxwrap.wrapper_ir import Program, hints_with_fallback, live_bytes, uses_streams


@dataclass(frozen=True, slots=True)
class ReorderResult:
    """A reordered program, and the peak memory in bytes before and after for the hints of symbols."""

    program: Program
    peak_before: int
    peak_after: int


def reorder_for_peak_memory(program: Program, hints: Mapping[str, Number] | None = None) -> ReorderResult:
    """Returns the program with the lines of its body in an order of lower peak memory.

    The order respects data, symbols and effects. Brackets and blocks inside lines are not moved, and programs that use
    streams are unchanged. Candidates are a greedy list schedule, depth-first search from the results, and the program's
    order, which is kept unless another one has a lower peak. Frees follow the last uses. n log n in the lines.

    Args:
        program: the program. It is not changed.
        hints: values of symbols by name; others have their declared hints, or a bounded estimate.
    """
    values = hints_with_fallback(program, hints)
    before = live_bytes(program, values, release_shared=False).peak
    if uses_streams(program):
        return ReorderResult(program, before, before)
    regions = SchedulingRegions(program, values)
    orders = [[_schedule(units, schedule, regions) for units in regions.regions] for schedule in _SCHEDULES]
    estimated, order = min([(regions.peak(order), order) for order in orders], key=lambda pair: pair[0])
    if estimated < regions.peak(regions.program_order):
        reordered = regions.apply_order(order)
        after = live_bytes(reordered, values, release_shared=False).peak  # includes blocks inside lines
        if after < before:
            return ReorderResult(reordered, before, after)
    return ReorderResult(program, before, before)


Schedule: TypeAlias = Callable[[Sequence[SchedulingUnit], Mapping[str, int], Mapping[str, int]], list[int]]


def _schedule(units: Sequence[SchedulingUnit], schedule: Schedule, regions: SchedulingRegions) -> Sequence[int]:
    return schedule(units, regions.sizes, regions.uses) if len(units) > 1 else range(len(units))


def _greedy_schedule(units: Sequence[SchedulingUnit], sizes: Mapping[str, int], uses: Mapping[str, int]) -> list[int]:
    """Schedules the ready unit that leaves the least memory live."""
    remaining = dict(uses)
    waiting = [len(unit.predecessors) for unit in units]
    users: dict[str, list[int]] = {}
    for unit in units:
        for root in unit.accessed:
            users.setdefault(root, []).append(unit.position)

    def net(unit: SchedulingUnit) -> int:
        defined_roots = sum([sizes.get(root, 0) for root in unit.defined_roots])
        return defined_roots - sum([sizes.get(root, 0) for root in unit.accessed if remaining[root] == 1])

    current = {unit.position: net(unit) for unit in units if not waiting[unit.position]}
    heap = [(value, position) for position, value in current.items()]
    heapify(heap)
    order: list[int] = []
    while heap:
        value, position = heappop(heap)
        if current.get(position) != value:
            continue  # scheduled or updated
        del current[position]
        order.append(position)
        unit = units[position]
        for later in unit.successors:
            waiting[later] -= 1
            if not waiting[later]:
                current[later] = net(units[later])
                heappush(heap, (current[later], later))
        for root in unit.accessed:
            remaining[root] -= 1
            if remaining[root] == 1:
                for other in users[root]:
                    if other in current:
                        current[other] = net(units[other])
                        heappush(heap, (current[other], other))
    return order


def _depth_first(units: Sequence[SchedulingUnit], sizes: Mapping[str, int], uses: Mapping[str, int]) -> list[int]:
    """Schedules units depth first from the results, those with the largest results first."""
    order: list[int] = []
    done: set[int] = set()

    def weight(position: int) -> tuple[int, int]:
        return -sum([sizes.get(root, 0) for root in units[position].defined_roots]), position

    for last in units:
        pending = [] if last.successors or last.position in done else [(last.position, False)]
        while pending:
            position, ready = pending.pop()
            if ready:
                order.append(position)
            elif position not in done:
                done.add(position)
                pending.append((position, True))
                pending += [(item, False) for item in sorted(units[position].predecessors, key=weight, reverse=True)]
    return order


_SCHEDULES: tuple[Schedule, ...] = (_greedy_schedule, _depth_first)
