"""Positions of collectives before overlap: where their results are needed, or where their operands are ready."""

from __future__ import annotations

from collections.abc import Sequence

from fxwrap.lines import StartCollective
from fxwrap.passes.bucket_collectives import functional_name
from fxwrap.passes.scheduling import Orders, SchedulingRegions, SchedulingUnit
from fxwrap.passes.unit_schedule import UnitSchedule
from fxwrap.symbolic import evaluate_size
from fxwrap.wrapper_ir import TensorType, values_in


def needed_order(regions: SchedulingRegions, allowed: int) -> Orders:
    """Returns orders in which collectives of one kind are in the order in which the program needs them.

    A collective whose results are larger than its operands, an all_gather, moves down to the first use of its results
    if results of a later one of its kind are used before. Any other moves up, with its waits, to the lines that compute
    its operands, if it passes one whose operands are computed later, and at most `allowed` bytes are live with its
    results there. The units of collectives commute in `regions`. So a program that gathers the first and the last
    parameters of a model at once gathers those of the first layer before the last ones, and reduces the gradients of
    the last ones first.
    """
    orders, profile, first = [], regions.profile(regions.program_order), 0
    for units in regions.regions:
        live = profile[first : first + len(units)]
        first += len(units)
        orders.append(_Positions(regions, units, live, allowed).order())
    return orders


_Key = tuple[int, int]
"""The position of a unit in the program, and a distance before or after it."""


class _Positions:
    """The order of the units of a region; `live` are the live bytes while each runs."""

    def __init__(
        self, regions: SchedulingRegions, units: Sequence[SchedulingUnit], live: list[int], allowed: int
    ) -> None:
        self.regions = regions
        self.units = units
        self.live = live
        self.allowed = allowed
        self.schedule = UnitSchedule(units, fixed_waits=True)
        self.keys: dict[int, _Key] = {position: (position, 0) for position in self.schedule.at}
        self.names = {unit.position: name for unit in units if (name := functional_name(unit.lines[0])) is not None}

    def order(self) -> Sequence[int]:
        """Returns the order of the units."""
        late = {start for start in self.names if self._grows(self.units[start].lines[0])}
        for start in self.names:
            if start not in late:
                self._move_up(start)
        for start in reversed([*self.names]):
            if start in late:
                self._move_down(start)
        ranked = sorted(self.keys, key=lambda position: (self.keys[position], position))
        self.schedule.at = {position: float(rank) for rank, position in enumerate(ranked)}
        return self.schedule.order()

    def _grows(self, line: object) -> bool:
        """Whether the results of a collective are larger than its operands."""
        assert isinstance(line, StartCollective)
        return self._bytes(line.results) > self._bytes(line.arguments)

    def _bytes(self, tree: object) -> int:
        types = [value.type for value in values_in(tree) if isinstance(value.type, TensorType)]
        return sum([evaluate_size(type_.storage_bytes, self.regions.values) for type_ in types])

    def _move_up(self, start: int) -> None:
        """Moves a start up to the lines that it needs, as far as memory allows, and its waits to it."""
        size = sum([self.regions.sizes.get(root, 0) for root in self.schedule.moved_roots(start)])
        ready = self._ready(start)
        earlier = [other for other in self._same_kind(start) if self.keys[other] < self.keys[start]]
        anchor, distance = max([ready, *[self.keys[other] for other in earlier if self._ready(other) <= ready]])
        low = start
        while low > anchor + 1 and self.live[low - 1] + size <= self.allowed:
            low -= 1
        key = (anchor, distance + 1) if low == anchor + 1 else (low - 1, 1)
        if not any(key < self.keys[other] for other in earlier):
            return
        self.keys[start] = key
        for wait in self._waits(start):
            anchor, distance = self._ready(wait)
            self.keys[wait] = anchor, distance + 1
        for item in range(low, start):
            self.live[item] += size

    def _move_down(self, start: int) -> None:
        """Moves a start and its waits down to the first lines that need its results."""
        others = [other for other in self._same_kind(start) if self.keys[other] > self.keys[start]]
        if not self._waits(start) or not any(self._needed(other) < self._needed(start) for other in others):
            return
        for wait in self._waits(start):
            anchor, distance = self._first_use(wait)
            self.keys[wait] = anchor, distance - 1
        anchor, distance = self._first_use(start)
        self.keys[start] = max(self.keys[start], (anchor, distance - 1))

    def _ready(self, position: int) -> _Key:
        """Returns the key of the last line that a unit depends on."""
        return max([self.keys[item] for item in self.schedule.before(position)], default=(-1, 0))

    def _needed(self, start: int) -> _Key:
        """Returns the key of the first line that needs results of a collective."""
        return min([self._first_use(wait) for wait in self._waits(start)], default=(len(self.units), 0))

    def _first_use(self, position: int) -> _Key:
        users = [self.keys[item] for item in self.schedule.after(position)]
        return min(users, default=(len(self.units), 0))

    def _same_kind(self, start: int) -> Sequence[int]:
        return [other for other, name in self.names.items() if name == self.names[start] and other != start]

    def _waits(self, start: int) -> Sequence[int]:
        return [item for item in self.schedule.after(start) if self.units[item].lines[0].is_async_wait]
