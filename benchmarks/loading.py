"""Seconds from `fxwrap.load` to the first result of GPT-2, in a process without the model.

The model has its real size (12 layers, 768 wide, 50257 words, float32). Its weights are in the file; or the file has no
weights, and `load_constants` reads them from a safetensors file or from tensors on the device. Each row is the median
of processes with empty caches. Imports and CUDA's initialisation are not included; the system's file cache has the
file.

    python benchmarks/loading.py [--device cuda] [--emitters python,cpp,fx] [--processes 5] [--record]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

import fxwrap
import fxwrap.artifact  # all that `fxwrap.load` imports
from benchmarks.processes import result_of
from benchmarks.results import Report, add_record_option

WEIGHTS = ("inside", "in a file", "in memory")
STEPS = ("load", "constants", "first call", "total", "later call")
TRACING = ("torch._dynamo", "torch._functorch.aot_autograd", "torch._inductor")


def save(folder: Path, emitters: list[str], chosen: argparse.Namespace) -> None:
    """Compiles the model with each emitter; saves it with and without weights, the weights, an input and its result.

    The last layer shares the first layer's weight, which a file contains once.
    """
    from benchmarks.full_models import full_case

    model = full_case("gpt2").build(0, layers=chosen.layers).to(chosen.device)
    words = torch.randint(0, 50257, (chosen.batch, chosen.length)).to(chosen.device)
    with torch.no_grad():
        exported = torch.export.export(model, (), {"input_ids": words}, strict=False)
        for emitter in emitters:
            options = fxwrap.Options(fallback="error", compile_cache=False).replace(emitter=emitter)
            compiled = fxwrap.compile_graph(exported, name="gpt2", options=options)
            result = compiled.flat(words)
            compiled.save(folder / f"{emitter}.fxw")
            fxwrap.save(compiled, folder / f"{emitter}-bare.fxw", constants=False)
    torch.save({"words": words, "results": result}, folder / "example.pt")
    write_weights(folder / "weights.safetensors", compiled.program.store.tensors)


def write_weights(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes tensors by name, shared memory once."""
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
    tensors = load_file(folder / "weights.safetensors", device=device) if weights == "in memory" else None
    words = example["words"]

    def timed(step: Callable[[], Any]) -> tuple[Any, float]:
        start = time.perf_counter()
        result = step()
        if device == "cuda":
            torch.cuda.synchronize()
        return result, time.perf_counter() - start

    path = folder / f"{emitter}{'' if weights == 'inside' else '-bare'}.fxw"
    loaded, load = timed(lambda: fxwrap.load(path))
    source = folder / "weights.safetensors" if tensors is None else tensors
    _, constants = timed(lambda: loaded.load_constants(source)) if weights != "inside" else (None, 0.0)
    results, first = timed(lambda: loaded.flat(words))
    _, later = timed(lambda: loaded.flat(words))
    torch.testing.assert_close(results, example["results"], rtol=1e-4, atol=1e-4)
    if loaded.recompile_reason or any(name in sys.modules for name in TRACING):
        raise SystemExit(f"something was compiled or traced: {loaded.recompile_reason!r}")
    return dict(zip(STEPS, (load, constants, first, load + constants + first, later), strict=True))


def measure_in_fresh_process(folder: Path, emitter: str, weights: str, chosen: argparse.Namespace) -> dict[str, float]:
    """Returns the result of `measure` in a new process with empty caches."""
    with tempfile.TemporaryDirectory() as caches:
        variables = {"FXWRAP_CACHE_DIR": f"{caches}/own", "TRITON_CACHE_DIR": f"{caches}/triton"}
        options = ["--device", chosen.device, "--threads", str(chosen.threads)]
        result: dict[str, float] = result_of([__file__, *options, "--job", str(folder), emitter, weights], variables)
    return result


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
    add_record_option(parser)
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
    emitters = chosen.emitters.split(",")
    with tempfile.TemporaryDirectory() as name:
        save(Path(name), emitters, chosen)
        megabytes = (Path(name) / f"{emitters[0]}.fxw").stat().st_size / 1e6
        note = f"GPT-2, a file of {megabytes:.0f} MB, medians of {chosen.processes} processes"
        report = Report(f"loading-{chosen.device}", chosen, chosen.device, note)
        for emitter in emitters:
            for weights in chosen.weights.split(","):
                runs = [measure_in_fresh_process(Path(name), emitter, weights, chosen) for _ in range(chosen.processes)]
                cells = {f"{step}, s": statistics.median([run[step] for run in runs]) for step in STEPS}
                report.add({"emitter, weights": f"{emitter}, {weights}", **cells}, runs)


if __name__ == "__main__":
    main()
