"""The compiles of this process that are still held, and those of one compiled function."""

from __future__ import annotations

import html
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

from fxwrap.artifact.loaded import LoadedProgram
from fxwrap.compile.compiled import Compiled, Stage
from fxwrap.converters.fx import EmittedGraph
from fxwrap.errors import InspectionError
from fxwrap.events import Event, EventLog, GraphLoaded, step_seconds
from fxwrap.lowering import NodeCoverage
from fxwrap.memory_planning import MemoryPlan
from fxwrap.report import LineTime, ReportContent, dump_folder, report_page, trace_compile, write_dump
from fxwrap.runtime.cache_folder import write_file
from fxwrap.torch_compat import (
    DynamoCompile,
    compiled_function,
    current_dynamo_compile,
    dynamo_graph_ids,
    traces_compiles,
)
from fxwrap.wrapper_ir import Program

KINDS = ("inference", "forward", "backward")
"""The kinds of graphs under torch.compile."""


@dataclass(frozen=True)
class _Details:
    """The part of a compile's record that does not hold the compiled graph."""

    name: str
    graph: str
    events: EventLog
    dynamo: DynamoCompile
    number: int


class _Registry:
    """The compiles of this process, as long as their results are held elsewhere."""

    def __init__(self) -> None:
        self._details: WeakKeyDictionary[Compiled | LoadedProgram, _Details] = WeakKeyDictionary()
        self._count = 0
        self._lock = threading.Lock()

    def add(self, compiled: Compiled | LoadedProgram, name: str, graph: str, events: EventLog) -> None:
        """Adds a compile, unless its result is one of an earlier compile."""
        with self._lock:
            details = _Details(name, graph, events, current_dynamo_compile(), self._count)
            self._count += 1
            self._details.setdefault(compiled, details)

    def record(self, compiled: Compiled | LoadedProgram) -> CompileRecord:
        """Returns the compile of a compiled graph, which was added."""
        return CompileRecord(compiled, self._details[compiled])

    def records(self) -> list[CompileRecord]:
        """Returns the compiles in their order."""
        with self._lock:
            items = list(self._details.items())
        return [
            CompileRecord(compiled, details) for compiled, details in sorted(items, key=lambda item: item[1].number)
        ]


_process = _Registry()


@dataclass(frozen=True)
class CompileRecord:
    """A graph that this process compiled, or loaded from a cache.

    `compiled` is the compiled graph, a `LoadedProgram` if one of torch's caches had it.
    """

    compiled: Compiled | LoadedProgram
    _details: _Details

    @property
    def name(self) -> str:
        """The program's name."""
        return self._details.name

    @property
    def kind(self) -> str:
        """The kind of graph: "inference", "forward" or "backward" under torch.compile, else "graph"."""
        return self.name if self.name in KINDS else "graph"

    @property
    def compile_id(self) -> str:
        """Dynamo's id of the compile, such as "0/0", as in its logs and traces; "" outside torch.compile."""
        return self._details.dynamo.compile_id

    @property
    def graph(self) -> str:
        """The FX graph as text; "" for a graph that one of torch's caches had."""
        return self._details.graph

    @property
    def options(self) -> str:
        """The options that are not at their default, as text."""
        if isinstance(self.compiled, Compiled):
            return self.compiled.options.text()
        return str(self.compiled.metadata.get("options", ""))

    @property
    def cached(self) -> bool:
        """Whether the program came from the compile cache or from one of torch's caches."""
        return not isinstance(self.compiled, Compiled) or self.compiled.cached

    @property
    def events(self) -> tuple[Event, ...]:
        """The events of the compile, in order; see `fxwrap.events`."""
        return self._details.events.events

    @property
    def seconds(self) -> Mapping[str, float]:
        """The seconds of each step, by name."""
        return MappingProxyType(step_seconds(self.events))

    @property
    def total_seconds(self) -> float:
        """The seconds of the compile: its steps, and what is between them, such as the cache."""
        return self._details.events.seconds

    @property
    def program(self) -> Program:
        """The program that runs."""
        return self.compiled.program

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The programs after each step that changed them; for a cached program, that one alone."""
        return self.compiled.stages if isinstance(self.compiled, Compiled) else (Stage("cache", self.program),)

    @property
    def coverage(self) -> tuple[NodeCoverage, ...]:
        """The outcome of each call of the graph; empty for a graph that one of torch's caches had."""
        return self.compiled.coverage if isinstance(self.compiled, Compiled) else ()

    @property
    def plan(self) -> MemoryPlan | None:
        """The program's memory plan, if there is one."""
        return self.compiled.plan

    def content(self, times: Mapping[str, LineTime] = MappingProxyType({})) -> ReportContent:
        """Returns the content of the report; `times` are those of a profile (`Profile.times`)."""
        compiled = self.compiled
        emitter = compiled.options.emitter if isinstance(compiled, Compiled) else compiled.emitter
        emitted = compiled.emitted if isinstance(compiled, Compiled) else None
        readable = emitted.graph_module.print_readable(print_output=False) if isinstance(emitted, EmittedGraph) else ""
        return ReportContent(
            name=self.name, kind=self.kind, compile_id=self.compile_id, graph=self.graph, options=self.options,
            emitter=emitter, source=compiled.source, cached=self.cached,
            stages=tuple([(stage.pass_name, stage.program) for stage in self.stages]), coverage=self.coverage,
            plan=self.plan, events=self._details.events, times=times, emitted_graph=readable,
        )  # fmt: skip

    def write_report(self, path: str | Path, times: Mapping[str, LineTime] = MappingProxyType({})) -> None:
        """Writes the report, one HTML page that needs no other file, with the times of a profile, if there are any.

        Raises OSError where that is not possible.
        """
        content = self.content(times)
        text = report_page([content], content.title)
        write_file(Path(path), lambda file: file.write(text.encode("utf-8", "surrogatepass")))

    def _repr_html_(self) -> str:
        """Returns the report in a frame, which notebooks show."""
        content = self.content()
        page = html.escape(report_page([content], content.title))
        return f'<iframe style="width:100%;height:700px;border:0" srcdoc="{page}"></iframe>'

    def __repr__(self) -> str:
        cached = ", cached" if self.cached else ""
        id_ = f" {self.compile_id}" if self.compile_id else ""
        return f"<{self.kind} graph '{self.name}'{id_}{cached}: {len(self.program.body.lines)} lines>"


def record_compile(compiled: Compiled, name: str, graph: str, events: EventLog) -> None:
    """Adds a compiled graph to `compiles`; it is listed as long as something else holds it."""
    _process.add(compiled, name, graph, events)


def record_loaded(loaded: LoadedProgram) -> CompileRecord:
    """Adds a graph that a file or one of torch's caches had to `compiles`."""
    name = str(loaded.metadata["name"])
    events = EventLog(name)
    events.record(GraphLoaded())
    _process.add(loaded, name, "", events)
    return _process.record(loaded)


def write_compile(compiled: Compiled | LoadedProgram, dump: str | None) -> None:
    """Writes a recorded graph into torch's structured trace and into a folder, if they are turned on.

    `dump` is the option; the environment has its default.
    """
    folder = dump_folder(dump)
    if folder is None and not traces_compiles():
        return
    content = _process.record(compiled).content()
    trace_compile(content)
    if folder is not None:
        write_dump(content, folder)


def compiles() -> tuple[CompileRecord, ...]:
    """Returns the graphs that this process compiled, or loaded from a cache, and still holds, in order."""
    return tuple(_process.records())


def inspect(function: Any) -> tuple[CompileRecord, ...]:
    """Returns the compiled graphs of one function or module, in the order of compiles.

    There are several for graph breaks, recompiles and training. Graphs that another object of the same class compiled
    are returned if this one runs them.

    Args:
        function: the result of `torch.compile(..., backend="fxwrap")`, a module after `module.compile(...)`, or a
            `Compiled`, such as that of a `CompiledStep`.

    Raises InspectionError for a function that was never compiled or called, and for one of another backend.
    """
    records = compiles()
    if isinstance(function, Compiled | LoadedProgram):
        return tuple([record for record in records if record.compiled is function])
    target = compiled_function(function)
    if target is None:
        raise InspectionError(
            _name_of(function), "it was not compiled",
            "Pass the result of torch.compile(..., backend='fxwrap'), or see fxwrap.compiles() for all graphs",
        )  # fmt: skip
    if own := [record for record in records if target.owns(record._details.dynamo)]:
        return tuple(own)
    if not str(getattr(target.backend, "__module__", "")).startswith("fxwrap."):
        raise InspectionError(
            _name_of(target.root), f"it was compiled with the backend '{target.backend_name}'",
            "Compile it with torch.compile(..., backend='fxwrap')",
        )  # fmt: skip
    ids = dynamo_graph_ids(target)
    if shared := [record for record in records if record._details.dynamo.graph_id in ids]:
        return tuple(shared)
    raise InspectionError(
        _name_of(target.root), "it has no compiled graph",
        "Call it first: torch.compile compiles at the first call. torch.compiler.reset() drops compiled graphs",
    )  # fmt: skip


def _name_of(function: object) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))
