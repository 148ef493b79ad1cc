"""The data flow of one block: reaching definitions, readers, and dependences between two lines.

Each line that writes memory makes a new version of it, as in memory SSA. Lines that only allocate, alias or release
memory make no version.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fxwrap import wrapper_ir as ir
from fxwrap.lines import ExternCall, Free, Mutate, PoolSlice, StartCollective, View, WaitCollective

MemoryVersion = tuple[str, int]
"""The content of memory (by name) since the line at a position wrote it; -1 for the initial content."""


def view_base(line: ir.LineBase) -> ir.Value | None:
    """Returns the base of a line that only defines a view of it: a view, or the call of a view operator."""
    match line:
        case View():
            return line.base
        case ExternCall(results=(ir.Value() as result,)):
            return line.alias_of(result)
        case _:
            return None


class CalledOperator(NamedTuple):
    """An operator and its operands."""

    target: str
    arguments: tuple[object, ...]
    keywords: tuple[tuple[str, object], ...] = ()


def operator_call(line: ir.LineBase) -> CalledOperator | None:
    """Returns the call of an operator that a line is, functional collectives included; None for other lines."""
    match line:
        case ExternCall() | Mutate():
            return CalledOperator(line.target, line.arguments, line.keywords)
        case StartCollective():
            return CalledOperator(line.operator, line.arguments)
        case WaitCollective():
            return CalledOperator("_c10d_functional.wait_tensor.default", (line.pending,))
        case _:
            return None


@dataclass(frozen=True, slots=True)
class MemoryDef:
    """The definition of a memory version: the position of the line, and the value through which it wrote."""

    position: int
    value: ir.Value


class DataFlow:
    """The data flow of a block's lines without plain frees. Built in linear time; queries take logarithmic time.

    Positions count the block's lines. `root_of` has each value's root, `def_position` the position of the line that
    defines a value or symbol, -1 for arguments.
    """

    def __init__(
        self, lines: Sequence[ir.LineBase], arguments: Iterable[ir.Value], functions: Mapping[str, ir.Block]
    ) -> None:
        self.lines = lines
        self.root_of: dict[str, str] = {}
        self.def_position: dict[str, int] = {}
        self.values: dict[str, ir.Value] = {}
        self.argument_names: set[str] = set()
        self._memory_of: dict[str, str] = {}  # as root_of, excluded slices of a pool are distinct
        self._writes: dict[str, list[int]] = {}  # of memories
        self._root_writes: dict[str, list[int]] = {}
        self._root_accesses: dict[str, list[int]] = {}
        self._users: dict[str, list[int]] = {}  # of values
        self._readers: dict[MemoryVersion, list[int]] = {}
        self._memory_defs: dict[MemoryVersion, MemoryDef] = {}
        self._effects: dict[ir.Effect, list[int]] = {}
        self._any_effect: list[int] = []
        self._brackets: list[int] = []
        self._effects_at: dict[int, tuple[ir.Effect, ...]] = {}
        for value in arguments:
            self.argument_names.add(value.name)
            self._define(value, value.name, value.name, -1)
        for position, line in enumerate(lines):
            self._add(position, line, functions)

    # --- building ---------------------------------------------------------------------------------------------------

    def _define(self, value: ir.Value, root: str, memory: str, position: int) -> None:
        self.values[value.name] = value
        self.root_of[value.name] = root
        self._memory_of[value.name] = memory
        self.def_position[value.name] = position

    def _add(self, position: int, line: ir.LineBase, functions: Mapping[str, ir.Block]) -> None:
        symbol = ir.defined_symbol(line)
        if symbol is not None:
            self.def_position[symbol.name] = position
        for value in self._values_read(line, position):
            memory = self._memory_of[value.name]
            self._readers.setdefault((memory, self._version(memory, position)), []).append(position)
        for value in dict.fromkeys([*ir.reads(line), *ir.writes(line), *ir.consumed(line)]):
            self._users.setdefault(value.name, []).append(position)
            self._root_accesses.setdefault(self.root_of[value.name], []).append(position)
        self._add_writes(position, line)
        for value in ir.defined(line):
            base = line.alias_of(value)
            if base is None:
                self._define(value, value.name, value.name, position)
            else:
                memory = value.name if isinstance(line, PoolSlice) else self._memory_of[base.name]
                self._define(value, self.root_of[base.name], memory, position)
            if base is None and not isinstance(line, View | PoolSlice):
                self._record_write(value, position)
            elif line.is_async_wait:  # the result, not the operand in flight, has the content
                self._memory_defs[self._memory_of[value.name], position] = MemoryDef(position, value)
        self._add_effects(position, line, functions)

    def _add_writes(self, position: int, line: ir.LineBase) -> None:
        in_flight = ir.reads(line) if line.is_async_start or line.is_async_wait else []
        for value in dict.fromkeys([*ir.writes(line), *ir.consumed(line), *in_flight]):
            self._record_write(value, position)
            _append_once(self._root_writes.setdefault(self.root_of[value.name], []), position)

    def _record_write(self, value: ir.Value, position: int) -> None:
        memory = self._memory_of[value.name]
        _append_once(self._writes.setdefault(memory, []), position)
        self._memory_defs[memory, position] = MemoryDef(position, value)

    def _add_effects(self, position: int, line: ir.LineBase, functions: Mapping[str, ir.Block]) -> None:
        if line.bracket[1] or line.event_step:
            self._brackets.append(position)
        effects = ir.all_effects(line, functions)
        if effects:
            self._effects_at[position] = effects
            self._any_effect.append(position)
        for effect in effects:
            self._effects.setdefault(effect, []).append(position)

    def _version(self, memory: str, position: int) -> int:
        positions = self._writes.get(memory, ())
        index = bisect_left(positions, position) - 1
        return positions[index] if index >= 0 else -1

    # --- contents ---------------------------------------------------------------------------------------------------

    def _values_read(self, line: ir.LineBase, position: int) -> list[ir.Value]:
        """Returns the values whose content a line reads, including initialised memory that it writes.

        An out variant does not read its out arguments; views and pool slices read nothing.
        """
        if isinstance(line, View | PoolSlice):
            return []
        if isinstance(line, ExternCall):
            return ir.reads(line)
        return [*ir.reads(line), *[value for value in ir.writes(line) if self.is_initialized_before(value, position)]]

    def version_at(self, value: ir.Value, position: int) -> MemoryVersion:
        """Returns the version of a value's memory before the line at a position."""
        memory = self._memory_of[value.name]
        return memory, self._version(memory, position)

    def reaching_def(self, value: ir.Value, position: int) -> MemoryDef | None:
        """Returns the definition that reaches a value at a position, if one line wrote all of it as that value."""
        definition = self._memory_defs.get(self.version_at(value, position))
        if definition is None or definition.position < 0:
            return None
        is_same = definition.value.name == value.name or definition.value.type == value.type
        return definition if is_same else None

    def is_initialized_before(self, value: ir.Value, position: int) -> bool:
        """Whether a value's memory is initialised before the line at a position."""
        memory, version = self.version_at(value, position)
        def_position = self.def_position[memory]
        if def_position >= 0 and version in (-1, def_position):
            line = self.lines[def_position]
            return line.results_initialized or line.zeroed
        return True

    # --- uses ------------------------------------------------------------------------------------------------------

    def readers(self, value: ir.Value, position: int) -> Sequence[int]:
        """Returns the positions of the lines that read the version of a value's memory that a line made."""
        return self._readers.get((self._memory_of[value.name], position), ())

    def readers_of_same_version(self, value: ir.Value, position: int) -> Sequence[int]:
        """Returns the positions of the lines that read the same version of a value as a line does, including it."""
        return self._readers.get(self.version_at(value, position), ())

    def users(self, name: str) -> Sequence[int]:
        """Returns the positions of the lines with a value as an operand, without frees."""
        return self._users.get(name, ())

    def accesses(self, root: str) -> Sequence[int]:
        """Returns the positions of the lines with a root or a view of it as an operand, without frees."""
        return self._root_accesses.get(root, ())

    def write_between(self, root: str, start: int, end: int, excluded: Collection[int] = ()) -> int | None:
        """Returns the first line strictly between two that writes or consumes a root, or None."""
        return _first_between(self._root_writes.get(root, ()), start, end, excluded)

    def access_between(self, root: str, start: int, end: int, excluded: Collection[int] = ()) -> int | None:
        """Returns the first line strictly between two with a root or a view of it as an operand, or None."""
        return _first_between(self._root_accesses.get(root, ()), start, end, excluded)

    def bracket_between(self, start: int, end: int) -> int | None:
        """Returns the first bracket, or record or wait of an event, strictly between two lines, or None."""
        return _first_between(self._brackets, start, end, ())

    def effect_conflict(self, position: int, start: int, end: int, excluded: Collection[int]) -> int | None:
        """Returns a line strictly between two that must not be reordered with the one at a position, or None."""
        effects = self._effects_at.get(position, ())
        if not effects:
            return None
        if ir.UNKNOWN in effects:
            return _first_between(self._any_effect, start, end, excluded)
        places = [self._effects.get(effect, ()) for effect in (*effects, ir.UNKNOWN)]
        conflicts = [_first_between(positions, start, end, excluded) for positions in places]
        return next((position for position in conflicts if position is not None), None)

    def operand_names(self, line: ir.LineBase) -> list[str]:
        """Returns the names of the values and symbols that must be defined before a line."""
        values = [value.name for value in dict.fromkeys([*ir.reads(line), *ir.writes(line), *ir.consumed(line)])]
        return values + [symbol.name for symbol in ir.symbols_used(line, *ir.Role)]


def _append_once(positions: list[int], position: int) -> None:
    if not positions or positions[-1] != position:
        positions.append(position)


def _first_between(positions: Sequence[int], start: int, end: int, excluded: Collection[int]) -> int | None:
    for index in range(bisect_right(positions, start), bisect_left(positions, end)):
        if positions[index] not in excluded:
            return positions[index]
    return None


def is_movable_free(line: ir.LineBase) -> bool:
    """Whether a line is a free that can be inserted again: on the stream that allocated the memory."""
    return isinstance(line, Free) and line.stream == 0


def outputs_of(line: ir.LineBase) -> tuple[ir.Value | None, ...]:
    """Returns the outputs of a line in order: its results (None for an undefined one), then the values it writes."""
    results = [leaf for name in line.fields_by_role[ir.Role.DEFINE] for leaf in ir.leaves(getattr(line, name))]
    values = [leaf for leaf in results if leaf is None or isinstance(leaf, ir.Value)]
    return (*values, *dict.fromkeys(ir.writes(line)))
