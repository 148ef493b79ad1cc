"""Profiler ranges around the lines that compute, so that profilers show them with their handles and sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from fxwrap.lines import CallFunction, EnterRange, ExitRange, StartCollective, WaitCollective
from fxwrap.wrapper_ir import Block, LineBase, Program, blocks


def insert_profile_ranges(program: Program) -> Program:
    """Returns the program with a range around each kernel launch, call and collective, also in nested blocks.

    The name of a range starts with the handle of its line, which is unique in a program; operators and source lines
    follow. A function is one range, since a captured CUDA graph runs as a whole. Lines that are in a range of their own
    get no other.
    """
    return program.replace(body=_Inserter().block(program.body))


def ranged_lines(program: Program) -> Mapping[str, LineBase]:
    """Returns the line in each range of a program with `insert_profile_ranges`, by the range's name."""
    return {line.name: inner for line, inner in pairwise(program.lines()) if isinstance(line, EnterRange)}


def remove_profile_ranges(program: Program) -> Program:
    """Returns the program without ranges, which torch.export cannot save."""
    functions = tuple([(name, _without_ranges(block)) for name, block in program.functions])
    return program.replace(body=_without_ranges(program.body), functions=functions)


def _without_ranges(block: Block) -> Block:
    lines = [
        line.replace(**{name: _without_ranges(inner) for name, inner in blocks(line)}) if blocks(line) else line
        for line in block.lines if not isinstance(line, EnterRange | ExitRange)
    ]  # fmt: skip
    return replace(block, lines=tuple(lines))


@dataclass
class _Inserter:
    """Numbers the lines without handles."""

    counts: dict[str, int] = field(default_factory=dict)

    def block(self, block: Block) -> Block:
        """Returns a block with ranges."""
        lines: list[LineBase] = []
        for line in block.lines:
            name = self.name(line)
            if inner := blocks(line):
                line = line.replace(**{field: self.block(item) for field, item in inner})
            enter, leave = EnterRange(name, origin=line.origin), ExitRange(name, origin=line.origin)
            lines += [enter, line, leave] if name else [line]
        return replace(block, lines=tuple(lines))

    def name(self, line: LineBase) -> str:
        """Returns the name of a line's range, "" for a line without one."""
        handle = "" if line.origin is None else line.origin.handle
        match line:
            case CallFunction():
                handle = self._numbered(line.function)
            case StartCollective():
                handle = self._numbered(line.operator.removesuffix(".default"))
            case WaitCollective():
                handle = self._numbered("wait")
            case _:
                pass
        if not handle or line.origin is None:
            return handle
        parts = (handle, ", ".join(line.origin.operators), line.origin.location_text())
        return "  ".join([part for part in parts if part])

    def _numbered(self, name: str) -> str:
        self.counts[name] = self.counts.get(name, 0) + 1
        return f"{name}:{self.counts[name]}"
