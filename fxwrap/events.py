"""The events of a compile, recorded once: logs, counts, dumps and reports are views of them."""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Event:
    """Something that a compile did.

    `logger` is the name of its logger, and `level` the level of its message. Fields are text, numbers and tuples.
    """

    logger: ClassVar[str] = "fxwrap.compile"
    level: ClassVar[int] = logging.INFO

    def message(self, name: str) -> str:
        """Returns the log message, for the compile of the graph `name`."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, object]:
        """Returns the class name as "event", and the fields."""
        return {"event": type(self).__name__, **dataclasses.asdict(self)}


@dataclass(frozen=True)
class GraphLowered(Event):
    """A graph with `calls` operator calls is compiled here, not loaded."""

    level = logging.DEBUG
    calls: int

    def message(self, name: str) -> str:
        return f"'{name}': {self.calls} calls are compiled"


@dataclass(frozen=True)
class StepEnded(Event):
    """A step of the pipeline ended after `seconds`.

    `changed` is whether it changed the program, None for steps over FX graphs, which change them in place.
    """

    level = logging.DEBUG
    step: str
    seconds: float
    changed: bool | None = None

    def message(self, name: str) -> str:
        unchanged = ", and changed nothing" if self.changed is False else ""
        return f"'{name}': {self.step} took {self.seconds:.3f} s{unchanged}"


@dataclass(frozen=True)
class GraphCompiled(Event):
    """The steps ended with a program. `steps` are their names and seconds; the message has those from 1 ms."""

    calls: int
    lines: int
    launches: int
    kernels: int
    seconds: float
    steps: tuple[tuple[str, float], ...]

    def message(self, name: str) -> str:
        steps = ", ".join([f"{step} {seconds:.3f}" for step, seconds in self.steps if seconds >= 1e-3])
        return (
            f"'{name}': {self.calls} calls became {self.lines} lines with {self.launches} launches of {self.kernels} "
            f"kernels in {self.seconds:.3f} s ({steps})"
        )


@dataclass(frozen=True)
class Recompiled(Event):
    """The graph is compiled again for the symbols of its first call."""

    symbols: tuple[tuple[str, int], ...]

    def message(self, name: str) -> str:
        return f"'{name}' is compiled again for the sizes of its first call: {dict(self.symbols)}"


@dataclass(frozen=True)
class OperatorDeclined(Event):
    """An operator is called instead of fused, for a decline reason; `location` is its line in the model's source."""

    level = logging.DEBUG
    node: str
    operator: str
    reason: str
    location: str

    def message(self, name: str) -> str:
        where = f" ({self.location})" if self.location else ""
        return f"'{name}': {self.operator} is called at {self.node}{where}: {self.reason}"


@dataclass(frozen=True)
class PassRan(Event):
    """A user's pass ran at a pass point, and `changed` the program or graph.

    `matches` is the number of matches that it replaced, None for a pass that does not return the result of a rewrite.
    `near_misses` are lines that begin a match and were not replaced, each with the reason; of many, the first ones
    ("..." ends them).
    """

    logger = "fxwrap.passes"
    pass_name: str
    point: str
    changed: bool
    matches: int | None = None
    near_misses: tuple[tuple[str, str], ...] = ()

    def message(self, name: str) -> str:
        shown = f"'{name}': pass '{self.pass_name}' ({self.point})"
        if self.matches is None:
            return f"{shown} {'changed it' if self.changed else 'changed nothing'}"
        missed = "".join([f"\n  {line.partition(chr(10))[0]}: {reason}" for line, reason in self.near_misses])
        return f"{shown} replaced {self.matches} matches; {len(self.near_misses)} near misses{missed}"


@dataclass(frozen=True)
class WarningIssued(Event):
    """The compile warned its caller; `category` is the class of the warning."""

    level = logging.DEBUG  # the warning itself is shown
    category: str
    text: str

    def message(self, name: str) -> str:
        return f"'{name}': {self.category}: {self.text}"


@dataclass(frozen=True)
class KernelsCompiled(Event):
    """Kernels were compiled, or found in the cache folder, after `seconds`; those in `failed` failed."""

    logger = "fxwrap.kernels"
    level = logging.DEBUG
    kernels: tuple[str, ...]
    failed: tuple[str, ...]
    seconds: float

    def message(self, name: str) -> str:
        failed = f", {len(self.failed)} failed" if self.failed else ""
        return f"'{name}': {len(self.kernels)} kernels are ready after {self.seconds:.3f} s{failed}"


@dataclass(frozen=True)
class KernelFailed(Event):
    """A kernel failed to compile, and its operators are called."""

    logger = "fxwrap.kernels"
    kernel: str
    operators: tuple[str, ...]
    error: str

    def message(self, name: str) -> str:
        return f"the kernel @{self.kernel} failed, and its operators are called: {self.error}"


@dataclass(frozen=True)
class MatmulTuned(Event):
    """A kernel with matmuls was timed beside library calls and the kernels that these leave."""

    logger = "fxwrap.tuning"
    kernel: str
    seconds: float
    library_seconds: float

    def message(self, name: str) -> str:
        return (
            f"kernel {self.kernel[:16]} with matmuls takes {self.seconds * 1e6:.1f} us, "
            f"the library {self.library_seconds * 1e6:.1f} us"
        )


@dataclass(frozen=True)
class KernelTuned(Event):
    """Configurations of a kernel were timed; `seconds` is the time of the fastest, `default_seconds` the default's."""

    logger = "fxwrap.tuning"
    kernel: str
    configurations: int
    seconds: float
    default_seconds: float

    def message(self, name: str) -> str:
        return (
            f"{self.configurations} configurations of kernel {self.kernel} timed: fastest {self.seconds * 1e6:.1f} us, "
            f"default {self.default_seconds * 1e6:.1f} us"
        )


@dataclass(frozen=True)
class CacheEvent(Event):
    """An event of the compile cache; `key` is the hash of its entry."""

    logger = "fxwrap.cache"
    key: str


@dataclass(frozen=True)
class CacheHit(CacheEvent):
    """The program was loaded from the cache folder."""

    seconds: float

    def message(self, name: str) -> str:
        return f"'{name}' was loaded from the cache in {self.seconds:.3f} s: {self.key}"


@dataclass(frozen=True)
class CacheMiss(CacheEvent):
    """The cache folder has no entry."""

    def message(self, name: str) -> str:
        return f"'{name}' is not in the cache: {self.key}"


@dataclass(frozen=True)
class CacheStored(CacheEvent):
    """The result was written into the cache folder."""

    def message(self, name: str) -> str:
        return f"'{name}' is cached: {self.key}"


@dataclass(frozen=True)
class CacheReceived(CacheEvent):
    """Another rank compiled the graph and sent the entry."""

    def message(self, name: str) -> str:
        return f"'{name}' was compiled by another rank: {self.key}"


@dataclass(frozen=True)
class CacheShared(CacheEvent):
    """The entry was sent to the other ranks."""

    level = logging.DEBUG

    def message(self, name: str) -> str:
        return f"'{name}' was sent to the other ranks: {self.key}"


@dataclass(frozen=True)
class CacheBypassed(Event):
    """The cache is neither read nor written."""

    logger = "fxwrap.cache"
    reason: str

    def message(self, name: str) -> str:
        return f"'{name}' bypasses the cache: {self.reason}"


@dataclass(frozen=True)
class NotCached(Event):
    """The result was not written into the cache folder."""

    logger = "fxwrap.cache"
    reason: str

    def message(self, name: str) -> str:
        return f"'{name}' is not cached: {self.reason}"


@dataclass(frozen=True)
class CacheEntryUnusable(Event):
    """An entry was damaged, and the graph is compiled."""

    logger = "fxwrap.cache"
    level = logging.WARNING
    error: str

    def message(self, name: str) -> str:
        return f"the cache entry of '{name}' is unusable, and it is compiled again: {self.error}"


@dataclass(frozen=True)
class WaitTimedOut(Event):
    """The compile of another process or rank took too long. `compiler` names the one that compiles instead."""

    logger = "fxwrap.cache"
    level = logging.WARNING
    compiler: str
    seconds: float
    error: str = ""

    def message(self, name: str) -> str:
        text = f"'{name}' is compiled by {self.compiler} itself after {self.seconds:.0f} s"
        return f"{text}: {self.error}" if self.error else text


@dataclass(frozen=True)
class GraphLoaded(Event):
    """The program came from one of torch's caches, from a precompiled file, or from a serving host's cache."""

    logger = "fxwrap.cache"
    level = logging.DEBUG

    def message(self, name: str) -> str:
        return f"'{name}' was loaded, not compiled"


@dataclass(frozen=True)
class DumpFailed(Event):
    """The dump could not be written."""

    level = logging.DEBUG  # there is a warning
    folder: str
    error: str

    def message(self, name: str) -> str:
        return f"'{name}' is not dumped to {self.folder}: {self.error}"


class _Tally:
    """The number of events of this process by class."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.counts = Counter[type[Event]]()


_process = _Tally()


def event_count(*kinds: type[Event]) -> int:
    """Returns the number of events of these classes since the process started."""
    with _process.lock:
        return sum([_process.counts[kind] for kind in kinds])


@dataclass(frozen=True)
class Activity:
    """The step that a compile is running, and the number of kernels that the step compiles."""

    step: str = "import_graph"
    kernels: int = 0


class EventLog:
    """The events of one compile, in order, with the seconds since it began.

    `activity` is the current step, which is no event: its end is one.
    """

    def __init__(self, name: str) -> None:
        """`name` is the name of the graph."""
        self.name = name
        self.activity = Activity()
        self._start = self._mark = time.perf_counter()
        self._events: list[tuple[float, Event]] = []

    @property
    def events(self) -> tuple[Event, ...]:
        """The events so far."""
        return tuple([event for _, event in self._events])

    @property
    def seconds(self) -> float:
        """The seconds from the start of the compile to its last event."""
        return self._events[-1][0] if self._events else 0.0

    def record(self, event: Event) -> None:
        """Adds an event, logs it at its level, and counts it for the process."""
        self._events.append((time.perf_counter() - self._start, event))
        with _process.lock:
            _process.counts[type(event)] += 1
        log = logging.getLogger(event.logger)
        if log.isEnabledFor(event.level):
            log.log(event.level, "%s", event.message(self.name))

    def begin_step(self, step: str) -> None:
        """The time until `end_step` is that of this step."""
        self.activity = Activity(step)
        self._mark = time.perf_counter()

    def begin_kernels(self, number: int) -> None:
        """The current step compiles a number of kernels from now on."""
        self.activity = Activity(self.activity.step, number)

    def end_step(self, step: str, changed: bool | None = None) -> None:
        """Records the end of a step; the next one begins."""
        now = time.perf_counter()
        self.record(StepEnded(step, now - self._mark, changed))
        self._mark = time.perf_counter()

    def to_json(self) -> str:
        """Returns one object for each event: its class as "event", its fields, and the seconds since the start."""
        rows = [{"at_s": round(at, 6), **event.to_dict()} for at, event in self._events]
        return json.dumps(rows, indent=1)


def step_seconds(events: tuple[Event, ...]) -> dict[str, float]:
    """Returns the seconds of each step in some events, in order; those of a repeated step are added."""
    seconds: dict[str, float] = {}
    for event in events:
        if isinstance(event, StepEnded):
            seconds[event.step] = seconds.get(event.step, 0.0) + event.seconds
    return seconds


def passes_of(events: tuple[Event, ...]) -> tuple[PassRan, ...]:
    """Returns the runs of the user's passes in some events, in order; of a repeated pass, the last."""
    passes = {(event.point, event.pass_name): event for event in events if isinstance(event, PassRan)}
    return tuple(passes.values())
