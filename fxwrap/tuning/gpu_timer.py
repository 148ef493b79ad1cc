"""Seconds of kernels on a GPU: many launches in a CUDA graph, replayed in turns, between events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxwrap.device_spec import CUDA
from fxwrap.printers import PrintedKernel
from fxwrap.runtime.cpp_kernels import KernelText
from fxwrap.runtime.kernels import compile_kernels, load_kernel
from fxwrap.runtime.triton_compile import KernelUse
from fxwrap.torch_compat import without_fake_mode
from fxwrap.tuning.work import BufferFacts, TuningWork

_ROUNDS = 9
_GRAPH_SECONDS = 300e-6
_MOST_LAUNCHES = 64
_MOST_SETS = 32
_BYTES_A_SECOND = 3e12
_LAUNCH_SECONDS = 2e-6


def gpu_name(device: torch.device) -> str | None:
    """Returns the name of a CUDA device; None for another, or where there is none on this machine."""
    if device.type != CUDA.device_type or not torch.cuda.is_available():  # it times with CUDA's events and graphs
        return None
    return torch.cuda.get_device_name(device)


def time_on_gpu(works: Sequence[TuningWork]) -> list[list[list[float]]]:
    """Returns for each work and each of its ways samples of the seconds of a launch; none where it cannot be launched.

    All ways are compiled first, together. Inputs are random, and where they are large several copies take turns, so
    that they come from memory and not from the cache. Assertions in kernels are left out.
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
        count = min(_MOST_LAUNCHES, int(_GRAPH_SECONDS / (work.bytes / _BYTES_A_SECOND + _LAUNCH_SECONDS)))
        count = max(count, len(sets), 1)
        graphs = {
            position: _captured(_launcher(text), work.grids[position], sets, count)
            for position, text in enumerate(texts) if text is not None
        }  # fmt: skip
        marks = []
        for number in range(_ROUNDS + 1):
            for position in sorted(graphs, key=lambda position: (position + number) % len(texts)):
                marks.append((number, position, _replayed(graphs[position])))
        stream.synchronize()
    for number, position, (start, end) in marks:
        if number > 0:  # the first round warms up
            samples[position].append(start.elapsed_time(end) / 1000 / count)
    return samples


def _launcher(text: KernelText) -> Callable[..., None]:
    return load_kernel(text.language, text.source, text.signature, text.options)


def _captured(
    launch: Callable[..., None], grid: Sequence[int], sets: Sequence[Sequence[Any]], count: int
) -> torch.cuda.CUDAGraph:
    """Returns a graph of many launches; what they need is loaded by one before."""
    launch(grid, *sets[0])
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


def _argument_sets(work: TuningWork) -> list[tuple[Any, ...]]:
    """Returns arguments of launches: as many sets as do not fit the cache together, one where a set leaves room."""
    generator = torch.Generator(work.device)
    generator.manual_seed(0)
    cache = torch.cuda.get_device_properties(work.device).L2_cache_size
    free, _ = torch.cuda.mem_get_info(work.device)
    wanted = 1 if work.bytes * 4 <= cache else min(2 * cache // work.bytes + 2, _MOST_SETS)
    count = max(min(wanted, free // 2 // max(work.bytes, 1)), 1)
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
