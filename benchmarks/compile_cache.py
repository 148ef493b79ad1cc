"""Seconds of fxwrap's own part of compiling GPT-2: in a first process, and in later ones that hit the compile cache.

The time is that beyond Dynamo and AOTAutograd: from a graph's arrival at the backend to a callable, which is the cache
look-up, or lowering, kernels and the C++ compiler, and loading the result. The first process of each row has an empty
cache folder (except for the bridge); the later ones have the first one's.

    python benchmarks/compile_cache.py [--layers 12] [--device cuda] [--emitters cpp] [--processes 5] [--record]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.results import Cell, Report, add_record_option


def measure(emitter: str, training: bool, layers: int, device: str) -> dict[str, Any]:
    """Runs the model once; returns seconds and cache hits by graph, and the seconds of the first call."""
    import torch

    import fxwrap
    from fxwrap import Compiled, Options
    from fxwrap.compile import make_backend
    from tests.support.models import MODELS

    graphs: list[dict[str, Any]] = []

    def compile_graph(*arguments: Any, **keywords: Any) -> Compiled:
        start, used = time.perf_counter(), time.process_time()
        compiled = fxwrap.compile_graph(*arguments, **keywords)
        _ = compiled.boxed
        seconds = time.perf_counter() - start
        graphs.append({
            "graph": keywords["name"], "seconds": seconds, "cpu": time.process_time() - used, "cached": compiled.cached,
        })  # fmt: skip
        return compiled

    case = MODELS["gpt2"]
    model = case.build(1, layers=layers).to(device).train(training)
    inputs = {name: item.to(device) for name, item in case.inputs(1, training=training).items()}
    backend = make_backend(Options().replace(emitter=emitter), compile_graph)
    function = torch.compile(model, backend=backend, dynamic=False)
    start = time.perf_counter()
    with torch.set_grad_enabled(training):
        output = function(**inputs)
    if training:
        case.loss(output).backward()
    return {"graphs": graphs, "first_call": time.perf_counter() - start}


def in_process(arguments: list[str], folder: Path) -> dict[str, Any]:
    """Returns the result of `measure` in a new process with this cache folder."""
    environment = {
        **os.environ, "FXWRAP_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "by_triton"),
        "FXWRAP_COMPILE_CACHE": "1",
    }  # fmt: skip
    command = [sys.executable, __file__, "--job", *arguments]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if process.returncode:
        raise SystemExit(process.stderr)
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result


def measure_row(emitter: str, training: bool, chosen: argparse.Namespace, report: Report) -> None:
    """Adds one row: the first process, and the median of the later ones."""
    from fxwrap.runtime.native import build_bridge

    bridge = build_bridge().folder
    arguments = [emitter, str(int(training)), str(chosen.layers), chosen.device]
    with tempfile.TemporaryDirectory() as name:
        shutil.copytree(bridge, Path(name) / bridge.name)
        first = in_process(arguments, Path(name))
        later = [in_process(arguments, Path(name)) for _ in range(chosen.processes)]
    if any(item["cached"] for item in first["graphs"]):
        raise SystemExit("the first process found a graph in an empty cache")
    if not all(item["cached"] for run in later for item in run["graphs"]):
        raise SystemExit("a later process missed the cache")

    def total(run: dict[str, Any], name: str) -> float:
        return sum(item[name] for item in run["graphs"])

    seconds = [total(run, "seconds") for run in later]
    cells: dict[str, Cell] = {
        "emitter": emitter,
        "graphs": "forward and backward" if training else "forward",
        "first process, s": total(first, "seconds"),
        "later, median s": statistics.median(seconds),
        "later, best s": min(seconds),
        "later, CPU s": statistics.median([total(run, "cpu") for run in later]),
        "first call in the first process, s": first["first_call"],
        "first call in later ones, s": statistics.median([run["first_call"] for run in later]),
    }
    report.add(cells, {"first": first, "later": later})


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_record_option(parser)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--emitters", default="python,cpp,fx")
    parser.add_argument("--processes", type=int, default=5, help="how many processes follow the first")
    parser.add_argument("--job", nargs=4, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.job:
        emitter, training, layers, device = chosen.job
        print(json.dumps(measure(emitter, bool(int(training)), int(layers), device)))
        return
    report = Report(f"compile_cache-{chosen.device}", chosen, chosen.device)
    for emitter in chosen.emitters.split(","):
        for training in (False, True):
            measure_row(emitter, training, chosen, report)


if __name__ == "__main__":
    main()
