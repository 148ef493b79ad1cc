"""The log of compiles: what became of each graph, and where the time went."""

from __future__ import annotations

import logging
import time

from fxwrap.lines import Launch
from fxwrap.wrapper_ir import Program

log = logging.getLogger("fxwrap.compile")


class StageTimes:
    """The seconds of each stage of a compile, in order."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._seconds: dict[str, float] = {}

    def end(self, stage: str) -> None:
        """Notes that a stage ends now, and the next begins."""
        now = time.perf_counter()
        self._seconds[stage] = now - self._last
        self._last = now

    def tell(self, program: Program, calls: int) -> None:
        """Writes what a graph with this many calls became into the log, if anyone reads it."""
        if not log.isEnabledFor(logging.INFO):
            return
        lines = list(program.lines())
        launches = sum([isinstance(line, Launch) for line in lines])
        stages = ", ".join([f"{stage} {seconds:.3f}" for stage, seconds in self._seconds.items()])
        log.info(
            "'%s': %d calls became %d lines with %d launches of %d kernels in %.3f s (%s)",
            program.name, calls, len(lines), launches, len(program.kernels), sum(self._seconds.values()), stages,
        )  # fmt: skip
