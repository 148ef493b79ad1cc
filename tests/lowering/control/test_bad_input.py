"""Control flow that does not fit together is refused before anything runs; the message shows what disagrees."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule

import fxwrap
from fxwrap.errors import GraphError
from tests.lowering.control.cases import random
from tests.lowering.control.graphs import (
    associative_scan_graph,
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

aten = torch.ops.aten
X, ZERO, YES = random(4, 8), torch.tensor(0), torch.tensor(True)


def with_fake_metadata(graph: GraphModule, inputs: tuple[Any, ...], outputs: tuple[torch.Tensor, ...]) -> GraphModule:
    """Returns the graph with fake values of its calls, which may be wrong.

    Without, torch's own rules for fake tensors would refuse the graph first.
    """
    mode = torch._subclasses.FakeTensorMode()
    fakes = iter([mode.from_tensor(item) if isinstance(item, torch.Tensor) else item for item in inputs])
    output_fakes = tuple([mode.from_tensor(item) for item in outputs])
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            node.meta["val"] = next(fakes)
        elif node.op == "call_function":
            node.meta["val"] = output_fakes[node.args[1]] if node.target is operator.getitem else output_fakes
    return graph


def assert_rejected(graph: GraphModule, inputs: tuple[Any, ...], outputs: tuple[torch.Tensor, ...], match: str) -> None:
    with pytest.raises(GraphError, match=match):
        fxwrap.lower(with_fake_metadata(graph, inputs, outputs), inputs)


@pytest.mark.parametrize(
    ("predicate", "shown"),
    [
        (torch.ones(2, dtype=torch.bool), r"a torch.bool tensor of sizes \[2\]"),
        (torch.ones(()), r"a torch.float32 tensor of sizes \[\]"),
        (torch.ones((), dtype=torch.int64), r"a torch.int64 tensor of sizes \[\]"),
    ],
    ids=["two elements", "float", "int"],
)
def test_a_predicate_that_is_not_a_bool(predicate: torch.Tensor, shown: str) -> None:
    graph = cond_graph(block(lambda x: x + 1, X), block(lambda x: x * 2, X))
    message = f"node 'cond': the predicate is {shown}. Pass a bool, or a boolean tensor of one element"
    assert_rejected(graph, (predicate, X), (X,), message)


def test_a_combine_function_that_is_not_pointwise() -> None:
    graph = associative_scan_graph(block(lambda a, b: a.sum(0) + b.sum(0), X[0], X[0]), 1)
    with pytest.raises(GraphError, match=r"not elementwise\. Use combine_mode='generic'"):
        fxwrap.lower(graph, [random(5, 8)])


def test_a_number_as_a_predicate() -> None:
    graph = cond_graph(block(lambda x: x + 1, X), block(lambda x: x * 2, X), predicate=3)
    assert_rejected(graph, (X,), (X,), "node 'cond': the predicate is 3")


@pytest.mark.parametrize(
    ("else_", "shown"),
    [
        (lambda x: x.double(), r"the true one returns f32\[4, 8\]@cpu, the false one f64\[4, 8\]@cpu"),
        (lambda x: x.sum(1), r"the true one returns f32\[4, 8\]@cpu, the false one f32\[4\]@cpu"),
        (lambda x: (x + 1, x), r"the true one returns f32\[4, 8\]@cpu, the false one f32\[4, 8\]@cpu, f32\[4, 8\]@cpu"),
        (lambda x: (), r"the true one returns f32\[4, 8\]@cpu, the false one nothing"),
        (lambda x: x.to("meta"), r"the true one returns f32\[4, 8\]@cpu, the false one f32\[4, 8\]@meta"),
    ],
    ids=["dtype", "dimensions", "number", "nothing", "device"],
)
def test_branches_that_disagree(else_: Any, shown: str) -> None:
    graph = cond_graph(block(lambda x: x + 1, X), block(else_, X))
    assert_rejected(graph, (YES, X), (X,), f"node 'cond': its branches disagree: {shown}")


def test_branch_sizes_that_differ_from_the_result() -> None:
    graph = cond_graph(block(lambda x: x[:2] + 1, X), block(lambda x: x + 1, X))
    shown = r"its branches disagree: the true one returns f32\[2, 8\]@cpu, the false one f32\[4, 8\]"
    assert_rejected(graph, (YES, X), (X,), shown)


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (lambda i, x: (i + 1, x.double()), r"the body returns f64\[4, 8\]@cpu, the carried state has f32\[4, 8\]@cpu"),
        (lambda i, x: (i.float(), x + 1), r"the body returns f32\[\]@cpu, the carried state has i64\[\]@cpu"),
        (lambda i, x: (i + 1, x[:2] + 1), r"the body returns f32\[2, 8\]@cpu, the carried state has f32\[4, 8\]@cpu"),
        (lambda i, x: (i + 1,), r"the body returns 1 \(i64\[\]@cpu\), the carried state has 2"),
    ],
    ids=["dtype", "dtype of a counter", "sizes", "number"],
)
def test_a_loop_whose_carried_values_change(body: Any, shown: str) -> None:
    graph = while_graph(condition(lambda i, x: i < 3, ZERO, X), block(body, ZERO, X), 2)
    assert_rejected(graph, (ZERO, X), (ZERO, X), f"node 'while_loop': {shown}")


def test_a_loop_condition_that_is_not_a_bool() -> None:
    graph = while_graph(condition(lambda i, x: x, ZERO, X), block(lambda i, x: (i + 1, x + 1), ZERO, X), 2)
    shown = r"node 'while_loop': the predicate is a torch.float32 tensor of sizes \[4, 8\]"
    assert_rejected(graph, (ZERO, X), (ZERO, X), shown)


def test_a_scan_whose_carried_values_change() -> None:
    graph = scan_graph(block(lambda carried, row: (carried.long(), row + 1), X[0], X[0]), 1, 1, 1)
    shown = r"node 'scan': the body returns i64\[8\]@cpu, the carried state has f32\[8\]@cpu"
    assert_rejected(graph, (X[0], X), (X[0], X), shown)


@pytest.mark.parametrize("stacked", [0, 2])
def test_a_scan_body_with_the_wrong_number_of_results(stacked: int) -> None:
    graph = scan_graph(block(lambda carried, row: (carried + row, row + 1), X[0], X[0]), 1, 1, stacked)
    shown = r"node 'scan': the body returns 1 \(f32\[8\]@cpu\), a slice of the stacked result has"
    assert_rejected(graph, (X[0], X), (X[0], *[X] * stacked), shown)


def test_a_map_body_with_the_wrong_slice_types() -> None:
    graph = map_graph(block(lambda row: row.double(), X[0]), 1, 1)
    assert_rejected(graph, (X,), (X,), r"node 'map_impl': the body returns f64\[8\]@cpu, .* has f32\[8\]@cpu")


def _writing(position: int, count: int) -> GraphModule:
    """A block that overwrites one of its arguments and returns copies of all."""

    def write(graph: Graph, *placeholders: Any) -> Any:
        graph.call_function(aten.add_.Tensor, (placeholders[position], 1))
        return tuple([graph.call_function(aten.clone.default, (item,)) for item in placeholders])

    return build_graph(count, write)


def test_a_block_that_writes_its_argument() -> None:
    message = "writes its operands. Write a copy, and return it"
    assert_rejected(
        cond_graph(_writing(0, 1), block(lambda x: x + 1, X)), (YES, X), (X,), f"node 'cond': 'then' {message}"
    )
    loop = while_graph(condition(lambda i, x: i < 3, ZERO, X), _writing(1, 2), 2)
    assert_rejected(loop, (ZERO, X), (ZERO, X), f"node 'while_loop': 'body' {message}")
    assert_rejected(map_graph(_writing(0, 1), 1, 1), (X,), (X,), f"node 'map_impl': 'body' {message}")


def test_a_block_that_writes_a_view_of_its_argument() -> None:
    def write(graph: Graph, x: Any) -> Any:
        row = graph.call_function(aten.select.int, (x, 0, 0))
        graph.call_function(aten.add_.Tensor, (row, 1))
        return (graph.call_function(aten.clone.default, (x,)),)

    graph = cond_graph(build_graph(1, write), block(lambda x: x + 1, X))
    assert_rejected(graph, (YES, X), (X,), "node 'cond': 'then' writes its operands")


@pytest.mark.parametrize("count", [1, 3])
def test_the_wrong_number_of_operands(count: int) -> None:
    graph = cond_graph(block(lambda x, y: x + y, X, X), block(lambda x, y: x * y, X, X), operands=count)
    message = (
        f"node 'cond': 'then' has 2 placeholders, but the call passes {count} operands. "
        "Pass one operand per placeholder"
    )
    assert_rejected(graph, (YES, *[X] * count), (X,), message)


def test_an_attribute_that_is_not_a_graph() -> None:
    def write(graph: Graph, flag: Any, x: Any) -> Any:
        call = graph.call_function(higher.cond, (flag, graph.get_attr("then"), graph.get_attr("then"), (x,)))
        return results(graph, call, 1)

    graph = build_graph(2, write, {"then": torch.nn.Linear(8, 8)})
    assert_rejected(graph, (YES, X), (X,), "node 'cond': 'then' is not a graph. Pass a GraphModule of ATen operators")


def test_an_operator_without_a_lowering() -> None:
    def write(graph: Graph, x: Any) -> Any:
        return results(graph, graph.call_function(higher.wrap_activation_checkpoint, (graph.get_attr("body"), (x,))), 1)

    graph = build_graph(1, write, {"body": block(lambda x: x + 1, X)})
    assert_rejected(
        graph,
        (X,),
        (X,),
        "node 'wrap_activation_checkpoint': the higher-order operator 'wrap_activation_checkpoint' has no",
    )
