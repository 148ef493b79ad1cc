"""A match, as builder functions get it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fxwrap.errors import RewriteError
from fxwrap.wrapper_ir import LineBase, Origin, Value


@dataclass(frozen=True)
class Match:
    """Lines of a program that match a pattern.

    `lines` are the matched lines in the program's order, `captured` the operands of wildcards by name,
    `labelled_lines` those of named operations, `outputs` the values that the replacement must define (None for an
    undefined result).
    """

    lines: tuple[LineBase, ...]
    captured: Mapping[str, Any]
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
    """Returns the sources of several origins, each once, in order."""
    return Origin(tuple(dict.fromkeys([source for origin in origins if origin for source in origin.sources])))
