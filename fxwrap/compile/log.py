"""The compile log: one line for each compiled graph, with the seconds of each step."""

from __future__ import annotations

import logging
import time

from fxwrap.lines import Launch
from fxwrap.wrapper_ir import Program

log = logging.getLogger("fxwrap.compile")


class StepTimes:
    """The seconds of each step of a compile, in order."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._seconds: dict[str, float] = {}

    def end(self, step: str) -> None:
        """Records the end of a step; the next one begins."""
        now = time.perf_counter()
        self._seconds[step] = now - self._last
        self._last = now

    def log_summary(self, program: Program, calls: int) -> None:
        """Logs the compile of a graph with this many calls, at level INFO."""
        if not log.isEnabledFor(logging.INFO):
            return
        lines = list(program.lines())
        launches = sum([isinstance(line, Launch) for line in lines])
        seconds = ", ".join([f"{step} {seconds:.3f}" for step, seconds in self._seconds.items()])
        log.info(
            "'%s': %d calls became %d lines with %d launches of %d kernels in %.3f s (%s)",
            program.name, calls, len(lines), launches, len(program.kernels), sum(self._seconds.values()), seconds,
        )  # fmt: skip
