"""Seconds that fxwrap itself takes to compile GPT-2: the first time, and in a second process.

What is measured is all that happens beyond Dynamo and AOTAutograd: from a graph's arrival at the backend until there is
something to call, the look-up in the cache, or lowering, kernels and C++ compiler, and the building of what runs. Each
row is a process of its own with a cache folder that is empty (but for the bridge), then one with what the first left.

    python benchmarks/compile_cache.py [--layers 12] [--device cuda] [--emitters python,cpp,fx] [--processes 5]
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


def measure(emitter: str, training: bool, layers: int, device: str) -> dict[str, Any]:
    """Runs the model once; returns seconds by graph, of the whole first call, and whether the cache had the graphs."""
    import torch

    import fxwrap
    from fxwrap import Compiled, Options
    from fxwrap.backend import make_backend
    from tests.models import MODELS

    graphs: list[dict[str, Any]] = []

    def compile_graph(*arguments: Any, **keywords: Any) -> Compiled:
        start, used = time.perf_counter(), time.process_time()
        made = fxwrap.compile_graph(*arguments, **keywords)
        _ = made.boxed
        seconds = time.perf_counter() - start
        graphs.append({
            "graph": keywords["name"], "seconds": seconds, "cpu": time.process_time() - used, "cached": made.cached,
        })  # fmt: skip
        return made

    case = MODELS["gpt2"]
    model = case.build(1, layers=layers).to(device).train(training)
    inputs = {name: item.to(device) for name, item in case.inputs(1, training=training).items()}
    function = torch.compile(model, backend=make_backend(Options(emitter=emitter), compile_graph), dynamic=False)
    start = time.perf_counter()
    with torch.set_grad_enabled(training):
        output = function(**inputs)
    if training:
        case.loss(output).backward()
    return {"graphs": graphs, "first_call": time.perf_counter() - start}


def in_process(arguments: list[str], folder: Path) -> dict[str, Any]:
    """What `measure` gives in a process of its own, with this cache folder."""
    environment = {
        **os.environ, "FXWRAP_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "by_triton"),
        "FXWRAP_COMPILE_CACHE": "1",
    }  # fmt: skip
    command = [sys.executable, __file__, "--job", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def row(emitter: str, training: bool, chosen: argparse.Namespace) -> None:
    """Prints one row: the first process, and the median of those that follow."""
    from fxwrap.runtime.native import build_bridge

    bridge = build_bridge().folder
    arguments = [emitter, str(int(training)), str(chosen.layers), chosen.device]
    with tempfile.TemporaryDirectory() as name:
        shutil.copytree(bridge, Path(name) / bridge.name)
        first = in_process(arguments, Path(name))
        later = [in_process(arguments, Path(name)) for _ in range(chosen.processes)]
    if any(item["cached"] for item in first["graphs"]) or not all(
        item["cached"] for found in later for item in found["graphs"]
    ):
        raise SystemExit("the cache had what it should not have, or did not have what it should")

    def total(found: dict[str, Any], what: str) -> float:
        return sum(item[what] for item in found["graphs"])

    cells = [
        total(first, "seconds"), statistics.median([total(found, "seconds") for found in later]),
        min(total(found, "seconds") for found in later), statistics.median([total(found, "cpu") for found in later]),
        first["first_call"], statistics.median([found["first_call"] for found in later]),
    ]  # fmt: skip
    label = f"{emitter} {'forward and backward' if training else 'forward'}"
    print(f"{label:<30}" + "".join(f"{cell:>12.3f}" for cell in cells), flush=True)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    heads = ("first", "second", "best", "its CPU", "call, first", "second")
    print(f"{'seconds':<30}" + "".join(f"{head:>12}" for head in heads))
    for emitter in chosen.emitters.split(","):
        for training in (False, True):
            row(emitter, training, chosen)


if __name__ == "__main__":
    main()
