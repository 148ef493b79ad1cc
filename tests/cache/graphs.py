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
from fxwrap.compile_cache.key import Request, make_key
from fxwrap.torch_compat import FakeTensorMode

_ATEN = torch.ops.aten

CALLS = Options(fuse=False)
"""Options under which nothing needs a C++ compiler."""


def layer(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """A product, and something of it."""
    product = x @ w
    return product, torch.relu(product) + 1


def inputs(size: int = 4) -> tuple[Tensor, Tensor]:
    """Inputs of a layer."""
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, 8, generator=generator), torch.randn(8, 8, generator=generator)


def graph(function: Callable[..., Any] = layer, given: Sequence[Any] = (), mode: str = "fake") -> GraphModule:
    """A function's graph; that of a layer by default."""
    return make_fx(function, tracing_mode=mode)(*(given or inputs()))


def compiled(options: Options = CALLS, **keywords: Any) -> Compiled:
    """A layer, compiled."""
    return fxwrap.compile_graph(graph(), options=options, **keywords)


def plain_layer() -> Compiled:
    """Something of an input, compiled from a graph without metadata, which only its example tells the size of."""
    made = Graph()
    x = made.placeholder("x")
    shifted = made.call_function(_ATEN.add.Tensor, (x, 1))
    made.output((made.call_function(_ATEN.relu.default, (shifted,)), x))
    return fxwrap.compile_graph(GraphModule({}, made), (torch.ones(2, 3),), options=CALLS)


def assert_same(results: Sequence[Tensor], given: Sequence[Any] = ()) -> None:
    """Checks a layer's results."""
    for result, wanted in zip(results, layer(*(given or inputs())), strict=True):
        torch.testing.assert_close(result, wanted)


def key_of(graph_module: Any, options: Options = CALLS, **changes: Any) -> str:
    """The key of a compile."""
    request = Request(graph_module, None, options.with_devices(), {}, "program", ())
    return make_key(dataclasses.replace(request, **changes)).digest


def by_hand() -> GraphModule:
    """A graph with arguments, keyword arguments, a view, two outputs and a tensor of its own."""
    mode, made = FakeTensorMode(), Graph()
    with mode:
        x, y = made.placeholder("x"), made.placeholder("y")
        x.meta["val"], y.meta["val"] = torch.empty(4, 6), torch.empty(6, 4).t()
        held = made.get_attr("held")
        held.meta["val"] = torch.empty(6)
        calls = [
            (_ATEN.view.default, (x, [2, 12]), {}), (_ATEN.add.Tensor, (x, y), {"alpha": 2}),
            (_ATEN.sub.Tensor, (x, held), {}), (_ATEN.sum.dim_IntList, (x, [1], True), {"dtype": torch.float64}),
            (_ATEN.mul.Tensor, (y, 1.0), {}),
        ]  # fmt: skip
        for target, arguments, keywords in calls:
            name = str(target).split(".")[1]
            node = made.create_node("call_function", target, arguments, keywords, name)
            values = [item.meta["val"] if isinstance(item, Node) else item for item in arguments]
            node.meta["val"] = target(*values, **keywords)
    made.output(tuple([node for node in made.nodes if node.op == "call_function"]))
    root = torch.nn.Module()
    root.register_buffer("held", torch.arange(6.0))
    return GraphModule(root, made)


def dynamic_layer(low: int = 2, hint: int = 4, guard: int = 0) -> GraphModule:
    """A graph of any batch; guards may have been found out on the way to it."""
    made = graph(given=(torch.randn(hint, 8), torch.randn(8, 8)), mode="symbolic")
    (size, *_) = made.graph.find_nodes(op="placeholder")[0].meta["val"].shape
    shape_env = size.node.shape_env
    if low > 2:
        shape_env.constrain_symbol_range(size.node.expr, low, 100)
    if guard:
        assert bool(size < guard)
    return made
