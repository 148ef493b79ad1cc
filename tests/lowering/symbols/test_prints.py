"""Graphs that print, and truth values that torch hands from graph to graph, in every emitter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fxwrap
from fxwrap import Options
from fxwrap.comparison import COMPARED_EMITTERS
from fxwrap.errors import GraphError
from tests.lowering.control.cases import random

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


INPUTS = (torch.arange(6.0).reshape(3, 2), torch.tensor(2.5), torch.tensor(3))
VERSIONS = [pytest.param(exported, id=name) for exported, name in ((False, "compiled"), (True, "exported")) if PRINTS]


@pytest.mark.parametrize("emitter", COMPARED_EMITTERS)
@pytest.mark.parametrize("exported", VERSIONS)
def test_a_graph_prints_the_same_as_eager(exported: bool, emitter: str, capsys: Any) -> None:
    options = Options(emitter=emitter)
    with torch._dynamo.config.patch(capture_scalar_outputs=True), torch.no_grad():
        run: Callable[..., Any]
        if exported:
            run = fxwrap.compile_graph(torch.export.export(Printing(), INPUTS), options=options)
        else:
            run = torch.compile(printing, backend="fxwrap", options={"emitter": emitter}, fullgraph=True)
            run(*INPUTS)
        capsys.readouterr()
        wanted = printing(*INPUTS)
        text = capsys.readouterr().out
        results = run(*INPUTS)
    assert text == capsys.readouterr().out and text.count("\n") == 3
    torch.testing.assert_close(results, wanted)


@pytest.mark.parametrize("printed", [[1.0, "a"]] if PRINTS else [])
def test_only_tensors_numbers_and_strings_are_printed(printed: Any) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.ops.higher_order.print, ("{}", printed))
    graph.output((graph.call_function(torch.ops.aten.sin.default, (x,)),))
    with pytest.raises(GraphError, match=r"node 'print.*it prints values that are not tensors, numbers or strings"):
        fxwrap.compile_graph(torch.fx.GraphModule(torch.nn.Module(), graph), [random(3)])
