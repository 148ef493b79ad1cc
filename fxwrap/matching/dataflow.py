"""The data flow of one block: who made what a line reads, who else reads it, and what lies between two lines.

Memory has a new version with each line that writes it, so that a buffer that is filled, read, and filled again is two
things. Lines that only allocate, rename or release memory make no data.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fxwrap.lines import Call, Free, PoolSlice, View
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
    reads,
    symbols_used,
    writes,
)

Content = tuple[str, int]
"""What memory (by name) holds since the line at a position wrote it; -1 for what it held at the start."""


@dataclass(frozen=True, slots=True)
class Made:
    """Who made a content: the position of the line, and the value through which it was written."""

    position: int
    value: Value


class DataFlow:
    """The data flow of a block's lines, plain frees left out. Built in linear time; questions take logarithmic time.

    Positions count the block's lines. `root_of` gives each value's root, `definer` where a value or symbol is defined.
    """

    def __init__(self, lines: Sequence[LineBase], arguments: Iterable[Value], functions: Mapping[str, Block]) -> None:
        self.lines = lines
        self.root_of: dict[str, str] = {}
        self.definer: dict[str, int] = {}
        self.values: dict[str, Value] = {}
        self.given: set[str] = set()
        self._memory_of: dict[str, str] = {}  # as root_of, but each slice of a pool by itself
        self._writes: dict[str, list[int]] = {}  # of memories
        self._root_writes: dict[str, list[int]] = {}
        self._root_touches: dict[str, list[int]] = {}
        self._users: dict[str, list[int]] = {}  # of values
        self._readers: dict[Content, list[int]] = {}
        self._made: dict[Content, Made] = {}
        self._effects: dict[Effect, list[int]] = {}
        self._any_effect: list[int] = []
        self._brackets: list[int] = []
        self._effects_at: dict[int, tuple[Effect, ...]] = {}
        for value in arguments:
            self.given.add(value.name)
            self._define(value, value.name, value.name, -1)
        for position, line in enumerate(lines):
            self._add(position, line, functions)

    # --- building ---------------------------------------------------------------------------------------------------

    def _define(self, value: Value, root: str, memory: str, position: int) -> None:
        self.values[value.name] = value
        self.root_of[value.name] = root
        self._memory_of[value.name] = memory
        self.definer[value.name] = position

    def _add(self, position: int, line: LineBase, functions: Mapping[str, Block]) -> None:
        symbol = defined_symbol(line)
        if symbol is not None:
            self.definer[symbol.name] = position
        for value in self._read_by(line, position):
            memory = self._memory_of[value.name]
            self._readers.setdefault((memory, self._version(memory, position)), []).append(position)
        windows = isinstance(line, View | PoolSlice)
        for value in dict.fromkeys([*reads(line), *writes(line), *consumed(line)]):
            self._users.setdefault(value.name, []).append(position)
            self._root_touches.setdefault(self.root_of[value.name], []).append(position)
        self._add_writes(position, line)
        for value in defined(line):
            base = line.alias_of(value)
            if base is None:
                self._define(value, value.name, value.name, position)
            else:
                memory = value.name if isinstance(line, PoolSlice) else self._memory_of[base.name]
                self._define(value, self.root_of[base.name], memory, position)
            if base is None and not windows:
                self._wrote(value, position)
        self._add_effects(position, line, functions)

    def _add_writes(self, position: int, line: LineBase) -> None:
        in_flight = reads(line) if line.starts_flight or line.ends_flight else []
        for value in dict.fromkeys([*writes(line), *consumed(line), *in_flight]):
            self._wrote(value, position)
        for value in dict.fromkeys([*writes(line), *consumed(line), *in_flight]):
            places = self._root_writes.setdefault(self.root_of[value.name], [])
            if not places or places[-1] != position:
                places.append(position)

    def _wrote(self, value: Value, position: int) -> None:
        memory = self._memory_of[value.name]
        places = self._writes.setdefault(memory, [])
        if not places or places[-1] != position:
            places.append(position)
        self._made[memory, position] = Made(position, value)

    def _add_effects(self, position: int, line: LineBase, functions: Mapping[str, Block]) -> None:
        if line.bracket[1] or line.event_step:
            self._brackets.append(position)
        effects = all_effects(line, functions)
        if effects:
            self._effects_at[position] = effects
            self._any_effect.append(position)
        for effect in effects:
            self._effects.setdefault(effect, []).append(position)

    def _version(self, memory: str, position: int) -> int:
        places = self._writes.get(memory, ())
        index = bisect_left(places, position) - 1
        return places[index] if index >= 0 else -1

    # --- contents ---------------------------------------------------------------------------------------------------

    def _read_by(self, line: LineBase, position: int) -> list[Value]:
        """Returns the values whose content a line reads: also of what it fills, where that holds something already.

        An out= call fills memory without looking at it; views and slices read nothing.
        """
        if isinstance(line, View | PoolSlice):
            return []
        if isinstance(line, Call):
            return reads(line)
        return [*reads(line), *[value for value in writes(line) if self.held_before(value, position)]]

    def content(self, value: Value, position: int) -> Content:
        """Returns what a line at a position finds in a value's memory."""
        memory = self._memory_of[value.name]
        return memory, self._version(memory, position)

    def maker(self, value: Value, position: int) -> Made | None:
        """Returns who made what a line at a position reads as a value, if one line made all of it as that value."""
        made = self._made.get(self.content(value, position))
        if made is None or made.position < 0:
            return None
        same = made.value.name == value.name or made.value.type == value.type
        return made if same else None

    def held_before(self, value: Value, position: int) -> bool:
        """Returns whether memory that a line at a position writes held something before."""
        memory, version = self.content(value, position)
        maker = self.definer[memory]
        if maker >= 0 and version in (-1, maker):
            line = self.lines[maker]
            return line.starts_written or bool(getattr(line, "zeroed", False))
        return True

    # --- who else ---------------------------------------------------------------------------------------------------

    def readers(self, value: Value, position: int) -> Sequence[int]:
        """Returns the positions of the lines that read what the line at a position left in a value's memory."""
        return self._readers.get((self._memory_of[value.name], position), ())

    def fellow_readers(self, value: Value, position: int) -> Sequence[int]:
        """Returns the positions of the lines that read what a line at a position reads as a value, itself included."""
        return self._readers.get(self.content(value, position), ())

    def users(self, name: str) -> Sequence[int]:
        """Returns the positions of the lines that name a value, but for frees."""
        return self._users.get(name, ())

    def touches(self, root: str) -> Sequence[int]:
        """Returns the positions of the lines that name a root or a window on it, but for frees."""
        return self._root_touches.get(root, ())

    def writes_between(self, root: str, start: int, end: int, but: Collection[int] = ()) -> int | None:
        """Returns the position of a line strictly between two that writes or takes a root, but for some, or None."""
        return _between(self._root_writes.get(root, ()), start, end, but)

    def touches_between(self, root: str, start: int, end: int, but: Collection[int] = ()) -> int | None:
        """Returns the position of a line strictly between two that names a root or a window on it, or None."""
        return _between(self._root_touches.get(root, ()), start, end, but)

    def bracket_between(self, start: int, end: int) -> int | None:
        """Returns the position of a bracket, or of a step of an event, strictly between two lines, or None."""
        return _between(self._brackets, start, end, ())

    def effect_conflict(self, position: int, start: int, end: int, but: Collection[int]) -> int | None:
        """Returns a line strictly between two whose order with the one at a position its effects fix, or None."""
        effects = self._effects_at.get(position, ())
        if not effects:
            return None
        if UNKNOWN in effects:
            return _between(self._any_effect, start, end, but)
        found = [_between(self._effects.get(effect, ()), start, end, but) for effect in (*effects, UNKNOWN)]
        return next((place for place in found if place is not None), None)

    def names_read(self, line: LineBase) -> list[str]:
        """Returns the names of the values and symbols that a line needs defined before it."""
        values = [value.name for value in dict.fromkeys([*reads(line), *writes(line), *consumed(line)])]
        return values + [symbol.name for symbol in symbols_used(line, *Role)]


def _between(places: Sequence[int], start: int, end: int, but: Collection[int]) -> int | None:
    for index in range(bisect_right(places, start), bisect_left(places, end)):
        if places[index] not in but:
            return places[index]
    return None


def is_plain_free(line: LineBase) -> bool:
    """Returns whether a line is a free that can be placed anew: one on the stream where the memory was made."""
    return isinstance(line, Free) and line.stream == 0


def outputs_of(line: LineBase) -> tuple[Value | None, ...]:
    """Returns what a line gives, in order: its results (None for one that is not there), then what it fills."""
    found: list[Value | None] = []

    def collect(tree: object) -> None:
        if isinstance(tree, tuple):
            for item in tree:
                collect(item)
        elif tree is None or isinstance(tree, Value):
            found.append(tree)

    for name in line.fields_by_role[Role.DEFINE]:
        collect(getattr(line, name))
    return (*found, *dict.fromkeys(writes(line)))
