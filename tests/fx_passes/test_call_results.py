"""Fake results that are known from equal calls, and views of replaced tensors."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fxwrap import Options
from fxwrap.devices import CPU
from fxwrap.fx_passes import graph_copy
from fxwrap.fx_passes.convolutions import biases
from fxwrap.fx_passes.convolutions.biases import unfuse_convolution_biases
from fxwrap.fx_passes.cse import eliminate_common_subexpressions
from fxwrap.fx_passes.graph_copy import CallResults, same_layout
from fxwrap.fx_passes.matmuls import rewrites
from fxwrap.fx_passes.matmuls.rewrites import pack_matmuls
from fxwrap.fx_passes.prepared_graph import FxPassContext, PreparedGraph
from fxwrap.fx_passes.training.joint_graph import decompose_for_recomputation
from fxwrap.torch_compat import FakeTensorMode, fake_like, storage_identity

aten = torch.ops.aten


def test_equal_calls_are_inferred_once_and_have_storages_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    inferred: list[Node] = []
    infer = graph_copy.run_on_fakes

    def count(node: Node, *arguments: Any) -> Any:
        inferred.append(node)
        return infer(node, *arguments)

    monkeypatch.setattr(graph_copy, "run_on_fakes", count)
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


def test_calls_on_symbolic_sizes_are_inferred_once_unless_they_have_new_symbols() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv(allow_dynamic_output_shape_ops=True))
    graph, results = Graph(), CallResults()
    layout = mode.from_tensor(torch.empty(5, 7), source=ConstantSource("x"), symbolic_context=DYNAMIC_ROWS)
    nodes = [graph.placeholder(name) for name in ("x", "y")]
    fakes: dict[Node, Any] = {node: fake_like(layout) for node in nodes}
    calls: dict[str, list[Any]] = {}
    for operand in nodes:
        for target, arguments in ((aten.exp.default, ()), (aten.slice.Tensor, (0, 1)), (aten.nonzero.default, ())):
            call = graph.call_function(target, (operand, *arguments))
            calls.setdefault(str(target), []).append(results.run(call, fakes))
    exps, slices, positions = calls.values()
    assert len(results._known) == 2
    assert same_layout(*exps) and storage_identity(exps[0]) != storage_identity(exps[1])
    assert same_layout(*slices) and [item.storage_offset() for item in slices] == [7, 7]
    assert [*map(storage_identity, slices)] == [storage_identity(fakes[node]) for node in nodes]
    assert not same_layout(*positions)


def test_symbolic_views_of_replaced_tensors_are_not_inferred_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
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


DYNAMIC_ROWS = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])

LIKE_A_GPU = dataclasses.replace(
    CPU,
    matmuls=dataclasses.replace(CPU.matmuls, packed_bytes=1 << 20),
    convolutions=dataclasses.replace(CPU.convolutions, unfused_bias_dtypes=frozenset({torch.float32})),
)


def heads(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return ((x @ first.t()).view(2, 2, 4).sin() + (x @ second.t()).view(2, 2, 4)).view(4, 4)


def convolution(x: Tensor, weight: Tensor, biases: Tensor) -> Tensor:
    return torch.conv2d(x.view(2, 2, 2, 2), weight[:2, :2, None, None], biases[0, :2]).sin().view(4, 4)


def batch_norm(x: Tensor, weights: Tensor, biases: Tensor) -> Tensor:
    normalized: Tensor = aten._native_batch_norm_legit.no_stats(x, weights[0], biases[0], True, 0.1, 1e-5)[0]
    return normalized.sin()


def _edited(graph: GraphModule) -> None:
    """Runs the passes."""
    fakes = {node: node.meta["val"] for node in graph.graph.nodes if "val" in node.meta}
    options = Options(devices=(LIKE_A_GPU,)).resolve_devices()
    context = FxPassContext(options, frozenset({"aten.sin.default", "aten.add.Tensor"}))
    unfuse_convolution_biases(pack_matmuls(PreparedGraph(graph, "program", fakes=fakes), context), context)


@pytest.mark.parametrize(
    ("layer", "edit"),
    [(heads, _edited), (convolution, _edited),
     (batch_norm, lambda graph: decompose_for_recomputation(graph, Options().resolve_devices()))],
    ids=["pack_matmuls", "unfuse_convolution_biases", "joint graph"],
)  # fmt: skip
def test_passes_infer_equal_layers_once(
    layer: Callable[..., Tensor], edit: Callable[[GraphModule], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many calls run on fakes for three layers as for two; the first has other operands than those after it."""
    inferred: list[object] = []

    def counted(infer: Callable[..., Any]) -> Callable[..., Any]:
        def count(call: Any, *arguments: Any) -> Any:
            target = call.target if isinstance(call, Node) else call
            inferred.extend([] if target is operator.getitem else [target])
            return infer(call, *arguments)

        return count

    for module, name in (
        (graph_copy, "run_on_fakes"), (graph_copy, "fake_call"), (biases, "fake_call"),
        (rewrites, "fake_call"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    counts = []
    for layers in (2, 3):
        graph = make_fx(_repeated(layer, layers), tracing_mode="fake")(*torch.randn(3, 4, 4))
        inferred.clear()
        edit(graph)
        counts.append(list(inferred))
    assert counts[0] == counts[1] and counts[0]


def _repeated(layer: Callable[..., Tensor], layers: int) -> Callable[..., Tensor]:
    def function(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        for _ in range(layers):
            x = layer(x, first, second)
        return x

    return function
