"""One replacement: what a builder made for a match, checked, and fitted into the program around it.

A result of the match that was memory of its own is taken over by name, so that the rest of the program stays as it is.
One that other memory takes the place of is replaced from there on, where nothing can tell. What the match wrote into
memory that others see is copied there, unless the builder wrote it there itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fxwrap.errors import RewriteError
from fxwrap.inference import tuples
from fxwrap.lines import Alloc, Call, Mutate, PoolSlice, Reuse, Workspace
from fxwrap.matching import DataFlow, Found, Placed
from fxwrap.rewrite.match import Match
from fxwrap.wrapper_ir import (
    LineBase,
    Role,
    Value,
    defined,
    leaves,
    map_leaves,
    map_line,
    print_line,
    print_type,
    reads,
    types_agree,
    used,
    writes,
)


class Refused(Exception):
    """A match that cannot be replaced by what the builder gave, without the program meaning something else."""


@dataclass(slots=True)
class Replacement:
    """New lines for a match, which begin at its position; what stands for values from there on, and lines that go too.

    `dropped` are the positions of lines that gave memory which is now taken over.
    """

    match: Match
    placed: Placed
    lines: list[LineBase]
    substituted: dict[str, Value] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)


def fit(match: Match, found: Found, placed: Placed, lines: list[LineBase], given: Any, flow: DataFlow) -> Replacement:
    """Returns the replacement of a match by lines that give these values.

    Raises RewriteError for what no replacement may be, Refused for what this place does not allow.
    """
    return _Fitting(match, found, placed, lines, flow).run(given)


class _Fitting:
    def __init__(self, match: Match, found: Found, placed: Placed, lines: list[LineBase], flow: DataFlow) -> None:
        self.found = found
        self.flow = flow
        self.removed = placed.removed
        self.position = placed.position
        self.made = {value.name: line for line in lines for value in defined(line)}
        self.new_roots: dict[str, str] = {}
        for line in lines:
            for value in defined(line):
                base = line.alias_of(value)
                self.new_roots[value.name] = value.name if base is None else self._root(base.name)
        self.renamed: dict[str, Value] = {}
        self.result = Replacement(match, placed, lines)
        self.copies: list[LineBase] = []
        self._check_lines(lines)

    def run(self, given: Any) -> Replacement:
        """Fits each given value in the place of an output."""
        wanted = self.found.outputs
        values = list(leaves(tuples(given) if isinstance(given, tuple | list) else (given,)))
        if len(values) != len(wanted):
            names = ", ".join([f"%{value.name}" if value is not None else "none" for value, _ in wanted])
            raise RewriteError(f"the replacement gives {len(values)} values, and the match {len(wanted)}: {names}")
        for (old, position), new in zip(wanted, values):
            if old is not None:
                self._output(old, position, new)
        lines = [map_line(line, self._rename) for line in self.result.lines] if self.renamed else self.result.lines
        self.result.lines = [*_without_unread(lines, self._given_names(wanted)), *self.copies]
        return self.result

    def _given_names(self, wanted: Sequence[tuple[Value | None, int]]) -> set[str]:
        names = {old.name for old, _ in wanted if old is not None}
        names |= {new.name for new in self.result.substituted.values()}
        return names | {value.name for line in self.copies for value in used(line)}

    def _rename(self, leaf: Any) -> Any:
        return self.renamed.get(leaf.name, leaf) if type(leaf) is Value else leaf

    # --- what lines may be ------------------------------------------------------------------------------------------

    def _check_lines(self, lines: Sequence[LineBase]) -> None:
        """Raises RewriteError for a line that reads what is gone, or writes what the match does not."""
        allowed = {self.flow.root_of[value.name] for position in self.removed
                   for value in writes(self.flow.lines[position])}  # fmt: skip
        gone = {value.name for position in self.removed for value in defined(self.flow.lines[position])}
        for line in lines:
            for value in used(line):
                if value.name in gone:
                    raise RewriteError(f"the replacement uses %{value.name}, which the match takes away", _text(line))
                if value.name not in self.made and self.flow.definer.get(value.name, -1) >= self.position:
                    raise RewriteError(f"the replacement uses %{value.name}, which is defined later", _text(line))
            for value in writes(line):
                if value.name not in self.made and self._root(value.name) not in allowed:
                    raise RewriteError(
                        f"the replacement writes %{value.name}, which the matched lines do not write", _text(line)
                    )

    def _root(self, name: str) -> str:
        return self.new_roots.get(name) or self.flow.root_of.get(name, name)

    # --- outputs ----------------------------------------------------------------------------------------------------

    def _output(self, old: Value, position: int, new: Any) -> None:
        if not isinstance(new, Value):
            raise RewriteError(f"the replacement gives {new!r} for %{old.name}, and a value is wanted")
        line = self.flow.lines[position]
        if new.name not in self.made and self.flow.definer.get(new.name, -1) in self.removed:
            raise RewriteError(f"the replacement gives %{new.name}, which the match takes away", _text(line))
        defines = old in defined(line)
        is_gone = self.flow.definer[self.flow.root_of[old.name]] in self.removed
        if not types_agree(old.type, new.type, compare_strides=defines or is_gone):
            raise RewriteError(
                f"%{old.name} is {print_type(old.type)}, and the replacement gives {print_type(new.type)} for it",
                _text(line),
            )
        fresh = self._is_fresh(new)
        if not defines and not is_gone:
            self._buffer(old, position, new, fresh)
        elif not defines or line.alias_of(old) is None:
            if fresh:
                self._take_over(old, new)
            else:
                self._substitute(old, new)
        else:
            self._window(old, new, fresh)

    def _is_fresh(self, new: Value) -> bool:
        """Whether a value is memory that the new lines made, and that no other output has taken."""
        return self.new_roots.get(new.name) == new.name and new.name not in self.renamed

    def _take_over(self, old: Value, new: Value) -> None:
        self.renamed[new.name] = old

    def _substitute(self, old: Value, new: Value) -> None:
        """Lets other memory stand for memory of the match's own, where nobody can tell."""
        flow, root = self.flow, self.flow.root_of[old.name]
        end = len(flow.lines)
        shown = self.renamed.get(self._root(new.name))
        other = shown.name if shown is not None else self._root(new.name)
        if any(flow.root_of[value.name] == root for value in reads(flow.lines[-1])):
            raise Refused(f"%{old.name} is given back, and %{new.name} is no memory of its own")
        if flow.writes_between(root, self.position, end, self.removed) is not None:
            raise Refused(f"%{old.name} is written or taken later, and %{new.name} is no memory of its own")
        last = max([self.position, *flow.touches(root)]) + 1
        if flow.writes_between(other, self.position, last, self.removed) is not None:
            raise Refused(f"%{new.name} would stand for %{old.name}, and is written before that was read last")
        self.result.substituted[old.name] = new

    def _window(self, old: Value, new: Value, fresh: bool) -> None:
        flow, root = self.flow, self.flow.root_of[old.name]
        same_memory = self._root(new.name) == root
        if old.type != new.type:
            raise Refused(f"%{old.name} is a window that begins elsewhere than %{new.name}")
        returned = any(value.name == old.name for value in reads(flow.lines[-1]))
        if not same_memory and (returned or flow.writes_between(root, self.position, len(flow.lines), self.removed)):
            raise Refused(f"%{old.name} shows memory of %{root}, and %{new.name} does not")
        if new.name in self.made and new.name not in self.renamed and (fresh or same_memory):
            self._take_over(old, new)
        else:
            self.result.substituted[old.name] = new

    def _buffer(self, old: Value, position: int, new: Value, fresh: bool) -> None:
        """What the match wrote into memory: the new value takes its place, or is copied there."""
        if new.name == old.name:
            if not any(value.name == old.name for line in self.result.lines for value in writes(line)):
                raise RewriteError(f"the replacement gives %{old.name} and writes nothing into it")
            return
        maker = self.flow.definer[old.name]
        own = self.flow.root_of[old.name] == old.name and maker >= 0
        if fresh and own and old.type == new.type and not isinstance(self.flow.lines[maker], PoolSlice):
            if self._is_only_written_by_match(old, position, maker):
                self._take_over(old, new)
                self.result.dropped.add(maker)
                return
            if not self._is_seen_through_windows(old):
                self.result.substituted[old.name] = new
                return
        source = self.renamed.get(new.name, new)
        copied = Mutate((), "aten.copy_.default", (old, source), (old,), origin=self.result.match.origin)
        self.copies.append(copied)

    def _is_only_written_by_match(self, old: Value, position: int, maker: int) -> bool:
        before = [place for place in self.flow.touches(old.name) if place <= position]
        is_memory = isinstance(self.flow.lines[maker], Alloc | Reuse | Workspace)
        return is_memory and all(place in self.removed for place in before)

    def _is_seen_through_windows(self, old: Value) -> bool:
        """Whether a window that was made on memory before is used after."""
        later = [place for place in self.flow.touches(old.name) if place > self.position]
        shown = {value.name for place in later for value in used(self.flow.lines[place])}
        return any(
            self.flow.root_of[name] == old.name and name != old.name and self.flow.definer[name] < self.position
            for name in shown
        )


def _without_unread(lines: Sequence[LineBase], given: set[str]) -> list[LineBase]:
    """Returns the lines with those of several results of a call that nothing uses left out."""
    read = given | {value.name for line in lines for value in used(line)}

    def trimmed(line: LineBase) -> LineBase:
        if not isinstance(line, Call | Mutate) or len(list(leaves(line.results))) < 2:
            return line
        results = map_leaves(line.results, lambda leaf: leaf if leaf is not None and leaf.name in read else None)
        pairs = zip(leaves(results), line.aliases)
        aliases = tuple([alias if leaf is not None else None for leaf, alias in pairs])
        kept: LineBase = line.replace(results=results, aliases=aliases if any(aliases) else ())
        return kept

    return [trimmed(line) for line in lines]


def substituted(line: LineBase, values: Mapping[str, Value]) -> LineBase:
    """Returns a line that reads other values in the place of some, by name."""
    changed: LineBase = map_line(
        line,
        lambda leaf: values.get(leaf.name, leaf) if type(leaf) is Value else leaf,
        (Role.READ, Role.WRITE, Role.CONSUME, Role.ATTR),
    )
    return changed


def _text(line: LineBase) -> str:
    return print_line(line).partition("\n")[0].strip()
