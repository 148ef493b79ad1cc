"""Another order of a program's lines, in which less memory is live at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from fxwrap.passes.parts import Parts
from fxwrap.passes.units import Unit
from fxwrap.symbolic import Scalar
from fxwrap.wrapper_ir import Program, live_bytes, uses_streams


@dataclass(frozen=True, slots=True)
class Reordered:
    """A program in another order, and its peak memory in bytes before and after, by the hints of symbols."""

    program: Program
    before: int
    after: int


def reorder_for_peak_memory(program: Program, hints: Mapping[str, Scalar] | None = None) -> Reordered:
    """Returns the program with the lines of its body in an order that holds less memory at its worst moment.

    What a line reads, writes, takes and defines, its symbols and its effects fix which lines must come before it;
    brackets stay where they are, and blocks inside lines are left alone, as are programs that use streams. Among the
    orders that are tried (what frees most comes first; depth first from the results; the program's own) the one with
    the lowest peak is taken, the program's own if no other is lower. Frees follow the last uses. n log n in the number
    of lines.

    Args:
        program: the program. It is not changed.
        hints: values of symbols, as `live_bytes` takes them.
    """
    before = live_bytes(program, hints).peak
    if uses_streams(program):
        return Reordered(program, before, before)
    parts = Parts(program, hints or {})
    orders = [[_scheduled(units, schedule, parts) for units in parts.parts] for schedule in _SCHEDULES]
    estimated, order = min([(parts.peak(order), order) for order in orders], key=lambda pair: pair[0])
    if estimated < parts.peak(parts.as_they_are):
        found = parts.ordered(order)
        after = live_bytes(found, hints).peak  # what blocks inside of lines hold counts here
        if after < before:
            return Reordered(found, before, after)
    return Reordered(program, before, before)


Schedule = Callable[[Sequence[Unit], Mapping[str, int], Mapping[str, int]], list[int]]


def _scheduled(units: Sequence[Unit], schedule: Schedule, parts: Parts) -> Sequence[int]:
    """Returns another order of one of the parts."""
    return schedule(units, parts.sizes, parts.uses) if len(units) > 1 else range(len(units))


def _most_freed_first(units: Sequence[Unit], sizes: Mapping[str, int], uses: Mapping[str, int]) -> list[int]:
    """Runs, of the units that may run, the one that leaves the least memory live."""
    remaining = dict(uses)
    waiting = [len(unit.before) for unit in units]
    users: dict[str, list[int]] = {}
    for unit in units:
        for root in unit.touched:
            users.setdefault(root, []).append(unit.position)

    def net(unit: Unit) -> int:
        made = sum([sizes.get(root, 0) for root in unit.made])
        return made - sum([sizes.get(root, 0) for root in unit.touched if remaining[root] == 1])

    current = {unit.position: net(unit) for unit in units if not waiting[unit.position]}
    heap = [(value, position) for position, value in current.items()]
    heapify(heap)
    found: list[int] = []
    while heap:
        value, position = heappop(heap)
        if current.get(position) != value:
            continue  # run already, or worth more by now
        del current[position]
        found.append(position)
        unit = units[position]
        for later in unit.after:
            waiting[later] -= 1
            if not waiting[later]:
                current[later] = net(units[later])
                heappush(heap, (current[later], later))
        for root in unit.touched:
            remaining[root] -= 1
            if remaining[root] == 1:
                for other in users[root]:
                    if other in current:
                        current[other] = net(units[other])
                        heappush(heap, (current[other], other))
    return found


def _depth_first(units: Sequence[Unit], sizes: Mapping[str, int], uses: Mapping[str, int]) -> list[int]:
    """Runs each unit as late as what needs it allows: what it depends on first, the largest results first."""
    found: list[int] = []
    done: set[int] = set()

    def weight(position: int) -> tuple[int, int]:
        return -sum([sizes.get(root, 0) for root in units[position].made]), position

    for last in units:
        pending = [] if last.after or last.position in done else [(last.position, False)]
        while pending:
            position, ready = pending.pop()
            if ready:
                found.append(position)
            elif position not in done:
                done.add(position)
                pending.append((position, True))
                pending += [(item, False) for item in sorted(units[position].before, key=weight, reverse=True)]
    return found


_SCHEDULES: tuple[Schedule, ...] = (_most_freed_first, _depth_first)
