"""Counts of this process's compiles, by where their programs came from."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

from fxwrap.runtime.compiler_runs import compiler_runs


@dataclass(frozen=True)
class CompileCounts:
    """Graphs that this process compiled or loaded since it started.

    Fields:
        compiled: graphs that were lowered here.
        loaded: graphs whose program came from the cache folder, entries of other ranks included, or from torch's caches
            and precompiled files.
        received: entries that another rank of the job compiled, and sent through the job's store.
        shared: entries that this process compiled, and sent to the job's store for the other ranks.
        timeouts: waits for another process's compile that reached the time limit.
        compiler_runs: runs of the C++ compiler that produced code, and kernels that Triton was asked to compile.
    """

    compiled: int = 0
    loaded: int = 0
    received: int = 0
    shared: int = 0
    timeouts: int = 0
    compiler_runs: int = 0

    def __sub__(self, earlier: CompileCounts) -> CompileCounts:
        """Returns the counts since earlier ones."""
        return CompileCounts(*[now - before for now, before in zip(_values(self), _values(earlier), strict=True)])


def _values(counts: CompileCounts) -> tuple[int, ...]:
    return (counts.compiled, counts.loaded, counts.received, counts.shared, counts.timeouts, counts.compiler_runs)


class _Counts:
    """The counts of this process."""

    def __init__(self) -> None:
        self.now = CompileCounts()
        self.lock = threading.Lock()


_process = _Counts()


def compile_counts() -> CompileCounts:
    """Returns the counts of this process; their difference to earlier ones covers the time in between."""
    return replace(_process.now, compiler_runs=compiler_runs())


def count_compile(event: str) -> None:
    """Adds one to a count; `event` is a field of `CompileCounts`."""
    with _process.lock:
        _process.now = replace(_process.now, **{event: getattr(_process.now, event) + 1})
