"""Timers that time nothing, and tuners that use them, for tests without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fxwrap
from fxwrap.tuning import Tuner, TuningRecords, TuningTask

OPTIONS = fxwrap.Options(cpu_kernels="triton", autotune=True)
SLOW, FAST = [1.0, 1.01, 0.99], [0.5, 0.51, 0.49]


class FakeTimer:
    """Reports one configuration as fast and all others as slow, and records the timed ones."""

    def __init__(self, fast: int) -> None:
        self.fast = fast
        self.works: list[TuningTask] = []

    def __call__(self, works: Sequence[TuningTask]) -> list[list[list[float]]]:
        self.works += works
        return [
            [
                FAST if position == min(self.fast, len(work.candidates) - 1) else SLOW
                for position in range(len(work.candidates))
            ]
            for work in works
        ]


def fail_timing(works: Sequence[TuningTask]) -> list[list[list[float]]]:
    raise AssertionError(f"{len(works)} kernels are timed again")


def tuner(
    timer: Callable[..., Any], folder: Path, name: str = "fake device", min_seconds: float = 0, **limits: int
) -> Tuner:
    return Tuner(timer, lambda _: name, TuningRecords(folder), min_seconds, **limits)
