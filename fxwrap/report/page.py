"""The report as one HTML page without links to other files: its data as JSON, its style and its script."""

from __future__ import annotations

import difflib
import html
import json
import re
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from fxwrap.converters.emission import emit
from fxwrap.errors import FxwrapError
from fxwrap.lines import Launch
from fxwrap.report.content import ReportContent
from fxwrap.report.memory import memory_data
from fxwrap.report.rows import OriginTable, emitted_rows, program_rows
from fxwrap.report.source import ModelSources
from fxwrap.wrapper_ir import Program

__all__ = ["report_page"]

_LANGUAGES = ("python", "cpp", "fx")

_SCRIPTS = ("code.js", "sections.js", "page.js")
"""The parts of the page's script: texts in panes; the sections beside them; the choice among these."""


def report_page(graphs: Sequence[ReportContent], title: str) -> str:
    """Returns the HTML page of some compiled graphs, which needs no other file and no network."""
    data = {"title": title, "graphs": [_GraphData(content).data() for content in graphs]}
    # "</script>" must not end the element, and U+2028 is no JSON
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c").replace("\u2028", "\\u2028")
    page = _file("page.html")
    script = "".join(map(_file, _SCRIPTS))
    parts = {"TITLE": html.escape(title), "STYLE": _file("page.css"), "SCRIPT": script, "DATA": text}
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda match: parts[match[1]], page)


@cache
def _file(name: str) -> str:
    return files("fxwrap.report").joinpath(name).read_text(encoding="utf-8")


class _GraphData:
    """Collects the data of one graph; origins and nodes are numbers in it."""

    def __init__(self, content: ReportContent) -> None:
        self.content = content
        self.table = OriginTable()
        self.sources = ModelSources()
        self.nodes: dict[str, int] = {}
        self.kernels: list[dict[str, Any]] = []

    def data(self) -> dict[str, Any]:
        """Returns the data of the graph."""
        content = self.content
        program = content.program
        graph = [[text, self._node(name)] for text, name in _graph_rows(content.graph)]
        stages = self._stages()
        self.kernels = self._kernels(program)
        emitted = {name: self._emitted(name) for name in _LANGUAGES}
        memory = memory_data(program, content.plan, self.table)
        origins = [self._origin(origin) for origin in self.table.origins]
        coverage = [[item.node, item.operator, item.kind, item.reason, item.location, self._node(item.node)]
                    for item in content.coverage]  # fmt: skip
        return {
            "name": content.title, "kind": content.kind, "options": content.options, "emitter": content.emitter,
            "cached": content.cached, "graph": graph, **stages, "kernels": self.kernels,
            "emitted": emitted, "origins": origins, "nodes": [*self.nodes], "coverage": coverage, "memory": memory,
            "files": self.sources.files(), "modules": self.sources.modules(),
            "nodeSources": [self.sources.of_node(name) for name in self.nodes],
            "events": json.loads(content.events.to_json()),
            "times": {
                handle: [time.seconds, time.limit_seconds, time.bytes, time.flops]
                for handle, time in content.times.items()
            },
        }  # fmt: skip

    def _node(self, name: str) -> int:
        """Returns the number of a node, -1 for the empty name."""
        return self.nodes.setdefault(name, len(self.nodes)) if name else -1

    def _origin(self, origin: Any) -> list[Any]:
        """Returns the text of an origin, its handle, and the numbers of its nodes."""
        for source in origin.sources:
            if source.node:
                self._node(source.node)
                self.sources.add(source)
        return [str(origin), origin.handle, [self._node(name) for name in origin.nodes]]

    def _stages(self) -> dict[str, Any]:
        """Returns the distinct rows of all stages, and each stage as the numbers of its rows, with differences."""
        numbers: dict[tuple[str, int, bool], int] = {}
        stages: list[dict[str, Any]] = []
        before: list[int] = []
        for name, program in self.content.stages:
            keys = [(row.text, row.origin, row.number >= 0) for row in program_rows(program, self.table)]
            rows = [numbers.setdefault(key, len(numbers)) for key in keys]
            stages.append({"name": name, "rows": rows, "changes": _changes(before, rows) if before else []})
            before = rows
        return {"rows": [[text, origin, int(numbered)] for text, origin, numbered in numbers], "stages": stages}

    def _kernels(self, program: Program) -> list[dict[str, Any]]:
        launches: dict[str, list[int]] = {}
        for line in program.lines():
            if isinstance(line, Launch):
                launches.setdefault(line.kernel, []).append(self.table.index(line.origin))
        return [
            {
                "name": kernel.name, "language": kernel.language, "source": kernel.source.strip("\n"),
                "loops": "" if kernel.loop_ir is None else str(kernel.loop_ir).strip("\n"),
                "origins": [origin for origin in launches.get(kernel.name, ()) if origin >= 0],
                "launches": len(launches.get(kernel.name, ())),
            }
            for kernel in program.kernels
        ]  # fmt: skip

    def _emitted(self, language: str) -> list[list[Any]]:
        content = self.content
        try:
            source = content.source if content.emitter == language else emit(content.program, language).source
        except FxwrapError as error:
            source = f"# This program has no form in this language: {error}"
        rows: list[list[Any]] = [[row.text, row.origin] for row in emitted_rows(source, self.table)]
        for kernel in self.kernels:
            before, separator, _ = source.partition(str(kernel["source"]))
            if separator:
                first = before.count("\n")
                for position in range(first, first + str(kernel["source"]).count("\n") + 1):
                    rows[position].append(kernel["origins"])
        return rows


def _graph_rows(text: str) -> Iterable[tuple[str, str]]:
    """Yields each row of a graph's text with the name of its node."""
    for row in text.rstrip("\n").split("\n") if text else ():
        stripped = row.strip()
        name = stripped[1:].partition(" ")[0].rstrip(":") if stripped.startswith("%") else ""
        yield row, name


def _changes(before: Sequence[int], after: Sequence[int]) -> list[list[int]]:
    """Returns the changed parts: the bounds of removed rows before, and of added rows after."""
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    return [[a, b, c, d] for tag, a, b, c, d in matcher.get_opcodes() if tag != "equal"]
