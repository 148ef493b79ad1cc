"""Graphs with higher-order operators, written by hand: also such as torch would not make itself."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

higher = torch.ops.higher_order

Write = Callable[..., Any]
"""Builds a graph: takes the graph and its placeholders, adds calls, returns the graph's results."""


def build_graph(count: int, write: Write, modules: dict[str, GraphModule] | None = None) -> GraphModule:
    """Returns a graph of so many placeholders, with other graphs as attributes of its module."""
    graph = Graph()
    placeholders = [graph.placeholder(f"x{number}") for number in range(count)]
    graph.output(write(graph, *placeholders))
    return GraphModule({**(modules or {})}, graph)


def block(function: Callable[..., Any], *examples: Tensor) -> GraphModule:
    """Returns a function as a graph of ATen operators that returns a tuple, as blocks do."""
    own = [example.clone() for example in examples]  # one tensor twice would be one placeholder twice
    return _plain(make_fx(lambda *arguments: _tuple(function(*arguments)))(*own))


def condition(function: Callable[..., Tensor], *examples: Tensor) -> GraphModule:
    """Returns a function as a graph that returns one value by itself, as a loop's condition does."""
    return _plain(make_fx(function)(*[example.clone() for example in examples]))


def _plain(graph: GraphModule) -> GraphModule:
    for node in graph.graph.nodes:
        node.meta.clear()  # what is hand-written has none
    return graph


def _tuple(results: Any) -> tuple[Any, ...]:
    return tuple(results) if isinstance(results, tuple | list) else (results,)


def results(graph: Graph, call: Node, count: int) -> tuple[Node, ...]:
    """Returns nodes that take the results of a call."""
    return tuple([graph.call_function(operator.getitem, (call, number)) for number in range(count)])


def cond_graph(then: GraphModule, else_: GraphModule, operands: int = 1, count: int = 1, predicate: Any = None) -> Any:
    """Returns a graph of a cond; the first placeholder is the predicate, unless `predicate` is set."""

    def write(graph: Graph, *placeholders: Node) -> Any:
        test, rest = (placeholders[0], placeholders[1:]) if predicate is None else (predicate, placeholders)
        blocks = graph.get_attr("then"), graph.get_attr("else_")
        return results(graph, graph.call_function(higher.cond, (test, *blocks, tuple(rest))), count)

    return build_graph(operands + (predicate is None), write, {"then": then, "else_": else_})


def while_graph(cond: GraphModule, body: GraphModule, carried: int, extra: int = 0) -> GraphModule:
    """Returns a graph of a while loop over its placeholders: those carried, then the others."""

    def write(graph: Graph, *placeholders: Node) -> Any:
        blocks = graph.get_attr("cond"), graph.get_attr("body")
        operands = (tuple(placeholders[:carried]), tuple(placeholders[carried:]))
        return results(graph, graph.call_function(higher.while_loop, (*blocks, *operands)), carried)

    return build_graph(carried + extra, write, {"cond": cond, "body": body})


def scan_graph(body: GraphModule, carried: int, over: int, stacked: int, extra: int = 0) -> GraphModule:
    """Returns a graph of a scan over its placeholders: those carried, those gone over, then the others."""

    def write(graph: Graph, *placeholders: Node) -> Any:
        lists: Sequence[Any] = (
            list(placeholders[:carried]),
            list(placeholders[carried : carried + over]),
            tuple(placeholders[carried + over :]),
        )
        call = graph.call_function(higher.scan, (graph.get_attr("body"), *lists))
        return results(graph, call, carried + stacked)

    return build_graph(carried + over + extra, write, {"body": body})


def map_graph(body: GraphModule, over: int, stacked: int) -> GraphModule:
    """Returns a graph of a map over its placeholders."""

    def write(graph: Graph, *placeholders: Node) -> Any:
        call = graph.call_function(higher.map_impl, (graph.get_attr("body"), list(placeholders), []))
        return results(graph, call, stacked)

    return build_graph(over, write, {"body": body})


def associative_scan_graph(combine: GraphModule, over: int, extra: int = 0) -> GraphModule:
    """Returns a graph of an associative scan over its placeholders, the last ones of which every combination gets."""

    def write(graph: Graph, *placeholders: Node) -> Any:
        lists = list(placeholders[:over]), tuple(placeholders[over:])
        call = graph.call_function(higher.associative_scan, (graph.get_attr("combine"), *lists))
        return results(graph, call, over)

    return build_graph(over + extra, write, {"combine": combine})
