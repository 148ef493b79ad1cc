"""Scheduling: regions of a program whose lines may be reordered, their units and dependences, and peak memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from fxwrap import wrapper_ir as ir
from fxwrap.lines import Alloc, Bind
from fxwrap.lines.frees import insert_frees
from fxwrap.symbolic import Number, evaluate_size


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
    """Yields the regions in which lines may be reordered.

    Brackets, the terminator, and inputs' symbols and checks are fixed: nothing reads or writes an input before its
    layout is checked.
    """
    start = next((index for index, line in enumerate(lines) if not _is_about_inputs(line)), len(lines))
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


def _is_about_inputs(line: ir.LineBase) -> bool:
    """Whether a line at the beginning of a program defines a symbol or is a check."""
    return ir.defined_symbol(line) is not None or (line.effects() == (ir.ASSERT,) and not ir.defined(line))


Commutes: TypeAlias = Callable[[ir.LineBase], bool]
"""Whether the effects of a line need no order with those of other lines that commute."""


def _commutes_never(_line: ir.LineBase) -> bool:
    return False


def build_units(
    lines: Sequence[ir.LineBase],
    root_of: Mapping[str, str],
    functions: Mapping[str, ir.Block],
    has_symbols: bool,
    commutes: Commutes = _commutes_never,
) -> list[SchedulingUnit]:
    """Returns the units of a region with their dependences."""
    units: list[SchedulingUnit] = []
    for position, line in enumerate(lines):
        if units and ir.defined_symbol(line) is not None and _follows_directly(units[-1], lines, position):
            units[-1].lines.append(line)
        else:
            units.append(SchedulingUnit(len(units), [line]))
    dependences = _DependenceBuilder(root_of, functions, has_symbols, commutes)
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
    def __init__(
        self, root_of: Mapping[str, str], functions: Mapping[str, ir.Block], has_symbols: bool, commutes: Commutes
    ) -> None:
        self.root_of = root_of
        self.commutes = commutes
        self.has_symbols = has_symbols
        self.functions = functions
        self.definer: dict[str, int] = {}  # of values and symbols, by name
        self.writer: dict[str, int] = {}  # of roots
        self.readers: dict[str, list[int]] = {}
        self.borrowed: dict[str, list[str]] = {}  # root in flight -> the roots it borrows
        self.effects: dict[ir.Effect, int] = {}  # the last line that commutes with no other
        self.commuting: dict[ir.Effect, list[int]] = {}  # the lines since then
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
            self._add_effects(unit, ir.all_effects(line, self.functions), self.commutes(line))
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
            written |= read  # later readers may read the memory through other values than the line's result
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

    def _add_effects(self, unit: SchedulingUnit, effects: tuple[ir.Effect, ...], commutes: bool) -> None:
        if not effects:
            return
        if self.unknown is not None:
            unit.predecessors.add(self.unknown)
        if ir.UNKNOWN in effects:
            unit.predecessors.update(self.since_unknown)
            self.unknown = unit.position
            self.since_unknown.clear()
            self.effects.clear()
            self.commuting.clear()
            return
        self.since_unknown.append(unit.position)
        for effect in effects:
            for other in self._conflicting(effect):
                unit.predecessors.update([self.effects[other]] if other in self.effects else [])
                unit.predecessors.update(() if commutes else self.commuting.get(other, ()))
            if commutes:
                self.commuting.setdefault(effect, []).append(unit.position)
            else:
                self.commuting.pop(effect, None)
                self.effects[effect] = unit.position

    def _conflicting(self, effect: ir.Effect) -> list[ir.Effect]:
        """Returns the effects that need an order with one: itself, and communication in an unknown group."""
        if effect.name != ir.ANY_COMMUNICATION.name:
            return [effect]
        if effect != ir.ANY_COMMUNICATION:
            return [effect, ir.ANY_COMMUNICATION]
        known = [*self.effects, *self.commuting, effect]
        return [item for item in dict.fromkeys(known) if item.name == effect.name]


Orders: TypeAlias = Sequence[Sequence[int]]
"""The order of the units of each region, by index."""


class SchedulingRegions:
    """The regions of a program's body between brackets, as units with their dependences.

    The bytes of `uncounted` roots do not count as live.
    """

    def __init__(
        self,
        program: ir.Program,
        hints: Mapping[str, Number],
        commutes: Commutes = _commutes_never,
        uncounted: Container[str] = (),
    ) -> None:
        self.program = program
        self.arguments = ir.program_arguments(program)
        root_of = ir.alias_roots(program.body.lines, self.arguments)
        functions = dict(program.functions)
        lines = [line for line in program.body.lines if not ir.is_release(line)]
        has_symbols = bool(ir.symbol_infos(program))
        self.regions = [
            build_units(region, root_of, functions, has_symbols, commutes) for region in split_regions(lines)
        ]  # fmt: skip
        self.values = ir.hints_with_fallback(program, hints)
        sizes = _owned_sizes(program, self.values)
        self.sizes = {root: size for root, size in sizes.items() if root not in uncounted}
        self.uses = Counter([root for units in self.regions for unit in units for root in unit.accessed])
        """The number of units that use each root."""

    @property
    def program_order(self) -> Orders:
        """The order of the program."""
        return [range(len(units)) for units in self.regions]

    def peak(self, orders: Orders) -> int:
        """Returns the peak of the memory that the body may free, without blocks inside lines."""
        return max(self.profile(orders), default=0)

    def profile(self, orders: Orders) -> list[int]:
        """Returns the live bytes of such memory while each unit runs, for the units of all regions in their order."""
        sizes, remaining, live = self.sizes, dict(self.uses), self.initial_bytes
        profile = list[int]()
        for units, order in zip(self.regions, orders, strict=True):
            for unit in [units[index] for index in order]:
                live += sum([sizes.get(root, 0) for root in unit.defined_roots])
                profile.append(live - sum([sizes.get(root, 0) for root in unit.consumed_roots]))
                for root in unit.accessed:
                    remaining[root] -= 1
                    if not remaining[root]:
                        live -= sizes.get(root, 0)
        return profile

    @property
    def initial_bytes(self) -> int:
        """The bytes of inputs that the body frees, before its first unit."""
        names = [value.name for value in _owned_inputs(self.program)]
        return sum([self.sizes.get(name, 0) for name in names if name in self.uses])

    @property
    def lower_bound(self) -> int:
        """A number of bytes below which no order has its peak: the most that a unit accesses, or live before all."""
        units = [unit for region in self.regions for unit in region]
        accessed = max([self._bytes(unit.accessed - unit.consumed_roots) for unit in units], default=0)
        consumed = max([self._bytes(unit.consumed_roots) for unit in units], default=0)
        return max(accessed, self.initial_bytes - consumed)

    def _bytes(self, roots: Iterable[str]) -> int:
        return sum([self.sizes.get(root, 0) for root in roots])

    @property
    def unowned_bytes(self) -> int:
        """The bytes of inputs and constants that the body does not free, which are live throughout."""
        owned = {value.name for value in _owned_inputs(self.program)}
        values = [value for value in self.arguments if value.name not in owned]
        sizes = [value.type.storage_bytes for value in values if isinstance(value.type, ir.TensorType)]
        return sum([evaluate_size(size, self.values) for size in sizes])

    def apply_order(
        self, orders: Orders, changed: Mapping[SchedulingUnit, Sequence[ir.LineBase]] | None = None
    ) -> ir.Program:
        """Returns the program with the units of each region in an order, and with the `changed` lines of some."""
        changed = changed or {}
        lines = [line for units, order in zip(self.regions, orders, strict=True) for index in order
                 for line in changed.get(units[index], units[index].lines)]  # fmt: skip
        lines = sink_allocations(lines)
        freed = insert_frees(lines, self.arguments, ir.released_inputs(self.program.inputs))
        return self.program.replace(body=ir.Block(self.program.body.arguments, freed))


def sink_allocations(lines: Sequence[ir.LineBase]) -> list[ir.LineBase]:
    """Returns lines in which allocations directly precede the first line that uses them, in the order of its writes.

    Allocations stay in their bracket.
    """
    result: list[ir.LineBase] = []
    pending: dict[str, Alloc] = {}
    for line in lines:
        if isinstance(line, Alloc):
            pending[line.result.name] = line
            continue
        if pending:
            fixed = line.bracket[1] or line.terminator
            names = list(pending) if fixed else [value.name for value in (*ir.writes(line), *ir.used(line))]
            result += [pending.pop(name) for name in dict.fromkeys(names) if name in pending]
        result.append(line)
    return result


def _owned_inputs(program: ir.Program) -> list[ir.Value]:
    """Returns the inputs whose memory the body frees: the caller has another reference to shared ones."""
    return ir.released_inputs([item for item in program.inputs if item.ownership is ir.Ownership.OWNED])


def _owned_sizes(program: ir.Program, values: Mapping[str, Number]) -> dict[str, int]:
    """Returns the size in bytes of each root of the body that it may free or return."""
    inputs = {
        item.name: item.type.element_bytes for item in _owned_inputs(program) if isinstance(item.type, ir.TensorType)
    }
    roots = [value for line in program.body.lines for value in ir.defined(line) if line.alias_of(value) is None]
    sizes = inputs | {item.name: item.type.storage_bytes for item in roots if isinstance(item.type, ir.TensorType)}
    return {name: evaluate_size(size, values) for name, size in sizes.items()}
