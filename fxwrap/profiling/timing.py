"""The seconds of each profiler range of a function."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fxwrap.comparison.measure import synchronise, uses_cuda
from fxwrap.torch_compat import delay_stream, quiet_profiler, range_profiler

_WARM_UPS = 2


@dataclass(frozen=True)
class RangeSeconds:
    """The median seconds of a run in a range, over all of its calls: on the host, and on the device (0.0 on CPUs)."""

    calls: float
    host: float
    device: float


def range_seconds(
    run: Callable[[], object], names: Sequence[str], repeats: int
) -> tuple[float, dict[str, RangeSeconds]]:
    """Returns the median seconds of a run without a profiler, and those of its ranges by name, with one.

    A GPU's times are those between events on the streams that are current at the ends of a range; the GPU waits before
    each run, so that they have no gaps in which it waits for the host.
    """
    for _ in range(_WARM_UPS):
        run()
    totals: list[float] = []
    for _ in range(repeats):
        synchronise()
        start = time.perf_counter()
        run()
        synchronise()
        totals.append(time.perf_counter() - start)
    rounds: list[Mapping[str, list[tuple[float, float]]]] = []
    for _ in range(repeats):
        with quiet_profiler(), range_profiler(cuda=uses_cuda()) as profiler:
            if uses_cuda():
                delay_stream(2 * max(totals))
            run()
        by_name: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for event in profiler.function_events or ():
            if event.name in by_name:
                by_name[event.name].append((event.time_range.elapsed_us() / 1e6, event.device_time_total / 1e6))
        rounds.append(by_name)
    return statistics.median(totals), {name: _median([item[name] for item in rounds]) for name in names}


def _median(rounds: Sequence[Sequence[tuple[float, float]]]) -> RangeSeconds:
    host = statistics.median([sum([host for host, _ in events]) for events in rounds])
    device = statistics.median([sum([device for _, device in events]) for events in rounds])
    return RangeSeconds(statistics.mean([len(events) for events in rounds]), host, device)
