"""What `ops.py` and `models.py` share: backends, float64 references and errors, interleaved times, device times.

Times are seconds. A contender is a function without arguments that makes `calls` calls.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import platform
import statistics
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import fxwrap
from fxwrap.backend import fxwrap as fxwrap_backend
from fxwrap.compare.reference import Float64Mode

BACKENDS = ("eager", "inductor", "fxwrap")
FLAGGED = 10.0
"""An error this many times eager's, and above the element type's own, is flagged."""


# Backends


def fresh_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy with a code object of its own, so that Dynamo keeps what each backend compiles apart."""
    return types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


def switches(backend: str) -> tuple[str, dict[str, Any]]:
    """The backend's own name, and the options that a name such as "fxwrap:cpp+graphs" stands for.

    "fxwrap:cpp" is fxwrap with another emitter, "inductor:fx_wrapper" Inductor with a switch of its configuration on;
    "+graphs" behind either replays CUDA graphs, which is Inductor's mode "reduce-overhead".
    """
    name, _, variant = backend.partition(":")
    variant, _, graphs = variant.partition("+")
    if name == "fxwrap":
        return name, {**({"emitter": variant} if variant else {}), **({"cuda_graphs": True} if graphs else {})}
    return name, {**({variant: True} if variant else {}), **({"triton.cudagraphs": True} if graphs else {})}


def compile_with(backend: str, target: Any, options: Mapping[str, Any], fullgraph: bool = False) -> Callable[..., Any]:
    """The target through a backend as `switches` reads its name; `options` are fxwrap's. "eager" gives it back."""
    name, chosen = switches(backend)
    match name:
        case "eager":
            return target
        case "fxwrap":
            return torch.compile(target, backend=fxwrap_backend, options={**options, **chosen}, fullgraph=fullgraph)
        case _:
            return torch.compile(target, backend=name, options=chosen or None, fullgraph=fullgraph)


def first_line(error: BaseException) -> str:
    """An error's class and the first line of its message."""
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
    """Copies of the tensors in a sequence or mapping, floating ones in float64."""
    if isinstance(tree, Tensor):
        return tree.to(torch.float64, copy=True) if tree.is_floating_point() else tree.clone()
    if isinstance(tree, Mapping):
        return {name: wide(item) for name, item in tree.items()}
    return [wide(item) for item in tree]


def in_float64(function: Callable[..., Any], drawn: torch.dtype) -> Callable[..., Any]:
    """The function with every operator in float64, also where it names a narrower type; it takes `wide` inputs."""

    def run(*arguments: Any, **keywords: Any) -> Any:
        with Float64Mode(drawn):
            return function(*arguments, **keywords)

    return run


def relative_error(got: Any, wanted: Any) -> float:
    """The largest over the tensors of norm(got - wanted) / norm(wanted), in float64.

    NaN where a result is missing, has another shape or is not finite.
    """
    pairs = list(zip(leaves(got), leaves(wanted)))
    if len(pairs) != len(list(leaves(wanted))) or any(mine.shape != theirs.shape for mine, theirs in pairs):
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
    """Whether an error is far above both eager's and the element type's own."""
    return not error <= FLAGGED * eager + torch.finfo(dtype).eps


# Times


@dataclass(frozen=True)
class Contender:
    """One side of a comparison: `run` makes `calls` calls; it is timed by the host's clock or by the device's."""

    run: Callable[[], object]
    calls: int


@dataclass
class Timed:
    """Seconds a call, one sample a round; `how` says what was timed where it is not the usual."""

    samples: list[float] = field(default_factory=list)
    how: str = ""

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


def synchronize(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def interleaved_host_times(
    contenders: Mapping[str, Contender], rounds: int, device: torch.device, *, wait: bool = True
) -> dict[str, Timed]:
    """Host seconds a call, the device's work included, in interleaved rounds that start with another side each.

    Without `wait` the device's work is left out: a run must be short enough for the device's queue to hold it.
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
    """Seconds a call on a CUDA device, by its own clock, in interleaved rounds.

    Each side's calls are recorded in a CUDA graph and replayed twice in a row: the second replay is timed, whose launch
    the first one hides. A side that cannot be recorded is timed by the profiler, as the sum of its kernels' times.
    """
    times = {name: Timed() for name in contenders}
    replays: dict[str, Callable[[], object]] = {}
    for name, contender in contenders.items():
        graph = recorded(contender)
        if graph is None:
            times[name].how = "profiler"
        else:
            replays[name] = graph.replay
    names = list(contenders)
    for index in range(rounds):
        for name in _rotated(names, index):
            contender = contenders[name]
            seconds = replayed_seconds(replays[name]) if name in replays else profiled_seconds(contender.run)
            times[name].samples.append(seconds / contender.calls)
    return times


def recorded(contender: Contender) -> torch.cuda.CUDAGraph | None:
    """The contender's calls as a CUDA graph; None where recording fails, which is said on the standard output."""
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
    except Exception as error:  # noqa: BLE001 - whatever stops recording, the profiler can still time it
        print(f"  not recorded as a CUDA graph: {first_line(error)}", flush=True)
        return None
    return graph


def replayed_seconds(replay: Callable[[], object]) -> float:
    """Seconds of one replay that follows another."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    replay()
    start.record()
    replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def profiled_seconds(run: Callable[[], object]) -> float:
    """The sum of the times of the kernels that a run starts."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA], acc_events=True) as profile:
        run()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profile.key_averages()) / 1e6


def _rotated(names: Sequence[str], index: int) -> list[str]:
    turn = index % len(names)
    return [*names[turn:], *names[:turn]]


# The table's numbers, and the machine


def geometric_mean(ratios: Iterable[float]) -> float:
    """exp(mean(log)); NaN of nothing."""
    logarithms = [math.log(ratio) for ratio in ratios]
    return math.exp(statistics.fmean(logarithms)) if logarithms else math.nan


def keep_freed_memory() -> None:
    """Has glibc keep freed memory: else large results pay page faults at every call, which hide the kernels."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of <malloc.h>
        mallopt(mmap_threshold, 1 << 30)
        mallopt(trim_threshold, (1 << 31) - 1)


def environment(device: torch.device, options: Mapping[str, Any]) -> dict[str, Any]:
    """What the figures depend on: versions, processor, threads, fxwrap's emitter and options."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else _processor(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "emitter": fxwrap.Options.from_mapping(options).emitter,
        "options": dict(options),
    }


def describe(facts: Mapping[str, Any]) -> str:
    """The environment in two lines."""
    chosen = f"options {facts['options']}" if facts["options"] else "default options"
    return (
        f"{facts['device']}, {facts['cores']} cores, {facts['threads']} threads, torch {facts['torch']}, "
        f"Python {facts['python']}, {facts['date']} UTC\n"
        f"Inductor with its default settings; fxwrap's emitter is {facts['emitter']!r}, {chosen}"
    )


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as text:
            names = [line.partition(":")[2].strip() for line in text if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.machine()
