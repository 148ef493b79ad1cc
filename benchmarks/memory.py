"""Memory plans of the test-suite's models: peak over the lower bound, allocations a call, and what pools save.

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
from fxwrap.lines import Alloc, Let, Pool, PoolSlice
from fxwrap.memory_planning import apply_plan
from fxwrap.passes import fold_views
from fxwrap.symbolic import Scalar, evaluate
from fxwrap.wrapper_ir import Program, live_bytes, symbol_infos
from tests.models import MODELS, ModelCase

BATCHES = range(2, 42, 2)
ROUNDS = 25


def programs(case: ModelCase, training: bool, *, symbolic: bool) -> list[Program]:
    """Returns the lowered graphs of a model: inference, or forward and backward."""
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
    return [fold_views(fxwrap.lower(graph, fakes, name=kind)) for kind, graph, fakes in graphs]


def all_programs(*, symbolic: bool) -> Iterator[tuple[str, Program]]:
    """Yields the programs of all models with their names."""
    for name, case in MODELS.items():
        for training in (False, True):
            for program in programs(case, training, symbolic=symbolic):
                yield f"{name} {program.name}", program


def count(program: Program, *kinds: type) -> int:
    """Returns how many lines of these classes a program has."""
    return sum(isinstance(line, kinds) for line in program.lines())


def peaks() -> None:
    """Prints the table of static plans."""
    print("model | lines | peak | peak / lower bound | allocations, with pools | plan ms")
    ratios = []
    for name, program in all_programs(symbolic=False):
        start = time.process_time()
        plan = plan_program(program, fxwrap.Options(memory_planning="auto"))
        took = time.process_time() - start
        planned = apply_plan(program, plan)
        ratios.append(plan.body.peak / plan.body.lower_bound)
        before, after = count(program, Alloc), count(planned, Alloc, Pool)
        lines = len(program.body.lines)
        print(
            f"{name} | {lines} | {plan.body.peak:,} | {ratios[-1]:.4f} | {before}, {after} | {took * 1e3:.1f}",
            flush=True,
        )
    print(f"geomean {geomean(ratios):.4f}, worst {max(ratios):.4f}")


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
        plan = plan_program(program, fxwrap.Options(memory_planning="auto"))
        planned = apply_plan(program, plan)
        own = []
        for batch in BATCHES:
            values = known(planned, dict.fromkeys(symbols, batch))
            own.append(live_bytes(planned, values).peak / live_bytes(program, values).peak)
        ratios += own
        allocations = f"{count(program, Alloc)}, {count(planned, Alloc, Pool)}"
        print(f"{name} | {len(symbols)} | {geomean(own):.4f}, {max(own):.4f} | {allocations}", flush=True)
    print(f"geomean {geomean(ratios):.4f}, worst {max(ratios):.4f}")


def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Small kernels, each with memory of its own."""
    for _ in range(20):
        x = torch.softmax(x.cumsum(0) * w, -1).cumsum(1) + x
    return x


def times() -> None:
    """Prints microseconds a call without planning, with reuse and with pools."""
    torch.set_num_threads(1)
    print("emitter, size | allocations, slices | none us | reuse us | pools us | pools / none")
    for size in (8, 128):
        inputs = (torch.randn(size, size), torch.randn(size, size))
        graph = make_fx(chain)(*inputs)
        for emitter in ("python", "cpp"):
            entries = {}
            for planning in ("none", "reuse", "auto"):
                options = fxwrap.Options(emitter=emitter, memory_planning=planning, check_inputs=False)
                compiled = fxwrap.compile_graph(graph, list(inputs), options=options)
                entries[planning] = compiled.flat
                if planning == "auto":
                    shown = f"{count(compiled.program, Alloc, Pool)}, {count(compiled.program, PoolSlice)}"
            medians = measure(entries, inputs, 300 if size == 8 else 30)
            ratio = medians["auto"] / medians["none"]
            cells = " | ".join(f"{medians[planning] * 1e6:.1f}" for planning in entries)
            print(f"{emitter}, {size} | {shown} | {cells} | {ratio:.2f}", flush=True)


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
