"""How long a run takes, and how much memory it holds at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fxwrap.torch_compat import allocation_record, quiet_profiler

_ENOUGH_SECONDS = 1.0


def median_seconds(prepare: Callable[[], Any], runs: Sequence[Callable[[Any], Any]], repeats: int) -> list[float]:
    """Returns the median time of each run, of up to `repeats` rounds that take about a second for each of them.

    `prepare` makes what a run is given, outside of the time. Every round runs each of them once, so that a machine that
    is busy for a while is busy for all. The first round is not counted.
    """
    for run in runs:
        run(prepare())
    taken: list[list[float]] = [[] for _ in runs]
    deadline = time.perf_counter() + _ENOUGH_SECONDS * len(runs)
    for round_ in range(repeats):
        if round_ >= 3 and time.perf_counter() > deadline:
            break
        for times, run in zip(taken, runs):
            given = prepare()
            _synchronise()
            start = time.perf_counter()
            run(given)
            _synchronise()
            times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in taken]


def peak_bytes(prepare: Callable[[], Any], run: Callable[[Any], Any]) -> int:
    """Returns the most bytes that a run allocates and holds at once, on the CPU and on the current CUDA device
    together.

    What was allocated before, such as inputs, does not count, whether the run releases it or not. On the CPU the
    numbers come from the allocator's own reports to torch's profiler, so that native code is seen as Python is; on
    CUDA from the caching allocator's statistics.
    """
    given = prepare()
    on_cuda = _uses_cuda()
    before = torch.cuda.memory_allocated() if on_cuda else 0
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with quiet_profiler(), torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profile:
        result = run(given)
    del result
    on_gpu = torch.cuda.max_memory_allocated() - before if on_cuda else 0
    return _peak(allocation_record(profile)) + on_gpu


def _peak(record: Iterable[int]) -> int:
    live = peak = 0
    for change in record:
        live += change
        peak = max(peak, live)
    return peak


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _synchronise() -> None:
    if _uses_cuda():
        torch.cuda.synchronize()
