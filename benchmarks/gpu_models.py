"""Full-size models on a GPU beside Inductor: time, host time, memory, plans, and where the time goes.

GPT-2 (12 layers, 8 x 512), a Llama of 8 layers (2048 wide, 4 x 512), BERT (12 layers, 8 x 512), T5 (6 and 6 layers,
8 x 512), ViT-B (16 images), ResNet-50 (32), forward, and a forward and backward of GPT-2, Llama and ResNet-50, in
bfloat16 with random weights. Sides: eager, Inductor (default, its C++ wrapper, `+graphs`, which is its mode
"reduce-overhead") and fxwrap by emitter, with and without CUDA graphs.

    python benchmarks/gpu_models.py --record                                   # run times, about ten minutes
    python benchmarks/gpu_models.py --measure profile --sides inductor,fxwrap:cpp
    python benchmarks/gpu_models.py --measure plan --models gpt2,llama,resnet --sides fxwrap:python,fxwrap:cpp
    python benchmarks/gpu_models.py --device cpu --small                       # the script itself, on any machine

Each model runs in its own process, several at a time, which are killed after `--budget` seconds. Messages are printed
as they arrive, and a model's rows when its process ends. Processes compile in parallel, but take times one at a time,
while none compiles. All sides of a model are timed in one process in interleaved rounds. Measures:

- time: median of a call with the device's work, over many calls in a row; "/ Inductor" is the ratio to Inductor's of
  the same kind (`+graphs` to `inductor:+graphs`, else to `inductor`).
- host: median until a call returns, with an empty device queue before; wrapper: the same for the compiled graph alone,
  without Dynamo's guards and AOTAutograd's wrappers (forward only).
- error: norm(difference) / norm(reference in float64), of the worst output; or of loss, all gradients, all weights.
- peak: most memory of a call beyond what was allocated before; held: memory after the compile and three calls.
- profile: kernels and device time of a call by class, and idle time.
- plan: the peak of each program's call over its plan's peak, the worst of a model's programs (see `gpu_jobs.py`).

The dashboard has compile times.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.full_models import FULL
from benchmarks.model_jobs import Job
from benchmarks.results import Cell, Report, add_record_option, geometric_mean, split_lists

SCRIPT = Path(__file__).parent / "gpu_jobs.py"
TRAINED = ("gpt2", "llama", "resnet")
SIDES = (
    "eager", "inductor", "inductor:cpp_wrapper", "inductor:+graphs", "fxwrap:python", "fxwrap:cpp", "fxwrap:fx",
    "fxwrap:python+graphs", "fxwrap:cpp+graphs", "fxwrap:fx+graphs",
)  # fmt: skip
CLASSES = ("matmul", "attention", "convolution", "generated", "copy", "other", "idle")
NAME = 16


@dataclass
class Row:
    """The measurements of a model, by side and measure."""

    name: str
    results: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    failure: str = ""

    def add(self, message: Mapping[str, Any]) -> None:
        """Adds a message of the process; the last message of a measure counts."""
        values = {name: item for name, item in message.items() if name not in ("side", "measure")}
        self.results.setdefault(message["side"], {})[message["measure"]] = values

    def value(self, side: str, measure: str, name: str) -> Any:
        """Returns one measured value, or None."""
        return self.results.get(side, {}).get(measure, {}).get(name)

    def scaled(self, side: str, measure: str, name: str, scale: float = 1.0) -> float | None:
        """Returns a measured value times `scale`, or None."""
        value = self.value(side, measure, name)
        return None if value is None else value * scale

    def ratio(self, side: str, measure: str, name: str) -> float | None:
        """Returns the ratio of a side's value to Inductor's of the same kind, or None."""
        own, other = self.value(side, measure, name), self.value(inductor_side(side), measure, name)
        return own / other if own is not None and other else None


def inductor_side(side: str) -> str:
    """Returns the Inductor side that a side is compared with."""
    return "inductor:+graphs" if side.endswith("+graphs") else "inductor"


@dataclass
class Runner:
    """Starts processes, prints their messages, and kills them at the time limit."""

    until: float
    limit: float
    rows: dict[str, Row] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, title: str, job: Job) -> Row:
        """Runs a job in a new process; returns its row."""
        with self._lock:
            row = self.rows.setdefault(title, Row(title))
        seconds = min(self.limit, self.until - time.monotonic())
        if seconds <= 1:
            row.failure = "the time budget is used up"
            return row
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), json.dumps(dataclasses.asdict(job))],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        errors: list[str] = []
        reader = threading.Thread(target=lambda: errors.extend(process.stderr or ()))
        reader.start()
        for line in process.stdout or ():
            self._receive(row, line)
        code = process.wait()
        timer.cancel()
        reader.join()
        if code:
            last = [text.strip() for text in errors if text.strip()][-1:] or [""]
            row.failure = f"stopped after {seconds:.0f} s" if code == -9 else f"exit code {code}: {last[0]}"
            print(f"  {title}: {row.failure}", flush=True)
        return row

    def _receive(self, row: Row, line: str) -> None:
        """Adds a line of a process to its row."""
        try:
            message = json.loads(line)
        except ValueError:
            return
        with self._lock:
            row.add(message)
            print(f"  {row.name:<{NAME}} {line.strip()[:300]}", flush=True)


LABELS = {
    "eager": "eager", "inductor": "Inductor", "inductor:cpp_wrapper": "Inductor C++ wrapper",
    "inductor:+graphs": "Inductor with graphs", "fxwrap:python": "Python", "fxwrap:cpp": "C++", "fxwrap:fx": "FX",
    "fxwrap:python+graphs": "Python with graphs", "fxwrap:cpp+graphs": "C++ with graphs",
    "fxwrap:fx+graphs": "FX with graphs",
}  # fmt: skip
"""The names of sides in tables."""


def run_cells(row: Row) -> dict[str, Cell]:
    """Returns times and peaks relative to Inductor, and errors."""
    cells: dict[str, Cell] = dict(zip(("model", "step"), row.name.split()))
    for side in row.results:
        if inductor_side(side) == side:
            cells[f"{LABELS[side]}, ms"] = row.scaled(side, "time", "seconds", 1e3)
        else:
            cells[f"{LABELS[side]} / Inductor"] = row.ratio(side, "time", "seconds")
    peaks = [side for side in ("fxwrap:python", "fxwrap:cpp") if side in row.results]
    cells |= {f"{LABELS[side]} peak / Inductor": row.ratio(side, "memory", "peak") for side in peaks}
    return {**cells, **{f"{LABELS[side]} error": row.scaled(side, "error", "error") for side in row.results}}


def host_cells(row: Row) -> dict[str, Cell]:
    """Returns host times relative to Inductor: of a whole call, and of the compiled graph alone."""
    cells: dict[str, Cell] = dict(zip(("model", "step"), row.name.split()))
    cells["Inductor, us"] = row.scaled("inductor", "host", "seconds", 1e6)
    for side in [side for side in row.results if side != inductor_side(side)]:
        cells[f"{LABELS[side]} host / Inductor"] = row.ratio(side, "host", "seconds")
        cells[f"{LABELS[side]} wrapper / Inductor"] = row.ratio(side, "wrapper", "seconds")
        cells[f"{LABELS[side]} allocations"] = row.scaled(side, "memory", "allocations")
    return cells


def profile_cells(row: Row, side: str) -> dict[str, Cell]:
    """Returns device microseconds and kernels of a call by class."""
    classes = row.results[side]["classes"]
    cells: dict[str, Cell] = {"model": row.name, "side": LABELS[side]}
    for name in CLASSES:
        cells[f"{name}, us"] = 1e6 * classes["seconds"].get(name, 0.0)
        if name != "idle":
            cells[f"{name} kernels"] = classes["kernels"].get(name, 0)
    return cells


def plan_cells(row: Row) -> dict[str, Cell]:
    """Returns the largest plan's peak, and the measured peaks over those of the plans."""
    cells: dict[str, Cell] = dict(zip(("model", "step"), row.name.split()))
    sides = [side for side, measures in row.results.items() if "plan" in measures]
    for side in sides:
        cells["plan, MB"] = row.scaled(side, "plan", "planned", 1e-6)
        cells |= {f"{LABELS[side]}: {kind} / plan": row.value(side, "plan", kind) for kind in ("all", "own")}
    return cells


def tables_of(chosen: argparse.Namespace) -> dict[str, Report]:
    """Returns the tables of the chosen measures by their names."""
    names = [name for measure in chosen.measure for name in ((measure, "host") if measure == "run" else (measure,))]
    note = {"plan": chosen.dtype}
    rounds = f"{chosen.dtype}, {chosen.rounds} interleaved rounds"
    return {name: Report(f"gpu_models-{name}", chosen, chosen.device, note.get(name, rounds)) for name in names}


def report_row(row: Row, tables: Mapping[str, Report]) -> None:
    """Adds a model's measurements to the tables, if its process came to its end."""
    if not row.results or row.failure:
        return
    for name, cells in (("run", run_cells), ("host", host_cells), ("plan", plan_cells)):
        if name in tables:
            tables[name].add(cells(row), row.results)
    for side in [side for side, measures in row.results.items() if "classes" in measures]:
        tables["profile"].add(profile_cells(row, side), row.results[side]["classes"])


def summary(rows: Sequence[Row]) -> str:
    """Returns geometric means and worst values of each side's ratios to Inductor's."""
    lines = [""]
    for measure, name, title in (
        ("time", "seconds", "time"), ("host", "seconds", "host time"), ("wrapper", "seconds", "wrapper time"),
        ("memory", "peak", "peak memory"),
    ):  # fmt: skip
        for side in [side for side in SIDES if side.startswith("fxwrap")]:
            ratios = {row.name: ratio for row in rows if (ratio := row.ratio(side, measure, name))}
            if ratios:
                worst = max(ratios, key=lambda name: ratios[name])
                lines.append(
                    f"{side} / {inductor_side(side)}, {title}: geometric mean {geometric_mean(ratios.values()):.3f} "
                    f"of {len(ratios)}, worst {ratios[worst]:.3f} ({worst})"
                )
    return "\n".join(lines)


def parsed_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(FULL), help=f"some of {', '.join(FULL)}, with commas")
    parser.add_argument("--steps", default="forward,training", help=f"training is of {', '.join(TRAINED)} alone")
    parser.add_argument("--sides", default=",".join(SIDES), help=f"some of {', '.join(SIDES)}, with commas")
    parser.add_argument("--measure", default="run", help="run, profile, plan; several with commas")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and images")
    parser.add_argument("--small", action="store_true", help="tiny models: to try the script")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds")
    parser.add_argument("--parallel", type=int, default=3, help="processes that compile at a time")
    parser.add_argument("--threads", type=int, default=4, help="of torch on the CPU")
    parser.add_argument("--time-limit", type=float, default=400, help="seconds that a process may take")
    parser.add_argument("--budget", type=float, default=570, help="seconds after which all processes are killed")
    parser.add_argument("--options", type=json.loads, default={}, help="fxwrap's options, as JSON")
    add_record_option(parser)
    chosen = parser.parse_args()
    steps, measures = ("forward", "training"), ("run", "profile", "plan")
    split_lists(parser, chosen, {"models": FULL, "steps": steps, "sides": SIDES, "measure": measures})
    return chosen


def jobs(chosen: argparse.Namespace, lock: Path) -> dict[str, Job]:
    """Returns the job of each process by its title."""
    steps = [(model, step) for model in chosen.models for step in chosen.steps if step == "forward" or model in TRAINED]
    return {
        f"{model} {step}": Job(
            ",".join(chosen.measure), model, step == "training", tuple(chosen.sides), chosen.device, None,
            chosen.threads, chosen.rounds, options=chosen.options, lock=str(lock),
            size="small" if chosen.small else "full", dtype=chosen.dtype,
        )
        for model, step in steps
    }  # fmt: skip


def main() -> None:
    """Runs the processes and prints the tables."""
    chosen = parsed_arguments()
    with tempfile.TemporaryDirectory() as name:
        runner = Runner(time.monotonic() + chosen.budget, chosen.time_limit)
        tables = tables_of(chosen)
        with ThreadPoolExecutor(chosen.parallel) as pool:
            running = [pool.submit(runner.run, *item) for item in jobs(chosen, Path(name) / "lock").items()]
            for done in as_completed(running):
                report_row(done.result(), tables)
    print(summary(list(runner.rows.values())))


if __name__ == "__main__":
    main()
