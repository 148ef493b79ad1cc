"""Small graphs for the cache: equal ones at each call, as another process would have them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import Compiled, Options
from fxwrap.compile_cache.key import CompileRequest, make_key
from fxwrap.torch_compat import FakeTensorMode

_ATEN = torch.ops.aten

CALLS = Options(fuse=False)
"""Options that need no C++ compiler."""


def layer(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """A matmul and pointwise operators on it."""
    product = x @ w
    return product, torch.relu(product) + 1


def inputs(size: int = 4) -> tuple[Tensor, Tensor]:
    """Inputs of a layer."""
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, 8, generator=generator), torch.randn(8, 8, generator=generator)


def graph(function: Callable[..., Any] = layer, arguments: Sequence[Any] = (), mode: str = "fake") -> GraphModule:
    """A function's graph; that of a layer by default."""
    return make_fx(function, tracing_mode=mode)(*(arguments or inputs()))


def compiled(options: Options = CALLS, **keywords: Any) -> Compiled:
    """A layer, compiled."""
    return fxwrap.compile_graph(graph(), options=options, **keywords)


def plain_layer() -> Compiled:
    """A pointwise function, compiled from a graph without metadata; only the example input defines its size."""
    fx_graph = Graph()
    x = fx_graph.placeholder("x")
    shifted = fx_graph.call_function(_ATEN.add.Tensor, (x, 1))
    fx_graph.output((fx_graph.call_function(_ATEN.relu.default, (shifted,)), x))
    return fxwrap.compile_graph(GraphModule({}, fx_graph), (torch.ones(2, 3),), options=CALLS)


def assert_same(results: Sequence[Tensor], arguments: Sequence[Any] = ()) -> None:
    """Checks a layer's results."""
    for result, wanted in zip(results, layer(*(arguments or inputs())), strict=True):
        torch.testing.assert_close(result, wanted)


def key_of(graph_module: Any, options: Options = CALLS, **changes: Any) -> str:
    """The key of a compile."""
    request = CompileRequest(graph_module, None, options.resolve_devices(), {}, "program", ())
    return make_key(dataclasses.replace(request, **changes)).digest


def hand_written_graph() -> GraphModule:
    """A graph with arguments, keyword arguments, a view, two outputs and a tensor attribute."""
    mode, fx_graph = FakeTensorMode(), Graph()
    with mode:
        x, y = fx_graph.placeholder("x"), fx_graph.placeholder("y")
        x.meta["val"], y.meta["val"] = torch.empty(4, 6), torch.empty(6, 4).t()
        held = fx_graph.get_attr("held")
        held.meta["val"] = torch.empty(6)
        calls = [
            (_ATEN.view.default, (x, [2, 12]), {}), (_ATEN.add.Tensor, (x, y), {"alpha": 2}),
            (_ATEN.sub.Tensor, (x, held), {}), (_ATEN.sum.dim_IntList, (x, [1], True), {"dtype": torch.float64}),
            (_ATEN.mul.Tensor, (y, 1.0), {}),
        ]  # fmt: skip
        for target, arguments, keywords in calls:
            name = str(target).split(".")[1]
            node = fx_graph.create_node("call_function", target, arguments, keywords, name)
            values = [item.meta["val"] if isinstance(item, Node) else item for item in arguments]
            node.meta["val"] = target(*values, **keywords)
    fx_graph.output(tuple([node for node in fx_graph.nodes if node.op == "call_function"]))
    root = torch.nn.Module()
    root.register_buffer("held", torch.arange(6.0))
    return GraphModule(root, fx_graph)


def dynamic_layer(low: int = 2, hint: int = 4, guard: int = 0) -> GraphModule:
    """A graph with a symbolic batch size; tracing may have added guards on it."""
    traced = graph(arguments=(torch.randn(hint, 8), torch.randn(8, 8)), mode="symbolic")
    (size, *_) = traced.graph.find_nodes(op="placeholder")[0].meta["val"].shape
    shape_env = size.node.shape_env
    if low > 2:
        shape_env.constrain_symbol_range(size.node.expr, low, 100)
    if guard:
        assert bool(size < guard)
    return traced
