"""Backends, float64 references and errors, interleaved host times and device times, peaks, shared by the scripts.

Times are seconds. A contender is a function without arguments that makes `calls` calls.
"""

from __future__ import annotations

import ctypes
import gc
import math
import statistics
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from benchmarks.results import parse_backend
from fxwrap.comparison.measure import peak_bytes
from fxwrap.compile import fxwrap as fxwrap_backend
from fxwrap.debugging import Float64Mode

Result = TypeVar("Result")
BACKENDS = ("eager", "inductor", "fxwrap")
FLAGGED = 10.0
"""An error is flagged if it exceeds eager's by this factor, and the element type's epsilon."""


# Backends


def fresh_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a copy with its own code object, so that Dynamo caches each backend separately."""
    return types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


def compile_with(backend: str, target: Any, options: Mapping[str, Any], fullgraph: bool = False) -> Callable[..., Any]:
    """Returns the target through a backend, named as for `parse_backend`; `options` are fxwrap's."""
    name, chosen = parse_backend(backend)
    match name:
        case "eager":
            return target
        case "fxwrap":
            return torch.compile(target, backend=fxwrap_backend, options={**options, **chosen}, fullgraph=fullgraph)
        case _:
            return torch.compile(target, backend=name, options=chosen or None, fullgraph=fullgraph)


def first_line(error: BaseException) -> str:
    """Returns an error's class and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


# Errors


def leaves(tree: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested sequences and mappings."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        yield from leaves(list(tree.values()))
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from leaves(item)


def wide(tree: Any) -> Any:
    """Returns copies of the tensors in a sequence or mapping, floating-point ones in float64."""
    if isinstance(tree, Tensor):
        return tree.to(torch.float64, copy=True) if tree.is_floating_point() else tree.clone()
    if isinstance(tree, Mapping):
        return {name: wide(item) for name, item in tree.items()}
    return [wide(item) for item in tree]


def in_float64(function: Callable[..., Any], drawn: torch.dtype) -> Callable[..., Any]:
    """Returns the function with every operator in float64, narrower types included; call it with `wide` inputs."""

    def run(*arguments: Any, **keywords: Any) -> Any:
        with Float64Mode(drawn):
            return function(*arguments, **keywords)

    return run


def relative_error(results: Any, expected: Any) -> float:
    """Returns the largest norm(result - expected) / norm(expected) over the tensors, in float64.

    NaN if a result is missing, has another shape or is not finite.
    """
    pairs = list(zip(leaves(results), leaves(expected)))
    if len(pairs) != len(list(leaves(expected))) or any(mine.shape != theirs.shape for mine, theirs in pairs):
        return math.nan
    worst = 0.0
    for mine, theirs in pairs:
        reference = theirs.detach().to(torch.float64)
        norm = float(torch.linalg.vector_norm(reference))
        distance = float(torch.linalg.vector_norm(mine.detach().to(torch.float64) - reference))
        error = distance / norm if norm else distance
        if not math.isfinite(error):
            return math.nan
        worst = max(worst, error)
    return worst


def is_suspicious(error: float, eager: float, dtype: torch.dtype) -> bool:
    """Whether an error is far above both eager's and the element type's epsilon."""
    return not error <= FLAGGED * eager + torch.finfo(dtype).eps


# Times


@dataclass(frozen=True)
class Contender:
    """One side of a comparison: `run` makes `calls` calls."""

    run: Callable[[], object]
    calls: int


@dataclass
class Timed:
    """Seconds per call, one sample per round; `method` names an unusual way of timing."""

    samples: list[float] = field(default_factory=list)
    method: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and the third quartile of the samples."""
        if len(self.samples) < 2:
            return self.samples[0], self.samples[0]
        first, _, third = statistics.quantiles(self.samples, n=4, method="inclusive")
        return first, third


def repeat(run: Callable[[], object], calls: int) -> None:
    """Calls a function so many times: one run of a contender."""
    for _ in range(calls):
        run()


def synchronize(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def interleaved_times(contenders: Mapping[str, Contender], rounds: int, device: torch.device) -> dict[str, Timed]:
    """Returns seconds per call: of the device's work alone on CUDA, of the host elsewhere."""
    if device.type == "cuda":
        return interleaved_device_times(contenders, rounds)
    return interleaved_host_times(contenders, rounds, device)


def interleaved_host_times(
    contenders: Mapping[str, Contender], rounds: int, device: torch.device, *, wait: bool = True
) -> dict[str, Timed]:
    """Returns host seconds per call, including the device's work, in interleaved rounds in rotating order.

    Without `wait`, the device's work is excluded; the device's queue must hold the work of a run.
    """
    times = {name: Timed() for name in contenders}
    names = list(contenders)
    gc.collect()
    gc.disable()
    try:
        for index in range(rounds):
            for name in _rotated(names, index):
                contender = contenders[name]
                synchronize(device)
                start = time.perf_counter()
                contender.run()
                if wait:
                    synchronize(device)
                times[name].samples.append((time.perf_counter() - start) / contender.calls)
    finally:
        gc.enable()
    return times


def interleaved_device_times(contenders: Mapping[str, Contender], rounds: int) -> dict[str, Timed]:
    """Returns seconds per call on a CUDA device, by CUDA events, in interleaved rounds.

    Each side's calls are captured in a CUDA graph and replayed twice; the second replay, whose launch the first hides,
    is timed. If capture fails, the profiler sums the times of its kernels.
    """
    times = {name: Timed() for name in contenders}
    replays: dict[str, Callable[[], object]] = {}
    for name, contender in contenders.items():
        graph = captured(contender)
        if graph is None:
            times[name].method = "profiler"
        else:
            replays[name] = graph.replay
    names = list(contenders)
    for index in range(rounds):
        for name in _rotated(names, index):
            contender = contenders[name]
            seconds = replayed_seconds(replays[name]) if name in replays else profiled_seconds(contender.run)
            times[name].samples.append(seconds / contender.calls)
    return times


def captured(contender: Contender) -> torch.cuda.CUDAGraph | None:
    """Returns the contender's calls as a CUDA graph, or None, with a message, if capture fails."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        contender.run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            contender.run()
    except Exception as error:  # noqa: BLE001 - the profiler times a side that cannot be captured
        print(f"  not captured as a CUDA graph: {first_line(error)}", flush=True)
        return None
    return graph


def replayed_seconds(replay: Callable[[], object]) -> float:
    """Returns the seconds of a replay directly after another."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    replay()
    start.record()
    replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def profiled_seconds(run: Callable[[], object]) -> float:
    """Returns the sum of the times of the kernels that a run launches."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA], acc_events=True) as profile:
        run()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profile.key_averages()) / 1e6


def _rotated(names: Sequence[str], index: int) -> list[str]:
    turn = index % len(names)
    return [*names[turn:], *names[:turn]]


# Memory


def peak_of(run: Callable[[], Result], device: torch.device) -> tuple[Result, int]:
    """Returns a call's result and the most bytes that it allocates on the device beyond those before it."""
    if device.type == "cuda":  # the allocator's statistics, which need no profiler in autograd's threads
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return run(), torch.cuda.max_memory_allocated() - before
    results: list[Result] = []
    peak = peak_bytes(lambda: None, lambda _: results.append(run()))
    return results[0], peak


def disable_malloc_trimming() -> None:
    """Makes glibc keep freed memory: else page faults of large results dominate every call."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of <malloc.h>
        mallopt(mmap_threshold, 1 << 30)
        mallopt(trim_threshold, (1 << 31) - 1)
