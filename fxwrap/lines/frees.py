"""Insertion of frees: each owned root is released right after its last use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fxwrap.lines.memory import Free
from fxwrap.lines.symbol import Bind
from fxwrap.wrapper_ir import LineBase, Value, alias_roots, consumed, defined, holds_memory, last_uses, reads, used


def insert_frees(
    lines: Sequence[LineBase], arguments: Iterable[Value], releasable: Iterable[Value]
) -> tuple[LineBase, ...]:
    """Returns the lines with a `memory.free` after the last use of each root that they define or that is releasable.

    `arguments` are all values that the lines see, `releasable` those that may be freed. Roots that a line consumes or
    the terminator returns are not freed. An unused root is freed after its definition, an unused argument before the
    first line. Linear in the number of lines.
    """
    arguments = list(arguments)
    root_of = alias_roots(lines, arguments)
    owned = {value.name: value for value in releasable}
    owned |= {value.name: value for line in lines for value in defined(line)
              if root_of[value.name] == value.name and holds_memory(value)}  # fmt: skip
    streams = _allocation_streams(lines)
    released = {value.name for line in lines for value in consumed(line)}
    released.update(root_of[value.name] for value in reads(lines[-1]))
    frees: dict[int, list[Free]] = {}
    for name, position in last_uses(lines, arguments).items():
        if name in owned and name not in released:
            frees.setdefault(position, []).append(Free(owned[name], streams.get(name, 0)))
    result: list[LineBase] = [*frees.get(-1, ())]
    due: list[Free] = []
    for position, line in enumerate(lines):
        result.append(line)
        due.extend(frees.get(position, ()))
        if not isinstance(lines[min(position + 1, len(lines) - 1)], Bind):  # a bind directly follows its source
            result.extend(due)
            due.clear()
    return tuple(result)


def drop_early_frees(lines: Sequence[LineBase], arguments: Iterable[Value]) -> list[LineBase]:
    """Returns the lines without the frees of memory that a later line uses or frees. Linear in the number of lines."""
    if not any(isinstance(line, Free) for line in lines):
        return list(lines)
    root_of = alias_roots(lines, arguments)
    used_later: set[str] = set()
    result: list[LineBase] = []
    for line in reversed(lines):
        if not isinstance(line, Free) or line.root.name not in used_later:
            result.append(line)
            used_later.update([root_of[value.name] for value in used(line)])
    return result[::-1]


def _allocation_streams(lines: Sequence[LineBase]) -> dict[str, int]:
    """Returns the stream that each root was allocated on, for roots not allocated on the current stream."""
    streams: dict[str, int] = {}
    for line in lines:
        inherited = [streams[value.name] for value in consumed(line) if value.name in streams] if streams else []
        stream = inherited[0] if inherited else 0 if line.event_step else line.stream
        if stream:
            streams |= {value.name: stream for value in defined(line) if line.alias_of(value) is None}
    return streams
