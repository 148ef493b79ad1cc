"""The model's source: the lines that nodes come from, and the tree of modules."""

from __future__ import annotations

import linecache
from typing import Any

from fxwrap.wrapper_ir import Source

_CONTEXT = 6
"""Lines that are shown around each line that a node comes from."""

_WHOLE = 400
"""Files up to this number of lines are shown whole."""


class ModelSources:
    """Collects the places in the model's source that nodes come from."""

    def __init__(self) -> None:
        self._files: dict[str, set[int]] = {}
        self._numbers: dict[str, int] = {}
        self._modules: dict[str, str] = {}
        self._of_node: dict[str, tuple[str, int, str]] = {}

    def add(self, source: Source) -> None:
        """Adds the place of a node."""
        if source.file:
            self._files.setdefault(source.file, set()).add(source.line)
            self._numbers.setdefault(source.file, len(self._numbers))
        for path, class_ in source.module_stack:
            self._modules.setdefault(path, class_)
        self._of_node[source.node] = (source.file, source.line, source.module)

    def of_node(self, name: str) -> list[Any]:
        """Returns the number of a node's file, its line, and the path of its module; [-1, 0, ""] if unknown."""
        file, line, module = self._of_node.get(name, ("", 0, ""))
        return [self._numbers.get(file, -1), line, module]

    def modules(self) -> list[list[str]]:
        """Returns the path and class of each module, parents before children."""
        ordered = sorted(self._modules.items(), key=lambda item: [_part(part) for part in item[0].split(".")])
        return [[path, class_.rpartition(".")[2]] for path, class_ in ordered]

    def files(self) -> list[dict[str, Any]]:
        """Returns the name of each file, and its lines with their numbers; [0, ""] between parts of a file."""
        return [{"name": name, "lines": _excerpt(name, lines)} for name, lines in self._files.items()]


def _part(part: str) -> tuple[bool, int, str]:
    return (not part.isdigit(), int(part) if part.isdigit() else 0, part)


def _excerpt(name: str, referenced: set[int]) -> list[list[Any]]:
    texts = linecache.getlines(name)
    if not texts:
        return [[number, "(the file is not readable here)"] for number in sorted(referenced)]
    if len(texts) <= _WHOLE:
        shown = list(range(1, len(texts) + 1))
    else:
        around = {near for number in referenced for near in range(number - _CONTEXT, number + _CONTEXT + 1)}
        shown = sorted([number for number in around if 1 <= number <= len(texts)])
    rows: list[list[Any]] = []
    for previous, number in zip([0, *shown], shown, strict=False):
        if number != previous + 1:
            rows.append([0, ""])
        rows.append([number, texts[number - 1].rstrip("\n")])
    return rows
