"""Whether the lines of a match may become one piece of program, and where: the rules that keep a program's meaning."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fxwrap.lines import Bind, View
from fxwrap.matching.dataflow import DataFlow, outputs_of
from fxwrap.matching.matcher import Found
from fxwrap.matching.patterns import Operation, Wildcard
from fxwrap.wrapper_ir import LineBase, Value, consumed, defined, print_line, reads, writes


@dataclass(frozen=True, slots=True)
class Placed:
    """A match that may be replaced: the lines that go, those that stay, and the position where new lines begin."""

    removed: frozenset[int]
    kept: frozenset[int]
    position: int


def place(
    found: Found, operations: Collection[Operation], wildcards: Collection[Wildcard], flow: DataFlow
) -> Placed | str:
    """Returns where the lines of a match may be replaced as one, or why not.

    What reads a result inside of the match from outside forbids it, unless the operation says that it may. New lines
    stand where one of the match's lines stood (the last one that allows it); between there and each other line of the
    match nothing may write what that reads, touch what that makes or writes, share its effects, or open a bracket.
    """
    removed = _removed(found, operations, flow)
    if isinstance(removed, str):
        return removed
    positions = frozenset(found.positions.values())
    reason = _unmovable(positions, flow) or _read_elsewhere(found, wildcards, positions, flow)
    if reason is not None:
        return reason
    kept = positions - removed
    reasons = []
    for position in sorted(removed, reverse=True):
        reason = _first_conflict(position, removed, kept, flow)
        if reason is None:
            return Placed(removed, kept, position)
        reasons.append(reason)
    return reasons[0]


def _removed(found: Found, operations: Collection[Operation], flow: DataFlow) -> frozenset[int] | str:
    """Returns which lines of a match go, or which of them something else needs."""
    given = {value.name: position for value, position in found.outputs if value is not None}
    removed = set(found.positions.values())
    for operation in sorted(operations, key=lambda item: -found.positions.get(id(item), -1)):
        position = found.positions.get(id(operation))
        if position is None:
            continue  # in a choice that was not taken, or an optional view
        user = _outside_user(position, given, removed, flow)
        if user is None:
            continue
        line = flow.lines[position]
        is_output = position in given.values()
        if is_output or not (operation.kept or isinstance(line, View)):
            value, place_ = user
            return f"%{value} is used by another line too: {_text(flow.lines[place_])}"
        removed.discard(position)
    return frozenset(removed)


def _outside_user(
    position: int, given: Mapping[str, int], removed: Collection[int], flow: DataFlow
) -> tuple[str, int] | None:
    """Returns what outside of a match needs the line at a position, by a value that the match does not give.

    `given` are the values that it does, each with the position of the line that gives it: a buffer may hold something
    else before.
    """
    line = flow.lines[position]
    for value in outputs_of(line):
        if value is None or given.get(value.name) == position:
            continue
        users: Sequence[int] = flow.readers(value, position)
        if line.alias_of(value) is not None:
            users = flow.users(value.name)
        elif flow.definer[value.name] == position:
            end = given.get(value.name, len(flow.lines))
            users = [*users, *[place_ for place_ in flow.touches(value.name) if place_ < end]]
        other = next((place_ for place_ in users if place_ not in removed), None)
        if other is not None:
            return value.name, other
    return None


def _unmovable(positions: Collection[int], flow: DataFlow) -> str | None:
    for position in positions:
        line = flow.lines[position]
        if line.terminator or line.bracket[1] or line.starts_flight or line.ends_flight or consumed(line):
            return f"{line.opcode} stays where it is"
        if getattr(line, "stream", 0) != 0:
            return f"{_text(line)} runs on another stream"
        following = flow.lines[position + 1] if position + 1 < len(flow.lines) else None
        made = [value.name for value in defined(line)]
        if isinstance(following, Bind) and following.source.name in made:
            return f"the sizes of %{following.source.name} are known only when it has run"
    return None


def _read_elsewhere(
    found: Found, wildcards: Collection[Wildcard], positions: Collection[int], flow: DataFlow
) -> str | None:
    for wildcard in wildcards:
        value = found.captured.get(wildcard.name)
        if not wildcard.only_here or not isinstance(value, Value):
            continue
        readers = flow.fellow_readers(value, found.read_at[wildcard.name])
        other = next((place_ for place_ in readers if place_ not in positions), None)
        if other is not None:
            return f"%{value.name} is read by another line too: {_text(flow.lines[other])}"
    return None


def _first_conflict(position: int, removed: Collection[int], kept: Collection[int], flow: DataFlow) -> str | None:
    """Returns why not all lines of a match can be as one at a position, or None."""
    for place_ in sorted(removed):
        if place_ == position:
            continue
        line, (start, end) = flow.lines[place_], sorted((place_, position))
        # new lines begin before the line at `position`, which is one of the removed
        conflict = _order(line, place_, start, end, removed, flow)
        if conflict is None and position < place_:
            conflict = _not_yet(line, position, removed, flow)
        if conflict is not None:
            return conflict
    for place_ in sorted(kept):
        start, end = sorted((place_, position))
        conflict = _reads_change(flow.lines[place_], place_, start, end, (*removed, place_), flow)
        if conflict is None and position < place_:
            conflict = _not_yet(flow.lines[place_], position, removed, flow)
        if conflict is not None:
            return conflict
    return None


def _order(line: LineBase, place_: int, start: int, end: int, but: Collection[int], flow: DataFlow) -> str | None:
    bracket = flow.bracket_between(start, end)
    if bracket is not None:
        return f"{_text(line)} would leave its bracket: {_text(flow.lines[bracket])}"
    other = flow.effect_conflict(place_, start, end, but)
    if other is not None:
        return f"{_text(line)} has an effect whose order with another line is fixed: {_text(flow.lines[other])}"
    for value in dict.fromkeys([*defined(line), *writes(line)]):
        if isinstance(line, View):
            continue  # it stays, if anything else reads it
        other = flow.touches_between(flow.root_of[value.name], start, end, but)
        if other is not None:
            return f"%{value.name} is touched between the lines of the match: {_text(flow.lines[other])}"
    return _reads_change(line, place_, start, end, but, flow)


def _reads_change(
    line: LineBase, place_: int, start: int, end: int, but: Collection[int], flow: DataFlow
) -> str | None:
    """Returns which line between two writes what a line reads; a view reads nothing."""
    for value in dict.fromkeys(reads(line)):
        root = flow.root_of[value.name]
        other = flow.writes_between(root, start, end, but)
        if other is not None:
            return f"%{value.name} is written between the lines of the match: {_text(flow.lines[other])}"
    return None


def _not_yet(line: LineBase, position: int, removed: Collection[int], flow: DataFlow) -> str | None:
    for name in flow.names_read(line):
        definer = flow.definer.get(name, -1)
        if definer >= position and definer not in removed:
            return f"{name} is not defined before the first line of the match that could be replaced"
    return None


def _text(line: LineBase) -> str:
    return print_line(line).partition("\n")[0].strip()
