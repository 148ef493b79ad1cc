"""Seconds in which a serving host loads the compiled subgraphs of a model in a later process, with vLLM's adapter.

Each subgraph is what is between two attentions of a Llama: the output projection, both norms, the MLP, the next
projection and rotary embeddings, for any number of tokens. All are different, since each has another width of the MLP,
so that none is loaded once for several. A first process compiles them into the host's folder; later ones load them, in
a process that has imported torch and fxwrap. The results of all are compared with eager's.

    python benchmarks/subgraph_loading.py [--subgraphs 80] [--processes 5] [--emitters python,cpp] [--record]
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

import fxwrap
from benchmarks.processes import output_of
from benchmarks.results import Report, add_record_option
from tests.integrations import vllm_interface
from tests.integrations.vllm_interface import Range

WIDTH = 64
TOKENS = Range(1, 512)


NAMES = ("attended", "residual", "angles", "out", "gate_up", "down", "qkv", "scales")


class Between(torch.nn.Module):
    """The part of a model between two attentions, with its weights as inputs, as vLLM passes them."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.inner = inner

    def forward(
        self, attended: Any, residual: Any, angles: Any, out: Any, gate_up: Any, down: Any, qkv: Any, scales: Any
    ) -> tuple[torch.Tensor, ...]:
        """Returns query, key and value of the next attention, and the residual."""
        hidden, residual = norm(attended @ out, residual, scales[0])
        gate, up = (hidden @ gate_up).chunk(2, -1)
        hidden, residual = norm((torch.nn.functional.silu(gate) * up) @ down, residual, scales[1])
        query, key, value = (hidden @ qkv).chunk(3, -1)
        return rotate(query, angles), rotate(key, angles), value, residual


def norm(hidden: torch.Tensor, residual: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of the sum, and the sum."""
    total = hidden + residual
    return total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6) * scale, total


def rotate(item: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotary embeddings."""
    left, right = item.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def inner_width(index: int) -> int:
    """The width of the MLP of a subgraph."""
    return 64 + 8 * index


def inputs_of(index: int, tokens: int) -> list[torch.Tensor]:
    """Returns the inputs of a subgraph."""
    inner, generator = inner_width(index), torch.Generator().manual_seed(index)
    shapes = (
        *((tokens, WIDTH), (tokens, WIDTH), (tokens, WIDTH // 2)),
        *((WIDTH, WIDTH), (WIDTH, 2 * inner), (inner, WIDTH), (WIDTH, 3 * WIDTH), (2, WIDTH)),
    )
    return [torch.randn(shape, generator=generator) / 8 for shape in shapes]


def make_compiler(folder: Path) -> Any:
    """Returns the compiler as vLLM makes it."""
    compiler = vllm_interface.resolve_obj_by_qualname("fxwrap.integrations.vllm.make_compiler")()
    compiler.initialize_cache(str(folder))
    return compiler


def save(folder: Path, count: int, emitter: str) -> None:
    """Compiles the subgraphs, and writes their handles beside them."""
    compiler, handles = make_compiler(folder), []
    for index in range(count):
        graphs: list[Any] = []
        inputs = inputs_of(index, 8)
        for item in inputs[:3]:
            torch._dynamo.mark_dynamic(item, 0)
        torch.compiler.reset()
        module = torch.compile(
            Between(inner_width(index)), backend=lambda graph, _, to=graphs: to.append(graph) or graph
        )
        with torch.inference_mode():
            module(*inputs)
        placeholders = graphs[0].graph.find_nodes(op="placeholder")
        examples = [node.meta["example_value"] for node in placeholders]
        handles.append(compiler.compile(graphs[0], examples, {"fxwrap": {"emitter": emitter}}, TOKENS)[1])
    assert len({key for key, _ in handles}) == count, "two subgraphs are equal"
    # Dynamo's inputs are in the order of their first use; the symbol is the number of tokens.
    order = [NAMES.index(node.name.removeprefix("l_").strip("_")) if "l_" in node.name else -1 for node in placeholders]
    (folder / "handles.json").write_text(json.dumps({"handles": handles, "order": order}))


def load(folder: Path, profile: str) -> dict[str, float]:
    """Loads all subgraphs, then calls each; returns the seconds of both."""
    saved = json.loads((folder / "handles.json").read_text())
    handles, order = saved["handles"], saved["order"]
    compiler = make_compiler(folder)
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    start, cpu = time.perf_counter(), time.process_time()
    functions = [compiler.load(tuple(handle), None, [], 0, TOKENS) for handle in handles]
    loaded, used = time.perf_counter() - start, time.process_time() - cpu
    profiler.disable()
    if profile:
        pstats.Stats(profiler).sort_stats("cumulative" if profile == "cumulative" else "tottime").print_stats(45)
    inputs = [inputs_of(index, 5) for index in range(len(handles))]
    with torch.inference_mode():
        start = time.perf_counter()
        results = [function(*[5 if position < 0 else items[position] for position in order])
                   for function, items in zip(functions, inputs, strict=True)]  # fmt: skip
        first = time.perf_counter() - start
        for index, (result, items) in enumerate(zip(results, inputs, strict=True)):
            torch.testing.assert_close(tuple(result), Between(inner_width(index))(*items), rtol=1e-4, atol=1e-4)
    counts = fxwrap.compile_counts()
    if (counts.compiled, counts.loaded, counts.compiler_runs) != (0, len(handles), 0):
        raise SystemExit(f"something was compiled: {counts}")
    return {"load": loaded, "CPU": used, "first calls": first}


def main() -> None:
    """Prints the table, or runs one process of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subgraphs", type=int, default=80)
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--emitters", default="python,cpp")
    parser.add_argument("--profile", default="", help="print where one process spends its time: cumulative or own")
    add_record_option(parser)
    parser.add_argument("--job", nargs=3, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.job:
        step, folder, emitter = chosen.job
        with vllm_interface.installed():
            if step == "save":
                save(Path(folder), chosen.subgraphs, emitter)
            else:
                print(json.dumps(load(Path(folder), chosen.profile)))
        return
    note = f"{chosen.subgraphs} different subgraphs; medians of {chosen.processes} processes"
    report = Report("subgraph_loading", chosen, note=note)
    for emitter in chosen.emitters.split(","):
        with tempfile.TemporaryDirectory() as name:
            run_process(chosen, "save", name, emitter)
            samples = [json.loads(run_process(chosen, "load", name, emitter)) for _ in range(chosen.processes)]
        medians = {step: statistics.median([sample[step] for sample in samples]) for step in samples[0]}
        report.add({"emitter": emitter, **{f"{step}, s": seconds for step, seconds in medians.items()}}, samples)


def run_process(chosen: argparse.Namespace, step: str, folder: str, emitter: str) -> str:
    """Runs a step in a new process; returns the last line that it prints."""
    options = ["--subgraphs", str(chosen.subgraphs), "--profile", chosen.profile]
    output = output_of([__file__, *options, "--job", step, folder, emitter], {"FXWRAP_COMPILE_CACHE": "0"})
    if chosen.profile:
        print(output)
    return output.splitlines()[-1] if output else ""


if __name__ == "__main__":
    main()
