"""Measurement of run time and peak memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from fxwrap.torch_compat import allocation_trace, quiet_profiler

Inputs = TypeVar("Inputs")

_TIMING_BUDGET_SECONDS = 1.0


@dataclass(frozen=True)
class RunTime:
    """The median seconds of a run: until its results are computed, and on the host alone, until the call returned."""

    seconds: float
    host_seconds: float


def run_times(prepare: Callable[[], Inputs], runs: Sequence[Callable[[Inputs], object]], repeats: int) -> list[RunTime]:
    """Returns the times of each run, over up to `repeats` rounds and about a second for each run.

    `prepare` returns the arguments of a run, and is not timed. Every round calls each run once, so that other load on
    the machine affects all of them. One round before the timing warms up.
    """
    for run in runs:
        run(prepare())
    seconds: list[list[tuple[float, float]]] = [[] for _ in runs]
    deadline = time.perf_counter() + _TIMING_BUDGET_SECONDS * len(runs)
    for round_ in range(repeats):
        if round_ >= 3 and time.perf_counter() > deadline:
            break
        for times, run in zip(seconds, runs):
            arguments = prepare()
            synchronise()
            start = time.perf_counter()
            run(arguments)
            returned = time.perf_counter()
            synchronise()
            times.append((time.perf_counter() - start, returned - start))
    medians = [[statistics.median(column) for column in zip(*times)] for times in seconds]
    return [RunTime(total, host) for total, host in medians]


def device_activity(prepare: Callable[[], Inputs], run: Callable[[Inputs], object]) -> tuple[int, float] | None:
    """Returns how many kernels a run launches on a CUDA device, and their seconds there; None if it uses none."""
    if not uses_cuda():
        return None
    arguments = prepare()
    synchronise()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with quiet_profiler(), torch.profiler.profile(activities=activities, acc_events=True) as profile:
        run(arguments)
        synchronise()
    events = [item for item in profile.events() if item.device_type.name == "CUDA"]
    if not events:
        return None
    kernels = [item for item in events if not item.name.startswith(("Memcpy", "Memset"))]
    return len(kernels), sum([item.self_device_time_total for item in events]) / 1e6


def peak_bytes(prepare: Callable[[], Inputs], run: Callable[[Inputs], object]) -> int:
    """Returns the peak memory of a run in bytes, on the CPU and the current CUDA device together.

    Earlier allocations, such as inputs, do not count, even if the run frees them. The CPU's figures come from the
    allocator's reports to torch's profiler, which include native code; CUDA's from the caching allocator's statistics.
    """
    arguments = prepare()
    on_cuda = uses_cuda()
    before = torch.cuda.memory_allocated() if on_cuda else 0
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with quiet_profiler(), torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profile:
        result = run(arguments)
    del result
    on_gpu = torch.cuda.max_memory_allocated() - before if on_cuda else 0
    return _peak(allocation_trace(profile)) + on_gpu


def _peak(record: Iterable[int]) -> int:
    live = peak = 0
    for change in record:
        live += change
        peak = max(peak, live)
    return peak


def uses_cuda() -> bool:
    """Whether this process has used CUDA."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def synchronise() -> None:
    """Waits for all work on the current CUDA device, if this process has used one."""
    if uses_cuda():
        torch.cuda.synchronize()
