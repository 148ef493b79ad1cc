"""One rule of the lowering of blocks a case: the program, and what emitted Python and C++ make of it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule

import fxwrap
from tests.lowering.control.cases import random
from tests.lowering.control.graphs import (
    block,
    build_graph,
    cond_graph,
    condition,
    higher,
    map_graph,
    results,
    scan_graph,
    while_graph,
)
from tests.support.golden import check_golden, sections

GOLDENS = Path(__file__).parent / "golden"
X, ZERO, YES = random(4, 8), torch.tensor(0), torch.tensor(True)
CONSTANT = torch.arange(8.0)


def a_constant_inside_becomes_an_argument() -> tuple[GraphModule, tuple[Any, ...]]:
    return cond_graph(block(lambda x: x * CONSTANT, X), block(lambda x: x + CONSTANT, X)), (YES, X)


def borrowed_block_results_are_copied() -> tuple[GraphModule, tuple[Any, ...]]:
    return cond_graph(block(lambda x: (x, x.t()), X), block(lambda x: (x + 1, x.t() * 2), X), count=2), (YES, X)


def carried_values_are_moved() -> tuple[GraphModule, tuple[Any, ...]]:
    cond = condition(lambda i, x, w: i < 3, ZERO, X, X)
    return while_graph(cond, block(lambda i, x, w: (i + 1, x * w), ZERO, X, X), 2, 1), (ZERO, X, X + 1)


def a_carried_number_is_bound_in_each_block() -> tuple[GraphModule, tuple[Any, ...]]:
    def write(graph: Graph, x: Any) -> Any:
        blocks = graph.get_attr("cond"), graph.get_attr("body")
        return results(graph, graph.call_function(higher.while_loop, (*blocks, (0, x), ())), 2)

    def judged(graph: Graph, i: Any, _x: Any) -> Any:
        return graph.call_function(operator.lt, (i, 3))

    def advanced(graph: Graph, i: Any, x: Any) -> Any:
        return graph.call_function(operator.add, (i, 1)), graph.call_function(torch.ops.aten.mul.Tensor, (x, i))

    return build_graph(1, write, {"cond": build_graph(2, judged), "body": build_graph(2, advanced)}), (X,)


def stacked_results_are_preallocated() -> tuple[GraphModule, tuple[Any, ...]]:
    body = block(lambda carried, row: (carried + row, row.sum()), X[0], X[0])
    return scan_graph(body, 1, 1, 1), (X[0], X)


def slice_layouts_match_the_traced_body() -> tuple[GraphModule, tuple[Any, ...]]:
    columns = random(8, 4).t()
    graph = map_graph(block(lambda row: row * 2, X[0]), 1, 1)
    mode = torch._subclasses.FakeTensorMode()
    for nested, operand, result in ((graph.body, torch.zeros(8), torch.zeros(8)), (graph, columns, torch.zeros(4, 8))):
        for node in nested.graph.nodes:
            whole = mode.from_tensor(operand if node.op == "placeholder" else result)
            node.meta["val"] = (whole,) if node.target is higher.map_impl else whole
    return graph, (columns,)


def a_shared_graph_is_one_function() -> tuple[GraphModule, tuple[Any, ...]]:
    layer = block(lambda x: (x * CONSTANT).sin(), X)

    def write(graph: Graph, x: Any) -> Any:
        for _ in range(2):
            (x,) = results(graph, graph.call_function(higher.invoke_subgraph, (graph.get_attr("layer"), "layer", x)), 1)
        return (x,)

    return build_graph(1, write, {"layer": layer}), (X,)


RULES: tuple[Callable[[], tuple[GraphModule, tuple[Any, ...]]], ...] = (
    a_constant_inside_becomes_an_argument,
    borrowed_block_results_are_copied,
    carried_values_are_moved,
    a_carried_number_is_bound_in_each_block,
    stacked_results_are_preallocated,
    slice_layouts_match_the_traced_body,
    a_shared_graph_is_one_function,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rules(rule: Callable[[], tuple[GraphModule, tuple[Any, ...]]], update_golden: bool) -> None:
    graph, inputs = rule()
    program = fxwrap.lower(graph, inputs, options=fxwrap.Options(fuse=False, check_inputs=False))
    fxwrap.verify(program)
    stages = [("program", str(program)), ("python", fxwrap.to_python(program).source)]
    source = fxwrap.to_cpp(program).source
    start = source.index("static void run")
    stages.append(("cpp", source[start : source.index("// namespace program")].rpartition("}")[0]))
    check_golden(GOLDENS / f"{rule.__name__}.txt", sections(stages), update_golden)
