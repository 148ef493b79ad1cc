"""Reordering of a program's lines for lower peak memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from fxwrap.passes.scheduling import Orders, SchedulingRegions, SchedulingUnit
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

    Lines keep the program's order as long as the live memory is within a budget; where a line would exceed it, those
    run before that free more than they allocate. The smallest one is searched. A program is unchanged if no
    order lowers its peak by `LEAST_GAIN`.

    The order respects data, symbols and effects. Brackets and blocks inside lines are not moved, no collective starts
    or ends early, and programs that use streams are unchanged. Frees follow the last uses. n log n in the lines.

    Args:
        program: the program. It is not changed.
        hints: values of symbols by name; others have their declared hints, or a bounded estimate.
    """
    values = hints_with_fallback(program, hints)
    before = live_bytes(program, values, release_shared=False).peak
    if uses_streams(program):
        return ReorderResult(program, before, before)
    regions = SchedulingRegions(program, values)
    order = _search(regions, _part(before, LEAST_GAIN), _part(before, _LARGE_GAIN))
    if order is not None:
        reordered = regions.apply_order(order)
        after = live_bytes(reordered, values, release_shared=False).peak  # includes blocks inside lines
        if after <= before - _part(before, LEAST_GAIN):
            return ReorderResult(reordered, before, after)
    return ReorderResult(program, before, before)


LEAST_GAIN = 1 / 1024
"""The part of the peak by which another order must lower it."""

_LARGE_GAIN = 1 / 128
"""The part of the peak by which orders are to lower it at first; the rest are searched only if none does."""

_PARTS, _BISECTIONS = 8, 3
"""Budgets between the lower bound and the program's peak that are tried, and then between the best and the next."""

_ATTEMPTS = 8
"""The number of units that are tried where a line exceeds the budget."""


def _part(peak: int, part: float) -> int:
    return max(1, int(peak * part))


def _search(regions: SchedulingRegions, least_gain: int, large_gain: int) -> Orders | None:
    """Returns an order whose peak is lower by at least `least_gain` bytes, or None."""
    low, peak = regions.lower_bound, regions.peak(regions.program_order)
    high = peak - large_gain
    best = _order_within(regions, high) if low <= high else None
    if best is None:
        low, high = max(low, high), peak - least_gain
        best = _order_within(regions, high) if low <= high else None
        if best is None:
            return None
    else:
        for budget in [low + (high - low) * part // _PARTS for part in range(_PARTS)]:
            order = _order_within(regions, budget)  # it may fit although a larger budget does not
            if order is not None:
                best, high = order, budget
                break
            low = budget
    for _ in range(_BISECTIONS):
        if high - low < least_gain:
            break
        budget = (low + high) // 2
        order = _order_within(regions, budget)
        if order is None:
            low = budget
        else:
            best, high = order, budget
    return best


def _order_within(regions: SchedulingRegions, budget: int) -> Orders | None:
    """Returns an order whose live bytes are within a budget, or None."""
    remaining, live = dict(regions.uses), regions.initial_bytes
    orders: list[Sequence[int]] = []
    for units in regions.regions:
        schedule = _RegionSchedule(units, regions.sizes, remaining, live)
        if not schedule.run(budget):
            return None
        orders.append(schedule.order)
        live = schedule.live
    return orders


class _RegionSchedule:
    """The order of a region's units, one after another, with the live bytes after the last."""

    def __init__(
        self, units: Sequence[SchedulingUnit], sizes: Mapping[str, int], remaining: dict[str, int], live: int
    ) -> None:
        self.order: list[int] = []
        self.live = live
        self._units = units
        self._sizes = sizes
        self._remaining = remaining  # uses of roots
        self._waiting = [len(unit.predecessors) for unit in units]
        self._done = [False] * len(units)
        self._users: dict[str, list[int]] = {}
        for unit in units:
            for root in unit.accessed:
                self._users.setdefault(root, []).append(unit.position)
        self._net = {unit.position: self._net_bytes(unit) for unit in units if self._is_movable(unit)}
        self._heap = [(value, position) for position, value in self._net.items()]
        heapify(self._heap)

    def run(self, budget: int) -> bool:
        """Schedules the units in their order, and earlier those that make room; returns whether they fit."""
        for unit in self._units:
            while not self._done[unit.position]:
                if self.live + self._allocated(unit) <= budget:
                    self._schedule(unit)
                elif not self._schedule_earlier(budget):
                    return False
        return True

    def _schedule_earlier(self, budget: int) -> bool:
        """Schedules the movable unit that leaves the least memory live, of those that fit; returns whether one does."""
        too_large: list[tuple[int, int]] = []
        while self._heap and len(too_large) < _ATTEMPTS:
            entry = heappop(self._heap)
            if self._net.get(entry[1]) != entry[0]:
                continue  # scheduled or updated
            if self.live + self._allocated(self._units[entry[1]]) <= budget:
                self._schedule(self._units[entry[1]])
                break
            too_large.append(entry)
        else:
            return False
        for entry in too_large:
            heappush(self._heap, entry)
        return True

    def _is_movable(self, unit: SchedulingUnit) -> bool:
        is_collective = any(line.is_async_start or line.is_async_wait for line in unit.lines)
        return not self._waiting[unit.position] and not is_collective

    def _allocated(self, unit: SchedulingUnit) -> int:
        """Returns the bytes that a unit needs while it runs."""
        return self._bytes(unit.defined_roots) - self._bytes(unit.consumed_roots)

    def _net_bytes(self, unit: SchedulingUnit) -> int:
        return self._bytes(unit.defined_roots) - self._bytes(self._last_uses(unit))

    def _last_uses(self, unit: SchedulingUnit) -> list[str]:
        return [root for root in unit.accessed if self._remaining[root] == 1]

    def _bytes(self, roots: Sequence[str] | frozenset[str]) -> int:
        return sum([self._sizes.get(root, 0) for root in roots])

    def _schedule(self, unit: SchedulingUnit) -> None:
        self.live += self._net_bytes(unit)
        self.order.append(unit.position)
        self._done[unit.position] = True
        self._net.pop(unit.position, None)
        for later in unit.successors:
            self._waiting[later] -= 1
            if self._is_movable(self._units[later]):
                self._update(later)
        for root in unit.accessed:
            self._remaining[root] -= 1
            if self._remaining[root] == 1:
                for other in self._users[root] if root in self._sizes else ():
                    if other in self._net:
                        self._update(other)

    def _update(self, position: int) -> None:
        value = self._net_bytes(self._units[position])
        if self._net.get(position) != value:
            self._net[position] = value
            heappush(self._heap, (value, position))
