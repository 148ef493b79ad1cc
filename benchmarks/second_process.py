"""Seconds from the start of a process to its first result, when an earlier process has compiled the model: GPT-2.

Beside TorchInductor with its caches, and beside the floor: a process that does the same without either. It imports
torch, loads the model's weights and runs it, for the mechanism "caches" through `torch.compile(backend="eager")`, since
Dynamo traces the model there. No backend can be faster than the floor. Both backends use torch's own mechanisms:

- caches: `torch.compile` with the caches on disk, AOTAutograd's and the backend's;
- precompile: `torch._dynamo.config.caching_precompile` with `torch.compiler.load_cache_artifacts`;
- aot: a file of `aot_compile`, loaded with `torch.compiler.load_compiled_function`.

Each mechanism and backend has cache folders of its own, which its first process fills (the column "first process");
fxwrap's bridge is there already, as in an installed wheel.
The later processes run in turn, one of each, in every round. A result that differs from eager's ends the script.
Run:

    python benchmarks/second_process.py [--device cuda] [--rounds 5] [--layers 12] [--modes caches,precompile,aot]
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.processes import result_of
from benchmarks.results import Cell, Report, add_record_option

MODES = ("caches", "precompile", "aot")
BACKENDS = ("inductor", "fxwrap")
EAGER = ("floor", "")
"""The side that compiles nothing: mechanism and backend."""
FLOORS = {"caches": ("caches", "eager"), "precompile": EAGER, "aot": EAGER}
"""By mechanism, the side that does what both backends must do."""
WEIGHTS = "weights"
"""The folder of the model's weights, beside the folders of the sides."""


class Logits(torch.nn.Module):
    """GPT-2 with the weights of a folder, from tokens to logits."""

    def __init__(self, weights: Path) -> None:
        super().__init__()
        from transformers import GPT2LMHeadModel

        self.model = GPT2LMHeadModel.from_pretrained(weights).eval()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the logits."""
        logits: torch.Tensor = self.model(tokens, use_cache=False).logits
        return logits


def save_weights(layers: int, folder: Path) -> None:
    """Writes a GPT-2 with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(n_layer=layers)).save_pretrained(folder)


def run_job(mode: str, backend: str, folder: Path, first: bool, device: str) -> dict[str, float]:
    """Runs the model in this process; returns the error of the result and the time when it was there."""
    model = Logits(folder.parent / WEIGHTS).to(device)
    tokens = torch.randint(0, 50257, (1, 128), generator=torch.Generator().manual_seed(0)).to(device)
    with torch.no_grad():
        function = model if (mode, backend) == EAGER else prepared(mode, backend, model, tokens, folder, first)
        result = function(tokens)
        if device == "cuda":
            torch.cuda.synchronize()
        end = time.time()
        error = (result - model(tokens)).norm() / result.norm()
    if first and mode == "precompile":
        artifacts = torch.compiler.save_cache_artifacts()
        assert artifacts is not None
        (folder / "artifacts.bin").write_bytes(artifacts[0])
    return {"end": end, "error": error.item()}


def prepared(mode: str, backend: str, model: Any, tokens: Any, folder: Path, first: bool) -> Callable[[Any], Any]:
    """Returns the compiled model by a mechanism; the first process of it saves."""
    from torch._dynamo import config

    if mode != "aot":
        if mode == "precompile":
            config.caching_precompile = True
        if mode == "precompile" and not first:
            torch.compiler.load_cache_artifacts((folder / "artifacts.bin").read_bytes())
        compiled: Callable[[Any], Any] = torch.compile(model, backend=backend, dynamic=False)
        return compiled
    if hasattr(config, "enable_aot_compile"):
        config.enable_aot_compile = True
    path = folder / "compiled.pt"
    if first:
        options: dict[str, Any] = {
            "guard_filter_fn": lambda guards: [item.guard_type in ("TENSOR_MATCH", "SHAPE_ENV") for item in guards]
        }
        source: Any = torch.compile(model, backend=backend, dynamic=False, fullgraph=True, options=options)
        source.forward.aot_compile(((tokens,), {})).save_compiled_function(str(path))
    with path.open("rb") as file:
        loaded = torch.compiler.load_compiled_function(file)
    return lambda tokens: loaded(model, tokens)


def measure(mode: str, backend: str, folder: Path, device: str, first: bool = False) -> float:
    """Returns the seconds from the start of a process to its first result."""
    variables = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch"), "FXWRAP_CACHE_DIR": str(folder / "fxwrap"),
        "TRITON_CACHE_DIR": str(folder / "triton"), "FXWRAP_COMPILE_CACHE": "1",
    }  # fmt: skip
    job = json.dumps([mode, backend, str(folder), first, device])
    start = time.time()
    result = result_of([__file__, "--job", job], variables)
    if not result["error"] < 1e-4:
        raise SystemExit(f"{mode} with {backend}: the result differs from eager's by {result['error']}")
    return float(result["end"] - start)


def main() -> None:
    """Prints the table, or runs one process of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    add_record_option(parser)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.job:
        mode, backend, folder, first, device = json.loads(chosen.job)
        print(json.dumps(run_job(mode, backend, Path(folder), first, device)))
        return
    from fxwrap.runtime.native import build_bridge

    report = Report(f"second_process-{chosen.device}", chosen, chosen.device, f"medians of {chosen.rounds} rounds")
    modes = chosen.modes.split(",")
    with tempfile.TemporaryDirectory() as name:
        save_weights(chosen.layers, Path(name) / WEIGHTS)
        compared = [(mode, backend) for mode in modes for backend in BACKENDS]
        sides = [*dict.fromkeys([*[FLOORS[mode] for mode in modes], *compared])]
        folders = {side: Path(name) / "-".join(side) for side in sides}
        bridge = build_bridge().folder
        for folder in folders.values():
            shutil.copytree(bridge, folder / "fxwrap" / bridge.name)
        first = {side: measure(*side, folders[side], chosen.device, first=True) for side in sides}
        times: dict[tuple[str, str], list[float]] = {side: [] for side in sides}
        for _ in range(chosen.rounds):
            for side in sides:
                times[side].append(measure(*side, folders[side], chosen.device))
    medians = {side: statistics.median(samples) for side, samples in times.items()}
    for mode in modes:
        floor, inductor, ours = medians[FLOORS[mode]], medians[mode, "inductor"], medians[mode, "fxwrap"]
        cells: dict[str, Cell] = {
            "mechanism": mode,
            "first process, Inductor, s": first[mode, "inductor"],
            "first process, fxwrap, s": first[mode, "fxwrap"],
            "floor, s": floor,
            "later, Inductor, s": inductor,
            "later, fxwrap, s": ours,
            "fxwrap / Inductor": ours / inductor,
            "floor / Inductor": floor / inductor,
            "beyond the floor, fxwrap / Inductor": (ours - floor) / (inductor - floor),
        }
        report.add(cells, {"-".join(side): times[side] for side in sides if side == FLOORS[mode] or side[0] == mode})


if __name__ == "__main__":
    main()
