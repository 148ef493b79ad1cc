"""One measurement of one full-size model, in a process of its own; `gpu_models.py` starts it and reads what it prints.

Each line of its output is a JSON object with one measurement, so that a process that is stopped has reported some:

    {"side": ..., "measure": "error" | "memory" | "time" | "host" | "wrapper" | "classes" | "plan" | "failure", ...}

    python benchmarks/gpu_jobs.py JOB_AS_JSON
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.measure_kernels import (
    Contender,
    Timed,
    compile_with,
    first_line,
    in_float64,
    interleaved_host_times,
    peak_of,
    relative_error,
    synchronize,
    wide,
)
from benchmarks.model_jobs import INPUT_SETS, Job, call, call_results, exclusive_lock, observed
from benchmarks.results import parse_backend
from fxwrap.compile import Compiled, compile_graph, make_backend
from fxwrap.lines import Return
from fxwrap.options import Options
from fxwrap.wrapper_ir import Block, live_bytes

SECONDS_A_SAMPLE = 0.04
PARTS = 3
"""The number of parts of the rounds; the medians so far are printed after each."""

CLASSES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("generated", re.compile(r"^fxwrap_|^triton_|cpp_kernel|cpp_fused")),
    ("attention", re.compile(r"flash|fmha|sdpa|attention|mem_eff", re.IGNORECASE)),
    ("convolution", re.compile(r"conv(?!ert)|implicit_gemm|winograd|fprop|dgrad|wgrad", re.IGNORECASE)),
    ("matmul", re.compile(r"gemm|gemv|cutlass|cublas|nvjet|splitk|::mm|::addmm|::bmm|_addmm", re.IGNORECASE)),
    ("copy", re.compile(r"memcpy|memset|direct_copy|copy_kernel|CatArray|fill_", re.IGNORECASE)),
)
"""Classes of device work by kernel name; the first match counts, the rest is "other"."""

Report = Callable[..., None]


def report(**measurement: Any) -> None:
    """Prints a measurement as a line of JSON."""
    print(json.dumps(measurement), flush=True)


def class_of(name: str) -> str:
    """Returns the class of a device kernel or CPU operator, by its name."""
    return next((title for title, pattern in CLASSES if pattern.search(name)), "other")


# Sides


def prepare_runs(job: Job) -> dict[str, Callable[[int], Any]]:
    """Returns, for each side that works, a function that calls it once on one of the sets of inputs.

    All sides share one model. Reports failures, the error against float64 on inputs that the compile did not see, and
    the device memory held after three calls.
    """
    torch._dynamo.config.recompile_limit = 64  # each side counts as a compile of the same code
    model = job.build()
    state = {name: item.clone() for name, item in model.state_dict().items()}
    reference = observed(job, job.build().double(), in_float64, wide)
    sets = [job.inputs(200 + index) for index in range(INPUT_SETS)]
    sides = {}
    for side in job.backends:
        try:
            run = _side(job, side, model, sets)
            held = _allocated(job)
            start = time.perf_counter()
            run(0)
            first = time.perf_counter() - start
            for index in (1, 2):
                run(index)
            synchronize(torch.device(job.device))
            held = _allocated(job) - held
            model.load_state_dict(state)
            error = relative_error(call_results(job, model, run.function), reference)  # type: ignore[attr-defined]
            model.load_state_dict(state)
        except Exception as problem:  # noqa: BLE001 - a side's failure is reported
            report(side=side, measure="failure", text=first_line(problem))
            continue
        report(side=side, measure="error", error=error, first_call=first, held=held)
        sides[side] = run
    return sides


def _side(job: Job, side: str, model: nn.Module, sets: Sequence[Mapping[str, Any]]) -> Callable[[int], Any]:
    function = compile_with(side, model, job.options or {}, fullgraph=True)

    def run(index: int) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        call(job, function, sets[index % len(sets)])
        if job.training:
            model.zero_grad(set_to_none=True)

    run.function = function  # type: ignore[attr-defined]
    return run


# Times


def measure_times(job: Job, sides: Mapping[str, Callable[[int], Any]]) -> None:
    """Reports medians of a call's time with the device's work, and of its host time."""
    device = torch.device(job.device)
    contenders = {side: _contender(run, device) for side, run in sides.items()}
    single = {side: Contender(_counted(run, 1), 1) for side, run in sides.items()}
    times: dict[str, list[float]] = {side: [] for side in sides}
    hosts: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(PARTS):
        for side, timed in interleaved_host_times(contenders, -(-job.rounds // PARTS), device).items():
            times[side] += timed.samples
        # one call at a time: the device's queue holds all of its launches
        for side, timed in interleaved_host_times(single, job.rounds, device, wait=False).items():
            hosts[side] += timed.samples
        for side in sides:
            timed = Timed(times[side])
            report(side=side, measure="time", seconds=timed.median, quartiles=timed.quartiles)
            report(side=side, measure="host", seconds=Timed(hosts[side]).median)


def _contender(run: Callable[[int], Any], device: torch.device) -> Contender:
    run(0)
    synchronize(device)
    start = time.perf_counter()
    run(0)
    synchronize(device)
    calls = max(1, round(SECONDS_A_SAMPLE / (time.perf_counter() - start)))
    return Contender(_counted(run, calls), calls)


def _counted(run: Callable[[int], Any], calls: int) -> Callable[[], object]:
    def sample() -> None:
        for index in range(calls):
            run(index)

    return sample


def wrappers(job: Job) -> dict[str, Contender]:
    """Returns each side's compiled graph, except with CUDA graphs, to be called without Dynamo and AOTAutograd."""
    if job.training:
        return {}
    contenders = {}
    for side in job.backends:
        if side == "eager" or side.endswith("+graphs"):
            continue
        recorder = _CompilerRecorder()
        try:
            backend = _backend_around(job, side, recorder.around)
            with torch._functorch.config.patch(enable_autograd_cache=False):  # a hit would not call the compiler
                call(job, torch.compile(job.build(), backend=backend, fullgraph=True), job.inputs(0))
        except Exception as problem:  # noqa: BLE001 - a side's failure is reported
            report(side=side, measure="failure", text=first_line(problem))
            continue
        contenders[side] = Contender(recorder.again, 1)
    return contenders


def _backend_around(job: Job, side: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """Returns a side as a backend whose graph compiler is wrapped by `around`."""
    name, chosen = parse_backend(side)
    if name == "fxwrap":
        options = Options.from_mapping({**(job.options or {}), **chosen})
        return make_backend(options, around(compile_graph))
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def backend(graph: Any, inputs: Any) -> Any:
        return compile_fx(graph, inputs, inner_compile=around(compile_fx_inner), config_patches=chosen)

    return backend


class _CompilerRecorder:
    """Records the compiled graph, and the inputs of its last call."""

    def __init__(self) -> None:
        self._run: Callable[[list[Any]], Any]
        self._inputs: list[Any]

    def around(self, compiler: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the compiler with recording."""

        def compiled(*arguments: Any, **keywords: Any) -> Any:
            result = compiler(*arguments, **keywords)
            self._run = result.boxed if isinstance(result, Compiled) else result

            def boxed(inputs: list[Any]) -> Any:
                self._inputs = list(inputs)
                return self._run(inputs)

            if isinstance(result, Compiled):
                return SimpleNamespace(program=result.program, boxed=boxed)
            boxed._boxed_call = True  # type: ignore[attr-defined]
            return boxed

        return compiled

    def again(self) -> None:
        """Calls the compiled graph with the same inputs."""
        with torch.no_grad():
            self._run(list(self._inputs))


def measure_wrappers(job: Job, contenders: Mapping[str, Contender]) -> None:
    """Reports medians of the host time of one call, with an empty device queue before."""
    for side, timed in interleaved_host_times(contenders, job.rounds, torch.device(job.device), wait=False).items():
        report(side=side, measure="wrapper", seconds=timed.median)


# Memory and counts


def _allocated(job: Job) -> int:
    return torch.cuda.memory_allocated() if job.device == "cuda" else 0


def measure_memory(job: Job, sides: Mapping[str, Callable[[int], Any]]) -> None:
    """Reports the peak of a call's memory, in bytes beyond the memory before it, and its allocations."""
    if job.device != "cuda":
        return
    for side, run in sides.items():
        counted = _allocations()
        _, peak = peak_of(partial(run, 0), torch.device("cuda"))
        report(side=side, measure="memory", peak=peak, allocations=_allocations() - counted)


def _allocations() -> int:
    return int(torch.cuda.memory_stats().get("allocation.all.allocated", 0))


def measure_classes(job: Job, sides: Mapping[str, Callable[[int], Any]], calls: int = 3) -> None:
    """Reports, by the profiler, the time and number of a call's kernels by class, and the idle time."""
    for side, run in sides.items():
        run(0)
        synchronize(torch.device(job.device))
        activity = torch.profiler.ProfilerActivity
        kinds = [activity.CUDA, activity.CPU] if job.device == "cuda" else [activity.CPU]
        with torch.profiler.profile(activities=kinds, acc_events=True) as profile:
            for index in range(calls):
                run(index)
            synchronize(torch.device(job.device))
        report(side=side, measure="classes", **_summary(_work(profile.events() or [], job.device), calls))


def _work(events: Iterable[Any], device: str) -> list[tuple[str, float, float]]:
    """Returns name, start and end, in seconds, of each device kernel, or of each outermost operator on a CPU."""
    return [
        (event.name, event.time_range.start / 1e6, event.time_range.end / 1e6) for event in events
        if (event.device_type.name == device.upper() if device == "cuda" else _is_outermost(event))
    ]  # fmt: skip


def _is_outermost(event: Any) -> bool:
    """Whether a CPU event is an operator call outside of other operator calls."""
    above = event.cpu_parent
    while above is not None and "::" not in above.name:
        above = above.cpu_parent
    return above is None and "::" in event.name


def _summary(work: Sequence[tuple[str, float, float]], calls: int) -> dict[str, Any]:
    """Returns seconds and kernels per call by class, "idle" included, and the ten longest kernels."""
    seconds: Counter[str] = Counter()
    names: Counter[str] = Counter()
    count: Counter[str] = Counter()
    busy, until = 0.0, float("-inf")
    for name, start, end in sorted(work, key=lambda item: item[1]):
        seconds[class_of(name)] += (end - start) / calls  # type: ignore[assignment]
        names[name] += (end - start) / calls  # type: ignore[assignment]
        count[class_of(name)] += 1
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    span = until - min([start for _, start, _ in work], default=until)
    seconds["idle"] = max(0.0, span - busy) / calls  # type: ignore[assignment]
    longest = [[name[:120], total] for name, total in names.most_common(10)]
    kernels = {title: number / calls for title, number in count.items()}
    return {"seconds": dict(seconds), "kernels": kernels, "longest": longest, "span": span / calls if work else 0.0}


# Memory plans


def measure_plans(job: Job) -> None:
    """Reports, for sides of fxwrap, the largest plan's peak in bytes, and the worst of the programs' peaks over plans.

    "all" includes a program's inputs and parameters in both; "own" excludes them, so that scratch memory of operators
    and the allocator's rounding, which no plan contains, count more.
    """
    for side in job.backends:
        if not side.startswith("fxwrap") or side.endswith("+graphs"):
            continue
        recorder = _PeakRecorder(torch.device(job.device))
        try:
            with torch._functorch.config.patch(enable_autograd_cache=False):  # a hit would not call the compiler
                backend = _backend_around(job, side, recorder.around)
                function = torch.compile(job.build(), backend=backend, fullgraph=True)
                for index in range(3):
                    recorder.is_on = index == 2
                    call(job, function, job.inputs(index))
        except Exception as problem:  # noqa: BLE001 - a side's failure is reported
            report(side=side, measure="failure", text=first_line(problem))
            continue
        report(side=side, measure="plan", **recorder.worst())


@dataclass(frozen=True)
class _Peak:
    """The peaks of one program in bytes: of its plan, of its inputs and parameters, of a call beyond those."""

    planned: int
    inputs: int
    measured: int


class _PeakRecorder:
    """Records the peak memory of each call of a compiled graph while `is_on`."""

    def __init__(self, device: torch.device) -> None:
        self.is_on = False
        self._device = device
        self._peaks: list[_Peak] = []

    def around(self, compiler: Callable[..., Compiled]) -> Callable[..., Any]:
        """Returns the compiler with recording."""

        def compiled(*arguments: Any, **keywords: Any) -> Any:
            result = compiler(*arguments, **keywords)
            planned = live_bytes(result.program).peak
            inputs = live_bytes(result.program.replace(body=Block((), (Return(()),)))).peak

            def boxed(values: list[Any]) -> Any:
                if not self.is_on:
                    return result.boxed(values)
                outputs, measured = peak_of(partial(result.boxed, values), self._device)
                self._peaks.append(_Peak(planned, inputs, measured))
                return outputs

            return SimpleNamespace(program=result.program, boxed=boxed)

        return compiled

    def worst(self) -> dict[str, float]:
        """Returns the largest planned peak, and the worst ratio of each kind."""
        return {
            "planned": max([peak.planned for peak in self._peaks]),
            "all": max([(peak.measured + peak.inputs) / peak.planned for peak in self._peaks]),
            "own": max([peak.measured / max(peak.planned - peak.inputs, 1) for peak in self._peaks]),
        }


def main() -> None:
    """Runs the job."""
    job = Job(**json.loads(sys.argv[1]))
    torch.set_num_threads(job.threads)
    tasks = job.task.split(",")
    with exclusive_lock(job.lock, shared=True):
        sides = prepare_runs(job) if {"run", "profile"} & set(tasks) else {}
        compiled_graphs = wrappers(job) if "run" in tasks else {}
    with exclusive_lock(job.lock):
        if "run" in tasks:
            measure_memory(job, sides)
            measure_times(job, sides)
            if compiled_graphs:
                measure_wrappers(job, compiled_graphs)
        if "profile" in tasks:
            measure_classes(job, sides)
        if "plan" in tasks:
            measure_plans(job)


if __name__ == "__main__":
    main()
