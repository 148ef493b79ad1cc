"""One measurement of one full-size model, in a process of its own; `gpu_models.py` starts it and reads what it prints.

Each line of its output is a JSON object with what was just found out, so that a process that is cut off has said
something:

    {"side": ..., "measure": "error" | "memory" | "time" | "host" | "wrapper" | "classes" | "compile" | "failure", ...}

    python benchmarks/gpu_jobs.py JOB_AS_JSON
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    relative_error,
    switches,
    synchronize,
    wide,
)
from benchmarks.model_jobs import INPUT_SETS, Job, alone, call, observed, outcome
from fxwrap.backend import make_backend
from fxwrap.compiler import Compiled, compile_graph
from fxwrap.lines import Alloc, Call, Launch, Pool
from fxwrap.options import Options

SECONDS_A_SAMPLE = 0.04
PARTS = 3
"""In how many goes the rounds are run; after each the medians so far are printed."""

CLASSES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("generated", re.compile(r"^fxwrap_|^triton_|cpp_kernel|cpp_fused")),
    ("attention", re.compile(r"flash|fmha|sdpa|attention|mem_eff", re.IGNORECASE)),
    ("convolution", re.compile(r"conv(?!ert)|implicit_gemm|winograd|fprop|dgrad|wgrad", re.IGNORECASE)),
    ("product", re.compile(r"gemm|gemv|cutlass|cublas|nvjet|splitk|::mm|::addmm|::bmm|_addmm", re.IGNORECASE)),
    ("copy", re.compile(r"memcpy|memset|direct_copy|copy_kernel|CatArray|fill_", re.IGNORECASE)),
)
"""Classes of a device's work by names of kernels, the first that matches; the rest is "other"."""

Say = Callable[..., None]


def say(**found: Any) -> None:
    """Prints what was found out."""
    print(json.dumps(found), flush=True)


def class_of(name: str) -> str:
    """The class of a kernel of the device, or of a CPU's operator, by its name."""
    return next((title for title, pattern in CLASSES if pattern.search(name)), "other")


# Sides


def prepared(job: Job) -> dict[str, Callable[[int], Any]]:
    """A function for each side that works, which calls it once on one of the sets of inputs; failures are said.

    All sides share one model. Its error against float64, on inputs that were not there when it was compiled, and what
    it holds of the device's memory after three calls are said too.
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
            error = relative_error(outcome(job, model, run.function), reference)  # type: ignore[attr-defined]
            model.load_state_dict(state)
        except Exception as problem:  # noqa: BLE001 - one side's failure is a cell of the table
            say(side=side, measure="failure", text=first_line(problem))
            continue
        say(side=side, measure="error", error=error, first_call=first, held=held)
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
    """Says medians of a call's time with the device's work, and of the host's part of it alone."""
    device = torch.device(job.device)
    contenders = {side: _contender(run, device) for side, run in sides.items()}
    single = {side: Contender(_counted(run, 1), 1) for side, run in sides.items()}
    times: dict[str, list[float]] = {side: [] for side in sides}
    hosts: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(PARTS):
        for side, timed in interleaved_host_times(contenders, -(-job.rounds // PARTS), device).items():
            times[side] += timed.samples
        # one call at a time: the device's queue holds its launches, so that the host never waits for room in it
        for side, timed in interleaved_host_times(single, job.rounds, device, wait=False).items():
            hosts[side] += timed.samples
        for side in sides:
            timed = Timed(times[side])
            say(side=side, measure="time", seconds=timed.median, quartiles=timed.quartiles)
            say(side=side, measure="host", seconds=Timed(hosts[side]).median)


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
    """What each side without CUDA graphs made of the model's one graph, to be called without Dynamo and AOTAutograd."""
    if job.training:
        return {}
    found = {}
    for side in job.backends:
        if side == "eager" or side.endswith("+graphs"):
            continue
        keeper = _Keeper()
        try:
            backend = _backend_around(job, side, keeper.around)
            with torch._functorch.config.patch(enable_autograd_cache=False):  # by which no compiler would be asked
                call(job, torch.compile(job.build(), backend=backend, fullgraph=True), job.inputs(0))
        except Exception as problem:  # noqa: BLE001 - one side's failure is a cell of the table
            say(side=side, measure="failure", text=first_line(problem))
            continue
        found[side] = Contender(keeper.again, 1)
    return found


class _Keeper:
    """Keeps what a compiler gave for a graph, and the inputs of its last call."""

    def __init__(self) -> None:
        self._run: Callable[[list[Any]], Any]
        self._inputs: list[Any]

    def around(self, compiler: Callable[..., Any]) -> Callable[..., Any]:
        """The compiler, what it gives kept."""

        def compiled(*arguments: Any, **keywords: Any) -> Any:
            made = compiler(*arguments, **keywords)
            self._run = made.boxed if isinstance(made, Compiled) else made

            def boxed(inputs: list[Any]) -> Any:
                self._inputs = list(inputs)
                return self._run(inputs)

            if isinstance(made, Compiled):
                return SimpleNamespace(program=made.program, boxed=boxed)
            boxed._boxed_call = True  # type: ignore[attr-defined]
            return boxed

        return compiled

    def again(self) -> None:
        """Calls it with the same inputs."""
        with torch.no_grad():
            self._run(list(self._inputs))


def measure_wrappers(job: Job, contenders: Mapping[str, Contender]) -> None:
    """Says medians of the host's time of one call of each, the device's queue empty before."""
    for side, timed in interleaved_host_times(contenders, job.rounds, torch.device(job.device), wait=False).items():
        say(side=side, measure="wrapper", seconds=timed.median)


# Memory and counts


def _allocated(job: Job) -> int:
    return torch.cuda.memory_allocated() if job.device == "cuda" else 0


def measure_memory(job: Job, sides: Mapping[str, Callable[[int], Any]]) -> None:
    """Says the peak of a call's own memory, in bytes beyond what is there before it, and its allocations."""
    if job.device != "cuda":
        return
    for side, run in sides.items():
        torch.cuda.synchronize()
        before, counted = torch.cuda.memory_allocated(), _allocations()
        torch.cuda.reset_peak_memory_stats()
        run(0)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        say(side=side, measure="memory", peak=peak, allocations=_allocations() - counted)


def _allocations() -> int:
    return int(torch.cuda.memory_stats().get("allocation.all.allocated", 0))


def measure_classes(job: Job, sides: Mapping[str, Callable[[int], Any]], calls: int = 3) -> None:
    """Says, by the profiler, what each class of kernels takes of a call's time, how many they are, what is idle."""
    for side, run in sides.items():
        run(0)
        synchronize(torch.device(job.device))
        activity = torch.profiler.ProfilerActivity
        kinds = [activity.CUDA, activity.CPU] if job.device == "cuda" else [activity.CPU]
        with torch.profiler.profile(activities=kinds, acc_events=True) as profile:
            for index in range(calls):
                run(index)
            synchronize(torch.device(job.device))
        say(side=side, measure="classes", **_summary(_work(profile.events() or [], job.device), calls))


def _work(events: Iterable[Any], device: str) -> list[tuple[str, float, float]]:
    """Name, start and end, in seconds, of each kernel of the device; of each operator that no other calls on a CPU."""
    return [
        (event.name, event.time_range.start / 1e6, event.time_range.end / 1e6) for event in events
        if (event.device_type.name == device.upper() if device == "cuda" else _is_outermost(event))
    ]  # fmt: skip


def _is_outermost(event: Any) -> bool:
    """Whether an event on the CPU is a call of an operator that is not made by another one."""
    above = event.cpu_parent
    while above is not None and "::" not in above.name:
        above = above.cpu_parent
    return above is None and "::" in event.name


def _summary(work: Sequence[tuple[str, float, float]], calls: int) -> dict[str, Any]:
    """Seconds a call by class, "idle" among them, kernels a call by class, and the ten longest names."""
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
    longest = [[name[:120], taken] for name, taken in names.most_common(10)]
    kernels = {title: number / calls for title, number in count.items()}
    return {"seconds": dict(seconds), "kernels": kernels, "longest": longest, "span": span / calls if work else 0.0}


# Compile time


def measure_compile(job: Job) -> None:
    """Says the seconds that one backend's own part takes in this process, whose caches are empty.

    Of fxwrap that is everything its backend does with the graphs that AOTAutograd hands it; of Inductor what its inner
    compiler does with them, which leaves out its passes over the joint graph. The whole first call stands beside it. A
    small function goes through the backend before, which pays what a process pays once.
    """
    (side,) = job.backends
    timer = _Timer()
    backend = _backend_around(job, side, timer.around)
    small = torch.compile(lambda x: torch.softmax(x * 2 + 1, dim=-1), backend=backend)
    with torch.set_grad_enabled(job.training):
        given = small(torch.randn(64, 64, device=job.device, requires_grad=job.training))
        if job.training:
            given.sum().backward()
    torch._dynamo.reset()
    setup, timer.seconds = timer.seconds, 0.0
    model, inputs = job.build(), job.inputs(0)
    call(job, model, inputs)
    synchronize(torch.device(job.device))
    start = time.perf_counter()
    call(job, torch.compile(model, backend=backend, fullgraph=True), inputs)
    synchronize(torch.device(job.device))
    whole = time.perf_counter() - start
    say(side=side, measure="compile", seconds=timer.seconds, first_call=whole, setup=setup, **timer.counts)


def _backend_around(job: Job, side: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """A side as a backend whose compiler of one graph has something around it."""
    name, chosen = switches(side)
    if name == "fxwrap":
        options = Options.from_mapping({**(job.options or {}), **chosen})
        return make_backend(options, around(compile_graph))
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def backend(graph: Any, inputs: Any) -> Any:
        return compile_fx(graph, inputs, inner_compile=around(compile_fx_inner), config_patches=chosen)

    return backend


class _Timer:
    """Adds up the time that wrapped functions take, and counts the lines of the programs that they give."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.counts: dict[str, int] = {}
        self._inside = False

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed; a call inside another one counts once."""

        def timed(*arguments: Any, **keywords: Any) -> Any:
            if self._inside:
                return function(*arguments, **keywords)
            self._inside, start = True, time.perf_counter()
            try:
                found = function(*arguments, **keywords)
            finally:
                self._inside = False
                self.seconds += time.perf_counter() - start
            if isinstance(found, Compiled):
                self.counts = counts(found)
            return found

        return timed


def counts(compiled: Compiled) -> dict[str, int]:
    """How many kernels a program has, and lines that launch, call and allocate."""
    kinds = Counter(type(line) for line in compiled.program.body.lines)
    return {
        "kernels": len(compiled.program.kernels),
        "launches": kinds[Launch],
        "calls": kinds[Call],
        "allocations": kinds[Alloc] + kinds[Pool],
    }


def main() -> None:
    """Does the job."""
    job = Job(**json.loads(sys.argv[1]))
    torch.set_num_threads(job.threads)
    tasks = job.task.split(",")
    with alone(job.lock, shared=True):
        if "compile" in tasks:
            measure_compile(job)
        sides = prepared(job) if {"run", "profile"} & set(tasks) else {}
        made_alone = wrappers(job) if "run" in tasks else {}
    with alone(job.lock):
        if "run" in tasks:
            measure_memory(job, sides)
            measure_times(job, sides)
            if made_alone:
                measure_wrappers(job, made_alone)
        if "profile" in tasks:
            measure_classes(job, sides)


if __name__ == "__main__":
    main()
