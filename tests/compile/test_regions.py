"""Parts of a graph that are compiled: the same results, the rest untouched, equal parts compiled once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import annotate

import fxwrap
from fxwrap.compile.regions import CompiledRegion, compile_regions
from fxwrap.errors import GraphError
from tests.support.long_form import sample_size
from tests.support.strategies.graphs import RandomGraph, graphs

aten = torch.ops.aten


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        with annotate({"fxwrap": "feed-forward"}):
            fed = self.down(torch.nn.functional.gelu(self.up(x)))
        return self.norm(x + fed)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Block(), Block(), Block()])

    def forward(self, x: Tensor, scale: dict[str, Tensor]) -> dict[str, Any]:
        for layer in self.layers:
            x = layer(x)
        return {"x": x * scale["by"], "shape": (x.shape[0], x.sum())}


def _parts(module: GraphModule) -> list[CompiledRegion]:
    return [child for child in module.modules() if isinstance(child, CompiledRegion)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("emitter", "dynamic"), [("python", False), ("fx", True), ("cpp", True)])
def test_tagged_nodes_are_compiled_and_equal_regions_shared(emitter: str, dynamic: bool) -> None:
    model, inputs = Model(), (torch.randn(4, 8), {"by": torch.randn(8)})
    shapes = ({0: Dim("batch", min=2, max=64)}, {"by": None}) if dynamic else None
    exported = torch.export.export(model, inputs, dynamic_shapes=shapes, strict=True).run_decompositions()
    before = exported.module(check_guards=False)
    after = compile_regions(before, options=fxwrap.Options(emitter=emitter))
    parts = _parts(after)
    assert len(parts) == 3 and len({id(part.compiled) for part in parts}) == 1
    assert not after.graph.find_nodes(op="call_function", target=aten.gelu.default)
    for size in (4, 7) if dynamic else (4,):
        arguments = (torch.randn(size, 8), inputs[1])
        torch.testing.assert_close(after(*arguments), model(*arguments))


def test_untagged_nodes_are_unchanged() -> None:
    exported = torch.export.export(Model(), (torch.randn(4, 8), {"by": torch.randn(8)}), strict=True)
    before = exported.run_decompositions().module(check_guards=False)
    text = str(before.graph)
    after = compile_regions(before)
    assert str(before.graph) == text
    was = {node.name: node for node in before.graph.nodes}
    for node in after.graph.nodes:
        if node.op == "call_module" or node.name not in was:
            assert node.name.startswith("part_")
            continue
        assert node.meta == was[node.name].meta
        if not isinstance(node.args[0] if node.args else None, Node) or node.args[0].op != "call_module":
            assert (node.op, str(node.target), str(node.args)) == _shown(was[node.name])
    assert [node.name for node in after.graph.find_nodes(op="placeholder")] == [
        node.name for node in before.graph.find_nodes(op="placeholder")
    ]
    assert dict(after.named_parameters()).keys() == dict(before.named_parameters()).keys()


def _shown(node: Node) -> tuple[str, str, str]:
    return node.op, str(node.target), str(node.args)


def _traced(function: Any, *inputs: Any) -> GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


def test_regions_do_not_form_cycles() -> None:
    def function(x: Tensor) -> Tensor:
        a = x.sin()
        return a.exp() + a.cos().tan()  # the cosine is outside: it needs the sine, and the tangent needs it

    graph = _traced(function, torch.randn(4))
    after = compile_regions(graph, select=lambda node: node.target is not aten.cos.default)
    assert len(_parts(after)) == 2
    x = torch.randn(4)
    torch.testing.assert_close(after(x), function(x))


def test_compiled_regions_can_be_traced_and_differentiated() -> None:
    graph = _traced(lambda x: x.exp().sin().exp() + 1, torch.randn(4))
    after = compile_regions(graph, select=lambda node: node.target is not aten.sin.default)
    called = _traced(after, torch.randn(4)).graph.find_nodes(op="call_function", target=aten.exp.default)
    assert len(called) == 2
    assert len(torch.fx.symbolic_trace(after).graph.find_nodes(op="call_function", target=aten.exp.default)) == 2
    x = torch.randn(4, requires_grad=True)
    (actual,) = torch.autograd.grad(after(x).sum(), x)
    torch.testing.assert_close(actual, x.exp() * x.exp().cos() * x.exp().sin().exp())
    torch.testing.assert_close(torch.vmap(after)(x.detach()[None]), after(x.detach())[None])


def test_effects_stay_ordered() -> None:
    def function(x: Tensor) -> Tensor:
        first = x.cos()
        noise = torch.rand_like(x)
        x.add_(1)
        return first + noise + torch.rand_like(x) + x.cos()

    graph = _traced(function, torch.randn(4))
    for outside in (aten.rand_like.default, aten.add_.Tensor, aten.cos.default):
        after = compile_regions(graph, select=lambda node, outside=outside: node.target is not outside)
        x, expected = torch.ones(4), torch.ones(4)
        torch.manual_seed(1)
        actual = after(x)
        torch.manual_seed(1)
        torch.testing.assert_close(actual, function(expected))
        torch.testing.assert_close(x, expected)


def test_regions_of_dynamo_graphs_are_compiled() -> None:
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    seen: list[GraphModule] = []

    def compiler(module: GraphModule, _inputs: Any) -> Any:
        seen.append(compile_regions(module))
        return make_boxed_func(seen[-1])

    model, x = Model(), torch.randn(4, 8)
    run = torch.compile(model, backend=aot_autograd(fw_compiler=compiler))
    arguments = (x, {"by": torch.ones(8)})
    run(*arguments)["x"].sum().backward()
    actual = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    model(*arguments)["x"].sum().backward()
    torch.testing.assert_close(actual, [parameter.grad for parameter in model.parameters()])
    assert len(_parts(seen[0])) == 3


@settings(max_examples=sample_size(12))
@given(graphs(), st.randoms(use_true_random=False))
def test_random_node_selections_are_equivalent(graph: RandomGraph, random: Any) -> None:
    traced = make_fx(graph.module, tracing_mode="fake")(*graph.inputs)
    chosen = {node.name: random.choice([None, "a", "b"]) for node in traced.graph.nodes}
    after = compile_regions(
        traced, select=lambda node: chosen[node.name], options=fxwrap.Options(emitter="interpreter")
    )
    arguments, expected = ([item.clone() for item in graph.inputs] for _ in range(2))
    torch.testing.assert_close(after(*arguments), traced(*expected), equal_nan=True)
    torch.testing.assert_close(arguments, expected, equal_nan=True)


def test_uncompilable_nodes_are_named_in_the_error() -> None:
    graph = _traced(lambda x: x.sin(), torch.randn(4))
    bare = GraphModule({}, torch.fx.symbolic_trace(lambda x: torch.ops.aten.sin.default(x)).graph)
    with pytest.raises(GraphError, match=r"'x'.*it has no meta"):
        compile_regions(bare, select=lambda node: True)
    called = torch.fx.symbolic_trace(nn.Sequential(nn.ReLU()))
    with pytest.raises(GraphError, match="call_module of '0' is not an ATen operator"):
        compile_regions(called, select=lambda node: True)
    assert not _parts(compile_regions(graph, select=lambda node: None))
