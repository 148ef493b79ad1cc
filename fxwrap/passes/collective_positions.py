"""Positions of collectives before overlap: where their results are needed, or where their operands are ready."""

from __future__ import annotations

from collections.abc import Sequence

from fxwrap.lines import StartCollective
from fxwrap.passes.bucket_collectives import functional_name
from fxwrap.passes.scheduling import Orders, SchedulingRegions, SchedulingUnit
from fxwrap.passes.unit_schedule import UnitSchedule
from fxwrap.symbolic import evaluate
from fxwrap.wrapper_ir import TensorType, values_in


def needed_order(regions: SchedulingRegions) -> Orders:
    """Returns orders in which collectives of one kind are in the order in which the program needs them.

    A collective whose results are larger than its operands, an all_gather, and its waits directly precede the first use
    of its results. Others directly follow the lines that compute their operands, as do their waits. The units of
    collectives commute in `regions`. Gathers of all parameters of a model at its begin, say, do not hold up those of
    its first layer, and the gradient of its last layer is reduced before those of the others, wherever the graph has
    these collectives.
    """
    return [_Positions(regions, units).order() for units in regions.regions]


_Key = tuple[int, int]
"""The position of a unit in the program, and a distance before or after it."""


class _Positions:
    def __init__(self, regions: SchedulingRegions, units: Sequence[SchedulingUnit]) -> None:
        self.units = units
        self.schedule = UnitSchedule(units, fixed_waits=True)
        self.keys: dict[int, _Key] = {position: (position, 0) for position in self.schedule.at}
        starts = [unit for unit in units if functional_name(unit.lines[0]) is not None]
        self.late = {unit.position for unit in starts if _grows(regions, unit)}
        self.early = {unit.position for unit in starts} - self.late

    def order(self) -> Sequence[int]:
        """Returns the order of the units."""
        if not self.late and not self.early:
            return range(len(self.units))
        for position in self.keys:
            if position in self.early:
                self._move_up(position)
        for position in reversed(list(self.keys)):
            if position in self.late or self.late.intersection(self._started(position)):
                self._move_down(position)
        ranked = sorted(self.keys, key=lambda position: (self.keys[position], position))
        self.schedule.at = {position: float(rank) for rank, position in enumerate(ranked)}
        return self.schedule.order()

    def _move_up(self, position: int) -> None:
        """Moves a start up to the lines that it needs, and its waits to it."""
        anchor, distance = max([self.keys[item] for item in self.schedule.before(position)], default=(-1, 0))
        if (anchor, distance + 1) >= self.keys[position]:
            return
        self.keys[position] = anchor, distance + 1
        for wait in self._waits(position):
            anchor, distance = max([self.keys[item] for item in self.schedule.before(wait)])
            self.keys[wait] = anchor, distance + 1

    def _move_down(self, position: int) -> None:
        """Moves a start or a wait down to the first line that needs it."""
        anchor, distance = min([self.keys[item] for item in self.schedule.after(position)], default=(len(self.units), 0))
        self.keys[position] = max(self.keys[position], (anchor, distance - 1))

    def _waits(self, start: int) -> Sequence[int]:
        return [item for item in self.schedule.after(start) if self.units[item].lines[0].is_async_wait]

    def _started(self, wait: int) -> Sequence[int]:
        is_wait = self.units[wait].lines[0].is_async_wait
        return [item for item in self.schedule.before(wait) if is_wait]


def _grows(regions: SchedulingRegions, unit: SchedulingUnit) -> bool:
    """Whether the results of a collective are larger than its operands."""
    line = unit.lines[0]
    assert isinstance(line, StartCollective)
    before, after = [
        sum([int(evaluate(value.tensor_type.storage_bytes, regions.values)) for value in values_in(tree)
             if isinstance(value.type, TensorType)])
        for tree in (line.arguments, line.results)
    ]  # fmt: skip
    return after > before
