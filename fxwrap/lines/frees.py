"""Frees: each owned root is released right after the last line that touches its memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fxwrap.lines.memory import Free
from fxwrap.lines.symbol import Bind
from fxwrap.wrapper_ir import LineBase, Value, consumed, defined, holds_memory, last_uses, reads, roots


def insert_frees(
    lines: Sequence[LineBase], arguments: Iterable[Value], releasable: Iterable[Value]
) -> tuple[LineBase, ...]:
    """Returns the lines with a `memory.free` after the last use of each root they define or that is releasable.

    `arguments` are all values the lines see, `releasable` those among them that may be freed. A root that the
    terminator gives back, or that a line consumes, is not freed. A root that nothing uses is freed where it is made;
    one of `releasable` before the first line. Linear in the number of lines.
    """
    given = list(arguments)
    root_of = roots(lines, given)
    owned = {value.name: value for value in releasable}
    owned |= {value.name: value for line in lines for value in defined(line)
              if root_of[value.name] == value.name and holds_memory(value)}  # fmt: skip
    made_on = _streams(lines)
    gone = {value.name for line in lines for value in consumed(line)}
    gone.update(root_of[value.name] for value in reads(lines[-1]))
    frees: dict[int, list[Free]] = {}
    for name, position in last_uses(lines, given).items():
        if name in owned and name not in gone:
            frees.setdefault(position, []).append(Free(owned[name], made_on.get(name, 0)))
    return _interleave(lines, frees)


def _streams(lines: Sequence[LineBase]) -> dict[str, int]:
    """Returns the streams on which memory is made, for roots that are not made on the current one."""
    found: dict[str, int] = {}
    for line in lines:
        stream = 0 if line.event_step else getattr(line, "stream", 0)
        taken = [found[value.name] for value in consumed(line) if value.name in found] if found else []
        stream = taken[0] if taken else stream
        if stream:
            found |= {value.name: stream for value in defined(line) if line.alias_of(value) is None}
    return found


def _interleave(lines: Sequence[LineBase], frees: Mapping[int, Sequence[Free]]) -> tuple[LineBase, ...]:
    placed: list[LineBase] = [*frees.get(-1, ())]
    due: list[Free] = []
    for position, line in enumerate(lines):
        placed.append(line)
        due.extend(frees.get(position, ()))
        binds_next = position + 1 < len(lines) and isinstance(lines[position + 1], Bind)
        if due and not binds_next:  # what binds the symbols of a result follows it directly
            placed.extend(due)
            due.clear()
    return tuple(placed)
