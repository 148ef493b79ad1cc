"""Assertions of tensor metadata: checked at compile time and removed, so that their operands fuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import Graph, GraphModule

import fxwrap
from fxwrap import Options
from fxwrap.comparison import COMPARED_EMITTERS
from fxwrap.errors import GraphError

aten = torch.ops.aten


class Casts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 2).to(torch.float16).relu() + 1


@pytest.mark.parametrize("emitter", COMPARED_EMITTERS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_an_exported_cast_fuses(emitter: str, dynamic: bool) -> None:
    x = torch.randn(8, 4)
    exported = torch.export.export(Casts(), (x,), dynamic_shapes=({0: Dim("rows")} if dynamic else None,))
    assert exported.graph.find_nodes(op="call_function", target=aten._assert_tensor_metadata.default)
    compiled = fxwrap.compile_graph(exported, options=Options(emitter=emitter))
    opcodes = [line.opcode for line in compiled.program.lines()]
    assert "extern.call" not in opcodes and opcodes.count("memory.alloc") == opcodes.count("kernel.launch") == 1
    torch.testing.assert_close(compiled(x), Casts()(x))


def asserting(example: Tensor, **properties: Any) -> GraphModule:
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = example
    graph.call_function(aten._assert_tensor_metadata.default, (x,), properties).meta["val"] = None
    graph.output((x,))
    return GraphModule(nn.Module(), graph)


@pytest.mark.parametrize(
    ("name", "value"),
    [("dtype", torch.float64), ("size", [4, 3]), ("stride", [1, 4]), ("device", torch.device("meta"))],
)
def test_an_assertion_that_fails_is_an_error(name: str, value: Any) -> None:
    with torch._subclasses.FakeTensorMode():
        example = torch.empty(3, 4)
    with pytest.raises(
        GraphError, match=f"it asserts that the {name} of 'x' is .*, but it is .*Export the model again"
    ):
        fxwrap.lower(asserting(example, **{name: value}))


def test_an_assertion_that_holds_is_removed() -> None:
    with torch._subclasses.FakeTensorMode():
        example = torch.empty(3, 4)
    program = fxwrap.lower(asserting(example, dtype=torch.float32, size=[3, 4], stride=[4, 1], layout=torch.strided))
    assert not any(line.opcode == "extern.call" for line in program.lines())
