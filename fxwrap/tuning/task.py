"""The unit of autotuning: a kernel in several configurations, with the arguments of a launch."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeAlias

import torch

from fxwrap.devices import CUDA
from fxwrap.loop_ir import FLOAT8, IndirectIndex, Kernel
from fxwrap.printers import KernelRequest, PrintedKernel
from fxwrap.runtime.cache_folder import read_cache_file, write_cache_file
from fxwrap.runtime.cpp_kernels import KernelText
from fxwrap.runtime.kernels import compile_kernels, load_kernel
from fxwrap.runtime.triton.compile import KernelUse
from fxwrap.symbolic import Number, symbol_kind
from fxwrap.torch_compat import without_fake_mode

log = logging.getLogger("fxwrap.tuning")

_DEFAULT_SCALARS: dict[str, Number] = {"float": 0.5, "bool": True}
_DEFAULT_UPPER_BOUND = 100
"""The upper bound of integers that are not indices; every integer dtype can hold it."""

BYTES_PER_SECOND = 3e12
"""The memory bandwidth of a large GPU."""
_PROGRAM_BYTES_PER_SECOND = 25e9
"""The bandwidth of one program, of which a multiprocessor runs a few."""


@dataclass(frozen=True)
class BufferSpec:
    """A buffer of a kernel: dtype, number of elements, the exclusive upper bound of integers, whether these ascend."""

    dtype: torch.dtype
    count: int
    upper_bound: int
    is_ascending: bool = False


@dataclass(frozen=True)
class TuningTask:
    """A kernel in several configurations, the default first, to be timed on a device.

    `grids` has the launch grid of each configuration for the traced sizes; `buffers` are the kernel's inputs and
    outputs, `numbers` its scalars, in parameter order. `key` names the kernel's tuning record.
    """

    key: str
    candidates: tuple[PrintedKernel, ...]
    grids: tuple[tuple[int, ...], ...]
    device: torch.device
    buffers: tuple[BufferSpec, ...]
    numbers: tuple[Number, ...]

    def with_first(self, count: int) -> TuningTask:
        """Returns the task with its first configurations only."""
        return replace(self, candidates=self.candidates[:count], grids=self.grids[:count])

    @property
    def bytes(self) -> int:
        """The size of all buffers."""
        return sum(item.count * item.dtype.itemsize for item in self.buffers)


Timer: TypeAlias = Callable[[Sequence[TuningTask]], list[list[list[float]]]]
"""Returns, for each task and configuration, samples of the seconds of one launch; none if it cannot be launched."""


def estimated_seconds(request: KernelRequest, printed: PrintedKernel) -> float:
    """Returns the estimated run time, by the bytes that its programs move and the bandwidth of the device.

    A device that states none (`DeviceSpec.memory_bytes_per_s`) counts as a large GPU.
    """
    kernel, hint = request.kernel, request.hint
    moved = sum(hint(item.extent) * item.dtype.itemsize for item in (*kernel.inputs, *kernel.outputs))
    programs = math.prod(hint(size) for size in printed.grid)
    limit = request.spec.memory_bytes_per_s or BYTES_PER_SECOND
    return moved / min(max(programs, 1) * _PROGRAM_BYTES_PER_SECOND, limit)


def make_tuning_task(key: str, request: KernelRequest, candidates: Sequence[PrintedKernel]) -> TuningTask:
    """Returns the task of timing a requested kernel in these configurations."""
    kernel, hint = request.kernel, request.hint
    upper_bound = _index_upper_bound(request)
    scalars = [(symbol, _DEFAULT_SCALARS.get(symbol_kind(symbol.name))) for symbol in kernel.symbols]
    return TuningTask(
        key,
        tuple(candidates),
        tuple([tuple([hint(size) for size in candidate.grid]) for candidate in candidates]),
        request.device,
        tuple(
            [
                BufferSpec(item.dtype, hint(item.extent), upper_bound, item.is_ascending)
                for item in (*kernel.inputs, *kernel.outputs)
            ]
        ),
        tuple([hint(symbol) if scalar is None else scalar for symbol, scalar in scalars]),
    )


def _index_upper_bound(request: KernelRequest) -> int:
    """Returns an upper bound of integers that makes all indirect indices valid."""
    sizes = [request.hint(atom.size) for atom in _indirect_indices(request.kernel)]
    return max(min(sizes, default=_DEFAULT_UPPER_BOUND), 1)


def _indirect_indices(kernel: Kernel) -> list[IndirectIndex]:
    return [atom for access in kernel.accesses for atom in access.index.atoms() if isinstance(atom, IndirectIndex)]


_FIELDS = {"fingerprint": str, "seconds": float, "default_seconds": float}


@dataclass(frozen=True)
class TuningRecord:
    """A kernel's selected configuration: fingerprint of the printed kernel, its seconds and those of the default."""

    fingerprint: str
    seconds: float
    default_seconds: float


class TuningRecords:
    """The records in a folder, by key. Unreadable files are ignored, and replaced by the next write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, key: str) -> TuningRecord | None:
        """Returns the record of a key; None without a valid one."""
        try:
            fields = json.loads(read_cache_file(self._path(key)) or b"")
        except (ValueError, RecursionError):
            return None
        if not isinstance(fields, dict) or set(fields) != set(_FIELDS):
            return None
        if not all(isinstance(fields[name], kind) for name, kind in _FIELDS.items()):
            return None
        return TuningRecord(**fields)

    def commit(self, key: str, record: TuningRecord, replacing: bool = False) -> TuningRecord:
        """Writes a record and returns the valid one: another process's if it was first.

        `replacing` overwrites an existing record, which is stale. A folder that cannot be written is not an error.
        """
        content = json.dumps(asdict(record)).encode()
        try:
            write_cache_file(self.folder.parent, f"{self.folder.name}/{key}.json", content, replaces=replacing)
        except OSError as error:
            if isinstance(error, FileExistsError) and not replacing:
                existing = self.read(key)
                return self.commit(key, record, replacing=True) if existing is None else existing
            log.warning("a choice is not recorded, and later processes time it again: %s", error)
        return record

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"


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


def has_gpu() -> bool:
    """Returns whether this process can time kernels on a GPU."""
    return torch.cuda.is_available()


def time_on_gpu(tasks: Sequence[TuningTask]) -> list[list[list[float]]]:
    """Returns, for each task and configuration, samples of the seconds of a launch; none if it cannot be launched.

    All configurations are compiled together first. Inputs are random, and launches rotate through copies of the buffers
    so that they read memory instead of the cache. Assertions in kernels are off.
    """
    texts = [[_text(candidate) for candidate in task.candidates] for task in tasks]
    uses = [KernelUse(text, task.device, task.numbers) for task, candidates in zip(tasks, texts) for text in candidates]
    start = time.perf_counter()
    errors = iter(compile_kernels(uses))
    compiled = time.perf_counter()
    samples = []
    with without_fake_mode(), torch.no_grad():
        for task, candidates in zip(tasks, texts, strict=True):
            runs = [text if next(errors) is None else None for text in candidates]
            with torch.cuda.device(task.device):
                samples.append(_time(task, runs))
    seconds = (compiled - start, time.perf_counter() - compiled)
    failed = sum([not item for task in samples for item in task])
    log.info("autotuning: compiled in %.1f s, timed in %.1f s; %d configurations cannot be launched", *seconds, failed)
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
    if buffer.dtype in FLOAT8:
        return tensor.copy_(torch.rand(buffer.count, device=device, generator=generator))
    if buffer.dtype.is_floating_point:
        return tensor.uniform_(generator=generator)
    if buffer.dtype is torch.bool:
        return tensor.random_(0, 2, generator=generator)
    tensor.random_(0, min(buffer.upper_bound, torch.iinfo(buffer.dtype).max), generator=generator)
    return tensor.sort().values if buffer.is_ascending else tensor
