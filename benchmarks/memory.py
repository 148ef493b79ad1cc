"""Memory plans of the test-suite's models: peak over the lower bound, allocations a call, and what planning saves.

Peaks are by the plan, in bytes, everything that is live counted: parameters and inputs too. `peaks` plans sizes that
are known; `sizes` makes the batch a symbol and evaluates the plan at 20 batches. Times are medians of interleaved
rounds in one process. Run: `python -m benchmarks.memory [peaks] [sizes] [times]` in the repository's root.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.compiler import plan_program
from fxwrap.lines import Let, Reuse
from fxwrap.memory_planning import MemoryPlan, apply_plan
from fxwrap.passes import fold_views
from fxwrap.passes.given_memory import fill_given_memory
from fxwrap.passes.reuse import reuse_memory
from fxwrap.symbolic import Scalar, evaluate
from fxwrap.wrapper_ir import (
    Program,
    TensorType,
    defined,
    live_bytes,
    program_arguments,
    reads,
    roots,
    symbol_infos,
)
from tests.models import MODELS, ModelCase

BATCHES = range(2, 42, 2)
SLACKS = (0.0, 0.02)
ROUNDS = 25


def graphs_of(case: ModelCase, training: bool, *, symbolic: bool) -> list[tuple[str, GraphModule, list[Any]]]:
    """Returns the graphs of a model with their fake inputs: inference, or forward and backward."""
    graphs: list[tuple[str, GraphModule, list[Any]]] = []

    def recorder(kind: str) -> Any:
        def compile_graph(graph: GraphModule, inputs: Sequence[Any]) -> Any:
            fakes = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
            graphs.append((kind, graph, fakes))
            return make_boxed_func(graph.forward)

        return compile_graph

    backend = aot_autograd(
        fw_compiler=recorder("forward"), bw_compiler=recorder("backward"), inference_compiler=recorder("inference"),
        partition_fn=min_cut_rematerialization_partition, keep_inference_input_mutations=True,
    )  # fmt: skip
    torch.compiler.reset()
    inputs = case.inputs(seed=1, training=training)
    if symbolic:
        inputs = {name: torch.cat([tensor] * 3) for name, tensor in inputs.items()}
        for tensor in inputs.values():
            torch._dynamo.mark_dynamic(tensor, 0)
    compiled = torch.compile(case.build(seed=0).train(training), backend=backend, fullgraph=True, dynamic=None)
    with torch.set_grad_enabled(training):
        output = compiled(**inputs)
    if training:
        case.loss(output).backward()
    return graphs


def programs(case: ModelCase, training: bool, *, symbolic: bool) -> list[Program]:
    """Returns the lowered graphs of a model."""
    found = graphs_of(case, training, symbolic=symbolic)
    return [fold_views(fxwrap.lower(graph, fakes, name=kind)) for kind, graph, fakes in found]


def all_programs(*, symbolic: bool) -> Iterator[tuple[str, Program]]:
    """Yields the programs of all models with their names."""
    for name, case in MODELS.items():
        for training in (False, True):
            for program in programs(case, training, symbolic=symbolic):
                yield f"{name} {program.name}", program


def allocations(program: Program) -> tuple[int, int]:
    """Returns how many allocations a call of a program makes, and how many of them it gives back.

    They are pools, `memory.alloc` and results of operators. What is given back cannot be in a pool.
    """
    lines = program.body.lines
    root_of = roots(lines, program_arguments(program))
    back = {root_of[value.name] for value in reads(lines[-1])}
    made = [(line, value) for line in lines if not isinstance(line, Reuse) for value in defined(line)
            if line.alias_of(value) is None and isinstance(value.type, TensorType)]  # fmt: skip
    return len(made), sum(value.name in back for _, value in made)


def planned(program: Program, slack: float) -> tuple[Program, MemoryPlan]:
    """Returns a program with pools, and its plan."""
    filled = fill_given_memory(program)
    plan = plan_program(filled, fxwrap.Options(memory_planning="auto", memory_slack=slack))
    return apply_plan(filled, plan), plan


def peaks() -> None:
    """Prints the table of static plans."""
    print("model | lines | allocations a call (given back) | reuse | pools | pools, 2% slack | peak | ratio | plan ms")
    ratios: dict[float, list[float]] = {slack: [] for slack in SLACKS}
    for name, program in all_programs(symbolic=False):
        cells = []
        start = time.process_time()
        for slack in SLACKS:
            found, plan = planned(program, slack)
            took = time.process_time() - start
            ratios[slack].append(plan.body.peak / plan.body.lower_bound)
            cells.append(allocations(found)[0])
        before, back = allocations(program)
        reused = allocations(reuse_memory(program))[0]
        shown = ", ".join(f"{ratios[slack][-1]:.4f}" for slack in SLACKS)
        print(
            f"{name} | {len(program.body.lines)} | {before} ({back}) | {reused} | {cells[0]} | {cells[1]} | "
            f"{plan.body.lower_bound:,} | {shown} | {took * 1e3:.0f}",
            flush=True,
        )
    for slack, found_ratios in ratios.items():
        print(f"slack {slack}: geomean {geomean(found_ratios):.4f}, worst {max(found_ratios):.4f}")


def geomean(ratios: Sequence[float]) -> float:
    """Returns the geometric mean."""
    return math.exp(statistics.fmean([math.log(ratio) for ratio in ratios]))


def known(program: Program, values: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Returns values of symbols with those that the lines compute from them."""
    found = dict(values)
    for line in program.lines():
        if isinstance(line, Let):
            expression = line.expr
            found[line.symbol.name] = expression if isinstance(expression, int) else evaluate(expression, found)
    return found


def sizes() -> None:
    """Prints the table of plans with one symbolic size."""
    print("model | symbols | geomean, worst of peak / lower bound | allocations, with pools")
    ratios = []
    for name, program in all_programs(symbolic=True):
        symbols = list(symbol_infos(program))
        found, _ = planned(program, 0.0)
        own = []
        for batch in BATCHES:
            values = known(found, dict.fromkeys(symbols, batch))
            own.append(live_bytes(found, values).peak / live_bytes(program, values).peak)
        ratios += own
        counts = f"{allocations(program)[0]}, {allocations(found)[0]}"
        print(f"{name} | {len(symbols)} | {geomean(own):.4f}, {max(own):.4f} | {counts}", flush=True)
    print(f"geomean {geomean(ratios):.4f}, worst {max(ratios):.4f}")


def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Small kernels, each with memory of its own."""
    for _ in range(20):
        x = torch.softmax(x.cumsum(0) * w, -1).cumsum(1) + x
    return x


def timed_graphs() -> Iterator[tuple[str, GraphModule, list[Any], int]]:
    """Yields what is timed: its name, the graph, inputs, and calls a round."""
    for size in (8, 128):
        inputs = [torch.randn(size, size), torch.randn(size, size)]
        yield f"chain of {size} x {size}", make_fx(chain)(*inputs), inputs, 300 if size == 8 else 30
    generator = torch.Generator().manual_seed(0)
    for name in ("gpt2", "llama"):
        ((_, graph, fakes),) = graphs_of(MODELS[name], False, symbolic=False)
        tensors = [torch.rand(fake.shape, generator=generator).to(fake.dtype) for fake in fakes]
        yield f"{name}, inference", graph, tensors, 30


def times() -> None:
    """Prints microseconds a call without planning, with reuse, with pools and with pools that have slack."""
    torch.set_num_threads(1)
    print("program, emitter | allocations | none us | reuse / none | pools / none | pools, 2% slack / none")
    ways: dict[str, dict[str, Any]] = {
        "none": {}, "reuse": {"memory_planning": "reuse"}, "auto": {"memory_planning": "auto"},
        "slack": {"memory_planning": "auto", "memory_slack": 0.02},
    }  # fmt: skip
    for name, graph, inputs, calls in timed_graphs():
        for emitter in ("python", "cpp", "fx"):
            entries, counts = {}, []
            for way, chosen in ways.items():
                options = fxwrap.Options(emitter=emitter, check_inputs=False, **chosen)
                compiled = fxwrap.compile_graph(graph, inputs, options=options)
                entries[way] = compiled.flat
                counts.append(str(allocations(compiled.program)[0]))
            medians = measure(entries, inputs, calls)
            ratios = " | ".join(f"{medians[way] / medians['none']:.2f}" for way in list(ways)[1:])
            print(f"{name}, {emitter} | {', '.join(counts)} | {medians['none'] * 1e6:.0f} | {ratios}", flush=True)


def measure(entries: Mapping[str, Any], inputs: Sequence[torch.Tensor], calls: int) -> dict[str, float]:
    """Returns the median seconds a call of each entry."""
    taken: dict[str, list[float]] = {name: [] for name in entries}
    for _ in range(ROUNDS):
        for name, entry in entries.items():
            start = time.perf_counter()
            for _ in range(calls):
                entry(*inputs)
            taken[name].append((time.perf_counter() - start) / calls)
    return {name: statistics.median(found[1:]) for name, found in taken.items()}


if __name__ == "__main__":
    chosen = sys.argv[1:] or ["peaks", "sizes", "times"]
    for part in chosen:
        {"peaks": peaks, "sizes": sizes, "times": times}[part]()
