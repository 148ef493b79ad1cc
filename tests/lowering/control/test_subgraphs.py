"""`invoke_subgraph`: one function in a program however often it is called, its kernels compiled once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.compiler import nested_compile_region

import fxwrap
from fxwrap.comparison.driver import capture
from fxwrap.lines import CallFunction
from fxwrap.testing import assert_programs_agree
from tests.lowering.control.cases import DEVICES, Case, Cases, random

CASES = Cases()
X, W = random(4, 8), random(8, 8, seed=1)


@nested_compile_region
def layer(a: Tensor, w: Tensor) -> Tensor:
    return (a @ w).sin() * 2


@nested_compile_region
def pair(a: Tensor, b: Tensor) -> Any:
    return a + b, a.t() * 2, b * a.shape[0]


@CASES.add((X, W))
def called_many_times(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(6):
        x = layer(x, w)
    return x


@CASES.add((X, W), dynamic=True)
def with_symbols(x: Tensor, w: Tensor) -> Tensor:
    return layer(layer(x, w) + x.shape[0], w)


@CASES.add((X, W.clone().requires_grad_()), training=True)
def in_training(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(3):
        x = layer(x, w)
    return x


@CASES.add((X, random(4, 8, seed=2)))
def with_views_and_several_results(x: Tensor, y: Tensor) -> Any:
    added, rotated, scaled = pair(x, y)
    again = pair(added, scaled)
    return rotated, *again


@CASES.add((X, W), (-X.abs(), W))
def inside_of_a_cond(x: Tensor, w: Tensor) -> Tensor:
    return torch.cond(x.sum() > -10, lambda a: layer(layer(a, w), w), lambda a: layer(a, w), (x,))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    @nested_compile_region
    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x)).relu()


@CASES.add((X.clone().requires_grad_(),), training=True)
class ModulesWithParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.sampled(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES.parameters)
def test_invoke_subgraph(case: Case, device: str) -> None:
    case.check(device)


def test_calls_share_one_function_and_its_kernels() -> None:
    (graph,) = capture(called_many_times, (X, W))
    program = graph.compiled.program
    assert len(program.functions) == 1 and len(program.kernels) == 1
    assert sum(isinstance(line, CallFunction) for line in program.body.lines) == 6


def test_forward_and_backward_have_a_function_each() -> None:
    graphs = capture(in_training, (X.clone().requires_grad_(), W.clone().requires_grad_()), training=True)
    for graph in graphs:
        program = graph.compiled.program
        assert len(program.functions) == 1
        assert sum(isinstance(line, CallFunction) for line in program.body.lines) == 3


SYMBOL_IN_A_FUNCTION = """
program @symbols(%x: borrowed f32[s0, 4]@cpu, %w: borrowed f32[4]@cpu) {
  s0 = symbol.size(%x) dim=0 range=(2, 64) hint=8
  %y = control.cond(s0 > 3, %w) : f32[4]@cpu {
  ^then(%a: f32[4]@cpu):
    %b = control.call @outer(%a) : f32[4]@cpu
    control.yield(%b)
  ^else(%c: f32[4]@cpu):
    %d = extern.call @aten.neg.default(%c) : f32[4]@cpu
    control.yield(%d)
  }
  control.return(%y)
}
function @inner(%e: f32[4]@cpu) {
  %f = extern.call @aten.mul.Scalar(%e, s0) : f32[4]@cpu
  control.yield(%f)
}
function @outer(%g: f32[4]@cpu) {
  %h = control.call @inner(%g) : f32[4]@cpu
  control.yield(%h)
}
"""


RESULTS_THAT_ARE_NONE = """
program @gradients(%x: borrowed f32[4]@cpu, %flag: borrowed bool[]@cpu) {
  _, %y = control.call @half(%x) : none, f32[4]@cpu
  _, %z = control.cond(%flag, %y) : none, f32[4]@cpu {
  ^then(%a: f32[4]@cpu):
    %b = extern.call @aten.exp.default(%a) : f32[4]@cpu
    control.yield(none, %b)
  ^else(%c: f32[4]@cpu):
    %d = extern.call @aten.neg.default(%c) : f32[4]@cpu
    control.yield(none, %d)
  }
  memory.free(%y)
  control.return(none, %z)
}
function @half(%e: f32[4]@cpu) {
  %f = extern.call @aten.mul.Scalar(%e, 0.5) : f32[4]@cpu
  control.yield(none, %f)
}
"""


@pytest.mark.parametrize("flag", [False, True])
def test_results_that_are_none(flag: bool) -> None:
    """torch's partitioner makes such functions: the gradient of what needs none."""
    program, x = fxwrap.verify(fxwrap.parse(RESULTS_THAT_ARE_NONE)), torch.arange(4.0)
    inputs = [x, torch.tensor(flag)]
    assert_programs_agree(program, inputs)
    nothing, z = fxwrap.run(program, inputs)
    assert nothing is None
    torch.testing.assert_close(z, (x / 2).exp() if flag else -x / 2)


@pytest.mark.parametrize("rows", [3, 5])
def test_symbols_are_passed_through_nested_calls(rows: int) -> None:
    program = fxwrap.verify(fxwrap.parse(SYMBOL_IN_A_FUNCTION))
    x, w = torch.ones(rows, 4), torch.randn(4)
    assert_programs_agree(program, [x, w])
    torch.testing.assert_close(fxwrap.run(program, [x, w])[0], w * 5 if rows == 5 else -w)
