"""Seconds from `fxwrap.load` to the first result of GPT-2, in a process that never saw the model.

The model has its real size (12 layers, 768 wide, 50257 words, float32: 0.5 GB of weights). Its weights are in the
file; or the file is saved without them and `load_constants` takes them from a safetensors file, or from tensors that
are on the device already. Each row is the median of processes with empty caches. Imports, and CUDA's own start, have
happened before. What was saved lies in the system's file cache, as what was just downloaded does.

    python benchmarks/loading.py [--device cuda] [--emitters python,cpp,fx] [--processes 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

import fxwrap

WEIGHTS = ("inside", "in a file", "in memory")
STEPS = ("load", "constants", "first call", "in all", "a later call")
TRACING = ("torch._dynamo", "torch._functorch.aot_autograd", "torch._inductor")


def save(folder: Path, emitters: list[str], chosen: argparse.Namespace) -> None:
    """Compiles the model by each emitter and saves it with and without weights; the weights; an input and its result.

    The last layer's weight is the first's: a file has it once, and it is given once.
    """
    from benchmarks.full_models import full_case

    model = full_case("gpt2").build(0, layers=chosen.layers).to(chosen.device)
    words = torch.randint(0, 50257, (chosen.batch, chosen.length)).to(chosen.device)
    with torch.no_grad():
        exported = torch.export.export(model, (), {"input_ids": words}, strict=False)
        for emitter in emitters:
            options = fxwrap.Options(emitter=emitter, fallback="error", compile_cache=False)
            compiled = fxwrap.compile_graph(exported, name="gpt2", options=options)
            result = compiled(words)
            compiled.save(folder / f"{emitter}.fxw")
            fxwrap.save(compiled, folder / f"{emitter}-bare.fxw", constants=False)
    torch.save({"words": words, "results": result}, folder / "example.pt")
    write_weights(folder / "weights.safetensors", compiled.program.store.tensors)


def write_weights(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes tensors by name, once where several are the same memory."""
    from safetensors.torch import save_file

    by_address: dict[int, str] = {}
    for name, tensor in tensors.items():
        by_address.setdefault(tensor.data_ptr(), name)
    save_file({name: tensors[name].contiguous() for name in by_address.values()}, path)


def measure(folder: Path, emitter: str, weights: str, device: str) -> dict[str, float]:
    """Loads the program in this process and calls it; returns seconds by step."""
    from safetensors.torch import load_file

    if device == "cuda":
        torch.zeros(1, device=device)
    example = torch.load(folder / "example.pt")
    there = load_file(folder / "weights.safetensors", device=device) if weights == "in memory" else None
    words = example["words"]

    def timed(step: Callable[[], Any]) -> tuple[Any, float]:
        start = time.perf_counter()
        found = step()
        if device == "cuda":
            torch.cuda.synchronize()
        return found, time.perf_counter() - start

    path = folder / f"{emitter}{'' if weights == 'inside' else '-bare'}.fxw"
    loaded, load = timed(lambda: fxwrap.load(path))
    given = folder / "weights.safetensors" if there is None else there
    _, constants = timed(lambda: loaded.load_constants(given)) if weights != "inside" else (None, 0.0)
    results, first = timed(lambda: loaded(words))
    _, later = timed(lambda: loaded(words))
    torch.testing.assert_close(results, example["results"], rtol=1e-4, atol=1e-4)
    if loaded.rebuilt or any(name in sys.modules for name in TRACING):
        raise SystemExit(f"something was compiled or traced: {loaded.rebuilt!r}")
    return dict(zip(STEPS, (load, constants, first, load + constants + first, later), strict=True))


def apart(folder: Path, emitter: str, weights: str, chosen: argparse.Namespace) -> dict[str, float]:
    """What `measure` gives in a process of its own with empty caches."""
    with tempfile.TemporaryDirectory() as caches:
        environment = {**os.environ, "FXWRAP_CACHE_DIR": f"{caches}/own", "TRITON_CACHE_DIR": f"{caches}/triton"}
        given = ["--device", chosen.device, "--threads", str(chosen.threads), "--job", str(folder), emitter, weights]
        command = [sys.executable, __file__, *given]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def parsed_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--emitters", default="python,cpp,fx")
    parser.add_argument("--weights", default=",".join(WEIGHTS), help="some of the default's, with commas")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=16, help="words of the input")
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="of torch on the CPU")
    parser.add_argument("--json", type=Path, help="file for all times, in seconds")
    parser.add_argument("--job", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Prints the table."""
    chosen = parsed_arguments()
    if chosen.job:
        torch.set_num_threads(chosen.threads)
        folder, emitter, weights = chosen.job
        print(json.dumps(measure(Path(folder), emitter, weights, chosen.device)))
        return
    emitters, found = chosen.emitters.split(","), {}
    with tempfile.TemporaryDirectory() as name:
        save(Path(name), emitters, chosen)
        megabytes = (Path(name) / f"{emitters[0]}.fxw").stat().st_size / 1e6
        print(f"{f'seconds, a file of {megabytes:.0f} MB':<30}" + "".join(f"{step:>14}" for step in STEPS))
        for emitter in emitters:
            for weights in chosen.weights.split(","):
                runs = [apart(Path(name), emitter, weights, chosen) for _ in range(chosen.processes)]
                found[f"{emitter}, weights {weights}"] = runs
                cells = [statistics.median([run[step] for run in runs]) for step in STEPS]
                label = f"{emitter}, weights {weights}"
                print(f"{label:<30}" + "".join(f"{cell:>14.3f}" for cell in cells), flush=True)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
