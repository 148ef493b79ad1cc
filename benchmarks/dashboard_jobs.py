"""One row of the dashboard, in a process of its own; `dashboard.py` starts it and reads what it prints.

Each line of its output is a JSON object with one measurement of one side, so that a process reports until it dies:

    {"side": ..., "measure": "compile" | "accuracy" | "memory" | "time" | "failure", "at": SECONDS, ...}

"at" is the time since the process imported its modules. A compile has the seconds of Dynamo (frames and guards, without
the compiler that it calls) as "dynamo", and fxwrap's those of its back end as "backend".

    python benchmarks/dashboard_jobs.py JOB_AS_JSON
"""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.testing import reduce_to_scalar_loss
from torch._dynamo.utils import compilation_time_metrics, same

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import gpu_jobs
from benchmarks.dashboard_models import DashboardModel, Sizes, dashboard_model
from benchmarks.measure_kernels import Contender, first_line, interleaved_host_times, leaves, synchronize
from benchmarks.model_jobs import exclusive_lock
from benchmarks.sweep_models import Inputs
from fxwrap.comparison.measure import peak_bytes
from fxwrap.compile import compiles
from fxwrap.compile import fxwrap as fxwrap_backend

TOLERANCES = {"inference": 1e-3, "training": 1e-2}
"""Of the dashboard: an error against float64 may exceed three times eager's by a tenth of it."""

SECONDS_A_SAMPLE = 0.05
NICENESS = 10
"""Of a process and its workers while they compile."""

DYNAMO_METRICS = ("_compile.compile_inner", "OutputGraph.call_user_compiler")
"""torch's measurements of all that Dynamo does with a frame, and of the part that is the compiler's."""

CHECKED_SEED, TIMED_SEED = 1, 2
"""Results are compared for inputs that the compile did not see."""

MODE_OPTIONS: Mapping[str, Mapping[str, object]] = {
    "": {},
    "max-autotune-no-cudagraphs": {"autotune": True},
    "reduce-overhead": {"cuda_graphs": True},
    "max-autotune": {"autotune": True, "cuda_graphs": True},
    "freezing": {"freeze": True},
}
"""fxwrap's options by mode of a side."""


START = time.monotonic()


def report(**measurement: Any) -> None:
    """Prints a measurement, with its time."""
    gpu_jobs.report(**measurement, at=round(time.monotonic() - START, 1))


@dataclass(frozen=True)
class DashboardJob:
    """A row: a model in one mode.

    Fields:
        step: "inference", or "training": a forward and a backward in train mode.
        precision: "bfloat16" or "float32" of weights and images, or "amp": float32 under autocast to bfloat16.
        batch: "static", or "dynamic": the batch size is a symbol.
        sides: "BACKEND" or "BACKEND:MODE" with torch.compile's modes, or "freezing"; "eager" is always measured, and
            "aot_eager" calls the operators of AOTAutograd's graph.
        options: fxwrap's.
        lock: a file, the device's; a process holds it alone while it measures times and memory, or runs in float64,
            and together with others while it checks results. Compilation needs no lock.
    """

    model: str
    step: str
    precision: str
    batch: str
    sides: tuple[str, ...]
    device: str
    sizes: Sizes
    rounds: int
    threads: int
    options: Mapping[str, Any]
    lock: str | None = None


class Subject:
    """The model of a job on its device, with its state, and how it is called."""

    def __init__(self, job: DashboardJob) -> None:
        self.job = job
        torch.manual_seed(0)
        self.source: DashboardModel = dashboard_model(job.model, job.sizes)
        model = self.source.build().to(job.device, self.dtype)
        self.model = model.train() if job.step == "training" else model.eval()
        self.state = {name: item.clone() for name, item in model.state_dict().items()}

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.job.precision == "bfloat16" else torch.float32

    def inputs(self, seed: int, dtype: torch.dtype | None = None) -> Inputs:
        """Returns random inputs on the device, floating-point ones in the model's dtype unless another is named."""
        chosen = self.dtype if dtype is None else dtype
        drawn = self.source.inputs(self.model, seed)
        inputs = {name: item.to(self.job.device, chosen if item.is_floating_point() else None)
                  for name, item in drawn.items()}  # fmt: skip
        if self.job.batch == "dynamic":
            for item in inputs.values():
                torch._dynamo.maybe_mark_dynamic(item, 0)
        return inputs

    def call(self, function: Callable[..., Any], inputs: Inputs, autocast: bool = True) -> list[Tensor]:
        """Calls the model, and in training runs the backward; returns the tensors of its output, with the loss."""
        is_training = self.job.step == "training"
        amp = autocast and self.job.precision == "amp"
        precision = torch.autocast(self.job.device, torch.bfloat16) if amp else contextlib.nullcontext()
        with torch.set_grad_enabled(is_training), precision:
            output = function(**inputs)
            tensors = list(leaves(dict(output) if isinstance(output, Mapping) else output))
            if is_training:
                loss = output["loss"] if isinstance(output, Mapping) else reduce_to_scalar_loss(output)
                tensors.append(loss)
        if is_training:
            loss.backward()
        return tensors

    def results(self, model: nn.Module, function: Callable[..., Any], inputs: Inputs, autocast: bool = True) -> Any:
        """Returns copies of a call's outputs, and in training of gradients and buffers, from equal random numbers."""
        torch.manual_seed(0)
        model.zero_grad(set_to_none=True)
        results = [item.detach().clone() for item in self.call(function, inputs, autocast)]
        if self.job.step == "training":
            gradients = {name: item.grad for name, item in model.named_parameters() if item.grad is not None}
            results += [gradients[name].clone() for name in sorted(gradients)]
            results += [item.clone() for item in model.buffers() if item.is_floating_point()]
            model.zero_grad(set_to_none=True)
        return results

    def restore(self) -> None:
        """Gives parameters and buffers their first values again."""
        self.model.load_state_dict(self.state)


def compiled(job: DashboardJob, side: str, model: nn.Module) -> Callable[..., Any]:
    """Returns the model through a side's backend and mode."""
    backend, _, mode = side.partition(":")
    if backend == "eager":
        return model
    if backend == "fxwrap":
        options = {**job.options, **MODE_OPTIONS[mode]}
        return torch.compile(model, backend=fxwrap_backend, options=options)
    if mode == "freezing":
        return torch.compile(model, backend=backend, options={"freezing": True})
    return torch.compile(model, backend=backend, mode=mode or None)


@dataclass(frozen=True)
class References:
    """The results of eager, and of eager in float64, None if the model does not run in it."""

    eager: list[Tensor]
    exact: list[Tensor] | None


def references(subject: Subject) -> References:
    """Returns the results that sides are compared with, on the CPU. Raises if eager fails, or memory is exhausted."""
    inputs = subject.inputs(CHECKED_SEED)
    eager = [item.cpu() for item in subject.results(subject.model, subject.model, inputs)]
    subject.restore()
    try:
        doubled = copy.deepcopy(subject.model).double()
        inputs = subject.inputs(CHECKED_SEED, torch.float64)
        exact = [item.cpu() for item in subject.results(doubled, doubled, inputs, autocast=False)]
    except torch.OutOfMemoryError:
        raise
    except Exception:  # noqa: BLE001 - the dashboard then compares with eager alone
        return References(eager, None)
    return References(eager, exact)


def _is_accurate(subject: Subject, results: list[Tensor], reference: References) -> tuple[bool, str]:
    """Returns whether results pass the dashboard's test, and the first difference that it logged."""
    differences: list[str] = []

    def log(message: str, *values: object) -> None:
        differences.append(message % values if values else message)

    if len(results) != len(reference.eager):
        return False, f"{len(results)} results, eager has {len(reference.eager)}"
    tolerance = TOLERANCES[subject.job.step]
    for result, eager, exact in zip(results, reference.eager, reference.exact or reference.eager, strict=True):
        eager, exact = eager.to(result.device), exact.to(result.device)  # one at a time: memory is shared
        if not same(eager, result, exact, tol=tolerance, equal_nan=True, log_error=log):
            return False, (differences or [""])[0]
    return True, ""


def release_memory(device: str) -> None:
    """Returns unused memory to the device, which other processes use too."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def prepare(subject: Subject) -> dict[str, Callable[..., Any]]:
    """Returns the functions of the sides that work; reports first calls, accuracy and failures."""
    torch._dynamo.config.recompile_limit = 64  # each side counts as a compile of the same code
    lock = subject.job.lock
    with exclusive_lock(lock):
        reference = references(subject)
        release_memory(subject.job.device)
    functions = {}
    for side in ("eager", *subject.job.sides):
        try:
            function = compiled(subject.job, side, subject.model)
            _warm_up(subject.job, side)
            inputs = subject.inputs(0)
            earlier, dynamo = compiles(), dynamo_seconds()
            start = time.perf_counter()
            subject.call(function, inputs)
            synchronize(torch.device(subject.job.device))
            seconds = time.perf_counter() - start
            own = [record.total_seconds for record in compiles() if record not in earlier]
            parts = {"dynamo": dynamo_seconds() - dynamo, **({"backend": sum(own)} if own else {})}
            report(side=side, measure="compile", seconds=seconds, **parts)
            subject.restore()
            with exclusive_lock(lock, shared=True):
                results = subject.results(subject.model, function, subject.inputs(CHECKED_SEED))
                subject.restore()
                passes, difference = _is_accurate(subject, results, reference)
                del results
                release_memory(subject.job.device)
            report(side=side, measure="accuracy", passes=passes, difference=difference[:200])
        except Exception as problem:  # noqa: BLE001 - a side's failure is reported
            report(side=side, measure="failure", text=first_line(problem)[:200])
            continue
        functions[side] = function
    return functions


def dynamo_seconds() -> float:
    """Returns the seconds that Dynamo has taken in this process, without the compilers that it called."""
    whole, called = (sum(compilation_time_metrics.get(name, ())) for name in DYNAMO_METRICS)
    return whole - called


def _warm_up(job: DashboardJob, side: str) -> None:
    """Compiles a small function, to pay what a process pays once for a backend: imports, workers, probes."""
    layer = nn.Sequential(nn.Linear(64, 64), nn.Softmax(-1)).to(job.device)
    compiled(job, side, layer)(torch.randn(64, 64, device=job.device)).sum().backward()
    synchronize(torch.device(job.device))


def measure(subject: Subject, functions: Mapping[str, Callable[..., Any]]) -> None:
    """Reports the peak memory and the times of each side, in interleaved rounds."""
    inputs = subject.inputs(TIMED_SEED)

    def run(function: Callable[..., Any], calls: int = 1) -> None:
        for _ in range(calls):
            torch.compiler.cudagraph_mark_step_begin()
            subject.model.zero_grad(set_to_none=True)
            subject.call(function, inputs)

    device = torch.device(subject.job.device)
    for function in functions.values():
        run(function, 2)
        synchronize(device)
    for side, function in functions.items():
        subject.model.zero_grad(set_to_none=True)
        report(side=side, measure="memory", peak=peak_bytes(lambda: None, lambda _, function=function: run(function)))  # type: ignore[misc]
    contenders = {}
    for side, function in functions.items():
        start = time.perf_counter()
        run(function)
        synchronize(device)
        calls = max(1, round(SECONDS_A_SAMPLE / (time.perf_counter() - start)))
        contenders[side] = Contender(lambda function=function, calls=calls: run(function, calls), calls)  # type: ignore[misc]
    for side, timed in interleaved_host_times(contenders, subject.job.rounds, device).items():
        report(side=side, measure="time", seconds=[float(f"{sample:.4g}") for sample in timed.samples])


def raise_priority() -> None:
    """Lets the threads of this process run before those of processes that compile, if it may (as root)."""
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, int(task), 0)


def main() -> None:
    """Runs the job."""
    fields = json.loads(sys.argv[1])
    job = DashboardJob(**{**fields, "sizes": Sizes(**fields["sizes"])})
    warnings.filterwarnings("ignore")
    torch.set_num_threads(job.threads)
    os.nice(NICENESS)
    try:
        subject = Subject(job)
        functions = prepare(subject)
    except Exception as problem:  # noqa: BLE001 - eager's failure is reported
        report(side="eager", measure="failure", text=first_line(problem)[:200])
        return
    with exclusive_lock(job.lock):
        raise_priority()
        measure(subject, functions)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # compile workers end with this process; to wait for them takes seconds
