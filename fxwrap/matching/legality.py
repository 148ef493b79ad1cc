"""Legality of replacing a match: whether its lines may become one sequence of lines, and at which position."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fxwrap.lines import Bind, View
from fxwrap.matching.dataflow import DataFlow, outputs_of, view_base
from fxwrap.matching.matcher import MatchBindings
from fxwrap.matching.patterns import Operation, Wildcard
from fxwrap.wrapper_ir import LineBase, Value, consumed, defined, line_text, reads, values_in, writes


@dataclass(frozen=True, slots=True)
class ReplacementSite:
    """Where a match is replaced: the positions of removed and retained lines, and that of the first new line."""

    removed: frozenset[int]
    retained: frozenset[int]
    position: int


def find_replacement_site(
    bindings: MatchBindings, operations: Collection[Operation], wildcards: Collection[Wildcard], flow: DataFlow
) -> ReplacementSite | str:
    """Returns where the lines of a match may be replaced, or the reason why not.

    An intermediate result must not be read outside of the match, unless its operation allows it. New lines take the
    position of one of the match's lines, the last possible one. Between there and each other line of the match, no line
    may write its operands, access its results, share its effects or open a bracket.
    """
    removed = _removable_lines(bindings, operations, flow)
    if isinstance(removed, str):
        return removed
    positions = frozenset(bindings.positions.values())
    reason = _immovable_reason(positions, flow) or _other_reader_reason(bindings, wildcards, positions, flow)
    if reason is not None:
        return reason
    retained = positions - removed
    reasons = []
    for position in sorted(removed, reverse=True):
        reason = _first_conflict(position, removed, retained, _operand_names(bindings), flow)
        if reason is None:
            return ReplacementSite(removed, retained, position)
        reasons.append(reason)
    return reasons[0]


def _removable_lines(
    bindings: MatchBindings, operations: Collection[Operation], flow: DataFlow
) -> frozenset[int] | str:
    """Returns the lines of a match that are removed, or the reason why one cannot be."""
    outputs = {value.name: position for value, position in bindings.outputs if value is not None}
    removed = set(bindings.positions.values())
    for operation in sorted(operations, key=lambda item: -bindings.positions.get(id(item), -1)):
        position = bindings.positions.get(id(operation))
        if position is None:
            continue  # in an unused choice, or an optional view
        user = _outside_user(position, outputs, removed, flow)
        if user is None:
            continue
        line = flow.lines[position]
        is_output = position in outputs.values()
        if is_output or not (operation.allow_uses_outside or operation.kind == "view" or isinstance(line, View)):
            value, other_position = user
            return f"%{value} is used by another line too: {line_text(flow.lines[other_position])}"
        removed.discard(position)
    return frozenset(removed)


def _outside_user(
    position: int, outputs: Mapping[str, int], removed: Collection[int], flow: DataFlow
) -> tuple[str, int] | None:
    """Returns an intermediate value of the line at a position and the position of its user outside of the match.

    `outputs` are the match's outputs, each with the position of its line: a buffer may have other content before.
    """
    line = flow.lines[position]
    for value in outputs_of(line):
        if value is None or outputs.get(value.name) == position:
            continue
        users: Sequence[int] = flow.readers(value, position)
        if line.alias_of(value) is not None:
            users = flow.users(value.name)
        elif flow.def_position[value.name] == position:
            ends = [end for name, end in outputs.items() if flow.root_of[name] == value.name]
            end = min(ends, default=len(flow.lines))  # later accesses are those of an output in the same memory
            users = [*users, *[other_position for other_position in flow.accesses(value.name) if other_position < end]]
            users += flow.users(value.name) if value.name not in outputs else ()
        other = next((other_position for other_position in users if other_position not in removed), None)
        if other is not None:
            return value.name, other
    return None


def _immovable_reason(positions: frozenset[int], flow: DataFlow) -> str | None:
    for position in positions:
        line = flow.lines[position]
        if line.terminator or line.bracket[1] or consumed(line):
            return f"{line.opcode} cannot be moved"
        if (line.is_async_start or line.is_async_wait) and not _is_complete(line, positions, flow):
            return f"{line.opcode} cannot be moved without the other line of the collective"
        if line.stream != 0:
            return f"{line_text(line)} runs on another stream"
        following = flow.lines[position + 1] if position + 1 < len(flow.lines) else None
        results = [value.name for value in defined(line)]
        if isinstance(following, Bind) and following.source.name in results:
            return f"the sizes of %{following.source.name} are known only at run time"
    return None


def _is_complete(line: LineBase, positions: frozenset[int], flow: DataFlow) -> bool:
    """Whether a match has both the start of a collective that writes no operand, and the waits for its results."""
    if line.is_async_wait:
        return all(flow.def_position[flow.root_of[value.name]] in positions for value in reads(line))
    waits = [[user for user in flow.users(value.name) if flow.lines[user].is_async_wait] for value in defined(line)]
    return not writes(line) and all(users and positions.issuperset(users) for users in waits)


def _other_reader_reason(
    bindings: MatchBindings, wildcards: Collection[Wildcard], positions: Collection[int], flow: DataFlow
) -> str | None:
    for wildcard in wildcards:
        value = bindings.captured.get(wildcard.name)
        if not wildcard.no_other_uses or not isinstance(value, Value):
            continue
        readers = flow.readers_of_same_version(value, bindings.read_positions[wildcard.name])
        other = next((other_position for other_position in readers if other_position not in positions), None)
        if other is not None:
            return f"%{value.name} is read by another line too: {line_text(flow.lines[other])}"
    return None


def _operand_names(bindings: MatchBindings) -> frozenset[str]:
    """Returns the names of the values that the wildcards of a pattern matched: the operands of its replacement."""
    return frozenset([value.name for item in bindings.captured.values() for value in values_in(item)])


def _first_conflict(
    position: int, removed: Collection[int], retained: Collection[int], operands: Collection[str], flow: DataFlow
) -> str | None:
    """Returns why the lines of a match cannot move to one position, or None."""
    within = {
        name for place in retained for value in defined(flow.lines[place]) if (name := value.name) not in operands
    }
    for other_position in sorted(removed):
        if other_position == position:
            continue
        line, (start, end) = flow.lines[other_position], sorted((other_position, position))
        conflict = _ordering_conflict(line, other_position, start, end, removed, flow)
        if conflict is None and position < other_position:
            conflict = _undefined_operand(line, position, removed, within, flow)
        if conflict is not None:
            return conflict
    for other_position in sorted(retained):
        start, end = sorted((other_position, position))
        conflict = _clobbered_read(flow.lines[other_position], start, end, (*removed, other_position), flow)
        if conflict is None and position < other_position:
            conflict = _undefined_operand(flow.lines[other_position], position, removed, within, flow)
        if conflict is not None:
            return conflict
    return None


def _ordering_conflict(
    line: LineBase, other_position: int, start: int, end: int, excluded: Collection[int], flow: DataFlow
) -> str | None:
    bracket = flow.bracket_between(start, end)
    if bracket is not None:
        return f"{line_text(line)} would leave its bracket: {line_text(flow.lines[bracket])}"
    other = flow.effect_conflict(other_position, start, end, excluded)
    if other is not None:
        return f"{line_text(line)} has an effect whose order with another line is fixed: {line_text(flow.lines[other])}"
    for value in dict.fromkeys([*defined(line), *writes(line)]):
        if view_base(line) is not None:
            continue  # if another line reads the view, it is retained
        other = flow.access_between(flow.root_of[value.name], start, end, excluded)
        if other is not None:
            return f"%{value.name} is accessed between the lines of the match: {line_text(flow.lines[other])}"
    return _clobbered_read(line, start, end, excluded, flow)


def _clobbered_read(line: LineBase, start: int, end: int, excluded: Collection[int], flow: DataFlow) -> str | None:
    """Returns why a line between two positions clobbers an operand of a line, or None."""
    for value in dict.fromkeys(reads(line)):
        root = flow.root_of[value.name]
        other = flow.write_between(root, start, end, excluded)
        if other is not None:
            return f"%{value.name} is written between the lines of the match: {line_text(flow.lines[other])}"
    return None


def _undefined_operand(
    line: LineBase, position: int, removed: Collection[int], within: Collection[str], flow: DataFlow
) -> str | None:
    """Returns why a line cannot move up to a position: an operand that is neither defined before nor in the match."""
    for name in flow.operand_names(line):
        def_position = flow.def_position.get(name, -1)
        if def_position >= position and def_position not in removed and name not in within:
            return f"{name} is not defined before the first line of the match that may be replaced"
    return None
