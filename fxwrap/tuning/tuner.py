"""Autotuning: selects the configuration of each kernel of a program by timing."""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import math
import statistics
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from typing_extensions import Self

from fxwrap.converters.base import Handler
from fxwrap.converters.emitted_program import BoxedCallable, EmittedProgram, FlatCallable, disable_autograd_and_autocast
from fxwrap.converters.interpreter import Interpreter
from fxwrap.errors import FxwrapError, TuningWarning
from fxwrap.events import EventLog, KernelTuned, MatmulTuned
from fxwrap.lines import ExtensionLine
from fxwrap.options import MatmulKernels
from fxwrap.printers import KernelRequest, PrintedKernel, candidate_kernels
from fxwrap.runtime.cache_folder import cache_folders
from fxwrap.torch_compat import DisableAutocast, is_dispatch_intercepted, without_fake_mode
from fxwrap.tuning.regions import (
    MIN_GAIN,
    MatmulRegion,
    RegionInputs,
    RegionTimer,
    is_faster,
    median_seconds,
    preserved_random_state,
    region_device,
    region_graph,
    region_inputs,
    region_key,
    time_alternatives,
    timed_device_name,
)
from fxwrap.tuning.task import (
    Timer,
    TuningRecord,
    TuningRecords,
    TuningTask,
    estimated_seconds,
    gpu_name,
    make_tuning_task,
    time_on_gpu,
)
from fxwrap.wrapper_ir import Block, Program

log = logging.getLogger("fxwrap.tuning")

_FORMAT = 2
MIN_SECONDS = 1e-6
"""Kernels with a shorter estimate are not timed: about the cost of a launch in a CUDA graph."""
MAX_CONFIGURATIONS = 256
"""The number of configurations that are compiled and timed together: about half a minute with eight workers."""
_GENERATED = "generated"
_LIBRARY = "library"
"""The fingerprints of records of matmuls."""
_MIN_RELATIVE_GAIN = 0.02
"""The relative gain over the default configuration that a faster one must have, beyond the spread of the samples."""


class Tuner:
    """Prints kernels by their tuning records, and times kernels without one. One compile uses one tuner.

    `print_kernel`, called by the lowering, prints the default configuration of kernels without a record and collects
    them; `tune` times them together and returns whether lowering again will change the program. `has_alternatives` is
    True if it printed a kernel with several configurations on a device that it can time.
    """

    def __init__(
        self,
        timer: Timer,
        device_name: Callable[[torch.device], str | None],
        records: TuningRecords,
        min_seconds: float = MIN_SECONDS,
        time_regions: RegionTimer = time_alternatives,
        max_configurations: int = MAX_CONFIGURATIONS,
    ) -> None:
        """`device_name` returns the name of a device, or None for one without timing.

        Kernels estimated below `min_seconds` keep the default configuration. `time_regions` times programs in turn.
        `max_configurations` of kernels are timed together: if there are more, the first ones of each kernel.
        """
        self._timer = timer
        self._min_seconds = min_seconds
        self._device_name = device_name
        self._records = records
        self._known: dict[str, TuningRecord] = {}
        self._stale: set[str] = set()
        self._tasks: dict[str, TuningTask] = {}
        self._used: dict[str, str] = {}
        self._time_regions = time_regions
        self._max_configurations = max_configurations
        self.has_alternatives = False

    @property
    def has_pending(self) -> bool:
        """Whether kernels without a record were printed."""
        return bool(self._tasks)

    def print_kernel(self, request: KernelRequest) -> PrintedKernel:
        """Prints a kernel by its record, or in the default configuration. Raises the errors of its printer."""
        candidates = candidate_kernels(request)
        default = candidates[0]()
        device = self._device_name(request.device) if len(candidates) > 1 else None
        if device is None:
            return default
        self.has_alternatives = True
        if estimated_seconds(request, default) < self._min_seconds:
            return default
        key = _key(request, default, device)
        record = self._known.get(key) or self._records.read(key)
        if record is not None:
            for candidate in (lambda: default, *candidates[1:]):
                printed = _printed(candidate)
                if printed is not None and fingerprint(printed) == record.fingerprint:
                    self._known[key] = record
                    self._used[key] = record.fingerprint
                    return printed
            self._stale.add(key)
        others = [printed for candidate in candidates[1:] if (printed := _printed(candidate)) is not None]
        self._tasks[key] = make_tuning_task(key, request, list(dict.fromkeys([default, *others])))
        return default

    def tune(self, events: EventLog | None = None) -> bool:
        """Times pending kernels and writes their records; returns whether any differs from its default.

        `events` is the log of the compile.
        """
        events = events or EventLog("kernels")
        tasks, self._tasks = self._limited(list(self._tasks.values())), {}
        changed = False
        for task, samples in zip(tasks, self._timer(tasks) if tasks else (), strict=True):
            best = fastest(samples)
            times = [statistics.median(seconds) if seconds else math.inf for seconds in samples]
            record = TuningRecord(fingerprint(task.candidates[best]), times[best], times[0])
            if math.isfinite(record.seconds):
                record = self._records.commit(task.key, record, task.key in self._stale)
            self._known[task.key] = record
            self._used[task.key] = record.fingerprint
            changed |= record.fingerprint != fingerprint(task.candidates[0])
            events.record(KernelTuned(task.key, len(task.candidates), record.seconds, record.default_seconds))
        return changed

    def _limited(self, tasks: list[TuningTask]) -> list[TuningTask]:
        """Returns the tasks, with the first configurations of each only if there are too many to time together."""
        count, note = sum([len(task.candidates) for task in tasks]), ""
        if count > self._max_configurations:
            first = max(self._max_configurations // len(tasks), 2)
            tasks = [task.with_first(first) for task in tasks]
            note = f" of {count}: the first {first} of each kernel"
            count = sum([len(task.candidates) for task in tasks])
        if tasks:
            log.info("autotuning times %d configurations of %d kernels%s", count, len(tasks), note)
        return tasks

    def choose_matmuls(
        self, regions: Sequence[MatmulRegion], graph: Graph, fakes: Callable[[Node], object],
        compile_region: Callable[[GraphModule, MatmulKernels], Callable[..., object]], events: EventLog | None = None,
    ) -> frozenset[str]:  # fmt: skip
        """Returns the matmuls of a program's regions, by node, for which the library is faster, and writes records.

        Each kernel with matmuls is compared with the library's calls and the kernels that then remain. `graph` is the
        one that was lowered, `compile_region` compiles a part of it. Matmuls that cannot be timed stay library calls.
        """
        events = events or EventLog("kernels")
        library: set[str] = set()
        for region in regions:
            part = region_graph(graph, fakes, region.nodes, region.internal)
            record = None if part is None else self._region_record(region, part, compile_region, events)
            if record is None or record.fingerprint == _LIBRARY:
                library |= region.matmuls
        return frozenset(library)

    def _region_record(
        self, region: MatmulRegion, part: GraphModule,
        compile_region: Callable[[GraphModule, MatmulKernels], Callable[..., object]], events: EventLog,
    ) -> TuningRecord | None:  # fmt: skip
        """Returns the record of a region, after timing it if there is none; None if it cannot be timed."""

        def programs() -> list[Callable[..., object]]:
            return [compile_region(part, "auto"), compile_region(part, "library")]

        return self._part_record(region, part, programs, events)

    def is_rewrite_faster(
        self, part: GraphModule, rewritten: GraphModule, rewrite: str,
        compile_region: Callable[[GraphModule, MatmulKernels], Callable[..., object]], events: EventLog,
    ) -> bool:  # fmt: skip
        """Whether a part of a graph is faster after a pass named `rewrite`, by its record or by timing both forms.

        Matmuls of both are library calls.
        """

        def programs() -> list[Callable[..., object]]:
            return [compile_region(item, "library") for item in (rewritten, part)]

        record = self._part_record(MatmulRegion(rewrite, (), frozenset()), part, programs, events)
        return record is not None and record.fingerprint == _GENERATED

    def is_program_faster(
        self, key: str, device: torch.device, inputs: Callable[[], RegionInputs],
        programs: Callable[[], Sequence[Callable[..., object]] | None], events: EventLog,
    ) -> bool:  # fmt: skip
        """Whether the first of two programs is as fast as the second, which is not tuned, by its record or by timing.

        `key` names both programs. It is if they cannot be timed, and if `programs` returns None.
        """
        content = (key, *self._environment(device))
        record = self._timed_record(_hash(content), "program", programs, inputs, events, min_gain=0.0)
        return record is None or record.fingerprint == _GENERATED

    def _part_record(
        self, region: MatmulRegion, part: GraphModule, programs: Callable[[], Sequence[Callable[..., object]]],
        events: EventLog,
    ) -> TuningRecord | None:  # fmt: skip
        """Returns the record of two programs of a region, the second one with the library's calls."""
        key = region_key(region, part, self._environment(region_device(part)))
        return self._timed_record(key, region.kernel, programs, lambda: region_inputs(part), events)

    def _environment(self, device: torch.device) -> tuple[str, ...]:
        return str(_FORMAT), timed_device_name(device), _triton_version(), torch.__version__

    def _timed_record(
        self, key: str, name: str, programs: Callable[[], Sequence[Callable[..., object]] | None],
        inputs: Callable[[], RegionInputs], events: EventLog, min_gain: float = MIN_GAIN,
    ) -> TuningRecord | None:  # fmt: skip
        """Returns the record of two programs: whether the first is faster; None if they cannot be timed.

        The first one has a record, without times, if `programs` returns None.
        """
        record = self._known.get(key) or self._records.read(key)
        if record is None or record.fingerprint not in (_LIBRARY, _GENERATED):
            try:
                with without_fake_mode(), torch.no_grad(), preserved_random_state():
                    timed = programs()
                    mine, theirs = ([], []) if timed is None else self._time_regions(timed, inputs())
            except (FxwrapError, torch.OutOfMemoryError):
                return None
            except RuntimeError as error:  # of operators that refuse random inputs or CUDA graphs
                warnings.warn(f"a choice between two programs is not timed: {error}", TuningWarning, stacklevel=2)
                return None
            if timed is None:
                chosen = TuningRecord(_GENERATED, 0.0, 0.0)
            else:
                seconds, library_seconds = median_seconds(mine), median_seconds(theirs)
                choice = _GENERATED if is_faster(mine, theirs, min_gain) else _LIBRARY
                chosen = TuningRecord(choice, min(seconds, library_seconds), library_seconds)
                events.record(MatmulTuned(name, seconds, library_seconds))
            record = self._records.commit(key, chosen, replacing=record is not None)
        self._known[key] = record
        self._used[key] = record.fingerprint
        return record

    @property
    def has_selected(self) -> bool:
        """Whether records or timing have selected anything, be it a default."""
        return bool(self._used)

    def add_tuning_header(self, program: Program) -> Program:
        """Returns the program with a hash of all selected configurations in its header, if it has tuned kernels."""
        if not self._used:
            return program
        text = "\n".join([f"{key} {selected}" for key, selected in sorted(self._used.items())])
        record = hashlib.sha256(text.encode()).hexdigest()[:16]
        return program.replace(header=(*program.header, ("tuning", record)))


def gpu_tuner() -> Tuner:
    """Returns the tuner for this machine's GPUs, with records in the cache folder."""
    return Tuner(time_on_gpu, gpu_name, TuningRecords(cache_folders()[-1] / "tuning"))


def fastest(samples: Sequence[Sequence[float]]) -> int:
    """Returns the index of the fastest configuration; 0, the default, unless the gain exceeds the samples' spread.

    `samples` has the seconds of each configuration; none for one that cannot be launched.
    """
    timed = [position for position, seconds in enumerate(samples) if seconds]
    if not timed:
        return 0
    best = min(timed, key=lambda position: statistics.median(samples[position]))
    if not samples[0]:
        return best
    default = statistics.median(samples[0])
    spread = _half_interquartile_range(samples[0]) + _half_interquartile_range(samples[best])
    gain = default - statistics.median(samples[best])
    return best if gain > max(spread, _MIN_RELATIVE_GAIN * default) else 0


def fingerprint(printed: PrintedKernel) -> str:
    """Returns the hash of a printed kernel and its grid that tuning records contain."""
    return _hash((printed.language, printed.signature, printed.options, printed.source, str(printed.grid)))


def _half_interquartile_range(samples: Sequence[float]) -> float:
    if len(samples) < 2:
        return 0.0
    low, _, high = statistics.quantiles(samples, n=4)
    return (high - low) / 2


def _key(request: KernelRequest, default: PrintedKernel, device: str) -> str:
    """Returns the key of a kernel's record: a hash of its default form, sizes, device and Triton's version."""
    kernel, hint = request.kernel, request.hint
    sizes = [hint(buffer.extent) for buffer in (*kernel.inputs, *kernel.outputs)]
    return _hash(
        (_FORMAT, fingerprint(default), sizes, [hint(size) for size in default.grid], device, _triton_version())
    )


def _hash(content: object) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()[:32]


def _triton_version() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _printed(candidate: Callable[[], PrintedKernel]) -> PrintedKernel | None:
    try:
        return candidate()
    except FxwrapError:
        return None


class SizeRecordingInterpreter(Interpreter):
    """Runs one call of a program. `observed_sizes` has the largest value of each int symbol, by name."""

    def __init__(self, program: Program, handlers: Mapping[type[ExtensionLine], Handler] | None = None) -> None:
        super().__init__(program, handlers)
        self.observed_sizes: dict[str, int] = {}

    def _block_interpreter(self, block: Block, arguments: list[object]) -> Self:
        inner = super()._block_interpreter(block, arguments)
        inner.observed_sizes = self.observed_sizes
        return inner

    def _run_lines(self, block: Block) -> None:
        super()._run_lines(block)
        for name, number in self.symbols.items():
            if type(number) is int:
                self.observed_sizes[name] = max(number, self.observed_sizes.get(name, number))


class FirstCallAutotuner:
    """The entries of a program that is compiled again for the sizes of its first call, after that call.

    The interpreter computes the first call. Concurrent calls run the untuned program, and so do calls under a dispatch
    mode or a CUDA graph capture, where nothing can be timed: a later call is then the first. If recompilation fails, a
    TuningWarning tells why, and the untuned program remains.
    """

    def __init__(
        self, program: Program, before: EmittedProgram, recompile: Callable[[Mapping[str, int]], EmittedProgram]
    ) -> None:
        """`recompile` takes the largest value of each int symbol in the first call, by name."""
        self._program = program
        self._before = before
        self._recompile: Callable[[Mapping[str, int]], EmittedProgram] | None = recompile
        self._lock = threading.Lock()
        self._boxed: BoxedCallable = self._first
        self._flat: FlatCallable = disable_autograd_and_autocast(self._first)

    def boxed(self, inputs: list[object]) -> Any:
        """The boxed entry, for every call."""
        return self._boxed(inputs)

    def flat(self, *inputs: object) -> Any:
        """The flat entry, for every call."""
        return self._flat(*inputs)

    def skip_tuning(self) -> None:
        """Keeps the untuned program for all calls; waits for a first call in progress."""
        with self._lock:
            self._finish(self._before)

    def _finish(self, entries: EmittedProgram) -> None:
        if self._recompile is not None:
            boxed, flat = entries.boxed, entries.flat
            self._recompile = None
            self._boxed, self._flat = boxed, flat

    def _first(self, inputs: list[object]) -> Any:
        if not _can_time() or not self._lock.acquire(blocking=False):
            return self._before.boxed(inputs)
        try:
            if self._recompile is None:  # another thread's call was the first
                return self._boxed(inputs)
            interpreter = SizeRecordingInterpreter(self._program)
            results = interpreter.run(inputs)
            self._compile(interpreter.observed_sizes)
            return results
        finally:
            self._lock.release()

    def _compile(self, observed_sizes: Mapping[str, int]) -> None:
        assert self._recompile is not None
        try:
            # fake-tensor propagation must not see the caller's modes
            with torch.inference_mode(False), torch.no_grad(), DisableAutocast():
                self._finish(self._recompile(observed_sizes))
        except FxwrapError as error:
            warnings.warn(
                f"the kernels keep their default configurations: autotuning failed: {error}", TuningWarning, 2
            )
            self._finish(self._before)


def _can_time() -> bool:
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return not capturing and not is_dispatch_intercepted()
