"""The test-suite's models, a forward and a step of training: compile time and run time of Inductor and fxwrap.

Compile time is what a backend adds: the first call through it less the first call through a backend that stops after
Dynamo and AOTAutograd ("aot_eager_decomp_partition"), each in a process of its own with empty caches, medians. What a
process pays once (imports, workers, probes of the compiler) shows in the first call of a small function, made before.
Run time is the host's time of a call, with the device's work, of eager, Inductor and fxwrap in interleaved rounds of
one process. Errors are norm(difference) / norm(reference) against the same model in float64, of the worst of: outputs;
or loss, all gradients, all parameters after the step, all buffers. Run:

"fxwrap:cpp" among the backends is fxwrap with its C++ emitter.

    python benchmarks/models.py [--models gpt2,vit] [--steps forward] [--gpt2-layers 12] [--device cuda] [--json FILE]
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

from benchmarks.measure_kernels import BACKENDS, describe, environment, geometric_mean
from benchmarks.model_jobs import BASELINE, Job
from fxwrap.runtime.native import build_bridge
from tests.models import MODELS

SIX = ("gpt2", "bert", "llama", "t5", "vit", "resnet")
SCRIPT = Path(__file__).parent / "model_jobs.py"
CACHE_VARIABLES = ("FXWRAP_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
FIRST_CALLS = (BASELINE, "inductor", "fxwrap")
OWN_CACHES = {"inductor": ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"), "fxwrap": ("FXWRAP_CACHE_DIR",)}
"""Which caches a backend fills; a run on a GPU would have both fill Triton's, with files named by content."""
CONTENDERS = (*BACKENDS, "fxwrap:cpp")
NAME = 28


@dataclass
class Row:
    """What was found out about a model: seconds by backend, errors, and why something is missing."""

    name: str
    first_calls: dict[str, list[float]] = field(default_factory=dict)
    setups: dict[str, list[float]] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def first_call(self, backend: str) -> float:
        """The median of the first calls; NaN where there is none."""
        return _median(self.first_calls.get(backend))

    def setup(self, backend: str) -> float:
        """The median of what the process paid before; NaN where there is none."""
        return _median(self.setups.get(backend))

    def compile_seconds(self, backend: str) -> float:
        """Seconds beyond what Dynamo and AOTAutograd take."""
        return self.first_call(backend) - self.first_call(BASELINE)

    @property
    def compile_ratio(self) -> float:
        """fxwrap's compile time to Inductor's."""
        return self.compile_seconds("fxwrap") / self.compile_seconds("inductor")

    def run_ratio(self, above: str, below: str) -> float:
        """The ratio of two run times; NaN where one is missing."""
        return self.times.get(above, math.nan) / self.times.get(below, math.nan)


def _median(samples: Sequence[float] | None) -> float:
    return statistics.median(samples) if samples else math.nan


@dataclass(frozen=True)
class Processes:
    """How processes of jobs are started: the folder for their caches, whether the bridge is there, how long they have.

    `known` are the caches of earlier processes by variable.
    """

    folder: Path
    link_bridge: bool
    time_limit: float | None
    known: dict[str, Path] = field(default_factory=dict)

    def caches(self, warm: bool) -> dict[str, Path]:
        """Folders for the caches of a new process: those that are known, or empty ones but for the bridge."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        caches = {name: folder / name for name in CACHE_VARIABLES} | (self.known if warm else {})
        for path in caches.values():
            path.mkdir(exist_ok=True)
        if self.link_bridge:
            bridge = build_bridge().folder
            if not (linked := caches["FXWRAP_CACHE_DIR"] / bridge.name).exists():
                linked.symlink_to(bridge)
        return caches

    def do(self, job: Job, warm: bool) -> dict[str, Any]:
        """Does a job in a new process, with the known caches or with empty ones; a failure is `{"failure": text}`."""
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
            return {"failure": f"cut off after {self.time_limit} s"}
        if job.backends[0] in OWN_CACHES:
            self.known.update({name: caches[name] for name in OWN_CACHES[job.backends[0]]})
        return _result(finished)


def _result(finished: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What a process found out."""
    if finished.returncode == 0:
        return dict(json.loads(finished.stdout.splitlines()[-1]))
    errors = [line for line in finished.stderr.splitlines() if line.strip() and not line.startswith(" ")]
    raised = [line for line in errors if "Error" in line or "Exception" in line]
    return {"failure": ((raised or errors)[-1:] or [f"exit code {finished.returncode}"])[0]}


def measure_compile(row: Row, job: Job, repeats: int, processes: Processes) -> None:
    """Adds the first calls to a row, the backends in turn."""
    for _ in range(repeats):
        for backend in (BASELINE, *[name for name in job.backends if name in FIRST_CALLS]):
            if backend in row.failures:
                continue
            result = processes.do(dataclasses.replace(job, task="first_call", backends=(backend,)), warm=False)
            if "failure" in result:
                row.failures[backend] = result["failure"]
                continue
            row.first_calls.setdefault(backend, []).append(result["seconds"])
            row.setups.setdefault(backend, []).append(result["setup"])


def measure_run(row: Row, job: Job, processes: Processes) -> None:
    """Adds run times and errors to a row; what its compile times left in caches is used."""
    result = processes.do(dataclasses.replace(job, task="run"), warm=True)
    if "failure" in result:
        row.failures["run"] = result["failure"]
        return
    row.times, row.errors = result["times"], result["errors"]
    row.failures.update(result["failures"])


def failures_text(row: Row) -> str:
    """A line for each failure."""
    return "".join(f"\n    {name} failed: {text}" for name, text in row.failures.items())


def compile_text(row: Row) -> str:
    """A row of the table of compile times."""
    setups = "".join(f"{row.setup(name):>10.2f}" for name in FIRST_CALLS)
    first = "".join(f"{row.first_call(name):>10.2f}" for name in FIRST_CALLS)
    beyond = "".join(f"{row.compile_seconds(name):>10.2f}" for name in FIRST_CALLS[1:])
    return f"{row.name:<{NAME}}{setups} |{first} |{beyond}{row.compile_ratio:>8.3f}{failures_text(row)}"


def compile_heading() -> str:
    """The two lines above the table of compile times."""
    names = "".join(f"{name:>10}" for name in ("AOT only", *FIRST_CALLS[1:]))
    beyond = "".join(f"{name:>10}" for name in FIRST_CALLS[1:])
    titles = f"{'small function':>30} |{'model':>30} |{'model, beyond AOT':>20}"
    return f"{'':<{NAME}}{titles}\n{'seconds':<{NAME}}{names} |{names} |{beyond}{'ratio':>8}"


def compile_summary(rows: Sequence[Row]) -> str:
    """All compile times together, and the worst ratio."""
    there = [row for row in rows if not math.isnan(row.compile_ratio)]
    if not there:
        return "compile time: nothing to compare"
    ours, theirs = (sum(row.compile_seconds(name) for row in there) for name in ("fxwrap", "inductor"))
    worst = max(there, key=lambda row: row.compile_ratio)
    text = f"fxwrap/inductor, compile time beyond AOTAutograd: {ours:.1f} s of {theirs:.1f} s together, "
    return text + f"ratio {ours / theirs:.3f}, worst {worst.compile_ratio:.3f} ({worst.name})"


def run_text(row: Row, backends: Sequence[str]) -> str:
    """A row of the table of run times."""
    cells = "".join(
        f"{1e6 * row.times[name]:>12.0f}{row.errors[name]:>9.1e}" if name in row.times else f"{'failed':>12}{'':>9}"
        for name in backends
    )
    ratios = "".join(f"{row.run_ratio(*pair):>8.2f}" for pair in (("fxwrap", "inductor"), ("fxwrap", "eager")))
    return f"{row.name:<{NAME}}{cells}{ratios}{failures_text(row)}"


def run_summary(title: str, ratios: Mapping[str, float]) -> str:
    """Geometric mean and worst of the ratios that there are."""
    there = {name: ratio for name, ratio in ratios.items() if ratio > 0}
    if not there:
        return f"{title}: nothing to compare"
    worst = max(there, key=lambda name: there[name])
    mean = geometric_mean(there.values())
    return f"{title}: geometric mean {mean:.3f} of {len(there)}, worst {there[worst]:.3f} ({worst})"


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
            rows.append((Row(f"{title} {steps}"), job))
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
        help="give fxwrap's empty cache the C++ bridge, built once for each torch (implied by the C++ emitter)",
    )  # fmt: skip
    parser.add_argument("--time-limit", type=float, help="seconds that a process may take")
    parser.add_argument("--lock", help="a file that scripts beside this one name too: one of them times at a time")
    parser.add_argument("--options", type=json.loads, default={}, help="fxwrap's options, as JSON")
    parser.add_argument("--json", type=Path, help="file for the results as data; times in seconds")
    chosen = parser.parse_args()
    known = {"models": list(MODELS), "backends": CONTENDERS, "steps": ("forward", "training")}
    for name, names in known.items():
        given = getattr(chosen, name).split(",")
        if unknown := set(given) - set(names):
            parser.error(f"--{name}: {', '.join(sorted(unknown))} is not among {', '.join(names)}")
        setattr(chosen, name, given)
    return chosen


def write_json(path: Path | None, facts: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Writes the rows so far."""
    if path is not None:
        results = [dataclasses.asdict(row) for row in rows]
        path.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")


def main() -> None:
    """Prints the tables."""
    chosen = parsed_arguments()
    torch.set_num_threads(chosen.threads)
    facts = environment(torch.device(chosen.device), chosen.options)
    print(describe(facts))
    with tempfile.TemporaryDirectory() as folder:
        _measure(chosen, facts, Path(folder))


def _measure(chosen: argparse.Namespace, facts: Mapping[str, Any], folder: Path) -> None:
    link_bridge = chosen.link_bridge or facts["emitter"] == "cpp" or "fxwrap:cpp" in chosen.backends
    pairs = [(row, job, Processes(folder, link_bridge, chosen.time_limit)) for row, job in measured_rows(chosen)]
    rows = [row for row, _, _ in pairs]
    if chosen.measure != "run":
        print(f"\nfirst calls in processes with empty caches, medians of {chosen.repeats}\n{compile_heading()}")
        for row, job, processes in pairs:
            measure_compile(row, job, chosen.repeats, processes)
            print(compile_text(row), flush=True)
            write_json(chosen.json, facts, rows)
        print(compile_summary(rows))
    if chosen.measure != "compile":
        print(f"\nmicroseconds of a call, medians of {chosen.rounds} interleaved rounds")
        heads = "".join(f"{name:>12}{'error':>9}" for name in chosen.backends)
        print(f"{'':<{NAME}}{heads}{'fx/ind':>8}{'fx/eag':>8}")
        for row, job, processes in pairs:
            measure_run(row, job, processes)
            print(run_text(row, chosen.backends), flush=True)
            write_json(chosen.json, facts, rows)
        for below in ("inductor", "eager"):
            for above in [name for name in chosen.backends if name.startswith("fxwrap")]:
                ratios = {row.name: row.run_ratio(above, below) for row in rows}
                print(run_summary(f"{above}/{below}, run time", ratios))


if __name__ == "__main__":
    main()
