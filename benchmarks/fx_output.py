"""What the FX output costs: first call, steady state, host time of the program alone, and errors.

Eager, Inductor, Inductor with its own FX output (`config.fx_wrapper`, where it compiles at all), and fxwrap with each
of its emitters, all through torch.compile. First calls are made in processes of their own with empty caches, after that
of a small function, which pays for imports and workers; medians. Steady state is the time of a call, the device's work
included, in interleaved rounds of one process. Errors are norm(difference) / norm(reference) against float64. The last
table is the host's time of a call of the forward's program alone, without torch.compile, its guards and the device's
work; on a CPU, kernels are the host's work. "tiny_kernels" is 200 softmaxes of an 8 x 8 matrix. Run:

    python benchmarks/fx_output.py [--models gpt2,tiny_kernels] [--gpt2-layers 12] [--device cuda] [--json FILE]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.measure_kernels import describe, environment
from benchmarks.model_jobs import TINY_KERNELS, Job
from benchmarks.models import Processes, Row, failures_text
from tests.models import MODELS

BACKENDS = ("eager", "inductor", "inductor:fx_wrapper", "fxwrap:fx", "fxwrap:python", "fxwrap:cpp")
EMITTERS = ("python", "fx", "fx, as a module", "cpp")
NAME = 24


def measure(row: Row, job: Job, processes: Processes, repeats: int) -> None:
    """Adds first calls, run times and errors of all backends to a row."""
    for _ in range(repeats):
        for backend in [name for name in job.backends if name not in row.failures]:
            result = processes.do(dataclasses.replace(job, task="first_call", backends=(backend,)), warm=False)
            if "failure" in result:
                row.failures[backend] = result["failure"]
            else:
                row.first_calls.setdefault(backend, []).append(result["seconds"])
    able = tuple([name for name in job.backends if name not in row.failures])
    result = processes.do(dataclasses.replace(job, backends=able), warm=False)
    if "failure" in result:
        row.failures["run"] = result["failure"]
        return
    row.times, row.errors = result["times"], result["errors"]
    row.failures.update(result["failures"])


def table(row: Row) -> str:
    """A table of what was found out about a model: seconds, microseconds, and times the Python emitter's."""
    lines = [f"\n{row.name:<{NAME}}{'first call s':>14}{'a call us':>12}{'/ python':>10}{'error':>10}"]
    for name in BACKENDS:
        if name in row.times:
            ratio = row.run_ratio(name, "fxwrap:python")
            seconds, micros = row.first_call(name), 1e6 * row.times[name]
            cells = f"{seconds:>14.2f}{micros:>12.0f}{ratio:>10.2f}{row.errors[name]:>10.1e}"
        else:
            cells = f"{'failed':>14}" if name in row.failures else f"{'left out':>14}"
        lines.append(f"  {name:<{NAME - 2}}{cells}")
    return "\n".join(lines) + failures_text(row)


def emitted_text(name: str, result: dict[str, Any]) -> str:
    """A row of the table of the program alone."""
    if "failure" in result:
        return f"{name:<{NAME}}failed: {result['failure']}"
    times, python = result["times"], result["times"]["python"]
    cells = "".join(f"{1e6 * times[form]:>12.1f}{times[form] / python:>7.2f}" for form in EMITTERS)
    return f"{name:<{NAME}}{result['launches']:>9}{cells}"


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
    parser.add_argument("--only-programs", action="store_true", help="only the last table")
    parser.add_argument("--json", type=Path, help="file for the results as data; times in seconds")
    chosen = parser.parse_args()
    for option, names in (("models", known), ("backends", BACKENDS)):
        given = getattr(chosen, option).split(",")
        if unknown := set(given) - set(names):
            parser.error(f"--{option}: {', '.join(sorted(unknown))} is not among {', '.join(names)}")
        setattr(chosen, option, given)
    return chosen


def main() -> None:
    """Prints the tables."""
    chosen = parsed_arguments()
    torch.set_num_threads(chosen.threads)
    facts = environment(torch.device(chosen.device), {})
    print(describe(facts))
    with tempfile.TemporaryDirectory() as folder:
        results = _results(chosen, Path(folder))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps({**facts, **results}, indent=1) + "\n")


def _results(chosen: argparse.Namespace, folder: Path) -> dict[str, Any]:
    jobs = []
    for model in chosen.models:
        layers = chosen.gpt2_layers if model.startswith("gpt2") else None
        backends = tuple(chosen.backends)
        jobs.append(Job("run", model, False, backends, chosen.device, layers, chosen.threads, chosen.rounds))
    processes = Processes(folder, link_bridge=True, time_limit=chosen.time_limit)
    rows = []
    for job in [] if chosen.only_programs else jobs:
        row = Row(job.model)
        measure(row, job, processes, chosen.repeats)
        rows.append(dataclasses.asdict(row))
        print(table(row), flush=True)
    heads = "".join(f"{form:>12}{'ratio':>7}" for form in EMITTERS)
    print(f"\n{'the program alone, us':<{NAME}}{'launches':>9}{heads}")
    programs = {}
    for job in jobs:
        programs[job.model] = processes.do(dataclasses.replace(job, task="emitted", backends=("fxwrap",)), warm=False)
        print(emitted_text(job.model, programs[job.model]), flush=True)
    return {"results": rows, "programs": programs}


if __name__ == "__main__":
    main()
