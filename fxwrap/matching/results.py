"""The results of matching and rewriting: matches, and candidates that did not match."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from fxwrap.errors import RewriteError
from fxwrap.wrapper_ir import LineBase, Origin, Program, Value, line_text


@dataclass(frozen=True)
class Match:
    """Lines of a program that match a pattern.

    `lines` are the matched lines in the program's order, `captured` the operands of wildcards by name,
    `labelled_lines` those of named operations, `outputs` the values that the replacement must define (None for an
    undefined result).
    """

    lines: tuple[LineBase, ...]
    captured: Mapping[str, object]
    labelled_lines: Mapping[str, LineBase]
    outputs: tuple[Value | None, ...]

    def __getitem__(self, name: str) -> Any:
        """Returns a captured value, number or other literal. Raises RewriteError for an unknown name."""
        if name not in self.captured:
            raise RewriteError(f"the pattern captures no '{name}'; it has {', '.join(self.captured) or 'no wildcards'}")
        return self.captured[name]

    def line(self, label: str) -> Any:
        """Returns the line of an operation by its name from `named`. Raises RewriteError for an unknown name."""
        if label not in self.labelled_lines:
            raise RewriteError(
                f"the pattern names no operation '{label}'; it has {', '.join(self.labelled_lines) or 'none'}"
            )
        return self.labelled_lines[label]

    @property
    def origin(self) -> Origin:
        """The sources of all lines, each once: the origin of new lines."""
        return merge_origins([line.origin for line in self.lines])


def merge_origins(origins: Iterable[Origin | None]) -> Origin:
    """Returns the sources of several origins, each once, in order, and their metadata as that of one node."""
    items = [origin for origin in origins if origin]
    sources = dict.fromkeys([source for origin in items for source in origin.sources])
    merged = {key: value for origin in items for _, entries in origin.metadata for key, value in entries.items()}
    return Origin(tuple(sources), metadata=(("", merged),) if merged else ())


@dataclass(frozen=True, slots=True)
class MatchFailure:
    """A candidate for the first output of a pattern, and why it was not replaced."""

    line: str
    reason: str

    def __str__(self) -> str:
        return f"{self.line}\n    {self.reason}"


@dataclass(frozen=True)
class RewriteResult:
    """A rewritten program, the matches that were replaced, and the candidates that were not.

    `graph_module` is the program in the form of the graph that was rewritten; None if that was a program.
    """

    program: Program
    matches: tuple[Match, ...]
    match_failures: tuple[MatchFailure, ...]
    graph_module: GraphModule | None = None

    def report(self) -> str:
        """Returns the number of replaced matches, and why the other candidates were not, as text."""
        parts = [f"{len(self.matches)} replaced, {len(self.match_failures)} not replaced"]
        parts += [f"replaced: {line_text(match.lines[-1])}" for match in self.matches]
        return "\n".join([*parts, *[f"not replaced: {failure}" for failure in self.match_failures]])
