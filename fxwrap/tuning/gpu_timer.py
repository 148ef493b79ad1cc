"""Seconds of kernels on a GPU: many launches in a CUDA graph, replayed in turns, between events."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fxwrap.device_spec import CUDA
from fxwrap.printers import PrintedKernel
from fxwrap.runtime.cpp_kernels import KernelText
from fxwrap.runtime.kernels import compile_kernels, load_kernel
from fxwrap.runtime.triton_compile import KernelUse
from fxwrap.torch_compat import without_fake_mode
from fxwrap.tuning.work import BYTES_A_SECOND, BufferFacts, TuningWork

_ROUNDS = 9
_GRAPH_SECONDS = 300e-6
_MOST_LAUNCHES = 64
_MOST_SETS = 32
_LAUNCH_SECONDS = 2e-6
_HOPELESS = 2.0
"""A way that took so many times the fastest one's seconds in the first round is not timed again."""


def gpu_name(device: torch.device) -> str | None:
    """Returns the name of a CUDA device; None for another, or where there is none on this machine."""
    if device.type != CUDA.device_type or not torch.cuda.is_available():  # it times with CUDA's events and graphs
        return None
    return torch.cuda.get_device_name(device)


def time_on_gpu(works: Sequence[TuningWork]) -> list[list[list[float]]]:
    """Returns for each work and each of its ways samples of the seconds of a launch; none where it cannot be launched.

    All ways are compiled first, together. Inputs are random, and several copies of the buffers take turns, so that they
    come from memory and not from the cache. Assertions in kernels are left out.
    """
    texts = [[_text(way) for way in work.ways] for work in works]
    uses = [KernelUse(text, work.device, work.numbers) for work, ways in zip(works, texts) for text in ways]
    errors = iter(compile_kernels(uses))
    samples = []
    with without_fake_mode(), torch.no_grad():
        for work, ways in zip(works, texts, strict=True):
            runs = [text if next(errors) is None else None for text in ways]
            with torch.cuda.device(work.device):
                samples.append(_time(work, runs))
    return samples


def _text(way: PrintedKernel) -> KernelText:
    options = tuple([(name, False if name == "debug" else option) for name, option in way.options])
    return KernelText(way.language, way.source, way.signature, options)


def _time(work: TuningWork, texts: Sequence[KernelText | None]) -> list[list[float]]:
    samples: list[list[float]] = [[] for _ in texts]
    if any(0 in grid for grid in work.grids):
        return samples
    try:
        sets = _argument_sets(work)
    except torch.OutOfMemoryError:
        return samples
    stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        count = min(_MOST_LAUNCHES, int(_GRAPH_SECONDS / (work.bytes / BYTES_A_SECOND + _LAUNCH_SECONDS)))
        count = max(count, len(sets), 1)
        made = {
            position: _captured(_launcher(text), work.grids[position], sets, count)
            for position, text in enumerate(texts) if text is not None
        }  # fmt: skip
        graphs = {position: graph for position, graph in made.items() if graph is not None}
        first = _round(graphs, stream, range(-1, 1))[len(graphs) :]  # the round before it warms up
        first_seconds = {position: seconds / count for position, seconds in first}
        hopeful = {position: graphs[position] for position in worth_more(first_seconds)}
        rest = _round(hopeful, stream, range(1, _ROUNDS))
    for position, seconds in [*first, *rest]:
        samples[position].append(seconds / count)
    return samples


def worth_more(seconds: Mapping[int, float]) -> list[int]:
    """Returns the positions of ways that may be the fastest yet, by the seconds that each took once."""
    limit = min(seconds.values(), default=0.0) * _HOPELESS
    return [position for position, found in seconds.items() if found <= limit]


def _round(
    graphs: Mapping[int, torch.cuda.CUDAGraph], stream: torch.cuda.Stream, numbers: range
) -> list[tuple[int, float]]:
    """Replays each graph once a round, in turns; returns in the order of replays which one it was, and its seconds."""
    order = sorted(graphs)
    marks = []
    for number in numbers:
        turn = number % max(len(order), 1)
        marks += [(position, _replayed(graphs[position])) for position in (*order[turn:], *order[:turn])]
    stream.synchronize()
    return [(position, start.elapsed_time(end) / 1000) for position, (start, end) in marks]


def _launcher(text: KernelText) -> Callable[..., None]:
    return load_kernel(text.language, text.source, text.signature, text.options)


def _captured(
    launch: Callable[..., None], grid: Sequence[int], sets: Sequence[Sequence[Any]], count: int
) -> torch.cuda.CUDAGraph | None:
    """Returns a graph of many launches; None where one before them, which loads what they need, fails."""
    try:
        launch(grid, *sets[0])
    except Exception:  # noqa: BLE001  whatever Triton and the driver raise for a kernel that wants more than the device has
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


def _replayed(graph: torch.cuda.CUDAGraph) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    events: list[torch.cuda.Event] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
    start, end = events
    start.record()
    graph.replay()
    end.record()
    return start, end


def set_count(set_bytes: int, cache_bytes: int, free_bytes: int) -> int:
    """Returns how many sets of buffers take turns: what does not fit the cache together, in half of the free memory."""
    wanted = min(2 * cache_bytes // max(set_bytes, 1) + 2, _MOST_SETS)
    return max(min(wanted, free_bytes // 2 // max(set_bytes, 1)), 1)


def _argument_sets(work: TuningWork) -> list[tuple[Any, ...]]:
    """Returns arguments of launches, in as many sets as do not fit the cache together."""
    generator = torch.Generator(work.device)
    generator.manual_seed(0)
    cache = torch.cuda.get_device_properties(work.device).L2_cache_size
    free, _ = torch.cuda.mem_get_info(work.device)
    count = set_count(work.bytes, cache, free)
    first = [_random(item, work.device, generator) for item in work.buffers]
    others = [[tensor.clone() for tensor in first] for _ in range(count - 1)]
    return [(*tensors, *work.numbers) for tensors in (first, *others)]


def _random(facts: BufferFacts, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """Returns numbers from 0 to 1, coins, or integers that are positions wherever the kernel gathers by them."""
    made = torch.empty(facts.count, dtype=facts.dtype, device=device)
    if facts.dtype.is_floating_point:
        return made.uniform_(generator=generator)
    if facts.dtype is torch.bool:
        return made.random_(0, 2, generator=generator)
    return made.random_(0, min(facts.below, torch.iinfo(facts.dtype).max), generator=generator)
