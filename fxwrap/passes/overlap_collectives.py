"""Overlap of communication with computation: collectives start earlier, and their results are awaited later."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor, prod

from fxwrap import wrapper_ir as ir
from fxwrap.lines import Alloc, ExtensionLine, ExternCall, Launch, View, WaitCollective
from fxwrap.passes.bucket_collectives import functional_name
from fxwrap.passes.collective_positions import needed_order
from fxwrap.passes.scheduling import SchedulingRegions, SchedulingUnit
from fxwrap.passes.unit_schedule import UnitSchedule
from fxwrap.symbolic import Number, evaluate_size
from fxwrap.wrapper_ir import LineBase, Program

_AHEAD = (16, 8, 4, 2, 1)
"""By how many collectives a start or a wait moves at most; the next number is tried if memory is short."""

_COVERS = (2, 4, 8, 16, 32, 64)
"""The bytes that lines move while a collective moves one. The ratio of a memory's bandwidth to a link's is about 8 with
NVLink and higher between hosts; small collectives take their latency. Each collective gets lines for the first number
before one gets them for the next."""

_SUFFICIENT_COVER = 16
"""The number from which on lines beside a collective are spare where memory is at its peak."""

_CANDIDATES = 4
"""The lines with results at the peak that may run later, the largest ones."""

_MATMULS = frozenset({"aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default"})
_OPERATIONS_PER_BYTE = 256
"""The operations of a matmul while a line without matmuls moves one byte: about the ratio of GPUs."""


def overlap_collectives(program: Program, *, slack: float = 0.0) -> Program:
    """Returns the program with collectives in flight over as many lines as dependences, effects and memory allow.

    First collectives of one kind get the order in which the program needs them. Then each start moves up, past the wait
    for the collective before, for the one before that, and so on, so that the next buckets of parameters are gathered
    ahead, and each wait moves down in the same way. Where few lines are left between a start and its wait, lines before
    the start that it does not depend on run after it, such as the gradients of weights beside an all_reduce of the
    gradient of an activation, with the starts that need them. Where few lines are left even so, starts that have enough
    lines after the wait follow it, since collectives that run at once share the links. Lines whose results are in
    memory at its peak run beside later collectives, if that lowers the peak. Between two starts, lines run in the order
    of the collectives whose results they need: updates of parameters, in the order in which their gradients are
    scattered. The peak memory exceeds that of the program by at most `slack`, a fraction. All decisions follow from the
    program; symbols count with one fixed value. All_gathers, all_reduces and reduce_scatters may pass each other; all
    other collectives keep their order in their group. Programs that use streams, and blocks inside lines, are
    unchanged.
    """
    if ir.uses_streams(program) or not any(line.is_async_start for line in program.body.lines):
        return program
    hints = dict.fromkeys(ir.symbol_infos(program), ir.FALLBACK_SIZE_HINT)
    allowed = int(_peak(program, hints) * (1 + slack))
    regions = _regions(program, hints)
    positioned = regions.apply_order(needed_order(regions, allowed - regions.unowned_bytes))
    if _peak(positioned, hints) <= allowed:
        regions = _regions(positioned, hints)
    for ahead in _AHEAD:
        moves = list(_RegionOverlap.of_regions(regions, allowed - regions.unowned_bytes))
        orders = [move.order(ahead) for move in moves]
        if _peak(regions.apply_order(orders), hints) <= allowed:
            break
    else:
        return program
    lowered = _with_lower_peak(regions, moves, orders)
    delayed = _with_delayed_lines(regions, moves, lowered, allowed - regions.unowned_bytes)
    spaced = _with_later_starts(regions, moves, delayed, allowed - regions.unowned_bytes)
    sorted_ = _with_ready_lines_first(regions, spaced, regions.peak(spaced))
    for changed in (sorted_, spaced):
        result = regions.apply_order(changed)
        if _peak(result, hints) <= allowed:
            return drop_repeated_waits(result)
    return drop_repeated_waits(regions.apply_order(orders))


def _regions(program: Program, hints: Mapping[str, Number]) -> SchedulingRegions:
    return SchedulingRegions(program, hints, lambda line: functional_name(line) is not None)


def _peak(program: Program, hints: Mapping[str, Number]) -> int:
    """Returns the peak memory of a program in bytes, which does not fall where it frees shared inputs."""
    return ir.live_bytes(program, hints, release_shared=False).peak


def _with_delayed_lines(
    regions: SchedulingRegions, moves: Sequence[_RegionOverlap], orders: Sequence[Sequence[int]], allowed: int
) -> Sequence[Sequence[int]]:
    """Returns orders in which lines that a start does not depend on run after it, as far as memory allows.

    First each collective gets as many as it needs, then the next one those that are left.
    """
    result = list(orders)
    rounds = [(cover, number, move) for cover in _COVERS for number, move in enumerate(moves)]
    for cover, number, move in rounds:
        for start in move.starts:
            _delay(regions, result, number, move, move.independent_before(start, cover), start, allowed)
    return result


def _delay(
    regions: SchedulingRegions, orders: list[Sequence[int]], number: int, move: _RegionOverlap, units: Sequence[int],
    after: int, allowed: int,
) -> None:  # fmt: skip
    """Moves units of a region behind another one: the last ones, as many as memory allows."""
    while units:
        before = dict(move.schedule.at)
        move.delay(units, after)
        order = move.schedule.order()
        if regions.peak([*orders[:number], order, *orders[number + 1 :]]) <= allowed:
            orders[number] = order
            return
        move.schedule.at = before
        units = units[(len(units) + 1) // 2 :]


def _with_later_starts(
    regions: SchedulingRegions, moves: Sequence[_RegionOverlap], orders: Sequence[Sequence[int]], allowed: int
) -> Sequence[Sequence[int]]:
    """Returns orders in which other starts follow the waits for collectives with few lines beside them.

    So these share the links with no others that can start later, as far as memory allows.
    """
    result = list(orders)
    for number, move in enumerate(moves):
        for wait in sorted(move.waits, key=move.schedule.at.__getitem__, reverse=True):
            _delay(regions, result, number, move, move.starts_to_follow(wait), wait, allowed)
    return result


def _with_lower_peak(
    regions: SchedulingRegions, moves: Sequence[_RegionOverlap], orders: Sequence[Sequence[int]]
) -> Sequence[Sequence[int]]:
    """Returns orders in which lines with results at the peak run after later starts, as long as that lowers the peak.

    Lines stay if a collective in flight needs them.
    """
    result = list(orders)
    for _ in range(_AHEAD[0]):
        profile = regions.profile(result)
        peak = max(profile)
        number, position = _at_index(result, profile.index(peak))
        move = moves[number]
        before = best = dict(move.schedule.at)
        for unit in move.movable_past(position):
            for start in move.later_starts(unit, position):
                move.delay([unit], start)
                lowered = regions.peak([*result[:number], move.schedule.order(), *result[number + 1 :]])
                peak, best = (lowered, move.schedule.at) if lowered < peak else (peak, best)
                move.schedule.at = dict(before)
        if best is before:
            break
        move.schedule.at = best
        result[number] = move.schedule.order()
    return result


def _at_index(orders: Sequence[Sequence[int]], index: int) -> tuple[int, int]:
    """Returns the region and the unit at an index into the orders of all regions."""
    number = 0
    while index >= len(orders[number]):
        index -= len(orders[number])
        number += 1
    return number, orders[number][index]


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
        if users and isinstance(unit.lines[0], Alloc | View | WaitCollective):
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
        values: of symbols, by name.
        last_use: the last unit of the program that uses each root, by the root's name.
        live: the live bytes while each unit of the program's order runs, as far as units moved.
        allowed: the largest number of live bytes.
    """

    units: Sequence[SchedulingUnit]
    sizes: Mapping[str, int]
    values: Mapping[str, Number]
    last_use: Mapping[str, SchedulingUnit]
    live: list[int]
    allowed: int
    schedule: UnitSchedule = field(init=False)
    starts: list[int] = field(init=False)
    waits: list[int] = field(init=False)
    costs: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.schedule = UnitSchedule(self.units, fixed_waits=True)
        self.costs = [self._cost(unit.lines[0]) for unit in self.units]
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
            yield cls(units, regions.sizes, regions.values, last_use, live, allowed)

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

    def independent_before(self, start: int, cover: int) -> list[int]:
        """Returns units before a start that can run while it is in flight, in their order.

        Those that cannot run beside the next collective are chosen first, then the last ones, until the collective has
        lines that move `cover` times its bytes. Those that cover an earlier collective stay, unless it has more than it
        needs.
        """
        at, schedule = self.schedule.at, self.schedule
        missing = self._missing(start, cover)
        earlier = sorted([item for item in self.starts if at[item] < at[start]], key=at.__getitem__)[-_AHEAD[0] :]
        surplus = {item: -self._missing(item, cover) for item in earlier}
        next_start = min([at[item] for item in self.starts if at[item] > at[start]], default=float(len(self.units)))
        first = at[earlier[0]] if len(earlier) == _AHEAD[0] else -1.0
        window = sorted([item for item in at if first < at[item] < at[start]], key=at.__getitem__, reverse=True)
        urgent = [item for item in window if schedule.latest(item) < next_start]
        starts = self._starts_to_delay(start, window, surplus)
        delayed: set[int] = set()
        for position in (*urgent, *window):
            if missing <= 0:
                break
            line, cost = self.units[position].lines[0], self.costs[position]
            if position in delayed or line.is_async_start or line.is_async_wait:
                continue
            blocking = {item for item in schedule.after(position) if at[item] <= at[start]} - delayed
            if not starts.keys() >= blocking:
                continue
            left = [item for item in earlier if at[item] < at[position] < schedule.latest(item) <= at[start]]
            if any(surplus[item] < cost for item in left):
                continue
            surplus.update({item: surplus[item] - cost for item in left})
            missing -= cost
            delayed.update([position], *[starts[item] for item in blocking])
        has_work = any(self.costs[position] for position in delayed)
        return sorted(delayed, key=at.__getitem__) if has_work else []

    def _starts_to_delay(
        self, start: int, window: Sequence[int], surplus: Mapping[int, int]
    ) -> Mapping[int, Sequence[int]]:
        """Returns the starts of a window before a start that can follow it, with those of their kind that must too.

        They have enough lines beside them afterwards. The window begins with its last unit.
        """
        at, units, passed = self.schedule.at, self.units, 0
        ended = {functional_name(units[start].lines[0])}
        result: dict[int, Sequence[int]] = {}
        last: dict[str, Sequence[int]] = {}
        for position in window:
            passed += self.costs[position]
            if not units[position].lines[0].is_async_start:
                continue
            name = functional_name(units[position].lines[0])
            if name is None or name in ended:
                continue
            if self.schedule.latest(position) <= at[start] or surplus.get(position, 0) < passed:
                ended.add(name)
                continue
            last[name] = result[position] = [position, *last.get(name, ())]
        return result

    def starts_to_follow(self, wait: int) -> list[int]:
        """Returns the starts that can follow a wait for a collective with few lines beside it, in their order.

        They have enough lines beside them afterwards. The order of collectives of one kind does not change.
        """
        at, schedule, units = self.schedule.at, self.schedule, self.units
        awaited = [item for item in schedule.before(wait) if units[item].lines[0].is_async_start]
        if not any(self._missing(item, _COVERS[0]) > 0 for item in awaited):
            return []
        earlier = sorted([item for item in self.starts if at[item] < at[wait]], key=at.__getitem__)[-_AHEAD[0] :]
        fixed = {None, *[functional_name(units[item].lines[0]) for item in awaited]}
        result: list[int] = []
        for start in reversed(earlier):
            line, end = units[start].lines[0], schedule.latest(start)
            beside = sum([self.costs[item] for item in at if at[wait] < at[item] < end])
            if functional_name(line) in fixed or beside < _SUFFICIENT_COVER * self._bytes(line):
                fixed.add(functional_name(line))
            else:
                result.append(start)
        return result[::-1]

    def movable_past(self, position: int) -> list[int]:
        """Returns units with work up to the unit at a position that can run after it, those with large results first.

        Units that a collective in flight needs are left out.
        """
        at, schedule, units = self.schedule.at, self.schedule, self.units
        now = at.get(position, -1.0)
        sizes = {item: sum([self.sizes.get(root, 0) for root in units[item].defined_roots])
                 for item in at if self.costs[item] and at[item] <= now < schedule.latest(item)}  # fmt: skip
        candidates = sorted([item for item in sizes if sizes[item]], key=lambda item: -sizes[item])[:_CANDIDATES]
        return [item for item in candidates if not self._is_needed(item)]

    def _is_needed(self, position: int) -> bool:
        """Whether a collective in flight beside a unit would lack lines without it."""
        at, cost = self.schedule.at, self.costs[position]
        in_flight = [start for start in self.starts if at[start] < at[position] < self.schedule.latest(start)]
        return any(self._missing(start, _SUFFICIENT_COVER) > -cost for start in in_flight)

    def later_starts(self, position: int, after: int) -> list[int]:
        """Returns the next starts behind the unit `after` that a unit can run after."""
        at, end = self.schedule.at, self.schedule.latest(position)
        return sorted([start for start in self.starts if at[after] < at[start] < end], key=at.__getitem__)[: _AHEAD[0]]

    def _missing(self, start: int, cover: int) -> int:
        """Returns the cost of the lines that a collective in flight lacks, negative if it has more than it needs."""
        at, end = self.schedule.at, self.schedule.latest(start)
        in_flight = [unit for unit in self.units if at[start] < at.get(unit.position, -1) < end]
        needed = cover * self._bytes(self.units[start].lines[0])
        return needed - sum([self.costs[unit.position] for unit in in_flight])

    def delay(self, lines: Sequence[int], start: int) -> None:
        """Moves units behind a start, in their order."""
        at = self.schedule.at
        low = at[start]
        high = min([position for position in at.values() if position > low], default=float(len(self.units)))
        for index, position in enumerate(lines, 1):
            at[position] = low + (high - low) * index / (len(lines) + 1)

    def _cost(self, line: LineBase) -> int:
        """Returns the bytes that a line moves, or for a matmul could move meanwhile; 0 for lines without work."""
        if not isinstance(line, Launch | ExternCall | ExtensionLine):
            return 0
        size = self._bytes(line)
        if isinstance(line, ExternCall) and line.target in _MATMULS:
            left, right = [value.tensor_type for value in ir.values_in(line.arguments)[-2:]]
            numbers = [left.element_count, right.sizes[-1]]
            return max(size, 2 * prod([evaluate_size(item, self.values) for item in numbers]) // _OPERATIONS_PER_BYTE)
        return size

    def _bytes(self, line: LineBase) -> int:
        """Returns the bytes of the tensors that a line uses and defines, each memory once."""
        new = [value for value in ir.defined(line) if line.alias_of(value) is None]
        tensors = {value.name: value for value in (*ir.used(line), *new)}
        types = [value.type for value in tensors.values() if isinstance(value.type, ir.TensorType)]
        return sum([evaluate_size(type_.storage_bytes, self.values) for type_ in types])

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
        size = sum([self.sizes.get(root, 0) for root in self.schedule.moved_roots(position)])
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
