"""Memory plans of the test suite's models: peak over the lower bound, allocations per call, and time per call.

Peaks are by the plan, in bytes, parameters and inputs included. `peaks` plans static sizes; `sizes` makes the batch a
symbol and evaluates the plan at 20 batches. Times are medians of interleaved rounds in one process. Run in the
repository's root: `python -m benchmarks.memory [peaks] [sizes] [times] [--record]`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from benchmarks.results import Cell, Report, add_record_option, geometric_mean
from fxwrap.compile import plan_program_memory
from fxwrap.lines import Let, Reuse
from fxwrap.memory_planning import MemoryPlan, apply_plan
from fxwrap.passes import fold_views
from fxwrap.passes.out_variants import use_out_variants
from fxwrap.passes.reuse import reuse_memory
from fxwrap.symbolic import Number, evaluate
from fxwrap.wrapper_ir import (
    Program,
    TensorType,
    alias_roots,
    defined,
    live_bytes,
    program_arguments,
    reads,
    symbol_infos,
)
from tests.support.models import MODELS, ModelCase

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
    graphs = graphs_of(case, training, symbolic=symbolic)
    return [fold_views(fxwrap.lower(graph, fakes, name=kind)) for kind, graph, fakes in graphs]


def all_programs(*, symbolic: bool) -> Iterator[tuple[str, Program]]:
    """Yields the programs of all models with their names."""
    for name, case in MODELS.items():
        for training in (False, True):
            for program in programs(case, training, symbolic=symbolic):
                yield f"{name} {program.name}", program


def allocations(program: Program) -> tuple[int, int]:
    """Returns the number of allocations of a call, and how many of them are returned.

    They are pools, `memory.alloc` and results of operators. Returned values cannot be in a pool.
    """
    lines = program.body.lines
    root_of = alias_roots(lines, program_arguments(program))
    returned = {root_of[value.name] for value in reads(lines[-1])}
    allocated = [(line, value) for line in lines if not isinstance(line, Reuse) for value in defined(line)
            if line.alias_of(value) is None and isinstance(value.type, TensorType)]  # fmt: skip
    return len(allocated), sum(value.name in returned for _, value in allocated)


def planned(program: Program, slack: float) -> tuple[Program, MemoryPlan]:
    """Returns a program with pools, and its plan."""
    filled = use_out_variants(program)
    plan = plan_program_memory(filled, fxwrap.Options(memory_planning="auto", memory_slack=slack))
    return apply_plan(filled, plan), plan


def peaks(chosen: argparse.Namespace) -> None:
    """Prints the table of static plans."""
    report = Report("memory-allocations", chosen, note="allocations of a call; peaks of the plan, in bytes")
    ratios: dict[float, list[float]] = {slack: [] for slack in SLACKS}
    for name, program in all_programs(symbolic=False):
        counts, peak, start = [], 0, time.process_time()
        for slack in SLACKS:
            pooled, plan = planned(program, slack)
            seconds = time.process_time() - start
            ratios[slack].append(plan.body.peak / plan.body.lower_bound)
            counts.append(allocations(pooled)[0])
            peak = plan.body.lower_bound
        before, returned = allocations(program)
        cells: dict[str, Cell] = {
            "graph": name,
            "lines": len(program.body.lines),
            "no planning": before,
            "of these returned": returned,
            "reuse": allocations(reuse_memory(program))[0],
            "pools": counts[0],
            "pools, slack 0.02": counts[1],
            "lower bound": peak,
            "peak / lower bound": ratios[0.0][-1],
            "plan, ms": 1e3 * seconds,
        }
        report.add(cells)
    report = Report("memory-summary", chosen, note="static sizes")
    for slack, values in ratios.items():
        means: dict[str, Cell] = {"geometric mean of peak / lower bound": geometric_mean(values), "worst": max(values)}
        report.add({"sizes": f"static, slack {slack}", **means}, values)


def symbol_values(program: Program, values: Mapping[str, Number]) -> dict[str, Number]:
    """Returns values of symbols, including those that lines compute from them."""
    result = dict(values)
    for line in program.lines():
        if isinstance(line, Let):
            expression = line.expr
            result[line.symbol.name] = expression if isinstance(expression, int) else evaluate(expression, result)
    return result


def sizes(chosen: argparse.Namespace) -> None:
    """Prints the table of plans with one symbolic size."""
    report = Report("memory-symbolic", chosen, note="one symbolic size")
    ratios = []
    for name, program in all_programs(symbolic=True):
        symbols = list(symbol_infos(program))
        pooled, _ = planned(program, 0.0)
        own = []
        for batch in BATCHES:
            values = symbol_values(pooled, dict.fromkeys(symbols, batch))
            own.append(live_bytes(pooled, values).peak / live_bytes(program, values).peak)
        ratios += own
        counts = {"no planning": allocations(program)[0], "pools": allocations(pooled)[0]}
        means = {"geometric mean of peak / lower bound": geometric_mean(own), "worst": max(own)}
        report.add({"graph": name, "symbols": len(symbols), **means, **counts}, own)
    print(f"geometric mean {geometric_mean(ratios):.4f}, worst {max(ratios):.4f}")


def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Small kernels, each with its own allocation."""
    for _ in range(20):
        x = torch.softmax(x.cumsum(0) * w, -1).cumsum(1) + x
    return x


def timed_graphs() -> Iterator[tuple[str, GraphModule, list[Any], int]]:
    """Yields name, graph, inputs and calls per round of each timed program."""
    for size in (8, 128):
        inputs = [torch.randn(size, size), torch.randn(size, size)]
        yield f"chain of {size} x {size}", make_fx(chain)(*inputs), inputs, 300 if size == 8 else 30
    generator = torch.Generator().manual_seed(0)
    for name in ("gpt2", "llama"):
        ((_, graph, fakes),) = graphs_of(MODELS[name], False, symbolic=False)
        tensors = [torch.rand(fake.shape, generator=generator).to(fake.dtype) for fake in fakes]
        yield f"{name}, inference", graph, tensors, 30


MODES: dict[str, dict[str, Any]] = {
    "none": {}, "reuse": {"memory_planning": "reuse"}, "pools": {"memory_planning": "auto"},
    "pools, slack 0.02": {"memory_planning": "auto", "memory_slack": 0.02},
}  # fmt: skip
"""Options by kind of planning."""


def times(chosen: argparse.Namespace) -> None:
    """Prints microseconds per call without planning, with reuse, with pools and with pools that have slack."""
    torch.set_num_threads(1)
    report = Report("memory-times", chosen, note=f"one thread, medians of {ROUNDS} rounds")
    for name, graph, inputs, calls in timed_graphs():
        for emitter in ("python", "cpp", "fx"):
            entries = {}
            cells: dict[str, Cell] = {"program, emitter": f"{name}, {emitter}"}
            for mode, changes in MODES.items():
                options = fxwrap.Options(emitter=emitter, check_inputs=False, **changes)
                compiled = fxwrap.compile_graph(graph, inputs, options=options)
                entries[mode] = compiled.flat
                cells[f"{mode}: allocations"] = allocations(compiled.program)[0]
            medians = measure(entries, inputs, calls)
            cells["no planning, us"] = 1e6 * medians["none"]
            report.add({**cells, **{f"{mode} / none": medians[mode] / medians["none"] for mode in list(MODES)[1:]}})


def measure(entries: Mapping[str, Any], inputs: Sequence[torch.Tensor], calls: int) -> dict[str, float]:
    """Returns the median seconds per call of each entry."""
    samples: dict[str, list[float]] = {name: [] for name in entries}
    for _ in range(ROUNDS):
        for name, entry in entries.items():
            start = time.perf_counter()
            for _ in range(calls):
                entry(*inputs)
            samples[name].append((time.perf_counter() - start) / calls)
    return {name: statistics.median(values[1:]) for name, values in samples.items()}


def main() -> None:
    """Prints the chosen tables."""
    tables = {"peaks": peaks, "sizes": sizes, "times": times}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", help=f"some of {', '.join(tables)}; default: all")
    add_record_option(parser)
    chosen = parser.parse_args()
    for name in chosen.tables or tables:
        tables[name](chosen)


if __name__ == "__main__":
    main()
