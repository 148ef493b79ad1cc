"""The lines of a block as units that can be reordered, with their dependences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fxwrap import wrapper_ir as ir
from fxwrap.lines import Bind


@dataclass(eq=False)
class SchedulingUnit:
    """A line with the symbol lines that must directly follow it.

    `accessed` are the roots that it uses or defines.
    """

    position: int
    lines: list[ir.LineBase]
    predecessors: set[int] = field(default_factory=set)
    successors: list[int] = field(default_factory=list)
    accessed: frozenset[str] = frozenset()
    defined_roots: frozenset[str] = frozenset()
    consumed_roots: frozenset[str] = frozenset()


def split_regions(lines: Sequence[ir.LineBase]) -> Iterator[Sequence[ir.LineBase]]:
    """Yields the regions in which lines may be reordered. Brackets, input bindings and the terminator are fixed."""
    start = next((index for index, line in enumerate(lines) if ir.defined_symbol(line) is None), len(lines))
    if start:
        yield from ([line] for line in lines[:start])
    region: list[ir.LineBase] = []
    for line in lines[start:]:
        if line.bracket[1] or line.terminator:
            yield region
            yield [line]
            region = []
        else:
            region.append(line)
    yield region


def build_units(
    lines: Sequence[ir.LineBase], root_of: Mapping[str, str], functions: Mapping[str, ir.Block], has_symbols: bool
) -> list[SchedulingUnit]:
    """Returns the units of a region with their dependences."""
    units: list[SchedulingUnit] = []
    for position, line in enumerate(lines):
        if units and ir.defined_symbol(line) is not None and _follows_directly(units[-1], lines, position):
            units[-1].lines.append(line)
        else:
            units.append(SchedulingUnit(len(units), [line]))
    dependences = _DependenceBuilder(root_of, functions, has_symbols)
    for unit in units:
        dependences.add(unit)
    for unit in units:
        for earlier in unit.predecessors:
            units[earlier].successors.append(unit.position)
    return units


def _follows_directly(unit: SchedulingUnit, lines: Sequence[ir.LineBase], position: int) -> bool:
    """Whether the symbol lines from a position on define a symbol in the types of a unit's results."""
    types = [value.type for line in unit.lines for value in ir.defined(line)]
    if not types:
        return False
    expected = {symbol.name for type_ in types for symbol in ir.type_symbols(type_)}
    for line in lines[position:]:
        defined_here = ir.defined_symbol(line)
        if defined_here is None:
            return False
        if isinstance(line, Bind) or defined_here.name in expected:
            return True
    return False


class _DependenceBuilder:
    """Computes the predecessors of units in the program's order."""

    def __init__(self, root_of: Mapping[str, str], functions: Mapping[str, ir.Block], has_symbols: bool) -> None:
        self.root_of = root_of
        self.has_symbols = has_symbols
        self.functions = functions
        self.definer: dict[str, int] = {}  # of values and symbols, by name
        self.writer: dict[str, int] = {}  # of roots
        self.readers: dict[str, list[int]] = {}
        self.borrowed: dict[str, list[str]] = {}  # root in flight -> the roots it borrows
        self.effects: dict[ir.Effect, int] = {}
        self.unknown: int | None = None
        self.since_unknown: list[int] = []

    def add(self, unit: SchedulingUnit) -> None:
        """Adds a unit and computes its predecessors."""
        accessed: set[str] = set()
        defined_roots: set[str] = set()
        consumed_roots: set[str] = set()
        for line in unit.lines:
            names = [value.name for value in ir.defined(line)]
            read, consumes = ir.reads(line), ir.consumed(line)
            written = [*ir.writes(line), *consumes]
            self._add_def_use(unit, line, [value.name for value in (*read, *written)], names)
            accessed |= self._add_memory(unit, line, read, written, names)
            defined_roots.update([name for name in names if self.root_of[name] == name])
            consumed_roots.update([value.name for value in consumes])
            self._add_effects(unit, ir.all_effects(line, self.functions))
        unit.predecessors.discard(unit.position)
        unit.accessed = frozenset(accessed)
        unit.defined_roots, unit.consumed_roots = frozenset(defined_roots), frozenset(consumed_roots)

    def _add_def_use(self, unit: SchedulingUnit, line: ir.LineBase, names: list[str], results: list[str]) -> None:
        if self.has_symbols:
            names += [symbol.name for symbol in ir.symbols_used(line, *ir.Role)]
        inner = ir.executed_blocks(line, self.functions)
        names += ir.captured_symbols(*inner, functions=self.functions, argument_types=True) if inner else ()
        unit.predecessors.update([self.definer[name] for name in names if name in self.definer])
        symbol = ir.defined_symbol(line)
        if symbol is not None:
            self.definer[symbol.name] = unit.position
        self.definer.update(dict.fromkeys(results, unit.position))

    def _add_memory(
        self,
        unit: SchedulingUnit,
        line: ir.LineBase,
        operands: Sequence[ir.Value],
        outs: Sequence[ir.Value],
        names: list[str],
    ) -> set[str]:
        """Adds the memory accesses of a line; returns the roots it uses or defines."""
        read = {self.root_of[value.name] for value in operands}
        written = {self.root_of[value.name] for value in outs}
        if line.is_async_wait:
            read |= {other for root in tuple(read) for other in self.borrowed.pop(root, ())}
        results = {self.root_of[name] for name in names}
        if line.is_async_start:
            for root in results:
                self.borrowed[root] = [other for other in read if other != root]
        for root in read | written:
            if root in self.writer:
                unit.predecessors.add(self.writer[root])
            self.readers.setdefault(root, []).append(unit.position)
        for root in written:
            unit.predecessors.update(self.readers.pop(root, ()))
            self.writer[root] = unit.position
        return read | written | results

    def _add_effects(self, unit: SchedulingUnit, effects: tuple[ir.Effect, ...]) -> None:
        if not effects:
            return
        if self.unknown is not None:
            unit.predecessors.add(self.unknown)
        if ir.UNKNOWN in effects:
            unit.predecessors.update(self.since_unknown)
            self.unknown = unit.position
            self.since_unknown.clear()
            self.effects.clear()
            return
        self.since_unknown.append(unit.position)
        for effect in effects:
            if effect in self.effects:
                unit.predecessors.add(self.effects[effect])
            self.effects[effect] = unit.position
