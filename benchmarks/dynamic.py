"""GPT-2 compiled once for every batch and length: fxwrap's dynamic program, its static ones, Inductor's dynamic one.

For each of some sizes a forward pass (or, with `--training`, a forward and a backward pass) is timed in turns: fxwrap
compiled once for any batch and length, fxwrap compiled for this size alone, Inductor compiled once. Batch and length
are marked as dynamic; `--all` compiles with dynamic=True, which includes the model's Python scalars. Times are the
host's with the device's work, medians. The script prints ratios for each size, geometric means, the number of graphs
that each dynamic backend compiled after the first size (expected: none), and the largest error. torch's own time per
call is measured with a backend that computes nothing. Run:

    python benchmarks/dynamic.py [--device cuda] [--sizes 20] [--layers 12] [--training] [--all] [--record]
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.measure_kernels import fresh_function
from benchmarks.results import Cell, Report, add_record_option, geometric_mean
from fxwrap import Options
from fxwrap.compile import Compiled, compile_graph, make_backend

SECONDS = 0.3
"""Seconds per contender and size, for at most `ROUNDS` calls."""
ROUNDS = 30


class Contender:
    """A compiled function, with the number of graphs that its backend compiled."""

    def __init__(self, name: str, function: Callable[[Tensor], Any], backend: Any, dynamic: bool | None) -> None:
        self.name = name
        self.compiled_graphs = 0
        self.first_graphs = 0
        self.call = torch.compile(fresh_function(function), backend=self._counting(backend), dynamic=dynamic)

    def _counting(self, backend: Any) -> Any:
        if backend != "inductor":
            return make_backend(backend, self._compile)
        from torch._inductor.compile_fx import compile_fx

        def compile_counted(graph: Any, inputs: Any) -> Any:
            self.compiled_graphs += 1
            return compile_fx(graph, inputs)

        return compile_counted

    def _compile(self, *arguments: Any, **chosen: Any) -> Compiled:
        self.compiled_graphs += 1
        return compile_graph(*arguments, **chosen)


def main() -> None:
    """Measures and prints."""
    chosen = _arguments()
    device = torch.device(chosen.device)
    torch.manual_seed(0)
    limits = (16, 512) if device.type == "cuda" else (4, 128)
    draw = random.Random(0)
    sizes = [(draw.randint(2, limits[0]), draw.randint(8, limits[1])) for _ in range(chosen.sizes)]
    layers = chosen.layers or (12 if device.type == "cuda" else 2)
    config = transformers.GPT2Config(n_layer=layers, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, use_cache=False)
    model: torch.nn.Module = transformers.GPT2LMHeadModel(config)
    model.to(device).train(chosen.training)
    torch.set_grad_enabled(chosen.training)
    options = Options(emitter=chosen.emitter)
    function = _step(model) if chosen.training else _forward(model)
    torch._dynamo.config.cache_size_limit = 64
    dynamic = True if chosen.all else None
    ours = Contender("fxwrap dynamic", function, options, dynamic)
    theirs = Contender("Inductor dynamic", function, "inductor", dynamic)
    rows: list[dict[str, float]] = []
    report = Report(f"dynamic-{device.type}", chosen, device, f"GPT-2, {layers} layers")
    try:
        for number, size in enumerate(sizes):
            tokens = torch.randint(0, config.vocab_size, size, generator=torch.Generator().manual_seed(number))
            tokens = _mark_dynamic(tokens.to(device))
            rows.append(_measure(function, tokens, options, ours, theirs))
            if number == 0:
                ours.first_graphs, theirs.first_graphs = ours.compiled_graphs, theirs.compiled_graphs
            report.add(_cells(size, rows[-1]), rows[-1])
    except KeyboardInterrupt:
        if not rows:
            raise
        print(f"interrupted after {len(rows)} of {len(sizes)} sizes")
    for other in ("static", "inductor"):
        ratios = [row["dynamic"] / row[other] for row in rows]
        print(f"dynamic to {other}: geometric mean {geometric_mean(ratios):.3f}, largest {max(ratios):.3f}")
    for contender in (ours, theirs):
        recompiled = contender.compiled_graphs - contender.first_graphs
        print(f"{contender.name}: {contender.first_graphs} graphs for the first size, {recompiled} compiled after it")
    print(f"largest error against eager: {max(row['error'] for row in rows):.1e}")
    alone = [_torch_alone(function, *call) for call in ((tokens, dynamic), (tokens.clone(), False))]
    print(f"torch alone, without a program: {alone[0] * 1e3:.0f} us a call, static {alone[1] * 1e3:.0f}")


def _cells(size: tuple[int, int], row: dict[str, float]) -> dict[str, Cell]:
    return {
        "batch": size[0],
        "length": size[1],
        "dynamic, ms": row["dynamic"],
        "static, ms": row["static"],
        "Inductor dynamic, ms": row["inductor"],
        "dynamic / static": row["dynamic"] / row["static"],
        "dynamic / Inductor": row["dynamic"] / row["inductor"],
        "error": row["error"],
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sizes", type=int, default=20)
    parser.add_argument("--layers", type=int, default=0, help="12 on a GPU and 2 on a CPU, unless given")
    parser.add_argument("--emitter", default="python")
    parser.add_argument("--training", action="store_true")
    parser.add_argument("--all", action="store_true", help="compile with dynamic=True")
    add_record_option(parser)
    return parser.parse_args()


def _mark_dynamic(tokens: Tensor) -> Tensor:
    """Marks batch and length as dynamic."""
    for dim in range(tokens.ndim):
        torch._dynamo.mark_dynamic(tokens, dim)
    return tokens


def _forward(model: nn.Module) -> Callable[[Tensor], Any]:
    def forward(tokens: Tensor) -> Any:
        return model(input_ids=tokens, use_cache=False)["logits"]

    return forward


def _step(model: nn.Module) -> Callable[[Tensor], Any]:
    def loss(tokens: Tensor) -> Any:
        logits = model(input_ids=tokens, use_cache=False)["logits"]
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    return loss


def _measure(
    function: Callable[[Tensor], Any], tokens: Tensor, options: Options, ours: Contender, theirs: Contender
) -> dict[str, float]:
    """Times the contenders on one size, in milliseconds, after a first call of each."""
    static = Contender("fxwrap static", function, options, False)
    unmarked = tokens.clone()
    calls = {"dynamic": (ours.call, tokens), "static": (static.call, unmarked), "inductor": (theirs.call, tokens)}
    expected = _run(function, unmarked)
    results = {name: _run(*call) for name, call in calls.items()}
    error = float((results["dynamic"] - expected).norm() / expected.norm())
    samples: dict[str, list[float]] = {name: [] for name in calls}
    start = time.perf_counter()
    while len(samples["static"]) < ROUNDS and time.perf_counter() - start < SECONDS * len(calls):
        for name, call in calls.items():
            before = time.perf_counter()
            _run(*call)
            samples[name].append((time.perf_counter() - before) * 1e3)
    return {**{name: statistics.median(times) for name, times in samples.items()}, "error": error}


def _torch_alone(function: Callable[[Tensor], Any], tokens: Tensor, dynamic: bool | None) -> float:
    """Returns the milliseconds of Dynamo and AOTAutograd per call, with a graph that returns a stored result."""
    result = function(tokens)

    def compile_nothing(*_: Any) -> Any:
        return make_boxed_func(lambda *_: [result])

    backend = aot_autograd(fw_compiler=compile_nothing, inference_compiler=compile_nothing)
    call = torch.compile(fresh_function(function), backend=backend, dynamic=dynamic)
    samples = []
    with torch.no_grad():
        for _ in range(2 * ROUNDS):
            before = time.perf_counter()
            _run(call, tokens)
            samples.append((time.perf_counter() - before) * 1e3)
    return statistics.median(samples)


def _run(call: Callable[[Tensor], Any], tokens: Tensor) -> Tensor:
    training = torch.is_grad_enabled()
    result: Tensor = call(tokens)
    if training and result.ndim == 0:
        result.backward()
    if tokens.is_cuda:
        torch.cuda.synchronize()
    return result.detach()


if __name__ == "__main__":
    main()
