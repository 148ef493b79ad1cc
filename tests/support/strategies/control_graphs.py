"""Random graphs with a cond, a while loop or a scan around random operators over small tensors."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from tests.support.strategies.graphs import FAMILIES, RandomGraph, graphs

aten, higher = torch.ops.aten, torch.ops.higher_order


DTYPES = (torch.float32, torch.float32, torch.int64)
INNER = graphs(FAMILIES, steps=8, writes=0, sizes=(3, 4, 2, 1), dtypes=DTYPES)


def _other(value: Tensor) -> Any:
    return aten.logical_not.default if value.dtype is torch.bool else aten.neg.default


def _extended(inner: RandomGraph, extra: int, end: Callable[[Graph, list[Node], list[Node]], Any]) -> GraphModule:
    """Returns a copy of a graph with placeholders in front; `end` maps them and the results to new results."""
    graph = copy.deepcopy(inner.module.graph)
    (output,) = graph.find_nodes(op="output")
    first = next(iter(graph.nodes))
    with graph.inserting_before(first):
        added = [graph.placeholder(f"carried{number}") for number in range(extra)]
    results = list(output.args[0])
    graph.erase_node(output)
    graph.output(tuple(end(graph, added, results)))
    graph.lint()
    return GraphModule(torch.nn.Module(), graph)


def _mixed(graph: Graph, carried: Node, results: Sequence[Node]) -> Node:
    """Adds what makes the next carried tensor: half the old one, and the sum of each result."""
    mixed = graph.call_function(aten.mul.Tensor, (carried, 0.5))
    for result in results:
        single = graph.call_function(aten._to_copy.default, (result,), {"dtype": torch.float32})
        total = graph.call_function(aten.tanh.default, (graph.call_function(aten.sum.default, (single,)),))
        mixed = graph.call_function(aten.add.Tensor, (mixed, total))
    return mixed


def _whole(modules: dict[str, GraphModule], count: int, write: Callable[[Graph, list[Node]], Node], gives: int) -> Any:
    graph = Graph()
    call = write(graph, [graph.placeholder(f"x{number}") for number in range(count)])
    items = [graph.call_function(operator.getitem, (call, number)) for number in range(gives)]
    graph.output(tuple([graph.call_function(aten.mul.Tensor, (item, 1)) for item in items]))
    return GraphModule(modules, graph)


def _cond(draw: Any, inner: RandomGraph) -> RandomGraph:
    values = inner.module(*[item.clone() for item in inner.inputs])

    def ended(graph: Graph, _added: list[Node], results: list[Node]) -> list[Node]:
        return [graph.call_function(_other(value), (node,)) for node, value in zip(results, values, strict=True)]

    def write(graph: Graph, inputs: list[Node]) -> Node:
        blocks = [graph.get_attr("then"), graph.get_attr("else_")]
        return graph.call_function(higher.cond, (inputs[0], *blocks, tuple(inputs[1:])))

    modules = {"then": _extended(inner, 0, ended), "else_": _twice(inner, values)}
    flag = torch.tensor(draw(st.booleans()))
    return RandomGraph(_whole(modules, len(inner.inputs) + 1, write, len(values)), (flag, *inner.inputs))


def _twice(inner: RandomGraph, values: Sequence[Tensor]) -> GraphModule:
    def ended(graph: Graph, _added: list[Node], results: list[Node]) -> list[Node]:
        outputs = []
        for node, value in zip(results, values, strict=True):
            once = graph.call_function(_other(value), (node,))
            outputs.append(graph.call_function(_other(value), (once,)))
        return outputs

    return _extended(inner, 0, ended)


def _while(draw: Any, inner: RandomGraph) -> RandomGraph:
    rounds = draw(st.integers(0, 3))

    def judged(graph: Graph, added: list[Node], _results: list[Node]) -> list[Node]:
        return [graph.call_function(aten.lt.Scalar, (added[0], rounds))]

    def advanced(graph: Graph, added: list[Node], results: list[Node]) -> list[Node]:
        return [graph.call_function(aten.add.Tensor, (added[0], 1)), _mixed(graph, added[1], results)]

    def write(graph: Graph, inputs: list[Node]) -> Node:
        blocks = [graph.get_attr("cond"), graph.get_attr("body")]
        return graph.call_function(higher.while_loop, (*blocks, tuple(inputs[:2]), tuple(inputs[2:])))

    cond = _extended(inner, 2, judged)
    (output,) = cond.graph.find_nodes(op="output")
    output.args = (output.args[0][0],)
    cond.graph.eliminate_dead_code()
    cond.recompile()
    modules = {"cond": cond, "body": _extended(inner, 2, advanced)}
    start = (torch.tensor(0), torch.linspace(-1, 1, 6).reshape(2, 3))
    return RandomGraph(_whole(modules, len(inner.inputs) + 2, write, 2), (*start, *inner.inputs))


def _scan(draw: Any, inner: RandomGraph) -> RandomGraph:
    length = draw(st.integers(1, 4))

    def ended(graph: Graph, added: list[Node], results: list[Node]) -> list[Node]:
        last = graph.call_function(aten.clone.default, (results[-1],), {"memory_format": torch.contiguous_format})
        return [_mixed(graph, added[0], results), last]

    def write(graph: Graph, inputs: list[Node]) -> Node:
        lists = (inputs[:1], inputs[1:2], tuple(inputs[2:]))
        return graph.call_function(higher.scan, (graph.get_attr("body"), *lists))

    rows = torch.stack([inner.inputs[0].roll(number) for number in range(length)])
    inputs = (torch.linspace(-1, 1, 6).reshape(2, 3), rows, *inner.inputs[1:])
    return RandomGraph(_whole({"body": _extended(inner, 1, ended)}, len(inputs), write, 2), inputs)


@st.composite
def control_graphs(draw: Any) -> RandomGraph:
    """Draws a graph whose only calls of its own are a higher-order operator and a product of each of its results."""
    return draw(st.sampled_from([_cond, _while, _scan]))(draw, draw(INNER))
