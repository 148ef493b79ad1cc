"""Full-size models on a GPU beside Inductor: time, host time, memory, compile time, and where the time goes.

GPT-2 (12 layers, 8 x 512), a Llama of 8 layers (2048 wide, 4 x 512), BERT (12 layers, 8 x 512), T5 (6 and 6 layers,
8 x 512), ViT-B (16 images), ResNet-50 (32), forward, and a forward and backward of GPT-2 and Llama, in bfloat16 with
random weights. Sides: eager, Inductor (default, its C++ wrapper, `+graphs`, which is its mode "reduce-overhead") and
fxwrap by emitter, with and without CUDA graphs.

    python benchmarks/gpu_models.py --json results.json                        # run times of all, about ten minutes
    python benchmarks/gpu_models.py --measure compile --models gpt2,llama      # cold compile times
    python benchmarks/gpu_models.py --measure profile --sides inductor,fxwrap:cpp
    python benchmarks/gpu_models.py --device cpu --small                       # the script itself, on any machine

Each model is a process, several at a time; what they find out is printed as soon as it is known, and the tables at the
end or when `--budget` seconds are over. They compile beside each other, and take times one after the other, while none
compiles. All sides of a model are timed in one process in interleaved rounds. Columns:

- ms: median of a call with the device's work, many calls in a row; "/ inductor" is its ratio to Inductor's of the same
  kind (`+graphs` to `inductor:+graphs`, else to `inductor`).
- host us: median until one call returns, the device's queue empty before; wrapper us: the same of what the compiler
  made of the model's graph, without Dynamo's guards and AOTAutograd's wrappers, which are torch's (forward only).
- error: norm(difference) / norm(reference in float64), of the worst output; or of loss, all gradients, all weights.
- peak MB: most memory that a call holds beyond what is there before it; held MB: what compiling and three calls left.
- allocs: allocations of a call. Of the profile: kernels and microseconds a call by class, and what is idle between.
- compile s: of the backend's own part, first call of a process with empty caches (see `gpu_jobs.py`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.full_models import FULL
from benchmarks.measure_kernels import describe, environment, geometric_mean
from benchmarks.model_jobs import Job
from benchmarks.models import Processes

SCRIPT = Path(__file__).parent / "gpu_jobs.py"
TRAINED = ("gpt2", "llama")
SIDES = (
    "eager", "inductor", "inductor:cpp_wrapper", "inductor:+graphs", "fxwrap:python", "fxwrap:cpp", "fxwrap:fx",
    "fxwrap:python+graphs", "fxwrap:cpp+graphs", "fxwrap:fx+graphs",
)  # fmt: skip
COMPILED = ("inductor", "inductor:cpp_wrapper", "fxwrap:python", "fxwrap:cpp")
CLASSES = ("product", "attention", "convolution", "generated", "copy", "other", "idle")
NAME = 16


@dataclass
class Row:
    """What was found out about a model: by side, by measure, what its process said."""

    name: str
    found: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    failure: str = ""

    def add(self, said: Mapping[str, Any]) -> None:
        """Takes what a process said; of one measure the last is kept."""
        facts = {name: item for name, item in said.items() if name not in ("side", "measure")}
        self.found.setdefault(said["side"], {})[said["measure"]] = facts

    def fact(self, side: str, measure: str, name: str) -> Any:
        """One number, or None."""
        return self.found.get(side, {}).get(measure, {}).get(name)

    def ratio(self, side: str, measure: str, name: str) -> float | None:
        """A side's number over Inductor's of the same kind."""
        own, other = self.fact(side, measure, name), self.fact(rival(side), measure, name)
        return own / other if own is not None and other else None


def rival(side: str) -> str:
    """The Inductor that a side is compared with."""
    return "inductor:+graphs" if side.endswith("+graphs") else "inductor"


@dataclass
class Runner:
    """Starts processes, prints what they say, and ends them when time is over."""

    processes: Processes
    until: float
    limit: float
    rows: dict[str, Row] = field(default_factory=dict)
    json_path: Path | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, title: str, job: Job, fresh: bool) -> None:
        """Does a job in a process of its own, with empty caches of its own where they are to be `fresh`."""
        with self._lock:
            row = self.rows.setdefault(title, Row(title))
        left = min(self.limit, self.until - time.monotonic())
        if left <= 1:
            row.failure = "no time was left"
            return
        caches = self.processes.caches(warm=False) if fresh else {}
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), json.dumps(dataclasses.asdict(job))],
            env=os.environ | {name: str(path) for name, path in caches.items()},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        cut = threading.Timer(left, process.kill)
        cut.start()
        errors: list[str] = []
        reader = threading.Thread(target=lambda: errors.extend(process.stderr or ()))
        reader.start()
        for line in process.stdout or ():
            self._take(row, line)
        code = process.wait()
        cut.cancel()
        reader.join()
        if code:
            last = [text.strip() for text in errors if text.strip()][-1:] or [""]
            row.failure = f"cut off after {left:.0f} s" if code == -9 else f"exit code {code}: {last[0]}"
            print(f"  {title}: {row.failure}", flush=True)

    def _take(self, row: Row, line: str) -> None:
        """Takes a line of a process."""
        try:
            said = json.loads(line)
        except ValueError:
            return
        with self._lock:
            row.add(said)
            print(f"  {row.name:<{NAME}} {line.strip()[:300]}", flush=True)
            write_json(self.json_path, self.facts, list(self.rows.values()))


def write_json(path: Path | None, facts: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Writes what is known so far."""
    if path is not None:
        results = [{"name": row.name, "failure": row.failure, "sides": row.found} for row in rows]
        path.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")


def number(value: Any, scale: float = 1.0, form: str = ".2f") -> str:
    """A number for a table; a dash where there is none."""
    return "-" if value is None else format(value * scale, form)


def run_table(row: Row) -> str:
    """The run times of a model, a line a side."""
    heads = (
        "ms", "/ inductor", "host us", "/ inductor", "wrapper us", "/ inductor", "error", "peak MB", "/ inductor",
        "held MB", "allocs",
    )  # fmt: skip
    lines = ["", f"{row.name:<22}" + "".join(f"{head:>12}" for head in heads)]
    for side, found in row.found.items():
        if "failure" in found:
            lines.append(f"{side:<22}  {found['failure']['text'][:160]}")
            continue
        if "error" not in found:
            continue
        cells = (
            number(row.fact(side, "time", "seconds"), 1e3, ".3f"), number(row.ratio(side, "time", "seconds")),
            number(row.fact(side, "host", "seconds"), 1e6, ".0f"), number(row.ratio(side, "host", "seconds")),
            number(row.fact(side, "wrapper", "seconds"), 1e6, ".0f"), number(row.ratio(side, "wrapper", "seconds")),
            number(row.fact(side, "error", "error"), 1, ".1e"), number(row.fact(side, "memory", "peak"), 1e-6, ".1f"),
            number(row.ratio(side, "memory", "peak")), number(row.fact(side, "error", "held"), 1e-6, ".1f"),
            number(row.fact(side, "memory", "allocations"), 1, "d"),
        )  # fmt: skip
        lines.append(f"{side:<22}" + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join([*lines, *([f"  {row.failure}"] if row.failure else [])]) if len(lines) > 2 else ""


def profile_table(row: Row) -> str:
    """Microseconds and kernels of a call by class, a line a side."""
    lines = ["", f"{row.name:<22}" + "".join(f"{head:>18}" for head in CLASSES)]
    for side, found in row.found.items():
        if "classes" in found:
            seconds, kernels = found["classes"]["seconds"], found["classes"]["kernels"]
            cells = [f"{1e6 * seconds.get(name, 0):.0f} ({kernels.get(name, 0):.0f})" for name in CLASSES]
            lines.append(f"{side:<22}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines) if len(lines) > 2 else ""


def compile_table(rows: Sequence[Row]) -> str:
    """Seconds of the backends' own parts, and their ratio to Inductor's."""
    lines = ["", f"{'cold compile, s':<22}" + "".join(f"{side:>24}" for side in COMPILED)]
    for row in rows:
        cells = [
            f"{number(row.fact(side, 'compile', 'seconds'))} ({number(row.ratio(side, 'compile', 'seconds'))})"
            for side in COMPILED
        ]
        if any("compile" in found for found in row.found.values()):
            lines.append(f"{row.name:<22}" + "".join(f"{cell:>24}" for cell in cells))
    return "\n".join(lines) if len(lines) > 2 else ""


def summary(rows: Sequence[Row]) -> str:
    """Geometric means over the models, and the worst, of each side's ratios to Inductor's."""
    lines = [""]
    for measure, name, title in (
        ("time", "seconds", "time"), ("host", "seconds", "host time"), ("wrapper", "seconds", "wrapper's time"),
        ("memory", "peak", "peak memory"), ("compile", "seconds", "compile time"),
    ):  # fmt: skip
        for side in [side for side in SIDES if side.startswith("fxwrap")]:
            ratios = {row.name: ratio for row in rows if (ratio := row.ratio(side, measure, name))}
            if ratios:
                worst = max(ratios, key=lambda name: ratios[name])
                lines.append(
                    f"{side} / {rival(side)}, {title}: geometric mean {geometric_mean(ratios.values()):.3f} "
                    f"of {len(ratios)}, worst {ratios[worst]:.3f} ({worst})"
                )
    return "\n".join(lines)


def parsed_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(FULL), help=f"some of {', '.join(FULL)}, with commas")
    parser.add_argument("--steps", default="forward,training", help=f"training is of {' and '.join(TRAINED)} alone")
    parser.add_argument("--sides", default=",".join(SIDES), help=f"some of {', '.join(SIDES)}, with commas")
    parser.add_argument("--measure", default="run", help="run, profile, compile; several with commas")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and images")
    parser.add_argument("--small", action="store_true", help="tiny models: to try the script")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds")
    parser.add_argument("--parallel", type=int, default=3, help="processes that compile at a time")
    parser.add_argument("--threads", type=int, default=4, help="of torch on the CPU")
    parser.add_argument("--time-limit", type=float, default=400, help="seconds that a process may take")
    parser.add_argument("--budget", type=float, default=570, help="seconds after which all processes are ended")
    parser.add_argument("--options", type=json.loads, default={}, help="fxwrap's options, as JSON")
    parser.add_argument("--json", type=Path, help="file for the results as data")
    chosen = parser.parse_args()
    for name, known in (("models", FULL), ("steps", ("forward", "training")), ("sides", SIDES),
                        ("measure", ("run", "profile", "compile"))):  # fmt: skip
        given = getattr(chosen, name).split(",")
        if unknown := set(given) - set(known):
            parser.error(f"--{name}: {', '.join(sorted(unknown))} is not among {', '.join(known)}")
        setattr(chosen, name, given)
    return chosen


def jobs(chosen: argparse.Namespace, lock: Path) -> list[tuple[str, Job, bool]]:
    """Title and job of each process, and whether it needs empty caches."""
    found = []
    for model in chosen.models:
        for step in chosen.steps:
            if step == "training" and model not in TRAINED:
                continue
            job = Job(
                ",".join(task for task in chosen.measure if task != "compile"), model, step == "training",
                tuple(chosen.sides), chosen.device, None, chosen.threads, chosen.rounds, options=chosen.options,
                lock=str(lock), size="small" if chosen.small else "full", dtype=chosen.dtype,
            )  # fmt: skip
            if "compile" in chosen.measure:
                for side in [side for side in COMPILED if side in chosen.sides]:
                    alone = dataclasses.replace(job, task="compile", backends=(side,), lock=None)
                    found.append((f"{model} {step}", alone, True))
            if job.task:
                found.append((f"{model} {step}", job, False))
    return found


def main() -> None:
    """Runs the processes and prints the tables."""
    chosen = parsed_arguments()
    facts = environment(torch.device(chosen.device), chosen.options)
    print(describe(facts), flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runner = Runner(
            Processes(folder, True, None), time.monotonic() + chosen.budget, chosen.time_limit,
            json_path=chosen.json, facts=facts,
        )  # fmt: skip
        # compile times are taken one after the other: compilers use all processors
        workers = 1 if chosen.measure == ["compile"] else chosen.parallel
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(lambda item: runner.run(*item), jobs(chosen, folder / "lock")))
    rows = list(runner.rows.values())
    write_json(chosen.json, facts, rows)
    texts = [*map(run_table, rows), *map(profile_table, rows), compile_table(rows), summary(rows)]
    print("\n".join(text for text in texts if text))


if __name__ == "__main__":
    main()
