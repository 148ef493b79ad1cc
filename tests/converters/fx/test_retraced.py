"""Emitted graphs that torch traces again: the retraced graph computes the same, and is imported as an equal program."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._functorch.compile_utils import fx_graph_cse
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.converters.fx import FxForm
from tests.support.program_equality import assert_equal
from tests.support.sample import Sample

SCAN_OF_ONE_TENSOR = Sample(
    "scan_of_one_tensor",
    """
program @p(%x: borrowed f32[5, 4]@cpu, %w: borrowed f32[4]@cpu) {
  %last, %other, %third, %rows = control.scan(%w, %w, %w) over=(%x) extra=(%w) :
      f32[4]@cpu, f32[4]@cpu, f32[4]@cpu, f32[5, 4]@cpu {
  ^body(%a: f32[4]@cpu, %b: f32[4]@cpu, %c: f32[4]@cpu, %row: f32[4]@cpu, %fixed: f32[4]@cpu):
    %a1 = extern.call @aten.add.Tensor(%a, %row) : f32[4]@cpu
    %b1 = extern.call @aten.mul.Tensor(%b, %row) : f32[4]@cpu
    %c1 = extern.call @aten.sub.Tensor(%c, %row) : f32[4]@cpu
    %out = extern.call @aten.mul.Tensor(%a, %fixed) : f32[4]@cpu
    control.yield(%a1, %b1, %c1, %out)
  }
  control.return(%last, %other, %third, %rows)
}
""".replace(" :\n     ", " :"),
)
"""torch's tracer gives parameters of a body that are one tensor one name, although carried ones change."""


def _cse_and_traced(module: GraphModule, *inputs: torch.Tensor) -> GraphModule:
    return make_fx(GraphModule(module, fx_graph_cse(module.graph)), tracing_mode="fake")(*inputs)


def _exported(module: GraphModule, *inputs: torch.Tensor) -> GraphModule:
    return torch.export.export(module, inputs, strict=False).module(check_guards=False)


TRACERS: dict[str, Callable[..., GraphModule]] = {
    "make_fx": lambda module, *inputs: make_fx(module, tracing_mode="fake")(*inputs),
    "CSE and make_fx": _cse_and_traced,
    "export": _exported,
}


@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.parametrize("form", ["in_place", "functional"])
def test_carried_operands_of_a_scan_that_are_one_tensor_stay_apart(form: FxForm, tracer: str) -> None:
    program, inputs = SCAN_OF_ONE_TENSOR.program(), SCAN_OF_ONE_TENSOR.inputs(0)
    module = fxwrap.to_fx(program, form=form).graph_module
    traced = TRACERS[tracer](module, *inputs)
    for result, wanted in zip(traced(*inputs), fxwrap.run(program, inputs), strict=True):
        torch.testing.assert_close(result, wanted, rtol=0, atol=0)
    assert_equal(program, fxwrap.from_fx(module))
    assert_equal(program, fxwrap.from_fx(traced))


@pytest.mark.parametrize("operator", [torch.ops.aten.alias.default, torch.ops.aten.detach.default])
def test_an_alias_that_a_tracer_adds_is_its_operand(operator: Callable[..., object]) -> None:
    """torch 2.15 returns `aten.alias` of the results that are views, earlier releases `aten.detach`."""
    program = SCAN_OF_ONE_TENSOR.program()
    module = fxwrap.to_fx(program).graph_module
    (returned,) = module.graph.output_node().args
    with module.graph.inserting_before(module.graph.output_node()):
        aliases = [module.graph.call_function(operator, (item,)) for item in returned]
    for item, alias in zip(returned, aliases, strict=True):
        alias.meta["val"] = item.meta["val"]
    module.graph.output_node().args = (tuple(aliases),)
    assert_equal(program, fxwrap.from_fx(module))
