"""Counts of this process's compiles, by where their programs came from."""

from __future__ import annotations

from dataclasses import dataclass

from fxwrap.events import CacheHit, CacheReceived, CacheShared, GraphLoaded, GraphLowered, WaitTimedOut, event_count
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


def compile_counts() -> CompileCounts:
    """Returns the counts of this process; their difference to earlier ones covers the time in between."""
    return CompileCounts(
        compiled=event_count(GraphLowered), loaded=event_count(CacheHit, GraphLoaded),
        received=event_count(CacheReceived), shared=event_count(CacheShared), timeouts=event_count(WaitTimedOut),
        compiler_runs=compiler_runs(),
    )  # fmt: skip
