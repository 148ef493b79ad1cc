"""What a builder function gets: the match."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fxwrap.errors import RewriteError
from fxwrap.wrapper_ir import LineBase, Origin, Value


@dataclass(frozen=True)
class Match:
    """Lines of a program that are as a pattern says.

    `lines` are the matched lines in the program's order, `captured` what wildcards stand for by name, `outputs` the
    values that the replacement has to give (None for a result that the line does not have), `origin` where the lines
    came from, together.
    """

    lines: tuple[LineBase, ...]
    captured: Mapping[str, Any]
    labelled: Mapping[str, LineBase]
    outputs: tuple[Value | None, ...]

    def __getitem__(self, name: str) -> Any:
        """Returns what a wildcard stands for: a value, a number, another literal. Raises RewriteError for no name."""
        if name not in self.captured:
            raise RewriteError(f"the pattern captures no '{name}'; it has {', '.join(self.captured) or 'no wildcards'}")
        return self.captured[name]

    def line(self, label: str) -> Any:
        """Returns the line of the operation that was `named` so. Raises RewriteError where there is none."""
        if label not in self.labelled:
            raise RewriteError(f"the pattern names no operation '{label}'; it has {', '.join(self.labelled) or 'none'}")
        return self.labelled[label]

    @property
    def origin(self) -> Origin:
        """Where the lines came from, together: new lines get it."""
        return merged_origin(self.lines)


def merged_origin(lines: tuple[LineBase, ...]) -> Origin:
    """Returns the sources of several lines together, each once, in order."""
    sources = [source for line in lines if line.origin is not None for source in line.origin.sources]
    return Origin(tuple(dict.fromkeys(sources)))
