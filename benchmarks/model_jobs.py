"""One measurement of one model, in its own process; `fx_output.py` starts it and reads its last line.

python benchmarks/model_jobs.py JOB_AS_JSON
"""

from __future__ import annotations

import dataclasses
import fcntl
import gc
import importlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.full_models import full_case
from benchmarks.results import parse_backend
from tests.support.models import MODELS, ModelCase, train_step

SEED = 1
INPUT_SETS = 8
SECONDS_A_SAMPLE = 0.05


class _TinyKernels(nn.Module):
    """Softmaxes of a small matrix along alternating dimensions, each a separate kernel."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        for index in range(self.count):
            x = torch.softmax(x * y, index % 2)
        return {"x": x}


def _small_matrices(generator: torch.Generator, _training: bool) -> dict[str, Tensor]:
    return {name: torch.randn(8, 8, generator=generator) for name in ("x", "y")}


TINY_KERNELS = ModelCase("tiny_kernels", lambda _dropout, count: _TinyKernels(count), _small_matrices, layers=200)
"""A graph whose launches cost more than its kernels' work."""


@dataclass(frozen=True)
class Job:
    """A measurement.

    Fields:
        task: "first_call" (seconds of the first call through one backend), "run" (times and errors of several),
            "emitted" (times of the program alone, by emitter) or "graphs" (times to make the emitted graph, by form).
        model: a name in the test suite's MODELS; `layers` is its number of layers, None for the suite's.
        size: "suite" for the test suite's models; "full" or "small" for those of `full_models.py`.
        dtype: torch's name of the dtype of weights and floating-point inputs.
        training: a forward and a backward in train mode; else a forward in eval mode without gradients.
        backends: names as `measure_kernels.compile_with` takes them.
        cold_process: whether no small function is called before the first call.
        options: fxwrap's.
        lock: a file; of the processes of `gpu_jobs.py` with the same lock, one at a time takes run times.
    """

    task: str
    model: str
    training: bool
    backends: tuple[str, ...]
    device: str = "cpu"
    layers: int | None = None
    threads: int = 2
    rounds: int = 25
    cold_process: bool = False
    options: Mapping[str, Any] | None = None
    lock: str | None = None
    size: str = "suite"
    dtype: str = "float32"

    @property
    def case(self) -> ModelCase:
        """The model with its inputs."""
        if self.size != "suite":
            return full_case(self.model, small=self.size == "small")
        return TINY_KERNELS if self.model == TINY_KERNELS.name else MODELS[self.model]

    def build(self) -> nn.Module:
        """The model on its device; equal weights at every call."""
        model = self.case.build(SEED, layers=self.layers).to(self.device, getattr(torch, self.dtype))
        return model.train() if self.training else model.eval()

    def inputs(self, seed: int) -> dict[str, Tensor]:
        """Fresh inputs on the device."""
        drawn = self.case.inputs(seed, training=self.training)
        dtype = getattr(torch, self.dtype)
        return {name: item.to(self.device, dtype if item.is_floating_point() else None) for name, item in drawn.items()}


def call(job: Job, function: Callable[..., Any], inputs: Mapping[str, Tensor]) -> Any:
    """A forward without gradients, or a forward and a backward."""
    if not job.training:
        with torch.no_grad():
            return function(**inputs)
    return function(**inputs)["loss"].backward()


def first_call(job: Job) -> dict[str, Any]:
    """Seconds of the first call of the model through one backend, after one of a small function.

    The small function pays for imports, workers and probes of the compiler; in a cold process the first call does. An
    eager call loads libraries before.
    """
    (name,) = job.backends
    model, inputs = job.build(), job.inputs(0)
    call(job, model, inputs)
    if not job.cold_process:
        with torch.no_grad():
            _compiled(job, name, _small)(torch.randn(64, 64, device=job.device))
    torch._dynamo.reset()
    if job.device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call(job, _compiled(job, name, model), inputs)
    if job.device == "cuda":
        torch.cuda.synchronize()
    return {"seconds": time.perf_counter() - start}


def _compiled(job: Job, name: str, target: Any) -> Any:
    """`measure_kernels.compile_with`, but imports fxwrap only if it is used, because its import counts."""
    base, chosen = parse_backend(name)
    if base != "fxwrap":
        return target if base == "eager" else torch.compile(target, backend=base, options=chosen or None)
    backend = importlib.import_module("fxwrap.compile.backend").fxwrap
    return torch.compile(target, backend=backend, options={**(job.options or {}), **chosen})


def _small(x: Tensor) -> Tensor:
    return torch.softmax(x * 2 + 1, dim=-1)


def run(job: Job) -> dict[str, Any]:
    """Returns median seconds of a call and errors against float64 by backend, or failures."""
    measuring = importlib.import_module("benchmarks.measure_kernels")
    reference = observed(job, job.build().double(), measuring.in_float64, measuring.wide)
    contenders, errors, failures = {}, {}, {}
    for backend in job.backends:
        model = job.build()
        function = measuring.compile_with(backend, model, job.options or {})
        try:
            call(job, function, job.inputs(0))
            errors[backend] = measuring.relative_error(call_results(job, model, function), reference)
            contenders[backend] = _contender(job, function, measuring.Contender)
        except Exception as error:  # noqa: BLE001 - a backend's failure is reported
            failures[backend] = measuring.first_line(error)
    times = measuring.interleaved_host_times(contenders, job.rounds, torch.device(job.device))
    return {"times": _medians(times), "errors": errors, "failures": failures}


def _medians(times: Mapping[str, Any]) -> dict[str, float]:
    return {name: timed.median for name, timed in times.items()}


def emitted(job: Job) -> dict[str, Any]:
    """Returns median host seconds of a call of the forward program alone, by emitter."""
    measuring, package = importlib.import_module("benchmarks.measure_kernels"), importlib.import_module("fxwrap")
    programs: list[Any] = []

    def record(program: Any) -> Any:
        programs.append(program)
        return program

    model = job.build()
    compiled = measuring.compile_with("fxwrap", model, {**(job.options or {}), "passes": (record,)})
    call(job, compiled, job.inputs(0))
    (program,) = programs
    inputs = [_random_input(item.value.type) for item in program.inputs]
    graph = package.to_fx(program)
    forms = {"python": package.to_python(program).flat, "fx": graph.flat, "fx, as a module": graph.graph_module}
    functional = package.to_fx(program, form="functional").graph_module
    forms |= {"fx, functional": functional, "fx, in place again": package.fx.in_place(functional)}
    forms["cpp"] = package.to_cpp(program).flat
    contenders = {name: _repeated(form, inputs, measuring) for name, form in forms.items()}
    with torch.no_grad():
        rounds = job.rounds if job.device == "cuda" else 8 * job.rounds  # two calls take less than a millisecond
        times = measuring.interleaved_host_times(contenders, rounds, torch.device(job.device), wait=False)
    launches = sum(type(line).__name__ == "Launch" for line in program.body.lines)
    return {"times": _medians(times), "launches": launches, "lines": len(program.body.lines)}


GRAPH_FORMS: Mapping[str, Mapping[str, str]] = {
    "kernels": {"kernels": "text"},
    "regions": {"kernels": "subgraph"},
    "functional kernels": {"kernels": "text", "fx_form": "functional"},
    "functional regions": {"kernels": "subgraph", "fx_form": "functional"},
}
"""The forms of an emitted graph by the options that choose them."""


def graphs(job: Job) -> dict[str, Any]:
    """Returns median CPU seconds from the forward graph of ATen operators to the emitted one, with its code, by form.

    No kernel is compiled. The forms alternate.
    """
    package, capture = importlib.import_module("fxwrap"), importlib.import_module("tests.support.capture")
    case = dataclasses.replace(job.case, layers=job.layers or job.case.layers)
    (captured,) = capture.capture_graphs(case, training=False, device=job.device)
    seconds: dict[str, list[float]] = {form: [] for form in GRAPH_FORMS}
    modules = {}
    for _ in range(job.rounds + 1):  # the first round fills the caches of expressions and schemas
        for form, options in GRAPH_FORMS.items():
            chosen = package.Options(emitter="fx", compile_cache=False, **(job.options or {}), **options)
            gc.collect()
            start = time.process_time()
            modules[form] = package.compile_graph(captured.graph_module, options=chosen).graph_module
            seconds[form].append(time.process_time() - start)
    calls = package.fx.regions(modules["regions"])
    times = {form: statistics.median(items[1:]) for form, items in seconds.items()}
    nodes, distinct = len(captured.graph_module.graph.nodes), len({call.name for call in calls})
    return {"times": times, "nodes": nodes, "calls": len(calls), "regions": distinct}


def _random_input(type_: Any) -> Tensor:
    """Returns a tensor of a program's input type; integers are valid indices."""
    tensor = torch.empty_strided(type_.sizes, type_.strides, dtype=type_.dtype, device=type_.device)
    return tensor.uniform_(0.1, 1.1) if type_.dtype.is_floating_point else tensor.random_(0, 2)


def _repeated(form: Callable[..., Any], inputs: list[Tensor], measuring: Any) -> Any:
    """Returns a contender of two calls, whose kernels fit into the device's queue."""
    with torch.no_grad():
        form(*inputs)
    return measuring.Contender(lambda: [form(*inputs) for _ in range(2)], 2)


@contextmanager
def exclusive_lock(lock: str | None, shared: bool = False) -> Iterator[None]:
    """Holds a lock file, exclusively or shared."""
    if lock is None:
        yield
        return
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield


def observed(job: Job, model: nn.Module, in_float64: Any, wide: Any) -> list[Tensor]:
    """Returns the results in float64."""
    return in_float64(lambda: call_results(job, model, model, wide), torch.float32)()


def call_results(job: Job, model: nn.Module, function: Any, prepare: Callable[[Any], Any] = dict) -> list[Tensor]:
    """Returns a call's outputs; for training the loss, and gradients, parameters and buffers as one vector each.

    A single gradient can consist of rounding errors only (a bias before a softmax), hence vectors.
    """
    inputs = prepare(job.inputs(100))
    if not job.training:
        output = call(job, function, inputs)
        return [item for item in output.values() if isinstance(item, Tensor)]
    step = train_step(model, function, inputs, seed=0)
    return [step.loss, *[_vector(group.values()) for group in (step.gradients, step.parameters, step.buffers) if group]]


def _vector(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([item.detach().double().flatten() for item in tensors])


def _contender(job: Job, function: Any, make: Any) -> Any:
    """Returns a contender of calls on rotating inputs."""
    sets = [job.inputs(200 + index) for index in range(INPUT_SETS)]

    def sweep() -> None:
        for inputs in sets:
            call(job, function, inputs)

    sweep()
    start = time.perf_counter()
    sweep()
    sweeps = max(1, math.ceil(SECONDS_A_SAMPLE / (time.perf_counter() - start)))

    def sample() -> None:
        for _ in range(sweeps):
            sweep()

    return make(sample, sweeps * len(sets))


def main() -> None:
    """Runs the job and prints its result as one line of JSON."""
    job = Job(**json.loads(sys.argv[1]))
    torch.set_num_threads(job.threads)
    match job.task:
        case "first_call":
            result = first_call(job)
        case "run":
            result = run(job)
        case "emitted":
            result = emitted(job)
        case "graphs":
            result = graphs(job)
        case other:
            raise ValueError(f"unknown task {other!r}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
