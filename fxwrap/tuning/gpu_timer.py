"""Times kernels on a GPU: alternating replays of CUDA graphs with many launches, between events."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from fxwrap.devices import CUDA
from fxwrap.printers import PrintedKernel
from fxwrap.runtime.cpp_kernels import KernelText
from fxwrap.runtime.kernels import compile_kernels, load_kernel
from fxwrap.runtime.triton.compile import KernelUse
from fxwrap.symbolic import Number
from fxwrap.torch_compat import without_fake_mode
from fxwrap.tuning.task import BYTES_PER_SECOND, BufferSpec, TuningTask

_ROUNDS = 9
_GRAPH_SECONDS = 300e-6
_MAX_LAUNCHES = 64
_MAX_ARGUMENT_SETS = 32
_LAUNCH_SECONDS = 2e-6
_PRUNE_RATIO = 2.0
"""The first-round ratio to the fastest configuration above which one is not timed again."""


def gpu_name(device: torch.device) -> str | None:
    """Returns the name of a CUDA device; None for other devices and machines without one."""
    if device.type != CUDA.device_type or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_name(device)


def time_on_gpu(tasks: Sequence[TuningTask]) -> list[list[list[float]]]:
    """Returns, for each task and configuration, samples of the seconds of a launch; none if it cannot be launched.

    All configurations are compiled together first. Inputs are random, and launches rotate through copies of the buffers
    so that they read memory instead of the cache. Assertions in kernels are off.
    """
    texts = [[_text(candidate) for candidate in task.candidates] for task in tasks]
    uses = [KernelUse(text, task.device, task.numbers) for task, candidates in zip(tasks, texts) for text in candidates]
    errors = iter(compile_kernels(uses))
    samples = []
    with without_fake_mode(), torch.no_grad():
        for task, candidates in zip(tasks, texts, strict=True):
            runs = [text if next(errors) is None else None for text in candidates]
            with torch.cuda.device(task.device):
                samples.append(_time(task, runs))
    return samples


def _text(candidate: PrintedKernel) -> KernelText:
    options = tuple([(name, False if name == "debug" else option) for name, option in candidate.options])
    return KernelText(candidate.language, candidate.source, candidate.signature, options)


def _time(task: TuningTask, texts: Sequence[KernelText | None]) -> list[list[float]]:
    samples: list[list[float]] = [[] for _ in texts]
    if any(0 in grid for grid in task.grids):
        return samples
    try:
        sets = _argument_sets(task)
    except torch.OutOfMemoryError:
        return samples
    stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        count = min(_MAX_LAUNCHES, int(_GRAPH_SECONDS / (task.bytes / BYTES_PER_SECOND + _LAUNCH_SECONDS)))
        count = max(count, len(sets), 1)
        graphs: dict[int, torch.cuda.CUDAGraph] = {}
        for position, text in enumerate(texts):
            if text is not None:
                launch = load_kernel(text.language, text.source, text.signature, text.options)
                graph = _capture(launch, task.grids[position], sets, count)
                if graph is not None:
                    graphs[position] = graph
        first = _round(graphs, stream, range(-1, 1))[len(graphs) :]  # the first round warms up
        first_seconds = {position: seconds / count for position, seconds in first}
        remaining = {position: graphs[position] for position in remaining_candidates(first_seconds)}
        rest = _round(remaining, stream, range(1, _ROUNDS))
    for position, seconds in [*first, *rest]:
        samples[position].append(seconds / count)
    return samples


def remaining_candidates(seconds: Mapping[int, float]) -> list[int]:
    """Returns the positions of configurations that may still be the fastest, by one sample of each."""
    limit = min(seconds.values(), default=0.0) * _PRUNE_RATIO
    return [position for position, sample in seconds.items() if sample <= limit]


def _round(
    graphs: Mapping[int, torch.cuda.CUDAGraph], stream: torch.cuda.Stream, numbers: range
) -> list[tuple[int, float]]:
    """Replays each graph once per round; returns the position and seconds of each replay, in order."""
    order = sorted(graphs)
    events = []
    for number in numbers:
        first = number % max(len(order), 1)
        events += [(position, _replay(graphs[position])) for position in (*order[first:], *order[:first])]
    stream.synchronize()
    return [(position, start.elapsed_time(end) / 1000) for position, (start, end) in events]


def _capture(
    launch: Callable[..., object], grid: Sequence[int], sets: Sequence[Sequence[torch.Tensor | Number]], count: int
) -> torch.cuda.CUDAGraph | None:
    """Returns a graph of many launches; None if a first launch, which loads the kernel, fails."""
    try:
        launch(grid, *sets[0])
    except Exception:  # noqa: BLE001  Triton and the driver raise many classes for kernels that exceed the device
        return None
    torch.cuda.current_stream().synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        for number in range(count):
            launch(grid, *sets[number % len(sets)])
    finally:
        graph.capture_end()
    return graph


def _replay(graph: torch.cuda.CUDAGraph) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    events: list[torch.cuda.Event] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
    start, end = events
    start.record()
    graph.replay()
    end.record()
    return start, end


def argument_set_count(set_bytes: int, cache_bytes: int, free_bytes: int) -> int:
    """Returns the number of argument sets: more than fit the cache, within half of the free memory."""
    count = min(2 * cache_bytes // max(set_bytes, 1) + 2, _MAX_ARGUMENT_SETS)
    return max(min(count, free_bytes // 2 // max(set_bytes, 1)), 1)


def _argument_sets(task: TuningTask) -> list[tuple[torch.Tensor | Number, ...]]:
    """Returns launch arguments, in more sets than fit the cache."""
    generator = torch.Generator(task.device)
    generator.manual_seed(0)
    cache = torch.cuda.get_device_properties(task.device).L2_cache_size
    free, _ = torch.cuda.mem_get_info(task.device)
    count = argument_set_count(task.bytes, cache, free)
    first = [_random(item, task.device, generator) for item in task.buffers]
    others = [[tensor.clone() for tensor in first] for _ in range(count - 1)]
    return [(*tensors, *task.numbers) for tensors in (first, *others)]


def _random(buffer: BufferSpec, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """Returns random floats in [0, 1), bools, or integers that are valid indirect indices."""
    tensor = torch.empty(buffer.count, dtype=buffer.dtype, device=device)
    if buffer.dtype.is_floating_point:
        return tensor.uniform_(generator=generator)
    if buffer.dtype is torch.bool:
        return tensor.random_(0, 2, generator=generator)
    return tensor.random_(0, min(buffer.upper_bound, torch.iinfo(buffer.dtype).max), generator=generator)
