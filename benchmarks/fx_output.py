"""Cost of the FX output: first call, steady state, host time of the program alone, and errors.

The sides are eager, Inductor, Inductor with its C++ wrapper and with its own FX output (`config.fx_wrapper`), and
fxwrap with each emitter, all through torch.compile. First calls run in their own processes with empty caches, after a
small function, which pays for imports and workers; with `--cold` there is none. Steady state is the time of a call
with the device's work, in interleaved rounds of one process. Errors are norm(difference) / norm(reference) against
float64. The last table is the host time of the forward program alone, without torch.compile and the device's work;
"fx, in place again" is the functional graph after `fxwrap.fx.in_place`. The table before it has the CPU time of the
process from the graph of ATen operators to the emitted graph, with kernels as text and as regions, in both forms; no
kernel is compiled. "tiny_kernels" is 200 softmaxes of an 8 x 8 matrix. `compile_scale.py --only chain` measures graph
construction, import and parsing by node, of 1,000 to 50,000 nodes. Run:

    python benchmarks/fx_output.py [--models gpt2,tiny_kernels] [--gpt2-layers 12] [--device cuda] [--record]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.model_jobs import TINY_KERNELS, Job
from benchmarks.processes import empty_caches, result_of
from benchmarks.results import Cell, Report, add_record_option, display_name, split_lists
from tests.support.models import MODELS

BACKENDS = (
    "eager", "inductor", "inductor:cpp_wrapper", "inductor:fx_wrapper", "fxwrap:fx", "fxwrap:fx+functional",
    "fxwrap:python", "fxwrap:cpp",
)  # fmt: skip


SCRIPT = Path(__file__).parent / "model_jobs.py"


@dataclass
class Row:
    """The measurements of a model: seconds by backend, errors, and failures."""

    model: str
    first_calls: dict[str, list[float]] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def first_call(self, backend: str) -> float:
        """The median of the first calls; NaN if there is none."""
        return statistics.median(self.first_calls.get(backend, [math.nan]))

    def run_ratio(self, above: str, below: str) -> float:
        """The ratio of two run times; NaN if one is missing."""
        return self.times.get(above, math.nan) / self.times.get(below, math.nan)


@dataclass(frozen=True)
class Processes:
    """Runs jobs in processes with empty caches in a folder, and a limit of seconds."""

    folder: Path
    limit: float | None

    def run(self, job: Job) -> dict[str, Any]:
        """Returns a job's result; a failure is `{"failure": text}`."""
        arguments = [str(SCRIPT), json.dumps(dataclasses.asdict(job))]
        try:
            return dict(result_of(arguments, empty_caches(self.folder), self.limit))
        except RuntimeError as error:
            return {"failure": error_line(str(error))}


def error_line(text: str) -> str:
    """Returns the last line of a process's messages that names an error, or else the last line."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(" ")]
    return ([line for line in lines if "Error" in line or "Exception" in line] or lines)[-1]


def print_failures(row: Row) -> None:
    """Prints a line for each failure."""
    for name, text in row.failures.items():
        print(f"    {name} failed: {text}", flush=True)


def measure(row: Row, job: Job, processes: Processes, repeats: int) -> None:
    """Adds first calls, run times and errors of all backends to a row."""
    measure_first_calls(row, job, processes, repeats)
    working = tuple([name for name in job.backends if name not in row.failures])
    result = processes.run(dataclasses.replace(job, backends=working))
    if "failure" in result:
        row.failures["run"] = result["failure"]
        return
    row.times, row.errors = result["times"], result["errors"]
    row.failures.update(result["failures"])


def measure_first_calls(row: Row, job: Job, processes: Processes, repeats: int) -> None:
    """Adds first calls to a row, each in its own process with empty caches."""
    for _ in range(repeats):
        for backend in [name for name in job.backends if name not in row.failures]:
            result = processes.run(dataclasses.replace(job, task="first_call", backends=(backend,)))
            if "failure" in result:
                row.failures[backend] = result["failure"]
            else:
                row.first_calls.setdefault(backend, []).append(result["seconds"])


def report_cold_calls(row: Row, report: Report) -> None:
    """Adds the first calls of processes that compile nothing else: they pay for imports and workers too."""
    for name, samples in row.first_calls.items():
        seconds = row.first_call(name)
        ratio = seconds / row.first_call("inductor") if "inductor" in row.first_calls else None
        cells: dict[str, Cell] = {"model": row.model, "side": display_name(name), "cold first call, s": seconds}
        report.add({**cells, "/ Inductor": ratio}, samples)
    print_failures(row)


def report_sides(row: Row, report: Report) -> None:
    """Adds a row for each backend to the table: first calls, calls, ratios to the Python emitter, errors."""
    for name in [name for name in BACKENDS if name in row.first_calls or name in row.failures]:
        measured = name in row.times
        cells: dict[str, Cell] = {
            "model": row.model,
            "side": display_name(name),
            "first call, s": row.first_call(name) if measured else None,
            "first call / FX": row.first_call(name) / row.first_call("fxwrap:fx") if measured else None,
            "call, us": 1e6 * row.times[name] if measured else None,
            "call / Python": row.run_ratio(name, "fxwrap:python") if measured else None,
            "error": row.errors.get(name),
        }
        report.add(cells, row.first_calls.get(name))
    print_failures(row)


def program_cells(name: str, result: dict[str, Any]) -> dict[str, Cell]:
    """Returns the row of the program alone, in microseconds and ratios to the Python emitter."""
    cells: dict[str, Cell] = {"program": name, "launches": result["launches"]}
    for form, seconds in result["times"].items():
        cells |= {f"{form}, us": 1e6 * seconds, f"{form} / python": seconds / result["times"]["python"]}
    return cells


def graph_cells(name: str, result: dict[str, Any]) -> dict[str, Cell]:
    """Returns the row of the time to make a graph: milliseconds with kernels as text, and the others' ratios to it."""
    times = result["times"]
    cells: dict[str, Cell] = {"model": name, "nodes": result["nodes"], "calls": result["calls"]}
    cells |= {"distinct regions": result["regions"], "kernels, ms": 1e3 * times["kernels"]}
    return cells | {f"{form} / kernels": times[form] / times["kernels"] for form in times if form != "kernels"}


def parsed_arguments() -> argparse.Namespace:
    """The command line."""
    known = (*MODELS, TINY_KERNELS.name)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="gpt2,tiny_kernels", help=f"some of {', '.join(known)}, with commas")
    parser.add_argument("--backends", default=",".join(BACKENDS), help="some of the default's, with commas")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--gpt2-layers", type=int, help="layers of GPT-2 (the suite's has 2)")
    parser.add_argument("--repeats", type=int, default=3, help="processes for each first call")
    parser.add_argument("--rounds", type=int, default=25, help="interleaved rounds of run times")
    parser.add_argument("--threads", type=int, default=2, help="of torch on the CPU")
    parser.add_argument("--time-limit", type=float, help="seconds that a process may take")
    tables = parser.add_mutually_exclusive_group()
    tables.add_argument("--only-programs", action="store_true", help="only the last table")
    tables.add_argument("--only-graphs", action="store_true", help="only the table of the time to make the graph")
    tables.add_argument("--cold", action="store_true", help="only first calls of processes without a small function")
    add_record_option(parser)
    chosen = parser.parse_args()
    split_lists(parser, chosen, {"models": known, "backends": BACKENDS})
    return chosen


def main() -> None:
    """Prints the tables."""
    chosen = parsed_arguments()
    torch.set_num_threads(chosen.threads)
    with tempfile.TemporaryDirectory() as folder:
        _measure(chosen, Path(folder))


def _measure(chosen: argparse.Namespace, folder: Path) -> None:
    jobs = []
    for model in chosen.models:
        layers = chosen.gpt2_layers if model.startswith("gpt2") else None
        backends = tuple(chosen.backends)
        jobs.append(Job("run", model, False, backends, chosen.device, layers, chosen.threads, chosen.rounds))
    processes = Processes(folder, chosen.time_limit)
    if chosen.cold:
        report = Report(f"fx_output-cold-{chosen.device}", chosen, chosen.device)
        for job in jobs:
            row = Row(job.model)
            measure_first_calls(row, dataclasses.replace(job, cold_process=True), processes, chosen.repeats)
            report_cold_calls(row, report)
        return
    if not chosen.only_programs and not chosen.only_graphs:
        report = Report(f"fx_output-{chosen.device}", chosen, chosen.device)
        for job in jobs:
            row = Row(job.model)
            measure(row, job, processes, chosen.repeats)
            report_sides(row, report)
    if not chosen.only_programs:
        report = Report(f"fx_output-graphs-{chosen.device}", chosen, chosen.device, "from ATen to the emitted graph")
        _report_task(jobs, "graphs", graph_cells, processes, report)
    if not chosen.only_graphs:
        report = Report(f"fx_output-programs-{chosen.device}", chosen, chosen.device, "the program alone")
        _report_task(jobs, "emitted", program_cells, processes, report)


def _report_task(
    jobs: Sequence[Job],
    task: str,
    cells: Callable[[str, dict[str, Any]], dict[str, Cell]],
    processes: Processes,
    report: Report,
) -> None:
    """Adds a row for each model to the table of a task."""
    for job in jobs:
        result = processes.run(dataclasses.replace(job, task=task, backends=("fxwrap",)))
        if "failure" in result:
            print(f"    {job.model} failed: {result['failure']}", flush=True)
        else:
            report.add(cells(job.model, result), result)


if __name__ == "__main__":
    main()
