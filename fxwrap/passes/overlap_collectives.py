"""Overlap of communication with computation: collectives start earlier, and their results are awaited later."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor

from fxwrap import wrapper_ir as ir
from fxwrap.lines import Alloc, ExtensionLine, ExternCall, Launch, View, WaitCollective
from fxwrap.passes.bucket_collectives import functional_name
from fxwrap.passes.scheduling import SchedulingRegions, SchedulingUnit
from fxwrap.passes.unit_schedule import UnitSchedule
from fxwrap.wrapper_ir import LineBase, Program

_AHEAD = (16, 8, 4, 2, 1)
"""By how many collectives a start or a wait moves at most; the next number is tried if memory is short."""

_COVER = 16
"""The bytes that lines move while a collective moves one: about the ratio of a memory's bandwidth to a link's."""


def overlap_collectives(program: Program, *, slack: float = 0.0) -> Program:
    """Returns the program with collectives in flight over as many lines as dependences, effects and memory allow.

    First each start moves up, past the wait for the collective before, for the one before that, and so on, so that the
    next buckets of parameters are gathered ahead. Then each wait moves down in the same way. Where few lines are left
    between a start and its wait, the lines before the start that it does not depend on run after it, such as the
    gradients of weights beside an all_reduce of the gradient of an activation. Between two starts, lines run in the
    order of the collectives whose results they need: updates of parameters, in the order in which their gradients are
    scattered. The peak memory exceeds that of the
    program by at most `slack`, a fraction. All decisions follow from the program; symbols count with one
    fixed value. All_gathers, all_reduces and reduce_scatters may pass each other, but no two of one kind; all other
    collectives keep their order in their group. Programs that use streams, and blocks inside lines, are unchanged.
    """
    if ir.uses_streams(program) or not any(line.is_async_start for line in program.body.lines):
        return program
    hints = dict.fromkeys(ir.symbol_infos(program), ir.FALLBACK_SIZE_HINT)
    regions = SchedulingRegions(program, hints, lambda line: functional_name(line) is not None)
    before = ir.live_bytes(program, hints).peak
    allowed = int(before * (1 + slack))
    for ahead in _AHEAD:
        moves = list(_RegionOverlap.of_regions(regions, allowed - regions.unowned_bytes))
        orders = [move.order(ahead) for move in moves]
        if ir.live_bytes(regions.apply_order(orders), hints).peak <= allowed:
            break
    else:
        return program
    delayed = _with_delayed_lines(regions, moves, orders, allowed - regions.unowned_bytes)
    sorted_ = _with_ready_lines_first(regions, delayed, allowed - regions.unowned_bytes)
    for changed in (sorted_, delayed):
        result = regions.apply_order(changed)
        if ir.live_bytes(result, hints).peak <= allowed:
            return drop_repeated_waits(result)
    return drop_repeated_waits(regions.apply_order(orders))


def _with_delayed_lines(
    regions: SchedulingRegions, moves: Sequence[_RegionOverlap], orders: Sequence[Sequence[int]], allowed: int
) -> Sequence[Sequence[int]]:
    """Returns orders in which lines that a start does not depend on run after it, as far as memory allows."""
    result = list(orders)
    for number, move in enumerate(moves):
        for start in move.starts:
            lines = move.independent_before(start)
            while lines:
                before = dict(move.schedule.at)
                move.delay(lines, start)
                order = move.schedule.order()
                if regions.peak([*result[:number], order, *result[number + 1 :]]) <= allowed:
                    result[number] = order
                    break
                move.schedule.at = before
                lines = lines[(len(lines) + 1) // 2 :]
    return result


def _with_ready_lines_first(
    regions: SchedulingRegions, orders: Sequence[Sequence[int]], allowed: int
) -> Sequence[Sequence[int]]:
    """Returns orders in which lines between two starts follow the results that they need, as far as memory allows."""
    result = [list(order) for order in orders]
    for number, units in enumerate(regions.regions):
        order = result[number]
        starts = [index for index, position in enumerate(order) if units[position].lines[0].is_async_start]
        for first, end in zip(starts, [*starts[1:], len(order)]):
            window = order[first + 1 : end]
            changed = _by_readiness(units, order[: first + 1], window)
            if changed == window:
                continue
            new = [*order[: first + 1], *changed, *order[end:]]
            if regions.peak([*result[:number], new, *result[number + 1 :]]) <= allowed:
                result[number] = order = new
    return result


def _by_readiness(units: Sequence[SchedulingUnit], before: Sequence[int], window: Sequence[int]) -> list[int]:
    """Returns the units of a window by the last collective, of those started before, whose results they need.

    Allocations and views, which do no work, stay with the first line that needs them.
    """
    started = {position: rank for rank, position in enumerate(before) if units[position].lines[0].is_async_start}
    needs: dict[int, int] = {}
    for position in window:
        unit = units[position]
        ranks = [needs[item] for item in unit.predecessors if item in needs]
        if unit.lines[0].is_async_wait:
            ranks += [started[item] for item in unit.predecessors if item in started]
        needs[position] = max(ranks, default=-1)
    for position in reversed(window):
        unit = units[position]
        users = [needs[item] for item in unit.successors if item in needs]
        if users and isinstance(unit.lines[0], Alloc | View):
            needs[position] = min(users)
    return sorted(window, key=lambda position: needs[position])


def drop_repeated_waits(program: Program) -> Program:
    """Returns the program without waits for memory that an earlier line of the body waited for."""
    root_of = ir.alias_roots(program.body.lines, ir.program_arguments(program))
    ready: dict[str, ir.Value] = {}
    lines: list[LineBase] = []
    for line in program.body.lines:
        if line.is_async_start:
            for value in ir.defined(line):
                ready.pop(root_of[value.name], None)
        if isinstance(line, WaitCollective):
            earlier = ready.setdefault(root_of[line.pending.name], line.result)
            if earlier is not line.result:
                lines.append(View(line.result, earlier, origin=line.origin))
                continue
        lines.append(line)
    if len(ready) == sum(line.is_async_wait for line in program.body.lines):
        return program
    return program.replace(body=ir.Block(program.body.arguments, tuple(lines)))


@dataclass
class _RegionOverlap:
    """The moves of starts and waits in one region.

    Fields:
        units: the units of the region, in the program's order.
        sizes: the bytes of roots, by name.
        last_use: the last unit of the program that uses each root, by the root's name.
        live: the live bytes while each unit of the program's order runs, as far as units moved.
        allowed: the largest number of live bytes.
    """

    units: Sequence[SchedulingUnit]
    sizes: Mapping[str, int]
    last_use: Mapping[str, SchedulingUnit]
    live: list[int]
    allowed: int
    schedule: UnitSchedule = field(init=False)
    starts: list[int] = field(init=False)
    waits: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.schedule = UnitSchedule(self.units, fixed_waits=True)
        self.starts = [unit.position for unit in self.units if unit.lines[0].is_async_start]
        self.waits = [unit.position for unit in self.units if unit.lines[0].is_async_wait]

    @classmethod
    def of_regions(cls, regions: SchedulingRegions, allowed: int) -> Iterator[_RegionOverlap]:
        """Yields the moves of each region, none so far."""
        last_use = {root: unit for units in regions.regions for unit in units for root in unit.accessed}
        profile, first = regions.profile(regions.program_order), 0
        for units in regions.regions:
            live = profile[first : first + len(units)]
            first += len(units)
            yield cls(units, regions.sizes, last_use, live, allowed)

    def order(self, ahead: int) -> Sequence[int]:
        """Returns the order of units in which starts and waits moved past up to `ahead` other collectives."""
        if not self.starts:
            return range(len(self.units))
        for distance in range(1, ahead + 1):
            latest: dict[str | None, float] = {}  # by name: the position of the last start so far
            for number, position in enumerate(self.starts):
                name = functional_name(self.units[position].lines[0])
                self._hoist(position, max(self._awaited_before(number, distance), floor(latest.get(name, -1)) + 1))
                latest[name] = self.schedule.at[position]
        for distance in range(1, ahead + 1):
            for position in self.waits:
                self._sink(position, self._started_after(position, distance))
        return self.schedule.order()

    def independent_before(self, start: int) -> list[int]:
        """Returns the units between the last wait and a start that can run while it is in flight, in their order.

        There are none if enough other lines run meanwhile.
        """
        at = self.schedule.at
        end = self.schedule.latest(start)
        in_flight = [unit for unit in self.units if at[start] < at.get(unit.position, -1) < end]
        needed = _COVER * sum([self.sizes.get(root, 0) for root in self.units[start].accessed])
        if sum([self._bytes(unit) for unit in in_flight]) >= needed:
            return []
        first = max([at[wait] for wait in self.waits if at[wait] < at[start]], default=-1.0)
        window = sorted([position for position in at if first < at[position] < at[start]], key=at.__getitem__)
        fixed = self._with_ancestors([start, *[position for position in window if position in self.starts]])
        movable = [position for position in window if position not in fixed]
        return movable if any(self._bytes(self.units[position]) for position in movable) else []

    def delay(self, lines: Sequence[int], start: int) -> None:
        """Moves units behind a start, in their order."""
        at = self.schedule.at
        low = at[start]
        high = min([position for position in at.values() if position > low], default=float(len(self.units)))
        for index, position in enumerate(lines, 1):
            at[position] = low + (high - low) * index / (len(lines) + 1)

    def _with_ancestors(self, positions: Sequence[int]) -> set[int]:
        """Returns units and those that they depend on."""
        result, pending = set(positions), list(positions)
        while pending:
            new = self.units[pending.pop()].predecessors - result
            result |= new
            pending += new
        return result

    def _bytes(self, unit: SchedulingUnit) -> int:
        """Returns the bytes that a unit reads and writes, 0 for communication and lines without work."""
        if not isinstance(unit.lines[0], Launch | ExternCall | ExtensionLine):
            return 0
        return sum([self.sizes.get(root, 0) for root in unit.accessed])

    def _awaited_before(self, number: int, distance: int) -> int:
        """Returns the position after the first wait that belongs to the collective `distance` starts before."""
        if number < distance:
            return 0
        started = self.starts[number - distance]
        return next((wait for wait in self.waits if wait > started), started) + 1

    def _started_after(self, position: int, distance: int) -> int:
        """Returns the position of the start that is `distance` starts behind a position."""
        later = [start for start in self.starts if start > position]
        return later[distance - 1] if len(later) >= distance else len(self.units)

    def _hoist(self, position: int, target: int) -> None:
        """Moves a start up, not above the unit at `target` and its own predecessors, as far as memory allows."""
        at = self.schedule.at
        now = ceil(at[position])  # it is directly before this unit
        target = max(target, floor(self.schedule.earliest(position)) + 1)
        size = sum([self.sizes.get(root, 0) for root in self.units[position].defined_roots])
        first = now
        while first > target and self.live[first - 1] + size <= self.allowed:
            first -= 1
        if first < now:
            at[position] = self._before(first, position)
            self._add(first, now, size)

    def _sink(self, position: int, target: int) -> None:
        """Moves a wait down, not below the unit at `target` and its own successors, as far as memory allows."""
        at = self.schedule.at
        now = floor(at[position]) + 1  # it is directly before this unit
        target = min(target, ceil(self.schedule.latest(position)))
        last_use, unit = self.last_use, self.units[position]
        size = sum([self.sizes.get(root, 0) for root in unit.accessed if last_use[root] is unit])
        end = now
        while end < target and self.live[end] + size <= self.allowed:
            end += 1
        if end > now:
            at[position] = self._before(end, position)
            self._add(now, end, size)

    def _before(self, unit: int, moved: int) -> float:
        """Returns the position directly before a unit. Moved units keep their order there."""
        return unit - 1 + (moved + 1) / (len(self.units) + 2)

    def _add(self, first: int, end: int, size: int) -> None:
        for position in range(first, end) if size else ():
            self.live[position] += size
