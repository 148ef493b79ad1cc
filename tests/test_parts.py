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
from fxwrap.errors import GraphError
from fxwrap.parts import CompiledPart, compile_parts
from tests.strategies.graphs import RandomGraph, graphs

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


def _parts(module: GraphModule) -> list[CompiledPart]:
    return [child for child in module.modules() if isinstance(child, CompiledPart)]


@pytest.mark.parametrize(("emitter", "dynamic"), [("python", False), ("fx", True), ("cpp", True)])
def test_tagged_nodes_are_compiled_and_equal_parts_once(emitter: str, dynamic: bool) -> None:
    model, inputs = Model(), (torch.randn(4, 8), {"by": torch.randn(8)})
    shapes = ({0: Dim("batch", min=2, max=64)}, {"by": None}) if dynamic else None
    exported = torch.export.export(model, inputs, dynamic_shapes=shapes, strict=True).run_decompositions()
    before = exported.module(check_guards=False)
    after = compile_parts(before, options=fxwrap.Options(emitter=emitter))
    parts = _parts(after)
    assert len(parts) == 3 and len({id(part.compiled) for part in parts}) == 1
    assert not after.graph.find_nodes(op="call_function", target=aten.gelu.default)
    for size in (4, 7) if dynamic else (4,):
        given = (torch.randn(size, 8), inputs[1])
        torch.testing.assert_close(after(*given), model(*given))


def test_the_rest_stays_as_it_was() -> None:
    exported = torch.export.export(Model(), (torch.randn(4, 8), {"by": torch.randn(8)}), strict=True)
    before = exported.run_decompositions().module(check_guards=False)
    text = str(before.graph)
    after = compile_parts(before)
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


def test_a_part_is_no_cycle() -> None:
    def function(x: Tensor) -> Tensor:
        a = x.sin()
        return a.exp() + a.cos().tan()  # the cosine is outside: it needs the sine, and the tangent needs it

    graph = _traced(function, torch.randn(4))
    after = compile_parts(graph, select=lambda node: node.target is not aten.cos.default)
    assert len(_parts(after)) == 2
    x = torch.randn(4)
    torch.testing.assert_close(after(x), function(x))


def test_compiled_parts_can_be_traced_and_differentiated() -> None:
    graph = _traced(lambda x: x.exp().sin().exp() + 1, torch.randn(4))
    after = compile_parts(graph, select=lambda node: node.target is not aten.sin.default)
    called = _traced(after, torch.randn(4)).graph.find_nodes(op="call_function", target=aten.exp.default)
    assert len(called) == 2
    assert len(torch.fx.symbolic_trace(after).graph.find_nodes(op="call_function", target=aten.exp.default)) == 2
    x = torch.randn(4, requires_grad=True)
    (found,) = torch.autograd.grad(after(x).sum(), x)
    torch.testing.assert_close(found, x.exp() * x.exp().cos() * x.exp().sin().exp())
    torch.testing.assert_close(torch.vmap(after)(x.detach()[None]), after(x.detach())[None])


def test_effects_keep_their_order() -> None:
    def function(x: Tensor) -> Tensor:
        first = x.cos()
        noise = torch.rand_like(x)
        x.add_(1)
        return first + noise + torch.rand_like(x) + x.cos()

    graph = _traced(function, torch.randn(4))
    for outside in (aten.rand_like.default, aten.add_.Tensor, aten.cos.default):
        after = compile_parts(graph, select=lambda node, outside=outside: node.target is not outside)
        given, wanted = torch.ones(4), torch.ones(4)
        torch.manual_seed(1)
        found = after(given)
        torch.manual_seed(1)
        torch.testing.assert_close(found, function(wanted))
        torch.testing.assert_close(given, wanted)


def test_what_dynamo_captures_is_compiled_in_parts(fresh_dynamo: None) -> None:
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    seen: list[GraphModule] = []

    def compiler(module: GraphModule, _inputs: Any) -> Any:
        seen.append(compile_parts(module))
        return make_boxed_func(seen[-1])

    model, x = Model(), torch.randn(4, 8)
    run = torch.compile(model, backend=aot_autograd(fw_compiler=compiler))
    given = (x, {"by": torch.ones(8)})
    run(*given)["x"].sum().backward()
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    model(*given)["x"].sum().backward()
    torch.testing.assert_close(found, [parameter.grad for parameter in model.parameters()])
    assert len(_parts(seen[0])) == 3


@settings(max_examples=12)
@given(graphs(), st.randoms(use_true_random=False))
def test_any_choice_of_nodes_gives_the_same(graph: RandomGraph, random: Any) -> None:
    traced = make_fx(graph.module, tracing_mode="fake")(*graph.inputs)
    chosen = {node.name: random.choice([None, "a", "b"]) for node in traced.graph.nodes}
    after = compile_parts(traced, select=lambda node: chosen[node.name], options=fxwrap.Options(emitter="interpreter"))
    given, wanted = ([item.clone() for item in graph.inputs] for _ in range(2))
    torch.testing.assert_close(after(*given), traced(*wanted), equal_nan=True)
    torch.testing.assert_close(given, wanted, equal_nan=True)


def test_what_cannot_be_compiled_is_an_error_that_names_the_node() -> None:
    graph = _traced(lambda x: x.sin(), torch.randn(4))
    bare = GraphModule({}, torch.fx.symbolic_trace(lambda x: torch.ops.aten.sin.default(x)).graph)
    with pytest.raises(GraphError, match=r"'x'.*it has no meta"):
        compile_parts(bare, select=lambda node: True)
    called = torch.fx.symbolic_trace(nn.Sequential(nn.ReLU()))
    with pytest.raises(GraphError, match="call_module of '0' is not an ATen operator"):
        compile_parts(called, select=lambda node: True)
    assert not _parts(compile_parts(graph, select=lambda node: None))
