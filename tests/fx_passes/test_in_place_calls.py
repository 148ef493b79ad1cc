"""In-place calls of graphs that nothing functionalised return their results where nothing else sees the write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fxwrap import Options
from fxwrap.fx_passes import prepare_graph
from fxwrap.fx_passes.prepared_graph import PreparedGraph
from fxwrap.lowering import RULES
from tests.lowering.planned_programs import STRICT, check

aten = torch.ops.aten


def _chain(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).relu_().mul_(2).clamp_(max=3)


def _view(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).view(2, 8).add_(1).view(-1)


def _part_of_a_tuple(x: Tensor, w: Tensor) -> Tensor:
    norm = aten.native_layer_norm(x, [4], None, None, 1e-5)
    return norm[0].sigmoid_() + norm[1]


def _input(x: Tensor, w: Tensor) -> Tensor:
    return x.add_(w)


def _read_before(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    return y.sin() * y.masked_fill_(w > 0, 1.0)


def _read_around(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    z = y.view(16)
    return y.relu_() + z.view(4, 4)


def _part(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    y[1].relu_()
    return y


def _both_returned(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ w
    return y.t(), y.relu_()


def _wider_operand(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).half().add_(w)


def _strided(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w)[:, ::2].exp_()


def _unfused(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).i0_()


def _random(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).bernoulli_(1.0)


CASES: dict[Callable[..., Any], int] = {
    _chain: 0, _view: 0, _part_of_a_tuple: 0, _read_before: 0,
    _input: 1, _read_around: 1, _part: 1, _both_returned: 1, _wider_operand: 1, _strided: 1, _unfused: 1, _random: 1,
}  # fmt: skip
"""Functions, and how many of their in-place calls stay."""


def _in_place_calls(graph: GraphModule | PreparedGraph) -> int:
    module = graph.graph_module if isinstance(graph, PreparedGraph) else graph
    targets = [str(node.target) for node in module.graph.nodes]
    return sum([target.startswith("aten.") and target.split(".")[1].endswith("_") for target in targets])


def _prepared(graph: GraphModule, inputs: list[Tensor], options: Options) -> PreparedGraph:
    return prepare_graph(graph, inputs, options, fused_operators=RULES)


@pytest.mark.parametrize("function", CASES, ids=[case.__name__.strip("_") for case in CASES])
def test_in_place_calls(function: Callable[..., Any]) -> None:
    """Results, their aliases and inputs are those of eager mode."""
    inputs = [torch.randn(4, 4) for _ in range(2)]
    graph = make_fx(function)(*[item.clone() for item in inputs])
    assert _in_place_calls(graph) > 0
    assert _in_place_calls(_prepared(graph, inputs, STRICT)) == CASES[function]
    check(function, *inputs)


def test_excluded() -> None:
    """Without fusion, and for operators that an option preserves."""
    inputs = [torch.randn(4, 4) for _ in range(2)]
    graph = make_fx(_chain)(*inputs)
    for options, count in ((STRICT.replace(fuse=False), 3), (STRICT.replace(preserve_ops=("aten.mul_.Tensor",)), 1)):
        assert _in_place_calls(_prepared(graph, inputs, options)) == count
