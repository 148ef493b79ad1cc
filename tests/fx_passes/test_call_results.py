"""Fake results that are known from equal calls, and views of replaced tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fxwrap.fx_passes import call_results, graph_copy
from fxwrap.fx_passes.call_results import CallResults
from fxwrap.fx_passes.cse import eliminate_common_subexpressions
from fxwrap.fx_passes.graph_copy import same_layout
from fxwrap.fx_passes.prepared_graph import PreparedGraph
from fxwrap.torch_compat import FakeTensorMode, storage_identity

aten = torch.ops.aten


def test_equal_calls_are_inferred_once_and_have_storages_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    inferred: list[Node] = []
    infer = call_results.run_on_fakes

    def count(node: Node, *arguments: Any) -> Any:
        inferred.append(node)
        return infer(node, *arguments)

    monkeypatch.setattr(call_results, "run_on_fakes", count)
    graph, results = Graph(), CallResults()
    with FakeTensorMode():
        fakes: dict[Node, Any] = {graph.placeholder(name): torch.empty(4, 6)[:, 1:5] for name in ("x", "y")}
    for operand in list(fakes):
        for target, arguments in ((aten.exp.default, ()), (aten.unsqueeze.default, (1,)), (aten.split.Tensor, (2,))):
            node = graph.call_function(target, (operand, *arguments))
            fakes[node] = results.run(node, fakes)
    assert [node.target for node in inferred] == [
        aten.exp.default, aten.unsqueeze.default, aten.split.Tensor, aten.split.Tensor,
    ]  # fmt: skip
    x, y, exp_x, view_x, parts_x, exp_y, view_y, parts_y = fakes.values()
    assert all(same_layout(*pair) for pair in ((exp_x, exp_y), (view_x, view_y), (parts_x[1], parts_y[1])))
    assert view_y.storage_offset() == 1
    owners = [storage_identity(item) for item in (x, y, exp_x, exp_y)]
    assert len(set(owners)) == 4
    views = [storage_identity(item) for item in (view_x, parts_x[1], view_y, parts_y[1])]
    assert views == [owners[0], owners[0], owners[1], owners[1]]


def test_symbolic_views_of_replaced_tensors_are_not_inferred_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.exp().view(-1).cos(), x.exp().t().sin()

    traced = make_fx(function, tracing_mode="symbolic")(torch.ones(5, 7))
    fakes = {node: node.meta["val"] for node in traced.graph.nodes if "val" in node.meta}
    transposed = traced.graph.find_nodes(op="call_function", target=aten.t.default)[0]

    def fail(*_arguments: object) -> Any:
        raise AssertionError("the layout of the view is known")

    monkeypatch.setattr(graph_copy, "run_on_fakes", fail)
    result = eliminate_common_subexpressions(PreparedGraph(traced, "program", fakes=fakes))
    (exp,) = result.graph_module.graph.find_nodes(op="call_function", target=aten.exp.default)
    (view,) = result.graph_module.graph.find_nodes(op="call_function", target=aten.t.default)
    assert storage_identity(result.fakes[view]) == storage_identity(result.fakes[exp])
    assert same_layout(result.fakes[view], fakes[transposed])
