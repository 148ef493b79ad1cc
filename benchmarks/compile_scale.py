"""Cost of a compile per line: graphs of 1k, 10k and 50k operators through every stage.

Chains and wide graphs are FX graphs with fake metadata, compiled without torch.compile and without fusion, so that each
operator has a line. The tables show microseconds of CPU time per line for each stage, garbage collection included;
stages in brackets are CPython, torch.fx and the C++ compiler on the output, and "[fx nodes alone]" is a torch.fx.Graph
with as many calls and no metadata. The last column compares the largest size with the smallest. The table of an
unrolled GRU shows lowering with fusion, in microseconds per node.
Run: `python benchmarks/compile_scale.py [--no-cpp] [--only gru] [--record]`.
"""

from __future__ import annotations

import argparse
import functools
import gc
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

sys.path.insert(0, str(Path(__file__).parent.parent))

import fxwrap
from benchmarks.results import Report, add_record_option

aten = torch.ops.aten
UNFUSED = fxwrap.Options(fuse=False)
GRU_STEPS, GRU_BATCH, GRU_SIZE = (100, 500, 1500), 8, 64
OPERATORS = (aten.mul.Tensor, aten.add.Tensor, aten.div.Tensor, aten.sub.Tensor)


def chain(count: int) -> GraphModule:
    """Returns a graph in which each operator reads the previous one."""

    def operands(index: int, nodes: list[Node], x: Node) -> tuple[Node, Node]:
        return (nodes[-1] if nodes else x), x

    return _graph(count, operands)


def wide(count: int) -> GraphModule:
    """Returns a graph in which every other operator reads only the input, and the others combine results."""

    def operands(index: int, nodes: list[Node], x: Node) -> tuple[Node, Node]:
        return (nodes[-1], nodes[-2]) if index % 2 and index > 1 else (x, x)

    return _graph(count, operands)


def _graph(count: int, operands: Callable[[int, list[Node], Node], tuple[Node, Node]]) -> GraphModule:
    graph, mode = Graph(), FakeTensorMode()
    x = graph.placeholder("x")
    with mode:
        x.meta["val"] = torch.empty(8, 8)
    nodes: list[Node] = []
    for index in range(count):
        node = graph.call_function(OPERATORS[index % len(OPERATORS)], operands(index, nodes, x))
        with mode:
            node.meta["val"] = torch.empty(8, 8)
        nodes.append(node)
    graph.output((nodes[-1], nodes[-2]))
    return GraphModule(torch.nn.Module(), graph)


def unrolled_gru(steps: int) -> GraphModule:
    """Returns a GRU as ATen operators: two matmuls and thirteen pointwise operators and views per step."""
    graph, mode = Graph(), FakeTensorMode()

    def call(operator: Any, *arguments: Any) -> Node:
        node = graph.call_function(operator, arguments)
        with mode:
            node.meta["val"] = operator(*[item.meta["val"] if isinstance(item, Node) else item for item in arguments])
        return node

    def placeholder(name: str, *sizes: int) -> Node:
        node = graph.placeholder(name)
        with mode:
            node.meta["val"] = torch.empty(*sizes)
        return node

    def gate(of_input: Node, of_state: Node, number: int) -> tuple[Node, Node]:
        first, last = GRU_SIZE * number, GRU_SIZE * (number + 1)
        return call(aten.slice.Tensor, of_input, 1, first, last), call(aten.slice.Tensor, of_state, 1, first, last)

    inputs, state = placeholder("inputs", steps, GRU_BATCH, GRU_SIZE), placeholder("state", GRU_BATCH, GRU_SIZE)
    input_weight = placeholder("input_weight", GRU_SIZE, 3 * GRU_SIZE)
    state_weight = placeholder("state_weight", GRU_SIZE, 3 * GRU_SIZE)
    for step in range(steps):
        of_input = call(aten.mm.default, call(aten.select.int, inputs, 0, step), input_weight)
        of_state = call(aten.mm.default, state, state_weight)
        reset = call(aten.sigmoid.default, call(aten.add.Tensor, *gate(of_input, of_state, 0)))
        update = call(aten.sigmoid.default, call(aten.add.Tensor, *gate(of_input, of_state, 1)))
        new_input, new_state = gate(of_input, of_state, 2)
        new = call(aten.tanh.default, call(aten.add.Tensor, new_input, call(aten.mul.Tensor, reset, new_state)))
        carried = call(aten.mul.Tensor, update, call(aten.sub.Tensor, state, new))
        state = call(aten.add.Tensor, new, carried)
    graph.output((state,))
    return GraphModule(torch.nn.Module(), graph)


def report_fused(chosen: argparse.Namespace) -> None:
    """Prints the cost of lowering with fusion per node."""
    report = Report("compile_scale-gru", chosen, note=f"unrolled GRU, medians of {chosen.repeat}")
    for steps in GRU_STEPS:
        graph = unrolled_gru(steps)
        nodes = len(graph.graph.nodes)
        runs = [timed(functools.partial(fxwrap.lower, graph)) for _ in range(chosen.repeat)]
        program, seconds = runs[0][0], [duration for _, duration in runs]
        micros = 1e6 * statistics.median(seconds) / nodes
        lines, kernels = len(program.body.lines), len(program.kernels)
        report.add({"steps": steps, "nodes": nodes, "lines": lines, "kernels": kernels, "us/node": micros}, seconds)


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """Returns the result and the CPU seconds of a call, those of child processes included."""
    gc.collect()
    start = _cpu_seconds()
    result = function()
    return result, _cpu_seconds() - start


def _cpu_seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def fx_nodes(count: int) -> Graph:
    """Returns a chain of `count` calls without metadata."""
    graph = Graph()
    x = last = graph.placeholder("x")
    for index in range(count):
        last = graph.call_function(OPERATORS[index % len(OPERATORS)], (last, x))
    graph.output((last,))
    return graph


def measure(graph: GraphModule, with_cpp: bool) -> dict[str, float]:
    """Returns microseconds per line for each stage."""
    seconds: dict[str, float] = {}
    program, seconds["lower"] = timed(lambda: fxwrap.lower(graph, options=UNFUSED))
    _, seconds["verify"] = timed(lambda: fxwrap.verify(program))
    text, seconds["IR text"] = timed(lambda: str(program))
    _, seconds["parse"] = timed(lambda: fxwrap.parse(text))
    python, seconds["Python text"] = timed(lambda: fxwrap.to_python(program))
    seconds["lower+verify+Python"] = seconds["lower"] + seconds["verify"] + seconds["Python text"]
    cpp, seconds["C++ text"] = timed(lambda: fxwrap.to_cpp(program))
    _, seconds["[CPython]"] = timed(lambda: compile(python.source, "program", "exec"))
    emitted, seconds["FX graph"] = timed(lambda: fxwrap.to_fx(program))
    _, seconds["[fx nodes alone]"] = timed(lambda: fx_nodes(len(program.body.lines)))
    _, seconds["[fx recompile]"] = timed(lambda: emitted.graph_module.recompile())
    _, seconds["from_fx"] = timed(lambda: fxwrap.from_fx(emitted))
    if with_cpp:
        _, seconds["[g++]"] = timed(lambda: cpp.boxed)
    return {stage: 1e6 * total / len(program.body.lines) for stage, total in seconds.items()}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-cpp", action="store_true", help="skip the C++ compiler")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 10000, 50000])
    parser.add_argument("--repeat", type=int, default=3, help="at least; small graphs are measured more often")
    parser.add_argument("--only", default="chain,wide,gru", help="some of the default's, separated by commas")
    add_record_option(parser)
    chosen = parser.parse_args()
    only = chosen.only.split(",")
    for name, build in [(name, build) for name, build in (("chain", chain), ("wide", wide)) if name in only]:
        report = Report(f"compile_scale-{name}", chosen, note=f"CPU time, medians of {chosen.repeat} or more")
        samples: dict[str, dict[int, list[float]]] = {}
        for size in chosen.sizes:
            graph = build(size)
            for index in range(max(chosen.repeat, min(15, 15_000 // size))):
                for stage, micros in measure(graph, not chosen.no_cpp and index == 0).items():
                    samples.setdefault(stage, {}).setdefault(size, []).append(micros)
        for stage, by_size in samples.items():
            medians = {size: statistics.median(values) for size, values in by_size.items()}
            cells = {f"{size} operators, us/line": median for size, median in medians.items()}
            report.add(
                {"stage": stage, **cells, "last / first": medians[chosen.sizes[-1]] / medians[chosen.sizes[0]]}, by_size
            )
    if "gru" in only:
        report_fused(chosen)


if __name__ == "__main__":
    main()
