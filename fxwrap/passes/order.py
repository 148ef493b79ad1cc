"""Another order of a program's lines, in which less memory is live at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from fxwrap.lines.frees import insert_frees
from fxwrap.passes.units import Unit, segments, units_of
from fxwrap.symbolic import Scalar, evaluate
from fxwrap.wrapper_ir import (
    Block,
    Program,
    TensorType,
    defined,
    is_release,
    known_values,
    live_bytes,
    program_arguments,
    released_inputs,
    roots,
    symbol_infos,
    uses_streams,
)


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
    parts = _Parts(program, hints or {})
    estimated, order = min([(parts.peak(order), order) for order in map(parts.scheduled, _SCHEDULES)],
                           key=lambda pair: pair[0])  # fmt: skip
    if estimated < parts.peak([range(len(units)) for units in parts.parts]):
        found = parts.ordered(order)
        after = live_bytes(found, hints).peak  # what blocks inside of lines hold counts here
        if after < before:
            return Reordered(found, before, after)
    return Reordered(program, before, before)


Orders = Sequence[Sequence[int]]
"""For each part of a program, its units by index."""

Schedule = Callable[[Sequence[Unit], Mapping[str, int], Mapping[str, int]], list[int]]


class _Parts:
    """The parts of a program's body between brackets, as units with what must come before what."""

    def __init__(self, program: Program, hints: Mapping[str, Scalar]) -> None:
        self.program = program
        self.arguments = program_arguments(program)
        root_of = roots(program.body.lines, self.arguments)
        functions = dict(program.functions)
        kept = [line for line in program.body.lines if not is_release(line)]
        has_symbols = bool(symbol_infos(program))
        self.parts = [units_of(segment, root_of, functions, has_symbols) for segment in segments(kept)]
        self.sizes = _owned_sizes(program, hints)
        self.uses: dict[str, int] = {}
        """How many units touch each root."""
        for units in self.parts:
            for unit in units:
                for root in unit.touched:
                    self.uses[root] = self.uses.get(root, 0) + 1

    def scheduled(self, schedule: Schedule) -> Orders:
        """Returns another order of each part."""
        return [schedule(units, self.sizes, self.uses) if len(units) > 1 else range(len(units)) for units in self.parts]

    def peak(self, orders: Orders) -> int:
        """Returns the most bytes that are live at once, of what may be freed, blocks inside of lines left out."""
        sizes, remaining = self.sizes, dict(self.uses)
        live = peak = 0
        for units, order in zip(self.parts, orders, strict=True):
            for unit in [units[index] for index in order]:
                live += sum([sizes.get(root, 0) for root in unit.made])
                peak = max(peak, live - sum([sizes.get(root, 0) for root in unit.taken]))
                for root in unit.touched:
                    remaining[root] -= 1
                    if not remaining[root]:
                        live -= sizes.get(root, 0)
        return peak

    def ordered(self, orders: Orders) -> Program:
        """Returns the program with the units of each part in this order."""
        found = [line for units, order in zip(self.parts, orders, strict=True) for index in order
                 for line in units[index].lines]  # fmt: skip
        lines = insert_frees(found, self.arguments, released_inputs(self.program.inputs))
        return self.program.replace(body=Block(self.program.body.arguments, lines))


def _owned_sizes(program: Program, hints: Mapping[str, Scalar]) -> dict[str, int]:
    """Returns the bytes of each root of the body that may be freed in it; what is given back counts too."""
    owned = released_inputs(program.inputs)
    owned += [value for line in program.body.lines for value in defined(line) if line.alias_of(value) is None]
    sizes = {value.name: value.type.storage_bytes for value in owned if isinstance(value.type, TensorType)}
    values = known_values(program, hints) if any(not isinstance(size, int) for size in sizes.values()) else {}
    return {name: size if isinstance(size, int) else int(evaluate(size, values)) for name, size in sizes.items()}


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
