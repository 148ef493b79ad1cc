"""Operators that change the layout of a tensor in place, in graphs that nothing functionalised, beside eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

import fxwrap
from fxwrap import Options
from fxwrap.errors import GraphError
from fxwrap.fx_passes.layout_changes import changes_layout, replace_layout_changes


def read_before_and_after(x: Tensor) -> Any:
    y = x * 2
    before = y.sum(1)
    y.transpose_(0, 1)
    return before, y.relu(), y.sum(1)


def written_through_both_names(x: Tensor) -> Any:
    y = x * 2
    view = y[0]
    z = y.t_()
    z.add_(1)
    y.mul_(2)
    return view, y, z + view[0]


def of_an_overwritten_tensor(x: Tensor) -> Any:
    y = x.sin()
    z = y.add_(1)
    z.unsqueeze_(0)
    return y * 2, z.cos()


def twice(x: Tensor) -> Any:
    y = x.exp().unsqueeze_(0)
    y.squeeze_(0)
    return y.swapaxes_(0, 1) + 1, y.detach_() * 2


def strided(x: Tensor) -> Any:
    return (x + 1).as_strided_((2, 3), (1, 2), 1) * 2


def of_a_linear_on_a_vector(x: Tensor) -> Any:
    return torch.nn.functional.linear(x[0], x).relu()


CASES = (
    read_before_and_after, written_through_both_names, of_an_overwritten_tensor, twice, strided,
    of_a_linear_on_a_vector,
)  # fmt: skip


@pytest.mark.parametrize("has_metadata", [True, False])
@pytest.mark.parametrize("function", CASES)
def test_later_readers_see_the_new_layout(function: Callable[[Tensor], Any], has_metadata: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3)
    graph = make_fx(function)(x.clone())
    assert any(changes_layout(node) for node in graph.graph.nodes)
    if not has_metadata:
        for node in graph.graph.nodes:
            node.meta = {}
    text = str(graph.graph)
    for fuse in (True, False):
        options = Options(compile_cache=False, fallback="error", fuse=fuse)
        results = fxwrap.run(fxwrap.lower(graph, [x], options=options), [x.clone()])
        for actual, expected in zip(tree_leaves(results), tree_leaves(function(x.clone())), strict=True):
            torch.testing.assert_close(actual, expected)
            assert actual.stride() == expected.stride()
    assert str(graph.graph) == text


def resized(x: Tensor) -> Tensor:
    return x.clone().resize_(2, 2) + 1


def resized_after_a_reader(x: Tensor) -> Tensor:
    y = x * 2
    total = y.sum()
    return y.resize_as_(total) + total


def transposed_input(x: Tensor) -> Tensor:
    return x.t_() * 2


@pytest.mark.parametrize("has_metadata", [True, False])
@pytest.mark.parametrize("function", [resized, resized_after_a_reader, transposed_input])
def test_a_change_that_no_view_describes_is_an_error(function: Callable[[Tensor], Any], has_metadata: bool) -> None:
    graph = make_fx(function)(torch.randn(4, 3))
    if not has_metadata:
        for node in graph.graph.nodes:
            node.meta = {}
    reason = r"node '\w+': aten\.\w+\.default changes the layout of '\w+' in place\. Use an operator that"
    with pytest.raises(GraphError, match=reason):
        fxwrap.lower(graph, [torch.randn(4, 3)])


def test_a_call_that_changes_no_layout_is_none() -> None:
    def function(x: Tensor) -> Tensor:
        return (x * 2).resize_(4, 3) + 1

    x = torch.randn(4, 3)
    (result,) = fxwrap.run(fxwrap.lower(make_fx(function)(x), [x]), [x])
    torch.testing.assert_close(result, function(x))


def test_a_layout_change_of_an_input_and_other_graphs_stay() -> None:
    graph = make_fx(transposed_input)(torch.randn(4, 3))
    assert [node for node in replace_layout_changes(graph).graph.nodes if changes_layout(node)]
    without = make_fx(torch.sin)(torch.randn(3))
    assert replace_layout_changes(without) is without
