"""Graphs that print, and truth values that torch hands from graph to graph, in every emitter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fxwrap
from fxwrap import Options
from fxwrap.compare import COMPARED
from fxwrap.errors import GraphError
from tests.control.cases import random

PRINTS = hasattr(torch.ops.higher_order, "print")
"""Whether this version of torch has an operator that prints."""


def printing(x: Tensor, f: Tensor, n: Tensor) -> Tensor:
    number = n.item()
    torch.ops.higher_order.print("{} rows, {total} of {name}", x.shape[0], total=x.sum(), name="x")
    torch.ops.higher_order.print("{0:.2f} {1} {truth}", f.item(), number + 1, truth=number > 2)
    y = (x * 2).sin()
    torch.ops.higher_order.print("{}", y[0])
    return y + number


class Printing(torch.nn.Module):
    def forward(self, x: Tensor, f: Tensor, n: Tensor) -> Tensor:
        return printing(x, f, n)


GIVEN = (torch.arange(6.0).reshape(3, 2), torch.tensor(2.5), torch.tensor(3))
VERSIONS = [pytest.param(exported, id=name) for exported, name in ((False, "compiled"), (True, "exported")) if PRINTS]


@pytest.mark.parametrize("emitter", COMPARED)
@pytest.mark.parametrize("exported", VERSIONS)
def test_a_graph_prints_what_eager_prints(exported: bool, emitter: str, capsys: Any, fresh_dynamo: None) -> None:
    options = Options(emitter=emitter)
    with torch._dynamo.config.patch(capture_scalar_outputs=True), torch.no_grad():
        run: Callable[..., Any]
        if exported:
            run = fxwrap.compile_graph(torch.export.export(Printing(), GIVEN), options=options)
        else:
            run = torch.compile(printing, backend="fxwrap", options={"emitter": emitter}, fullgraph=True)
            run(*GIVEN)
        capsys.readouterr()
        wanted = printing(*GIVEN)
        text = capsys.readouterr().out
        found = run(*GIVEN)
    assert text == capsys.readouterr().out and text.count("\n") == 3
    torch.testing.assert_close(found[0] if exported else found, wanted)


@pytest.mark.parametrize("printed", [[1.0, "a"]] if PRINTS else [])
def test_what_is_printed_is_a_tensor_a_number_or_a_string(printed: Any) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.ops.higher_order.print, ("{}", printed))
    graph.output((graph.call_function(torch.ops.aten.sin.default, (x,)),))
    with pytest.raises(GraphError, match=r"node 'print.*it prints more than tensors, numbers and strings"):
        fxwrap.compile_graph(torch.fx.GraphModule(torch.nn.Module(), graph), [random(3)])
