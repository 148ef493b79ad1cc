"""Cost of a compile per line: graphs of 1k, 10k and 50k operators through every stage.

Chains and wide graphs are built as FX graphs with fake metadata, without torch.compile. For each size the table gives
microseconds a line for our own stages, and beside them what CPython, torch.fx and the C++ compiler take on our output.
The last columns compare the largest size with the smallest. Run: `python benchmarks/compile_scale.py [--no-cpp]`.
"""

from __future__ import annotations

import argparse
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
    program, seconds["lower"] = timed(lambda: fxwrap.lower(graph))
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
    chosen = parser.parse_args()
    for name, build in (("chain", chain), ("wide", wide)):
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


if __name__ == "__main__":
    main()
