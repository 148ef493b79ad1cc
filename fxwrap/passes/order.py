"""Another order of a program's lines, in which less memory is live at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from fxwrap.lines.frees import insert_frees
from fxwrap.symbolic import Scalar, evaluate
from fxwrap.wrapper_ir import (
    UNKNOWN,
    Block,
    Effect,
    LineBase,
    Program,
    Role,
    TensorType,
    Value,
    all_effects,
    consumed,
    defined,
    defined_symbol,
    is_release,
    known_values,
    live_bytes,
    outer_symbols,
    program_arguments,
    reads,
    released_inputs,
    roots,
    run_blocks,
    symbol_infos,
    symbols_used,
    uses_streams,
    writes,
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


@dataclass(eq=False)
class _Unit:
    """A line with the symbol lines that must follow it directly, and the units that come before and after it.

    `touched` are the roots that it uses or makes, `made` those that it makes, `taken` those that it makes others of.
    """

    position: int
    lines: list[LineBase]
    before: set[int] = field(default_factory=set)
    after: list[int] = field(default_factory=list)
    touched: frozenset[str] = frozenset()
    made: frozenset[str] = frozenset()
    taken: frozenset[str] = frozenset()


Orders = Sequence[Sequence[int]]
"""For each part of a program, its units by index."""

Schedule = Callable[[Sequence[_Unit], Mapping[str, int], Mapping[str, int]], list[int]]


class _Parts:
    """The parts of a program's body between brackets, as units with what must come before what."""

    def __init__(self, program: Program, hints: Mapping[str, Scalar]) -> None:
        self.program = program
        self.arguments = program_arguments(program)
        root_of = roots(program.body.lines, self.arguments)
        functions = dict(program.functions)
        kept = [line for line in program.body.lines if not is_release(line)]
        has_symbols = bool(symbol_infos(program))
        self.parts = [_units(segment, root_of, functions, has_symbols) for segment in _segments(kept)]
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


def _segments(lines: Sequence[LineBase]) -> Iterator[Sequence[LineBase]]:
    """Yields parts of a body within which lines may move: brackets, what binds inputs, and the end stay in place."""
    start = next((index for index, line in enumerate(lines) if defined_symbol(line) is None), len(lines))
    if start:
        yield from ([line] for line in lines[:start])
    part: list[LineBase] = []
    for line in lines[start:]:
        if line.bracket[1] or line.terminator:
            yield part
            yield [line]
            part = []
        else:
            part.append(line)
    yield part


def _units(
    lines: Sequence[LineBase], root_of: Mapping[str, str], functions: Mapping[str, Block], has_symbols: bool
) -> list[_Unit]:
    """Returns the units of a part, with what must come before what."""
    units: list[_Unit] = []
    for line in lines:
        if units and defined_symbol(line) is not None:
            units[-1].lines.append(line)
        else:
            units.append(_Unit(len(units), [line]))
    order = _Order(root_of, functions, has_symbols)
    for unit in units:
        order.add(unit)
    for unit in units:
        for earlier in unit.before:
            units[earlier].after.append(unit.position)
    return units


class _Order:
    """Finds what must come before each unit, walking them in the program's order."""

    def __init__(self, root_of: Mapping[str, str], functions: Mapping[str, Block], has_symbols: bool) -> None:
        self.root_of = root_of
        self.has_symbols = has_symbols
        self.functions = functions
        self.maker: dict[str, int] = {}  # of values and symbols, by name
        self.writer: dict[str, int] = {}  # of roots
        self.readers: dict[str, list[int]] = {}
        self.borrowed: dict[str, list[str]] = {}  # root in flight -> the roots it borrows
        self.effects: dict[Effect, int] = {}
        self.unknown: int | None = None
        self.since_unknown: list[int] = []

    def add(self, unit: _Unit) -> None:
        """Records a unit and what must come before it."""
        touched: set[str] = set()
        made: set[str] = set()
        gone: set[str] = set()
        for line in unit.lines:
            names = [value.name for value in defined(line)]
            read, taken = reads(line), consumed(line)
            written = [*writes(line), *taken]
            self._names(unit, line, [value.name for value in (*read, *written)], names)
            touched |= self._memory(unit, line, read, written, names)
            made.update([name for name in names if self.root_of[name] == name])
            gone.update([value.name for value in taken])
            self._effects(unit, all_effects(line, self.functions))
        unit.before.discard(unit.position)
        unit.touched, unit.made, unit.taken = frozenset(touched), frozenset(made), frozenset(gone)

    def _names(self, unit: _Unit, line: LineBase, names: list[str], made: list[str]) -> None:
        if self.has_symbols:
            names += [symbol.name for symbol in symbols_used(line, *Role)]
        inner = run_blocks(line, self.functions)
        names += outer_symbols(*inner, functions=self.functions, argument_types=True) if inner else ()
        unit.before.update([self.maker[name] for name in names if name in self.maker])
        symbol = defined_symbol(line)
        if symbol is not None:
            self.maker[symbol.name] = unit.position
        self.maker.update(dict.fromkeys(made, unit.position))

    def _memory(
        self, unit: _Unit, line: LineBase, reads_: Sequence[Value], writes_: Sequence[Value], names: Sequence[str]
    ) -> set[str]:
        """Records what a line reads, and writes or takes; returns the roots it touches."""
        read = {self.root_of[value.name] for value in reads_}
        written = {self.root_of[value.name] for value in writes_}
        if line.ends_flight:
            read |= {other for root in tuple(read) for other in self.borrowed.pop(root, ())}
        made = {self.root_of[name] for name in names}
        if line.starts_flight:
            for root in made:
                self.borrowed[root] = [other for other in read if other != root]
        for root in read | written:
            if root in self.writer:
                unit.before.add(self.writer[root])
            self.readers.setdefault(root, []).append(unit.position)
        for root in written:
            unit.before.update(self.readers.pop(root, ()))
            self.writer[root] = unit.position
        return read | written | made

    def _effects(self, unit: _Unit, effects: tuple[Effect, ...]) -> None:
        if not effects:
            return
        if self.unknown is not None:
            unit.before.add(self.unknown)
        if UNKNOWN in effects:
            unit.before.update(self.since_unknown)
            self.unknown = unit.position
            self.since_unknown.clear()
            self.effects.clear()
            return
        self.since_unknown.append(unit.position)
        for effect in effects:
            if effect in self.effects:
                unit.before.add(self.effects[effect])
            self.effects[effect] = unit.position


def _most_freed_first(units: Sequence[_Unit], sizes: Mapping[str, int], uses: Mapping[str, int]) -> list[int]:
    """Runs, of the units that may run, the one that leaves the least memory live."""
    remaining = dict(uses)
    waiting = [len(unit.before) for unit in units]
    users: dict[str, list[int]] = {}
    for unit in units:
        for root in unit.touched:
            users.setdefault(root, []).append(unit.position)

    def net(unit: _Unit) -> int:
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


def _depth_first(units: Sequence[_Unit], sizes: Mapping[str, int], uses: Mapping[str, int]) -> list[int]:
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
