"""Positions of the units of a region, for passes that merge several units into one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from fxwrap.lines import Alloc, ExternCall, Launch, StartCollective, View
from fxwrap.passes.scheduling import SchedulingUnit

_PAD, _GATHER = "aten.constant_pad_nd.default", "_c10d_functional.all_gather_into_tensor"


class UnitSchedule:
    """The positions of a region's units: units that are merged into one share a position.

    The predecessors of a unit have lower positions. Allocations, views, lines that only prepare inputs for all_gathers,
    and waits have none. They directly precede their first use, but waits stay where they are, or directly follow a
    start that moves behind them. With `fixed_waits`, waits have positions, with `fixed_preparations` preparing lines.
    A part of a parameter is padded on ranks with fewer rows than others, and all ranks must move collectives alike.
    """

    def __init__(
        self, units: Sequence[SchedulingUnit], *, fixed_waits: bool = False, fixed_preparations: bool = False
    ) -> None:
        self.units = units
        self._waits = [unit.lines[0].is_async_wait and not fixed_waits for unit in units]
        self._preparations: dict[int, list[int]] = {}
        """The all_gathers that each preparing line prepares."""
        floating: list[bool] = []
        for unit in units:
            is_ready = all(floating[item] and not self._waits[item] for item in unit.predecessors)
            is_placed = len(unit.lines) > 1 or not (
                isinstance(unit.lines[0], Alloc | View) or self._waits[unit.position]
            )
            if is_placed and is_ready and not fixed_preparations and (gathers := self._prepared_gathers(unit)):
                self._preparations[unit.position] = gathers
            floating.append(not is_placed or unit.position in self._preparations)
        self.at = {unit.position: float(unit.position) for unit in units if not floating[unit.position]}
        self._before: list[frozenset[int]] = []
        """For each unit, its predecessors, through units without a position."""
        self._after: dict[int, list[int]] = {}
        for unit in units:
            before = frozenset([item for item in unit.predecessors if not floating[item]])
            before = before.union(*[self._before[item] for item in unit.predecessors if floating[item]])
            before = before.union(*[self._gathers_before(unit, item) for item in unit.predecessors])
            self._before.append(before)
            for item in before if not floating[unit.position] else ():
                self._after.setdefault(item, []).append(unit.position)

    def _prepared_gathers(self, unit: SchedulingUnit) -> list[int]:
        """Returns the all_gathers that alone read the results of an elementwise line; none if it is another line.

        What the line reads, as a parameter that the optimizer updates, is written after these all_gathers at the
        earliest, which read it themselves on ranks that prepare nothing.
        """
        line = unit.lines[0]
        is_plain = len(unit.lines) == 1 and not line.effects()
        is_elementwise = isinstance(line, Launch) or (isinstance(line, ExternCall) and line.target == _PAD)
        if not is_plain or not is_elementwise:
            return []
        allocated = [self.units[item] for item in unit.predecessors if isinstance(self.units[item].lines[0], Alloc)]
        results = unit.defined_roots.union(*[item.defined_roots for item in allocated])
        gathers, others = list[int](), list[int]()
        for position in unit.successors:
            first = self.units[position].lines[0]
            if isinstance(first, StartCollective) and first.operator.startswith(_GATHER):
                gathers.append(position)
            elif not first.is_async_wait:
                if not results.isdisjoint(self.units[position].accessed):
                    return []
                others.append(position)
        return gathers if gathers and max(gathers) < min(others, default=len(self.units)) else []

    def _gathers_before(self, unit: SchedulingUnit, position: int) -> list[int]:
        """Returns the all_gathers that a preparing line prepares, for a unit that writes what that line reads."""
        gathers = self._preparations.get(position, [])
        return [] if unit.position in gathers or unit.lines[0].is_async_wait else gathers

    def moved_roots(self, position: int) -> frozenset[str]:
        """Returns the roots that exist from a start on: those it defines, and those of the lines that prepare it."""
        before = [item for item in self.units[position].predecessors if item in self._preparations]
        return self.units[position].defined_roots.union(*[self.units[item].accessed for item in before])

    def groups(
        self, units: Sequence[SchedulingUnit], accepts: Callable[[Sequence[SchedulingUnit]], bool]
    ) -> Iterator[list[SchedulingUnit]]:
        """Yields groups of two or more units that can share a position and that `accepts` accepts, in their order."""
        group: list[SchedulingUnit] = []
        for unit in units:
            if group and (not accepts([*group, unit]) or self._span([*group, unit]) is None):
                yield from [group] if len(group) > 1 else []
                group = []
            group.append(unit)
        yield from [group] if len(group) > 1 else []

    def sharing(self, units: Sequence[SchedulingUnit]) -> list[SchedulingUnit]:
        """Returns those of some units that may share a position with another one: others end before it can start."""
        spans = sorted([(self.earliest(unit.position), self.latest(unit.position), unit.position) for unit in units])
        ends = [-1.0, *accumulate([high for _, high, _ in spans], max)]  # of the units before
        starts = [*[low for low, _, _ in spans[1:]], float(len(self.units))]  # of the next unit
        positions = {
            position for (low, high, position), end, start in zip(spans, ends, starts) if low < end or start < high
        }
        return [unit for unit in units if unit.position in positions]

    def _span(self, group: Sequence[SchedulingUnit]) -> tuple[float, float] | None:
        """Returns the positions between which units can share one; None if there are none."""
        positions = {unit.position for unit in group}
        before = frozenset[int]().union(*[self._before[position] for position in positions])
        after = [item for position in positions for item in self._after.get(position, ())]
        low = max([self.at[item] for item in before], default=-1.0)
        high = min([self.at[item] for item in after], default=float(len(self.units)))
        return (low, high) if low < high and before.isdisjoint(positions) else None

    def earliest(self, position: int) -> float:
        """Returns the position of the last predecessor of a unit, -1 without one."""
        return max([self.at[item] for item in self._before[position]], default=-1.0)

    def latest(self, position: int) -> float:
        """Returns the position of the first successor of a unit, the number of units without one."""
        return min([self.at[item] for item in self._after.get(position, ())], default=float(len(self.units)))

    def before(self, position: int) -> frozenset[int]:
        """Returns the predecessors of a unit that have a position."""
        return self._before[position]

    def after(self, position: int) -> Sequence[int]:
        """Returns the successors of a unit that have a position."""
        return self._after.get(position, ())

    def common_position(self, group: Sequence[SchedulingUnit], late: bool) -> float | None:
        """Returns the position that units can share nearest to the last, or the first, of them; None if there is none.

        Units that moved since the group was formed may have left none.
        """
        span = self._span(group)
        if span is None:
            return None
        low, high = span
        between = sorted([low, *[position for position in self.at.values() if low < position < high], high])
        own = [self.at[unit.position] for unit in group]
        if late:
            return max(own) if max(own) < high else (between[-2] + high) / 2
        return min(own) if min(own) > low else (low + between[1]) / 2

    def move_together(self, group: Sequence[SchedulingUnit]) -> bool:
        """Moves units to the earliest position that they can share; returns whether there is one."""
        position = self.common_position(group, late=False)
        if position is not None:
            self.at.update(dict.fromkeys([unit.position for unit in group], position))
        return position is not None

    def order(self) -> list[int]:
        """Returns the units by position, those without one between their predecessors and their first use."""
        keys: dict[int, tuple[float, int, int]] = {}
        for unit in reversed(self.units):
            first_use = min([keys[item][0] for item in unit.successors], default=float(len(self.units)))
            keys[unit.position] = (*self._place(unit, first_use), unit.position)
        return sorted(keys, key=lambda position: keys[position])

    def _place(self, unit: SchedulingUnit, first_use: float) -> tuple[float, int]:
        """Returns the position of a unit, and whether it runs before (0), as (1) or after (2) the unit there."""
        own = self.at.get(unit.position)
        if own is not None:
            return own, 1
        if not self._waits[unit.position]:
            return first_use, 0
        started = max([self.at[item] for item in self._before[unit.position]], default=-1.0)
        if unit.position < started:
            return started, 2
        return min((float(unit.position), 1), (first_use, 0))
