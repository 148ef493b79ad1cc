"""Frees: each owned root is released right after the last line that touches its memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fxwrap.lines import Bind, Free
from fxwrap.wrapper_ir import LineBase, Value, consumed, defined, reads, used


def insert_frees(lines: Sequence[LineBase], releasable: Iterable[Value]) -> tuple[LineBase, ...]:
    """Returns the lines with a `memory.free` after the last use of each root they define or that is releasable.

    A root that the terminator gives back, or that a line consumes, is not freed. A root that nothing uses is freed
    where it is made; one of `releasable` before the first line. Linear in the number of lines.
    """
    root_of: dict[str, Value] = {value.name: value for value in releasable}
    last_use: dict[str, int] = {value.name: -1 for value in releasable}
    gone: set[str] = set()
    for position, line in enumerate(lines):
        for value in used(line):
            root = root_of.get(value.name)
            if root is not None:
                last_use[root.name] = position
        gone.update(value.name for value in consumed(line))
        for value in defined(line):
            base = line.alias_of(value)
            if base is None:
                root_of[value.name] = value
                last_use[value.name] = position
            elif base.name in root_of:
                root_of[value.name] = root_of[base.name]
    gone.update(root_of[value.name].name for value in reads(lines[-1]) if value.name in root_of)
    return _interleave(lines, root_of, last_use, gone)


def _interleave(
    lines: Sequence[LineBase], root_of: Mapping[str, Value], last_use: Mapping[str, int], gone: set[str]
) -> tuple[LineBase, ...]:
    frees: dict[int, list[Value]] = {}
    for name, position in last_use.items():
        if name not in gone:
            frees.setdefault(position, []).append(root_of[name])
    placed: list[LineBase] = [Free(root) for root in frees.get(-1, ())]
    due: list[Value] = []
    for position, line in enumerate(lines):
        placed.append(line)
        due.extend(frees.get(position, ()))
        binds_next = position + 1 < len(lines) and isinstance(lines[position + 1], Bind)
        if due and not binds_next:  # what binds the symbols of a result follows it directly
            placed.extend(Free(root) for root in due)
            due.clear()
    return tuple(placed)
