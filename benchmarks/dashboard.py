"""PyTorch's performance dashboard over models of `transformers` and `timm`: fxwrap beside TorchInductor and eager.

    python benchmarks/dashboard.py --device cuda --shard 1/4 --seconds 500     # again, until it prints "all rows done"
    python benchmarks/dashboard.py --device cuda --collect --record cuda       # rows to results/dashboard-cuda.json
    python benchmarks/dashboard.py --batch 2 --length 128 --only 'GPT2LM|BertFor|T5Small|resnet50' \\
        --modes inference-float32-static --sides inductor,fxwrap,inductor:freezing,fxwrap:freezing   # on a CPU

A mode is STEP-PRECISION-BATCH, such as training-amp-static. Each model and mode is a row: all sides are measured in
one process, times in interleaved rounds. A row is a file in the folder `--rows`, written when it is complete; rows that
are there are not measured again, so that a run that was stopped continues. A process that crashes or takes longer than
`--limit` seconds leaves a row with what it had reported. Measures, as on the dashboard:

- accuracy: `torch._dynamo.utils.same` with its tolerances, against eager and eager in float64, for inputs that the
  compile did not see. A side passes a row if it is accurate and does not fail; other measures count if all sides pass.
- speedup: eager's median time over the side's. A training step is a forward and a backward.
- compile: seconds of the first call, Dynamo included, after a small function was compiled; caches are empty.
- memory: the most that a call allocates beyond what was allocated before it.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from benchmarks.dashboard_jobs import MODE_OPTIONS, DashboardJob
from benchmarks.dashboard_models import Sizes, names
from benchmarks.dashboard_tables import EAGER_FAILS, INDUCTOR, OWN, summary, worst
from benchmarks.models import Processes
from benchmarks.results import REPOSITORY, Cell, add_record_option, cell_text, environment, result_path, write_result
from fxwrap.runtime.native import build_bridge

SCRIPT = Path(__file__).parent / "dashboard_jobs.py"
STEPS, PRECISIONS, BATCHES = ("inference", "training"), ("bfloat16", "amp", "float32"), ("static", "dynamic")
MODES = ("inference-bfloat16-static", "training-amp-static", "inference-bfloat16-dynamic", "training-bfloat16-static")
FACTS = ("script", "arguments", "commit", "date", "machine", "versions")
SIDES = ("inductor", "fxwrap", "inductor:max-autotune-no-cudagraphs", "fxwrap:max-autotune-no-cudagraphs")


def value_of(row: Mapping[str, Any], side: str, measure: str) -> float | None:
    """Returns a measure of a side, None if it is missing: "compile" and "time" in seconds, "memory" in bytes."""
    measured = row["sides"].get(side, {}).get(measure)
    if measured is None:
        return None
    match measure:
        case "time":
            return statistics.median(measured["seconds"])
        case "memory":
            return float(measured["peak"])
        case _:
            return float(measured["seconds"])


def status(row: Mapping[str, Any], side: str) -> str:
    """Returns "pass", "wrong", the text of a failure, or `EAGER_FAILS`."""
    measures = row["sides"].get(side, {})
    if "failure" in measures:
        return str(measures["failure"]["text"])
    if "accuracy" not in row["sides"].get("eager", {}):
        return EAGER_FAILS
    if "accuracy" not in measures:
        return row["failure"] or "not measured"
    return "pass" if measures["accuracy"]["passes"] else "wrong"


def table_cells(row: Mapping[str, Any], sides: Sequence[str]) -> dict[str, Cell]:
    """Returns the cells of a row: eager's time, and of each side its status, speedup, compile time and memory."""
    eager = value_of(row, "eager", "time")
    cells: dict[str, Cell] = {"library": row["library"], "model": row["model"], "mode": row["mode"]}
    cells["eager, ms"] = None if eager is None else 1e3 * eager
    cells["failure"] = row["failure"] or row["sides"].get("eager", {}).get("failure", {}).get("text") or None
    for side in sides:
        seconds, memory = value_of(row, side, "time"), value_of(row, side, "memory")
        cells[f"{side}: status"] = status(row, side)
        cells[f"{side}: speedup"] = eager / seconds if eager and seconds else None
        cells[f"{side}: compile, s"] = value_of(row, side, "compile")
        cells[f"{side}: peak, MB"] = None if memory is None else memory / 1e6
    return cells


# Rows


@dataclasses.dataclass(frozen=True)
class Dashboard:
    """The rows of a command line, measured one by one or several at a time."""

    chosen: argparse.Namespace
    folder: Path
    until: float

    def missing(self) -> list[tuple[str, str, str]]:
        """Returns library, model and mode of this shard's rows that are not there."""
        rows = [(*item, mode) for mode in self.chosen.modes for item in names() if re.search(self.chosen.only, item[1])]
        part, parts = self.chosen.shard
        return [row for row in rows[part - 1 :: parts] if not self._is_done(row[1], row[2])]

    def _is_done(self, model: str, mode: str) -> bool:
        path = self.path(model, mode)
        return path.exists() and set(self.chosen.sides) <= set(json.loads(path.read_text())["chosen sides"])

    @property
    def rows_folder(self) -> Path:
        """The folder of rows of this device and these sizes."""
        return self.chosen.rows / f"{self.chosen.device}-{self.sizes_text.replace(' ', '-')}"

    @property
    def sizes(self) -> Sizes:
        """The sizes of models and inputs."""
        return Sizes(self.chosen.small, self.chosen.batch, self.chosen.length)

    @property
    def sizes_text(self) -> str:
        """The sizes in words."""
        chosen = {name: getattr(self.chosen, name) for name in ("batch", "length")}
        changed = [f"{name} {size}" for name, size in chosen.items() if size]
        return " ".join(["small models" if self.chosen.small else "base models", *changed])

    def path(self, model: str, mode: str) -> Path:
        """Returns the file of a row."""
        return self.rows_folder / f"{model}--{mode}.json"

    def measure(self, library: str, model: str, mode: str) -> None:
        """Measures a row and writes its file; a row that the end of the time interrupts has none."""
        remaining = self.until - time.monotonic()
        if remaining < self.chosen.least:
            return
        seconds = min(self.chosen.limit, remaining)
        start = time.monotonic()
        sides, failure = self._run(model, mode, seconds)
        if failure.startswith("stopped") and seconds < self.chosen.limit:
            reported = [f"{side} {', '.join(measures)}" for side, measures in sides.items()]
            print(f"{model} {mode}: interrupted after {seconds:.0f} s, with {'; '.join(reported)}", flush=True)
            return
        row = {
            "library": library, "model": model, "mode": mode, "failure": failure, "sides": sides,
            "chosen sides": self.chosen.sides, "seconds": round(time.monotonic() - start, 1),
            **environment(torch.device(self.chosen.device)),
        }  # fmt: skip
        write_atomically(self.path(model, mode), json.dumps(row))
        cells = table_cells(row, self.chosen.sides)
        print(" | ".join(map(cell_text, cells.values())), f"({row['seconds']} s)", flush=True)

    def _run(self, model: str, mode: str, seconds: float) -> tuple[dict[str, dict[str, Any]], str]:
        """Returns the measures by side that a process reports, and why it ended early, if so."""
        step, precision, batch = mode.split("-")
        job = DashboardJob(
            model, step, precision, batch, tuple(self.chosen.sides), self.chosen.device, self.sizes,
            self.chosen.rounds, self.chosen.threads, self.chosen.options, str(self.folder / "lock"),
        )  # fmt: skip
        caches = Processes(self.folder, True, None).caches(warm=False)
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), json.dumps(dataclasses.asdict(job))],
            env=os.environ | {name: str(path) for name, path in caches.items()},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            output, errors = process.communicate(timeout=seconds)
            failure = ""
        except subprocess.TimeoutExpired:
            failure = f"stopped after {seconds:.0f} s"
            os.killpg(process.pid, signal.SIGKILL)  # its compile workers too
            output, errors = process.communicate()
        if process.returncode and not failure:
            failure = f"exit code {process.returncode}: {([''] + errors.strip().splitlines())[-1][:160]}"
        return _measures(output), failure

    def collect(self) -> None:
        """Prints and records the rows that are there, with the facts of the newest run."""
        rows = [json.loads(path.read_text()) for path in sorted(self.rows_folder.glob("*--*.json"))]
        if not rows:
            print(f"no rows in {self.rows_folder}")
            return
        rows.sort(key=lambda row: (row["mode"], row["library"], row["model"]))
        tables = [table_cells(row, self.chosen.sides) for row in rows]
        for line in summary(tables):
            print(" | ".join(f"{name} {cell_text(cell)}" for name, cell in line.items()))
        for side in [side for side in self.chosen.sides if side.startswith(OWN)]:
            slowest = [f"{name} {ratio:.2f}" for name, ratio in worst(tables, side)]
            print(f"{side}, slowest beside Inductor: {', '.join(slowest)}")
        path = result_path("dashboard", self.chosen)
        if path is not None:
            runs = sorted({f"{row['machine']['device']}, commit {row['commit'][:8]}" for row in rows})
            facts = {name: max(rows, key=lambda row: row["date"])[name] for name in FACTS}
            note = f"{self.sizes_text}; rows of {'; '.join(runs)}"
            write_result(path, {**facts, "note": note, "rows": tables, "raw": [row["sides"] for row in rows]})


def _measures(output: str) -> dict[str, dict[str, Any]]:
    """Returns the measurements that a process printed, by side and measure."""
    sides: dict[str, dict[str, Any]] = {}
    for line in output.splitlines():
        try:
            message = json.loads(line)
        except ValueError:
            continue
        if isinstance(message, dict) and {"side", "measure"} <= set(message):
            sides.setdefault(message.pop("side"), {})[message.pop("measure")] = message
    return sides


def write_atomically(path: Path, text: str) -> None:
    """Writes a file under another name and renames it, so that a reader finds it whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(text)
    temporary.replace(path)


# The command line


def _shard(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a part such as 1/4")
    return int(part), int(parts)


def _modes(text: str) -> list[str]:
    modes = text.split(",")
    if unknown := set(modes) - {"-".join(parts) for parts in itertools.product(STEPS, PRECISIONS, BATCHES)}:
        raise argparse.ArgumentTypeError(f"unknown modes: {', '.join(sorted(unknown))}")
    return modes


def _sides(text: str) -> list[str]:
    sides = text.split(",")
    known = {f"{backend}:{mode}".rstrip(":") for backend in (INDUCTOR, OWN) for mode in MODE_OPTIONS}
    if unknown := set(sides) - known:
        raise argparse.ArgumentTypeError(
            f"unknown sides: {', '.join(sorted(unknown))}; known: {', '.join(sorted(known))}"
        )
    return sides


def parsed_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--only", default="", help="a regular expression of model names")
    parser.add_argument("--modes", type=_modes, default=list(MODES), help="STEP-PRECISION-BATCH, with commas")
    parser.add_argument("--sides", type=_sides, default=list(SIDES), help="BACKEND or BACKEND:MODE, with commas")
    parser.add_argument("--small", action="store_true", help="few layers and channels, two samples")
    parser.add_argument("--batch", type=int, help="samples, instead of each model's own number")
    parser.add_argument("--length", type=int, help="words of a sample, instead of each model's own number")
    parser.add_argument("--rows", type=Path, default=REPOSITORY / "build" / "dashboard", help="the folder of rows")
    parser.add_argument("--shard", type=_shard, default=(1, 1), metavar="I/N", help="a part of the rows")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after this time")
    parser.add_argument("--limit", type=float, default=400, help="seconds for one row")
    parser.add_argument("--least", type=float, default=20, help="seconds that must remain to begin a row")
    parser.add_argument("--parallel", type=int, default=1, help="processes that compile at a time; one measures times")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds")
    parser.add_argument("--threads", type=int, default=2, help="of torch on the CPU")
    parser.add_argument("--options", type=json.loads, default={"emitter": "cpp"}, help="fxwrap's options, as JSON")
    parser.add_argument("--collect", action="store_true", help="measure nothing: print and record the rows")
    add_record_option(parser)
    return parser.parse_args(arguments)


def main() -> None:
    """Measures the missing rows, or collects them."""
    chosen = parsed_arguments()
    with tempfile.TemporaryDirectory() as name:
        dashboard = Dashboard(chosen, Path(name), time.monotonic() + chosen.seconds)
        if chosen.collect:
            dashboard.collect()
            return
        start = time.monotonic()
        build_bridge()  # else each row would build it
        print(
            f"{len(dashboard.missing())} rows to measure; the bridge took {time.monotonic() - start:.0f} s", flush=True
        )
        with ThreadPoolExecutor(chosen.parallel) as pool:
            list(pool.map(lambda row: dashboard.measure(*row), dashboard.missing()))
        left = len(dashboard.missing())
    print(f"{left} rows are missing" if left else "all rows done")


if __name__ == "__main__":
    main()
