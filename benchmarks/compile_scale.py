"""Cost of a compile per line: graphs of 1k, 10k and 50k operators through every stage.

Chains and wide graphs are built as FX graphs with fake metadata, without torch.compile, and compiled without fusion, so
that there is a line for each operator. For each size the table gives microseconds a line for our own stages, and beside
them what CPython, torch.fx and the C++ compiler take on our output. The last columns compare the largest size with the
smallest. Then the cost of lowering with fusion, in microseconds a node: a GRU, unrolled 100, 500 and 1500 steps.
Run: `python benchmarks/compile_scale.py [--no-cpp] [--only gru]`.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

import fxwrap

aten = torch.ops.aten
UNFUSED = fxwrap.Options(fuse=False)
GRU_STEPS, GRU_BATCH, GRU_SIZE = (100, 500, 1500), 8, 64
OPERATORS = (aten.mul.Tensor, aten.add.Tensor, aten.div.Tensor, aten.sub.Tensor)


def chain(count: int) -> GraphModule:
    """A graph in which each operator reads the one before."""

    def operands(index: int, made: list[Node], x: Node) -> tuple[Node, Node]:
        return (made[-1] if made else x), x

    return _graph(count, operands)


def wide(count: int) -> GraphModule:
    """A graph in which every other operator reads the input alone, and the ones between add it all up."""

    def operands(index: int, made: list[Node], x: Node) -> tuple[Node, Node]:
        return (made[-1], made[-2]) if index % 2 and index > 1 else (x, x)

    return _graph(count, operands)


def _graph(count: int, operands: Callable[[int, list[Node], Node], tuple[Node, Node]]) -> GraphModule:
    graph, mode = Graph(), FakeTensorMode()
    x = graph.placeholder("x")
    with mode:
        x.meta["val"] = torch.empty(8, 8)
    made: list[Node] = []
    for index in range(count):
        node = graph.call_function(OPERATORS[index % len(OPERATORS)], operands(index, made, x))
        with mode:
            node.meta["val"] = torch.empty(8, 8)
        made.append(node)
    graph.output((made[-1], made[-2]))
    return GraphModule(torch.nn.Module(), graph)


def unrolled_gru(steps: int) -> GraphModule:
    """A recurrent network as ATen operators: two matrix products and thirteen pointwise operators and views a step."""
    graph, mode = Graph(), FakeTensorMode()

    def call(operator: Any, *arguments: Any) -> Node:
        node = graph.call_function(operator, arguments)
        with mode:
            node.meta["val"] = operator(*[item.meta["val"] if isinstance(item, Node) else item for item in arguments])
        return node

    def given(name: str, *sizes: int) -> Node:
        node = graph.placeholder(name)
        with mode:
            node.meta["val"] = torch.empty(*sizes)
        return node

    def gate(of_input: Node, of_state: Node, number: int) -> tuple[Node, Node]:
        first, last = GRU_SIZE * number, GRU_SIZE * (number + 1)
        return call(aten.slice.Tensor, of_input, 1, first, last), call(aten.slice.Tensor, of_state, 1, first, last)

    inputs, state = given("inputs", steps, GRU_BATCH, GRU_SIZE), given("state", GRU_BATCH, GRU_SIZE)
    input_weight, state_weight = given("input_weight", GRU_SIZE, 3 * GRU_SIZE), given("weight", GRU_SIZE, 3 * GRU_SIZE)
    for step in range(steps):
        of_input = call(aten.mm.default, call(aten.select.int, inputs, 0, step), input_weight)
        of_state = call(aten.mm.default, state, state_weight)
        reset = call(aten.sigmoid.default, call(aten.add.Tensor, *gate(of_input, of_state, 0)))
        update = call(aten.sigmoid.default, call(aten.add.Tensor, *gate(of_input, of_state, 1)))
        new_input, new_state = gate(of_input, of_state, 2)
        new = call(aten.tanh.default, call(aten.add.Tensor, new_input, call(aten.mul.Tensor, reset, new_state)))
        kept = call(aten.mul.Tensor, update, call(aten.sub.Tensor, state, new))
        state = call(aten.add.Tensor, new, kept)
    graph.output((state,))
    return GraphModule(torch.nn.Module(), graph)


def print_fused(repeat: int) -> None:
    """Prints what lowering with fusion costs a node."""
    print(f"\n{'unrolled GRU':<14}{'nodes':>8}{'lines':>8}{'kernels':>9}{'seconds':>9}{'us a node':>11}")
    for steps in GRU_STEPS:
        graph = unrolled_gru(steps)
        nodes = len(graph.graph.nodes)
        runs = [timed(functools.partial(fxwrap.lower, graph)) for _ in range(repeat)]
        program, seconds = runs[0][0], statistics.median([taken for _, taken in runs])
        counts = f"{nodes:>8}{len(program.body.lines):>8}{len(program.kernels):>9}"
        print(f"{steps:>5} steps   {counts}{seconds:>9.2f}{1e6 * seconds / nodes:>11.0f}", flush=True)


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """The result of a call and the seconds it took, with the garbage collector out of the way."""
    gc.collect()
    gc.disable()
    start = time.perf_counter()
    result = function()
    seconds = time.perf_counter() - start
    gc.enable()
    return result, seconds


def measure(graph: GraphModule, with_cpp: bool) -> dict[str, float]:
    """Microseconds a line for each stage."""
    seconds: dict[str, float] = {}
    program, seconds["lower"] = timed(lambda: fxwrap.lower(graph, options=UNFUSED))
    _, seconds["verify"] = timed(lambda: fxwrap.verify(program))
    _, seconds["IR text"] = timed(lambda: str(program))
    python, seconds["Python text"] = timed(lambda: fxwrap.to_python(program))
    seconds["lower+verify+Python"] = seconds["lower"] + seconds["verify"] + seconds["Python text"]
    cpp, seconds["C++ text"] = timed(lambda: fxwrap.to_cpp(program))
    _, seconds["[CPython]"] = timed(lambda: compile(python.source, "program", "exec"))
    emitted, seconds["FX graph"] = timed(lambda: fxwrap.to_fx(program))
    _, seconds["[fx recompile]"] = timed(lambda: emitted.graph_module.recompile())
    if with_cpp:
        _, seconds["[g++]"] = timed(lambda: cpp.boxed)
    return {stage: 1e6 * taken / len(program.body.lines) for stage, taken in seconds.items()}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-cpp", action="store_true", help="leave out the C++ compiler")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 10000, 50000])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", default="chain,wide,gru", help="some of these, with commas")
    chosen = parser.parse_args()
    only = chosen.only.split(",")
    for name, build in [(name, build) for name, build in (("chain", chain), ("wide", wide)) if name in only]:
        columns = []
        for size in chosen.sizes:
            graph = build(size)
            runs = [measure(graph, not chosen.no_cpp and index == 0) for index in range(chosen.repeat)]
            stages = runs[0]
            columns.append({stage: statistics.median([run[stage] for run in runs if stage in run]) for stage in stages})
        print(f"\n{name}, us a line" + "".join(f"{size:>12}" for size in chosen.sizes) + f"{'last/first':>12}")
        for stage in columns[0]:
            ratio = columns[-1][stage] / columns[0][stage]
            cells = "".join(f"{column[stage]:>12.1f}" for column in columns)
            print(f"{stage:<22}{cells}{ratio:>12.2f}", flush=True)
    if "gru" in only:
        print_fused(chosen.repeat)


if __name__ == "__main__":
    main()
