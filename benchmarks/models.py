"""The test suite's models, forward and training step: compile time and run time of Inductor and fxwrap.

Compile time is the first call through a backend less the first call through a backend that stops after Dynamo and
AOTAutograd ("aot_eager_decomp_partition"), each in its own process with empty caches. The cost that a process pays once
(imports, workers, probes of the compiler) is that of a small function, which is called before.
Run time is the host's time of a call, with the device's work, of eager, Inductor and fxwrap in interleaved rounds of
one process. Errors are norm(difference) / norm(reference) against the same model in float64, of the worst of: outputs;
or loss, all gradients, all parameters after the step, all buffers. Run:

"fxwrap:cpp" among the backends is fxwrap with its C++ emitter.

    python benchmarks/models.py [--models gpt2,vit] [--steps forward] [--gpt2-layers 12] [--device cuda] [--record]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.measure_kernels import BACKENDS
from benchmarks.model_jobs import BASELINE, Job
from benchmarks.results import Cell, Report, add_record_option, display_name, geometric_mean, split_lists
from fxwrap.runtime.native import build_bridge, build_planner
from tests.support.models import MODELS

SIX = ("gpt2", "bert", "llama", "t5", "vit", "resnet")
SCRIPT = Path(__file__).parent / "model_jobs.py"
CACHE_VARIABLES = ("FXWRAP_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
FIRST_CALLS = (BASELINE, "inductor", "fxwrap")
OWN_CACHES = {"inductor": ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"), "fxwrap": ("FXWRAP_CACHE_DIR",)}
"""The caches that a backend fills; on a GPU both fill Triton's, whose files are named by content."""
CONTENDERS = (*BACKENDS, "fxwrap:cpp")


@dataclass
class Row:
    """The measurements of a model: seconds by backend, errors, and failures."""

    model: str
    step: str
    first_calls: dict[str, list[float]] = field(default_factory=dict)
    setups: dict[str, list[float]] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Model and step."""
        return f"{self.model} {self.step}"

    def first_call(self, backend: str) -> float:
        """The median of the first calls; NaN if there is none."""
        return _median(self.first_calls.get(backend))

    def setup(self, backend: str) -> float:
        """The median of the small function's first calls; NaN if there is none."""
        return _median(self.setups.get(backend))

    def compile_seconds(self, backend: str) -> float:
        """Seconds beyond Dynamo and AOTAutograd."""
        return self.first_call(backend) - self.first_call(BASELINE)

    @property
    def compile_ratio(self) -> float:
        """fxwrap's compile time to Inductor's."""
        return self.compile_seconds("fxwrap") / self.compile_seconds("inductor")

    def run_ratio(self, above: str, below: str) -> float:
        """The ratio of two run times; NaN if one is missing."""
        return self.times.get(above, math.nan) / self.times.get(below, math.nan)


def _median(samples: Sequence[float] | None) -> float:
    return statistics.median(samples) if samples else math.nan


@dataclass(frozen=True)
class Processes:
    """Starts processes of jobs within a time limit, with their caches in a folder, with or without a wheel's libraries.

    `warm_caches` are the caches of earlier processes by variable.
    """

    folder: Path
    link_libraries: bool
    time_limit: float | None
    warm_caches: dict[str, Path] = field(default_factory=dict)

    def caches(self, warm: bool) -> dict[str, Path]:
        """Returns the cache folders of a new process: those of earlier processes if `warm`, else empty ones."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        caches = {name: folder / name for name in CACHE_VARIABLES} | (self.warm_caches if warm else {})
        for path in caches.values():
            path.mkdir(exist_ok=True)
        for library in (build_bridge().folder, build_planner().parent) if self.link_libraries else ():
            if not (linked := caches["FXWRAP_CACHE_DIR"] / library.name).exists():
                linked.symlink_to(library)
        return caches

    def run_job(self, job: Job, warm: bool) -> dict[str, Any]:
        """Runs a job in a new process; a failure is `{"failure": text}`."""
        caches = self.caches(warm)
        try:
            finished = subprocess.run(
                [sys.executable, str(SCRIPT), json.dumps(dataclasses.asdict(job))],
                env=os.environ | {name: str(path) for name, path in caches.items()},
                capture_output=True,
                text=True,
                check=False,
                timeout=self.time_limit,
            )
        except subprocess.TimeoutExpired:
            return {"failure": f"stopped after {self.time_limit} s"}
        if job.backends[0] in OWN_CACHES:
            self.warm_caches.update({name: caches[name] for name in OWN_CACHES[job.backends[0]]})
        return _result(finished)


def _result(finished: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Returns the result of a process."""
    if finished.returncode == 0:
        return dict(json.loads(finished.stdout.splitlines()[-1]))
    errors = [line for line in finished.stderr.splitlines() if line.strip() and not line.startswith(" ")]
    raised = [line for line in errors if "Error" in line or "Exception" in line]
    return {"failure": ((raised or errors)[-1:] or [f"exit code {finished.returncode}"])[0]}


def measure_compile(row: Row, job: Job, repeats: int, processes: Processes) -> None:
    """Adds first calls to a row, backend by backend."""
    for _ in range(repeats):
        for backend in (BASELINE, *[name for name in job.backends if name in FIRST_CALLS]):
            if backend in row.failures:
                continue
            result = processes.run_job(dataclasses.replace(job, task="first_call", backends=(backend,)), warm=False)
            if "failure" in result:
                row.failures[backend] = result["failure"]
                continue
            row.first_calls.setdefault(backend, []).append(result["seconds"])
            row.setups.setdefault(backend, []).append(result["setup"])


def measure_run(row: Row, job: Job, processes: Processes) -> None:
    """Adds run times and errors to a row, with the caches of its compile times."""
    result = processes.run_job(dataclasses.replace(job, task="run"), warm=True)
    if "failure" in result:
        row.failures["run"] = result["failure"]
        return
    row.times, row.errors = result["times"], result["errors"]
    row.failures.update(result["failures"])


def print_failures(row: Row) -> None:
    """Prints a line for each failure."""
    for name, text in row.failures.items():
        print(f"    {name} failed: {text}", flush=True)


def compile_cells(row: Row) -> dict[str, Cell]:
    """Returns a row of the table of compile times, in seconds."""
    cells: dict[str, Cell] = {"model": row.model, "step": row.step}
    for backend in FIRST_CALLS:
        name = "AOT only" if backend == BASELINE else display_name(backend)
        cells |= {f"{name}: small function, s": row.setup(backend), f"{name}: model, s": row.first_call(backend)}
    beyond = {f"{display_name(backend)}, s": row.compile_seconds(backend) for backend in FIRST_CALLS[1:]}
    return {**cells, **beyond, "fxwrap / Inductor": row.compile_ratio}


def compile_summary(rows: Sequence[Row]) -> str:
    """Returns the total of compile times, and the worst ratio."""
    compared = [row for row in rows if not math.isnan(row.compile_ratio)]
    if not compared:
        return "compile time: nothing to compare"
    ours, theirs = (sum(row.compile_seconds(name) for row in compared) for name in ("fxwrap", "inductor"))
    worst = max(compared, key=lambda row: row.compile_ratio)
    text = f"fxwrap/inductor, compile time beyond AOTAutograd: {ours:.1f} s of {theirs:.1f} s in total, "
    return text + f"ratio {ours / theirs:.3f}, worst {worst.compile_ratio:.3f} ({worst.name})"


def run_cells(row: Row, backends: Sequence[str]) -> dict[str, Cell]:
    """Returns a row of the table of run times, in microseconds."""
    cells: dict[str, Cell] = {"model": row.model, "step": row.step}
    for backend in backends:
        micros = 1e6 * row.times[backend] if backend in row.times else None
        cells |= {f"{display_name(backend)}, us": micros, f"{display_name(backend)} error": row.errors.get(backend)}
    return cells


def run_summary(title: str, ratios: Mapping[str, float]) -> str:
    """Returns the geometric mean and the worst of the existing ratios."""
    existing = {name: ratio for name, ratio in ratios.items() if ratio > 0}
    if not existing:
        return f"{title}: nothing to compare"
    worst = max(existing, key=lambda name: existing[name])
    mean = geometric_mean(existing.values())
    return f"{title}: geometric mean {mean:.3f} of {len(existing)}, worst {existing[worst]:.3f} ({worst})"


def measured_rows(chosen: argparse.Namespace) -> list[tuple[Row, Job]]:
    """The rows to measure."""
    rows = []
    for model in chosen.models:
        layers = chosen.gpt2_layers if model.startswith("gpt2") else None
        title = f"{model}, {layers} layers" if layers else model
        for steps in chosen.steps:
            job = Job(
                "run", model, steps == "training", tuple(chosen.backends), chosen.device, layers, chosen.threads,
                chosen.rounds, chosen.cold_process, chosen.options, chosen.lock,
            )  # fmt: skip
            rows.append((Row(title, steps), job))
    return rows


def parsed_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(SIX), help=f"some of {', '.join(MODELS)}, with commas")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", default="forward,training", help="one of them or both, with a comma")
    parser.add_argument("--measure", choices=("compile", "run", "both"), default="both")
    parser.add_argument("--gpt2-layers", type=int, help="layers of GPT-2 (the suite's has 2)")
    parser.add_argument("--backends", default=",".join(BACKENDS), help=f"some of {', '.join(CONTENDERS)}, with commas")
    parser.add_argument("--repeats", type=int, default=3, help="processes for each compile time")
    parser.add_argument("--rounds", type=int, default=25, help="interleaved rounds of run times")
    parser.add_argument("--threads", type=int, default=2, help="of torch on the CPU")
    parser.add_argument(
        "--cold-process", action="store_true",
        help="no small function first: imports count, for the AOT baseline too (it imports much of Inductor)",
    )  # fmt: skip
    parser.add_argument(
        "--link-bridge", action="store_true",
        help="give fxwrap's empty cache the native libraries, built once for each torch (implied by the C++ emitter)",
    )  # fmt: skip
    parser.add_argument("--time-limit", type=float, help="seconds that a process may take")
    parser.add_argument("--lock", help="a file that scripts beside this one name too: one of them times at a time")
    parser.add_argument("--options", type=json.loads, default={}, help="fxwrap's options, as JSON")
    add_record_option(parser)
    chosen = parser.parse_args()
    split_lists(parser, chosen, {"models": MODELS, "backends": CONTENDERS, "steps": ("forward", "training")})
    return chosen


def main() -> None:
    """Prints the tables."""
    chosen = parsed_arguments()
    torch.set_num_threads(chosen.threads)
    with tempfile.TemporaryDirectory() as folder:
        _measure(chosen, Path(folder))


def _measure(chosen: argparse.Namespace, folder: Path) -> None:
    link_libraries = chosen.link_bridge or chosen.options.get("emitter") == "cpp" or "fxwrap:cpp" in chosen.backends
    pairs = [(row, job, Processes(folder, link_libraries, chosen.time_limit)) for row, job in measured_rows(chosen)]
    rows = [row for row, _, _ in pairs]
    if chosen.measure != "run":
        report = Report(f"models-compile-{chosen.device}", chosen, chosen.device, f"medians of {chosen.repeats}")
        for row, job, processes in pairs:
            measure_compile(row, job, chosen.repeats, processes)
            report.add(compile_cells(row), dataclasses.asdict(row))
            print_failures(row)
        print(compile_summary(rows))
    if chosen.measure != "compile":
        report = Report(f"models-run-{chosen.device}", chosen, chosen.device, f"medians of {chosen.rounds} rounds")
        for row, job, processes in pairs:
            measure_run(row, job, processes)
            report.add(run_cells(row, chosen.backends), dataclasses.asdict(row))
            print_failures(row)
        for below in ("inductor", "eager"):
            for above in [name for name in chosen.backends if name.startswith("fxwrap")]:
                ratios = {row.name: row.run_ratio(above, below) for row in rows}
                print(run_summary(f"{above}/{below}, run time", ratios))


if __name__ == "__main__":
    main()
