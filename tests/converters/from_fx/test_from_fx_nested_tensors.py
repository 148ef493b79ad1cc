"""Graphs inside of graphs that hold tensors of their own, read back: these become constants of the program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.split_module import split_module

import fxwrap
from fxwrap.compile import emit
from fxwrap.options import EMITTERS
from fxwrap.wrapper_ir import ConstantStore, Program
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
from tests.support.program_equality import assert_equal

ATEN = torch.ops.aten
X, ROW = torch.ones(3, 4), torch.ones(4)
WEIGHT, BIAS = torch.linspace(-1, 1, 4), torch.linspace(0, 3, 4)


def imported(graph: GraphModule, *inputs: Tensor) -> Program:
    """A hand-written graph as a program, which is what reading its own graph gives again."""
    for node, val in zip(graph.graph.find_nodes(op="placeholder"), inputs, strict=True):
        node.meta["val"] = val
    before = graph.print_readable(print_output=False)
    program = fxwrap.from_fx(graph)
    assert graph.print_readable(print_output=False) == before
    assert_equal(program, fxwrap.from_fx(fxwrap.to_fx(program)))
    return program


def constant_tensors(program: Program) -> list[Tensor]:
    """The tensors of a program's constants, in order."""
    return [program.store.tensors[constant.value.name] for constant in program.constants]


def same_tensors(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return len(actual) == len(expected) and all(one is other for one, other in zip(actual, expected, strict=True))


SCALED = block(lambda x: x * WEIGHT + BIAS, X)
SHIFTED = block(lambda x: x - BIAS, X)


def nested() -> GraphModule:
    """A branch that holds a tensor, and a branch in it that holds that one and another."""
    inner = cond_graph(SCALED, SHIFTED)

    def write(graph: Graph, flag: Node, x: Node) -> Any:
        (result,) = results(graph, graph.call_function(higher.cond, (flag, *map(graph.get_attr, inner_names), (x,))), 1)
        return (graph.call_function(ATEN.mul.Tensor, (result, graph.get_attr("bias"))),)

    inner_names = ("then", "else_")
    modules: dict[str, Any] = {"then": inner.then, "else_": inner.else_, "bias": BIAS}
    outer = build_graph(2, write, modules)
    same = block(lambda flag, x: x * 2, torch.tensor(True), X)

    def whole(graph: Graph, flag: Node, x: Node) -> Any:
        blocks = graph.get_attr("outer"), graph.get_attr("same")
        return results(graph, graph.call_function(higher.cond, (flag, *blocks, (flag, x))), 1)

    return build_graph(2, whole, {"outer": outer, "same": same})


def function() -> GraphModule:
    """A function that is called twice."""

    def write(graph: Graph, x: Node) -> Any:
        for _ in range(2):
            call = graph.call_function(higher.invoke_subgraph, (graph.get_attr("layer"), "layer", x))
            (x,) = results(graph, call, 1)
        return (x,)

    return build_graph(1, write, {"layer": SCALED})


def through(x: Tensor, rounds: int) -> Tensor:
    for _ in range(rounds):
        x = x * WEIGHT + BIAS
    return x


LOOP = while_graph(
    condition(lambda i, x: i < BIAS.sum(), torch.tensor(0), X),
    block(lambda i, x: (i + 1, x * WEIGHT + BIAS), torch.tensor(0), X),
    2,
)
SCAN = scan_graph(block(lambda total, row: (total + row * WEIGHT, total - BIAS), ROW, ROW), 1, 1, 1)
ZERO, SIX = torch.tensor(0), torch.tensor(6)
YES, NO = torch.tensor(True), torch.tensor(False)
BOTH = [WEIGHT, BIAS]
CASES: dict[str, tuple[GraphModule, tuple[Tensor, ...], tuple[Tensor, ...], list[Tensor]]] = {
    "one branch": (cond_graph(SCALED, block(lambda x: x * 2, X)), (YES, X), (through(X, 1),), BOTH),
    "both branches": (cond_graph(SCALED, SHIFTED), (NO, X), (X - BIAS,), BOTH),
    "a branch of a branch": (nested(), (YES, X), (through(X, 1) * BIAS,), BOTH),
    "a loop and its condition": (LOOP, (ZERO, X), (SIX, through(X, 6)), [BIAS, WEIGHT]),
    "a scan": (SCAN, (ROW, X), (ROW + 3 * WEIGHT, torch.stack([ROW + n * WEIGHT - BIAS for n in range(3)])), BOTH),
    "a map": (map_graph(block(lambda row: row * WEIGHT + BIAS, ROW), 1, 1), (X,), (through(X, 1),), BOTH),
    "a function": (function(), (X,), (through(X, 2),), BOTH),
}


@pytest.mark.parametrize("name", CASES)
def test_tensors_of_blocks_become_constants(name: str) -> None:
    graph, inputs, wanted, tensors = CASES[name]
    program = imported(graph, *inputs)
    assert same_tensors(constant_tensors(program), tensors)
    for emitter in EMITTERS:
        torch.testing.assert_close(list(emit(program, emitter)(*inputs)), list(wanted))


def emitted() -> GraphModule:
    """The graph of a program that multiplies by a constant and adds 1."""
    program = fxwrap.parse(
        """
program @multiplied(%x: borrowed f32[3, 4]@cpu) {
  %y = extern.call @aten.mul.Tensor(%x, %w) : f32[3, 4]@cpu
  %z = extern.call @aten.add.Scalar(%y, 1) : f32[3, 4]@cpu
  memory.free(%y)
  control.return(%z)
}
constant %w: f32[4]@cpu
"""
    )
    return fxwrap.to_fx(program.replace(store=ConstantStore({"w": WEIGHT}))).graph_module


def _spliced(graph: GraphModule) -> GraphModule:
    """Puts a call of a graph that holds the same tensor, and another one, before the output."""
    graph.add_submodule("part", SCALED)
    output = graph.graph.output_node()
    with graph.graph.inserting_before(output):
        call = graph.graph.call_module("part", (output.args[0][0],))  # type: ignore[index]
        (result,) = results(graph.graph, call, 1)
    output.args = ((result,),)
    graph.recompile()
    return graph


def _in_a_branch(graph: GraphModule) -> GraphModule:
    """Puts a branch before the output which calls such a graph."""

    def write(inner: Graph, x: Node) -> Any:
        return results(inner, inner.call_module("part", (x,)), 1)

    graph.add_submodule("branch", build_graph(1, write, {"part": SCALED}))
    output = graph.graph.output_node()
    with graph.graph.inserting_before(output):
        blocks = graph.graph.get_attr("branch"), graph.graph.get_attr("branch")
        call = graph.graph.call_function(higher.cond, (True, *blocks, (output.args[0][0],)))  # type: ignore[index]
        (result,) = results(graph.graph, call, 1)
    output.args = ((result,),)
    graph.recompile()
    return graph


@pytest.mark.parametrize("change", [_spliced, _in_a_branch], ids=lambda change: change.__name__)
def test_tensors_of_inserted_modules_become_constants(change: Callable[[GraphModule], GraphModule]) -> None:
    graph = change(emitted())
    wanted = (X * WEIGHT + 1) * WEIGHT + BIAS
    order = {node: place for place, node in enumerate(graph.graph.nodes)}
    split = split_module(graph, graph, lambda node: 2 * order[node] // len(order))  # type: ignore[arg-type]
    for module in (graph, split):
        program = fxwrap.from_fx(module)
        assert same_tensors(constant_tensors(program), [WEIGHT, BIAS])
        assert_equal(program, fxwrap.from_fx(fxwrap.to_fx(program)))
        torch.testing.assert_close(emit(program, "python")(X), (wanted,))


def test_a_function_that_writes_its_tensor_makes_the_constant_mutable() -> None:
    count = torch.zeros(4)

    def body(graph: Graph, x: Node) -> Any:
        state = graph.get_attr("count")
        graph.call_function(ATEN.add_.Tensor, (state, 1))
        return (graph.call_function(ATEN.mul.Tensor, (x, state)),)

    def write(graph: Graph, x: Node) -> Any:
        call = graph.call_function(higher.invoke_subgraph, (graph.get_attr("layer"), "layer", x))
        return results(graph, call, 1)

    program = imported(build_graph(1, write, {"layer": build_graph(1, body, {"count": count})}), X)
    assert [constant.mutable for constant in program.constants] == [True]
    for rounds in (1, 2):
        assert torch.equal(fxwrap.run(program, [X])[0], X * rounds)
        assert torch.equal(count, torch.full((4,), float(rounds)))
