"""The content of a report, as data: the results of a compile without the objects that run it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fxwrap.events import EventLog
from fxwrap.lowering import NodeCoverage
from fxwrap.memory_planning import MemoryPlan
from fxwrap.wrapper_ir import Program

__all__ = ["LineTime", "ReportContent"]


@dataclass(frozen=True)
class LineTime:
    """The time of a line in a run: measured, and at the limits of its device, for its bytes and operations."""

    seconds: float
    limit_seconds: float
    bytes: int
    flops: int


@dataclass(frozen=True)
class ReportContent:
    """A compiled graph.

    Fields:
        name: the program's name.
        kind: "inference", "forward" or "backward" under torch.compile, else "graph".
        compile_id: Dynamo's id of the compile ("0/0"), "" outside torch.compile.
        graph: the text of the FX graph that was compiled, "" for a graph from torch's caches.
        options: the options that are not at their default.
        emitter: the name of the emitter that runs.
        source: the emitted text that runs.
        emitted_graph: an emitted FX graph as torch prints it, with places in the model; "" for other emitters.
        cached: whether the program came from a cache.
        stages: the programs after each step that changed them, by step; the last one runs.
        coverage: the outcome of each call of the graph.
        plan: the memory plan, if there is one.
        events: the log of the compile.
        times: the measured lines by handle, if the graph was profiled.
    """

    name: str
    kind: str
    compile_id: str
    graph: str
    options: str
    emitter: str
    source: str
    cached: bool
    stages: tuple[tuple[str, Program], ...]
    coverage: tuple[NodeCoverage, ...]
    plan: MemoryPlan | None
    events: EventLog
    times: Mapping[str, LineTime] = field(default_factory=dict)
    emitted_graph: str = ""

    @property
    def program(self) -> Program:
        """The program that runs."""
        return self.stages[-1][1]

    @property
    def title(self) -> str:
        """The name and the compile id."""
        return f"{self.name} {self.compile_id}" if self.compile_id else self.name
