"""Elements that a size of a run lacks, selected or written through a view: a program raises as eager mode does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.passes.runtime_assert import insert_deferred_runtime_asserts

import fxwrap
from fxwrap import Options
from fxwrap.torch_compat import find_shape_env
from tests.devices.registration import on_abacus
from tests.support.versions import fails_before

aten = torch.ops.aten


def traced(function: Callable[..., Any], *inputs: Tensor) -> GraphModule:
    """Returns the graph of a function with the assertions that torch defers."""
    module = make_fx(lambda *tensors: (function(*tensors),), tracing_mode="symbolic")(*inputs)
    module.graph.eliminate_dead_code()
    shape_env = find_shape_env([node.meta["val"] for node in module.graph.find_nodes(op="placeholder")])
    assert shape_env is not None
    insert_deferred_runtime_asserts(module, shape_env, "graph")
    module.recompile()
    return module


def written(write: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def function(rows: Tensor) -> Tensor:
        copy = rows + 1
        write(copy)
        return copy

    return function


OF_ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "the first": lambda rows: rows.select(0, 0) + 1,
    "the last, a view": lambda rows: rows.select(0, -1),
    "the third": lambda rows: rows.select(0, 2) * 2,
    "the third from the end": lambda rows: rows.select(0, -3) * 2,
    "select_scatter": lambda rows: aten.select_scatter.default(rows, torch.zeros(3), 0, 1),
    "slice_scatter": lambda rows: aten.slice_scatter.default(rows, torch.zeros(2, 3), 0, 0, 2),
    "diagonal_scatter": lambda rows: aten.diagonal_scatter.default(rows, torch.zeros(2), -1),
    "a row in place": written(lambda rows: rows.select(0, 1).copy_(torch.zeros(3))),
    "rows in place": written(lambda rows: aten.slice.Tensor(rows, 0, 0, 2).copy_(torch.zeros(2, 3))),
}


_NO_TRACE = {
    "diagonal_scatter": fails_before("2.13", "torch asks how long it is", GuardOnDataDependentSymNode),
    "rows in place": fails_before("2.12", "torch asks how many there are", GuardOnDataDependentSymNode),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [pytest.param(name, marks=_NO_TRACE.get(name, ())) for name in OF_ROWS])
def test_rows_that_a_run_lacks(name: str) -> None:
    """Kernels of the test device check each access, so that a read outside of a buffer is an error of another class."""

    def function(x: Tensor) -> Tensor:
        chosen = torch.nonzero(x[:, 0] > 0).squeeze(1)
        return OF_ROWS[name](aten.index_select.default(x, 0, chosen))

    inputs = [torch.cat([torch.ones(count, 3), -torch.ones(6 - count, 3)]) for count in range(6)]
    module = traced(torch.func.functionalize(function, remove="mutations"), inputs[3])
    errors = set[type[Exception]]()
    with on_abacus():
        for emitter in ("python", "fx", "interpreter"):
            program = fxwrap.compile_graph(module, None, options=Options(emitter=emitter, compile_cache=False))
            for x in inputs:
                try:
                    wanted = function(x)
                except (IndexError, RuntimeError) as error:
                    errors.add(type(error))
                    with pytest.raises(type(error), match=r"out of range|size|fit|Runtime assertion"):
                        program(x)
                else:
                    torch.testing.assert_close(program(x)[0], wanted)
    assert errors
