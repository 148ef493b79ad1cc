"""PyTorch's performance dashboard over models of `transformers` and `timm`: fxwrap beside TorchInductor and eager.

    python benchmarks/dashboard.py --device cuda --gpus 4 --parallel 4 --seconds 540 --record cuda
    python benchmarks/dashboard.py --device cuda --collect --record cuda    # prints the figures of the rows
    python benchmarks/dashboard.py --batch 2 --length 128 --only 'GPT2LM|BertFor|T5Small|resnet50' \\
        --modes inference-float32-static --sides inductor,fxwrap,inductor:freezing,fxwrap:freezing   # on a CPU

A mode is STEP-PRECISION-BATCH, such as training-amp-static. Each model and mode is a row: all sides are measured in
one process, times in interleaved rounds. Rows are in one result file, written again after each; rows that are there are
not measured again, so that the same command continues a run that was stopped, until it prints "all rows done"; those
from before `--since` stay until they are replaced. A
process that crashes or takes longer than `--limit` seconds leaves a row with what it had reported. Several processes
share a device: while one measures times, others compile, at a lower priority if the run may set it (as root), and with
a part of the processors each that is the same for all sides.
Measures, as on the dashboard:

- accuracy: `torch._dynamo.utils.same` with its tolerances, against eager and eager in float64, for inputs that the
  compile did not see. A side passes a row if it is accurate and does not fail; other measures count if all sides pass.
- speedup: eager's median time over the side's. A training step is a forward and a backward.
- compile: seconds of the first call, Dynamo included, after a small function was compiled; caches are empty. Rows
  compile the sides in different orders: the first call of a channels-last depthwise convolution takes seconds in
  cuDNN, which compiles its plan, for the first side alone. Parts of it are Dynamo's, and, of fxwrap's, its back end's:
  the steps after AOTAutograd. The side "aot_eager" has no back end: its compile is a lower bound of that with any.
- memory: the most that a call allocates beyond what was allocated before it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from benchmarks.dashboard_jobs import MODE_OPTIONS, DashboardJob
from benchmarks.dashboard_models import Sizes, names
from benchmarks.dashboard_rows import RowFile, exhausted_memory, is_complete, table_cells
from benchmarks.dashboard_tables import AOT_EAGER, INDUCTOR, OWN, summary, worst
from benchmarks.processes import REPOSITORY, empty_caches
from benchmarks.results import add_record_option, cell_text, environment, result_path
from fxwrap.runtime.native import build_bridge, build_planner

SCRIPT = Path(__file__).parent / "dashboard_jobs.py"
STEPS, PRECISIONS, BATCHES = ("inference", "training"), ("bfloat16", "amp", "float32"), ("static", "dynamic")
MODES = ("inference-bfloat16-static", "training-amp-static", "inference-bfloat16-dynamic", "training-bfloat16-static")
SIDES = ("inductor", "fxwrap", "inductor:max-autotune-no-cudagraphs", "fxwrap:max-autotune-no-cudagraphs")
MOST_WORKERS = 8

RowName: TypeAlias = tuple[str, str, str]
"""Library, model and mode."""


# Rows


@dataclasses.dataclass(frozen=True)
class Dashboard:
    """The rows of a command line, measured by several processes on each device.

    Fields:
        chosen: the command line.
        folder: for caches and locks.
        rows: those that are there.
        until: when measuring ends, by the monotonic clock.
    """

    chosen: argparse.Namespace
    folder: Path
    rows: RowFile
    until: float

    def missing(self) -> list[RowName]:
        """Returns rows of this shard that are not there or too old: each group of modes in turn, model by model."""
        items = [item for item in names() if re.search(self.chosen.only, item[1])]
        rows = [(*item, mode) for group in self.chosen.modes for item in items for mode in group]
        part, parts = self.chosen.shard
        sides, since = self.chosen.sides, self.chosen.since
        return [row for row in rows[part - 1 :: parts] if not self.rows.has(*row[1:], sides, since)]

    def run(self) -> None:
        """Measures the missing rows; those that ran out of memory again, alone on a device."""
        again = self._measure_all(self.missing(), self.chosen.parallel)
        self._measure_all(again, 1)

    def _measure_all(self, rows: Sequence[RowName], parallel: int) -> list[RowName]:
        """Measures rows, `parallel` at a time on each device; returns those that share a device and exhaust memory."""
        waiting: deque[RowName] = deque(rows)
        again: list[RowName] = []

        def work(place: int) -> None:
            while (name := self._next(waiting)) is not None:
                row = self.measure(*name, gpu=place % self.chosen.gpus)
                if row is not None and parallel > 1 and exhausted_memory(row):
                    again.append(name)
                    print(f"{name[1]} {name[2]}: memory was exhausted, to be measured alone", flush=True)
                elif row is not None:
                    self._add(row)

        places = self.chosen.gpus * parallel
        with ThreadPoolExecutor(places) as pool:
            list(pool.map(work, range(places)))
        return again

    def _next(self, waiting: deque[RowName]) -> RowName | None:
        """Returns the next row; None if there is none, or no time to measure one."""
        if self.until - time.monotonic() < self.chosen.least:
            return None
        try:
            return waiting.popleft()
        except IndexError:
            return None

    def _add(self, row: dict[str, Any]) -> None:
        self.rows.add(row)
        cells = table_cells(row, self.chosen.sides)
        print(" | ".join(map(cell_text, cells.values())), f"({row['seconds']} s)", flush=True)

    def measure(self, library: str, model: str, mode: str, gpu: int = 0) -> dict[str, Any] | None:
        """Measures a row; returns None for one that the end of the time interrupts."""
        start = time.monotonic()
        seconds = min(self.chosen.limit, self.until - start)
        sides, failure = self._run(model, mode, seconds, gpu)
        if failure.startswith("stopped") and seconds < self.chosen.limit:
            reported = [f"{side} {', '.join(measures)}" for side, measures in sides.items()]
            print(f"{model} {mode}: interrupted after {seconds:.0f} s, with {'; '.join(reported)}", flush=True)
            return None
        return {
            "library": library, "model": model, "mode": mode, "failure": failure, "sides": sides,
            "chosen sides": self.chosen.sides, "seconds": round(time.monotonic() - start, 1),
            **_environment(self.chosen.device),
        }  # fmt: skip

    def _run(self, model: str, mode: str, seconds: float, gpu: int) -> tuple[dict[str, dict[str, Any]], str]:
        """Returns the measures by side that a process reports, and why it ended early, if so."""
        step, precision, batch = mode.split("-")
        sides = self.chosen.sides
        job = DashboardJob(
            model, step, precision, batch, order_of(sides, f"{model} {mode}"), self.chosen.device, _sizes(self.chosen),
            self.chosen.rounds, self.chosen.threads, self.chosen.options, str(self.folder / f"lock-{gpu}"),
        )  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), json.dumps(dataclasses.asdict(job))],
            env={**os.environ, **empty_caches(self.folder), **self.limits(gpu)},
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
        measures = _measures(output)
        return measures, "" if is_complete(measures, sides) else failure

    def limits(self, gpu: int) -> dict[str, str]:
        """Returns the environment of a process that has one device, and its part of the processors for compilation."""
        processes = self.chosen.gpus * self.chosen.parallel
        workers = str(max(1, min(MOST_WORKERS, (os.cpu_count() or 1) // processes)))
        variables = {"TORCHINDUCTOR_COMPILE_THREADS": workers, "FXWRAP_COMPILE_WORKERS": workers}
        if self.chosen.device == "cuda":
            visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(self.chosen.gpus)))
            variables["CUDA_VISIBLE_DEVICES"] = visible.split(",")[gpu]
        return variables

    def show(self) -> None:
        """Prints the figures of the rows."""
        tables = self.rows.tables()
        for line in summary(tables) if tables else []:
            print(" | ".join(f"{name} {cell_text(cell)}" for name, cell in line.items()))
        for side in [side for side in self.chosen.sides if side.startswith(OWN)] if tables else []:
            slowest = [f"{name} {ratio:.2f}" for name, ratio in worst(tables, side)]
            print(f"{side}, slowest beside Inductor: {', '.join(slowest)}")


def order_of(sides: Sequence[str], name: str) -> tuple[str, ...]:
    """Returns sides in the order in which a row compiles them: later ones find more of torch's caches filled."""
    orders = list(itertools.permutations(sides))
    return orders[zlib.crc32(name.encode()) % len(orders)]


@functools.cache
def _environment(device: str) -> dict[str, object]:
    return environment(torch.device(device))


def _sizes(chosen: argparse.Namespace) -> Sizes:
    """Returns the sizes of models and inputs."""
    return Sizes(chosen.small, chosen.batch, chosen.length)


def sizes_text(chosen: argparse.Namespace) -> str:
    """Returns the sizes in words."""
    changed = [f"{name} {size}" for name in ("batch", "length") if (size := getattr(chosen, name))]
    return " ".join(["small models" if chosen.small else "base models", *changed])


def rows_path(chosen: argparse.Namespace) -> Path:
    """Returns the file of rows: the one named, or the recorded result, or one of this device and these sizes."""
    recorded = result_path("dashboard", chosen)
    name = f"{chosen.device}-{sizes_text(chosen).replace(' ', '-')}.json"
    return chosen.rows or recorded or REPOSITORY / "build" / "dashboard" / name


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
    known = {f"{backend}:{mode}".rstrip(":") for backend in (INDUCTOR, OWN) for mode in MODE_OPTIONS} | {AOT_EAGER}
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
    parser.add_argument(
        "--modes", type=_modes, action="append", help="STEP-PRECISION-BATCH, with commas; repeated, a group for later"
    )
    parser.add_argument("--sides", type=_sides, default=list(SIDES), help="BACKEND or BACKEND:MODE, with commas")
    parser.add_argument("--small", action="store_true", help="few layers and channels, two samples")
    parser.add_argument("--batch", type=int, help="samples, instead of each model's own number")
    parser.add_argument("--length", type=int, help="words of a sample, instead of each model's own number")
    parser.add_argument("--rows", type=Path, help="the file of rows, instead of that of --record or one in build")
    parser.add_argument(
        "--since", default="", metavar="DATE", help="measure rows of earlier days, such as 2026-11-29, again"
    )
    parser.add_argument("--shard", type=_shard, default=(1, 1), metavar="I/N", help="a part of the rows")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after this time")
    parser.add_argument("--limit", type=float, default=400, help="seconds for one row")
    parser.add_argument("--least", type=float, default=20, help="seconds that must remain to begin a row")
    parser.add_argument("--gpus", type=int, default=1, help="devices of this machine that are used")
    parser.add_argument("--parallel", type=int, default=1, help="processes of a device; one at a time measures times")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds")
    parser.add_argument("--threads", type=int, default=2, help="of torch on the CPU")
    parser.add_argument("--options", type=json.loads, default={"emitter": "cpp"}, help="fxwrap's options, as JSON")
    parser.add_argument("--collect", action="store_true", help="measure nothing: print the figures of the rows")
    add_record_option(parser)
    chosen = parser.parse_args(arguments)
    chosen.modes = chosen.modes or [list(MODES[:2]), list(MODES[2:])]
    return chosen


def main() -> None:
    """Measures the missing rows, and prints the figures of all."""
    chosen = parsed_arguments()
    torch.set_num_threads(chosen.threads)  # of the processes of rows, as recorded
    until = time.monotonic() + chosen.seconds
    rows = RowFile(rows_path(chosen), sizes_text(chosen))
    with tempfile.TemporaryDirectory() as name:
        dashboard = Dashboard(chosen, Path(name), rows, until)
        if not chosen.collect:
            start = time.monotonic()
            build_bridge()  # a wheel has both libraries; else each row would build them
            build_planner()
            seconds = time.monotonic() - start
            print(f"{len(dashboard.missing())} rows to measure; native libraries took {seconds:.0f} s", flush=True)
            dashboard.run()
            left = len(dashboard.missing())
            print(f"{left} rows are missing" if left else "all rows done")
        dashboard.show()


if __name__ == "__main__":
    main()
