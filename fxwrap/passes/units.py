"""The lines of a block as units that may change places, with what must come before what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fxwrap.lines import Bind
from fxwrap.wrapper_ir import (
    UNKNOWN,
    Block,
    Effect,
    LineBase,
    Role,
    Value,
    all_effects,
    consumed,
    defined,
    defined_symbol,
    outer_symbols,
    reads,
    run_blocks,
    symbols_used,
    type_symbols,
    writes,
)


@dataclass(eq=False)
class Unit:
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


def segments(lines: Sequence[LineBase]) -> Iterator[Sequence[LineBase]]:
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


def units_of(
    lines: Sequence[LineBase], root_of: Mapping[str, str], functions: Mapping[str, Block], has_symbols: bool
) -> list[Unit]:
    """Returns the units of a part, with what must come before what."""
    units: list[Unit] = []
    for position, line in enumerate(lines):
        if units and defined_symbol(line) is not None and _follows_directly(units[-1], lines, position):
            units[-1].lines.append(line)
        else:
            units.append(Unit(len(units), [line]))
    order = _Order(root_of, functions, has_symbols)
    for unit in units:
        order.add(unit)
    for unit in units:
        for earlier in unit.before:
            units[earlier].after.append(unit.position)
    return units


def _follows_directly(unit: Unit, lines: Sequence[LineBase], position: int) -> bool:
    """Whether the line at a position, or a symbol line right after it, defines a symbol in the types of a unit."""
    types = [value.type for line in unit.lines for value in defined(line)]
    if not types:
        return False
    awaited = {symbol.name for type_ in types for symbol in type_symbols(type_)}
    for line in lines[position:]:
        made = defined_symbol(line)
        if made is None:
            return False
        if isinstance(line, Bind) or made.name in awaited:
            return True
    return False


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

    def add(self, unit: Unit) -> None:
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

    def _names(self, unit: Unit, line: LineBase, names: list[str], made: list[str]) -> None:
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
        self, unit: Unit, line: LineBase, reads_: Sequence[Value], writes_: Sequence[Value], names: Sequence[str]
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

    def _effects(self, unit: Unit, effects: tuple[Effect, ...]) -> None:
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
