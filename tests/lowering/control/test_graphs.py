"""Control flow in graphs written by hand and in exported programs."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.map import map as map_over
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.export import Dim, export
from torch.fx import Graph

import fxwrap
from fxwrap.comparison import COMPARED_EMITTERS
from fxwrap.compile import emit
from fxwrap.lines import ScanLoop
from fxwrap.testing import assert_emitters_agree
from tests.lowering.control.cases import random
from tests.lowering.control.graphs import (
    associative_scan_graph,
    block,
    build_graph,
    cond_graph,
    condition,
    higher,
    map_graph,
    results,
    scan_graph,
    while_graph,
)

X, ROWS = random(4, 8), random(5, 8)
YES, NO = torch.tensor(True), torch.tensor(False)
ZERO = torch.tensor(0)

# --- written by hand --------------------------------------------------------------------------------------------------


def agree(graph: torch.fx.GraphModule, *inputs: Any, wanted: Any) -> fxwrap.Program:
    """Asserts that every emitter has the expected results; returns the program."""
    program = fxwrap.lower(graph, inputs)
    for emitter in COMPARED_EMITTERS:
        actual = emit(program, emitter)(*inputs)
        torch.testing.assert_close(tuple(actual), tuple(wanted), rtol=1e-5, atol=1e-6, check_stride=True)
    return program


@pytest.mark.parametrize("flag", [True, False])
def test_a_condition_that_is_a_constant(flag: bool) -> None:
    graph = cond_graph(block(lambda x: x + 1, X), block(lambda x: x * 2, X), predicate=flag)
    agree(graph, X, wanted=(X + 1 if flag else X * 2,))


@pytest.mark.parametrize("flag", [YES, NO, YES.reshape(1, 1)])
def test_branches_that_return_operands_views_and_duplicates(flag: Tensor) -> None:
    """What a block does not own is copied, into the layout that both branches have."""

    def then(x: Tensor, y: Tensor) -> Any:
        z = y + 1
        return x, z, z, x.t()

    def else_(x: Tensor, y: Tensor) -> Any:
        return y, x * 2, x[:], y.t()

    graph = cond_graph(block(then, X, X), block(else_, X, X), operands=2, count=4)
    chosen = then if flag.item() else else_
    agree(graph, flag, X, X + 1, wanted=chosen(X, X + 1))


def test_blocks_without_operands_capture_constants() -> None:
    constant = torch.arange(4.0)
    graphs = [block(lambda: constant * 2), block(lambda: constant + 1)]
    for flag in (YES, NO):
        program = agree(cond_graph(*graphs, operands=0), flag, wanted=(constant * 2 if flag else constant + 1,))
        assert len(program.constants) == 1


def test_an_associative_scan_with_a_constant_and_an_operand_for_all() -> None:
    factor = torch.arange(8.0) / 8
    combine = block(lambda a, b, c: a * b * factor + (a + b) * c, X[0], X[0], X[0])
    eager = torch.ops.higher_order.associative_scan(combine, [ROWS], (X[0],))
    program = agree(associative_scan_graph(combine, 1, 1), ROWS, X[0], wanted=eager)
    assert len(program.constants) == 1 and not any(isinstance(line, ScanLoop) for line in program.lines())


def test_an_associative_scan_in_a_branch_is_decomposed() -> None:
    then = associative_scan_graph(block(lambda a, b: a + b, X[0], X[0]), 1)
    graph = cond_graph(then, block(lambda x: x * 2, X))
    agree(graph, YES, X, wanted=(X.cumsum(0),))
    outcomes = {item.node: item.kind for item in fxwrap.compile_graph(graph, [YES, X]).coverage}
    assert outcomes["then.associative_scan"] == "fused"


@pytest.mark.parametrize("rounds", [0, 1, 4])
def test_a_loop_that_swaps_carried_values(rounds: int) -> None:
    cond = condition(lambda i, x, y, end: i < end, ZERO, X, X, ZERO)
    body = block(lambda i, x, y, end: (i + 1, y, x), ZERO, X, X, ZERO)
    wanted = (torch.tensor(rounds), X, X + 1) if rounds % 2 == 0 else (torch.tensor(rounds), X + 1, X)
    agree(while_graph(cond, body, 3, 1), ZERO, X, X + 1, torch.tensor(rounds), wanted=wanted)


@pytest.mark.parametrize("rounds", [0, 4])
def test_a_loop_that_carries_numbers(rounds: int) -> None:
    """They are numbers of which nothing is known in the blocks, although the first ones are constants."""

    def judged(graph: Graph, i: Any, _scale: Any, _x: Any) -> Any:
        return graph.call_function(operator.lt, (i, rounds))

    def advanced(graph: Graph, i: Any, scale: Any, x: Any) -> Any:
        scaled = graph.call_function(torch.ops.aten.mul.Tensor, (x, scale))
        return graph.call_function(operator.add, (i, 1)), graph.call_function(operator.mul, (scale, 3)), scaled

    def write(graph: Graph, x: Any) -> Any:
        blocks = graph.get_attr("cond"), graph.get_attr("body")
        return results(graph, graph.call_function(higher.while_loop, (*blocks, (0, 2, x), ())), 3)

    graph = build_graph(1, write, {"cond": build_graph(3, judged), "body": build_graph(3, advanced)})
    scale, x = 2, X
    for _ in range(rounds):
        scale, x = scale * 3, x * scale
    program = fxwrap.lower(graph, [X])
    for emitter in COMPARED_EMITTERS:
        count, factor, result = emit(program, emitter)(X)
        assert (count, factor) == (rounds, scale), emitter
        torch.testing.assert_close(result, x)


def test_a_loop_with_duplicate_initial_values() -> None:
    cond = condition(lambda i, x, y: i < 3, ZERO, X, X)
    body = block(lambda i, x, y: (i + 1, x + y, x - y), ZERO, X, X)
    x, y = X, X
    for _ in range(3):
        x, y = x + y, x - y
    agree(while_graph(cond, body, 3), ZERO, X, X, wanted=(torch.tensor(3), x, y))


@pytest.mark.parametrize("length", [1, 5])
def test_a_scan_of_any_length(length: int) -> None:
    rows = ROWS[:length]
    body = block(lambda carried, row: (carried + row, carried * 2, row.sum()), X[0], X[0])
    last, seen = X[0], []
    for row in rows:
        seen.append((last * 2, row.sum()))
        last = last + row
    wanted = [torch.stack(column) for column in zip(*seen, strict=True)]
    agree(scan_graph(body, 1, 1, 2), X[0], rows, wanted=(last, *wanted))


@pytest.mark.parametrize("length", [1, 5])
def test_a_map_of_any_length_over_slices_with_gaps(length: int) -> None:
    body = block(lambda row, other: (row.sin() + other, other.sum()), X[0], X[0])
    rows, columns = ROWS[:length], random(8, 5).t()[:length]
    agree(map_graph(body, 2, 2), rows, columns, wanted=(rows.sin() + columns, columns.sum(1)))


NO_SLICE = """
program @scan(%start: borrowed f32[8]@cpu, %xs: borrowed f32[s0, 8]@cpu) {
  s0 = symbol.size(%xs) dim=0
  %last, %sums, %rows = control.scan(%start) over=(%xs) : f32[8]@cpu, f32[s0]@cpu, f32[s0, 8]@cpu {
  ^body(%carry: f32[8]@cpu, %slice: f32[8]@cpu):
    %sum = extern.call @aten.add.Tensor(%carry, %slice) : f32[8]@cpu
    %total = extern.call @aten.sum.default(%sum) : f32[]@cpu
    %out = extern.call @aten.clone.default(%sum) : f32[8]@cpu
    control.yield(%sum, %total, %out)
  }
  %mapped = control.map(%xs) extra=(%start) : f32[s0, 8]@cpu {
  ^body(%row: f32[8]@cpu, %other: f32[8]@cpu):
    %new = extern.call @aten.mul.Tensor(%row, %other) : f32[8]@cpu
    control.yield(%new)
  }
  control.return(%last, %sums, %rows, %mapped)
}
"""


@pytest.mark.parametrize("length", [0, 1, 3])
def test_slices_of_any_length_including_zero(length: int) -> None:
    """torch does not trace a scan over no elements, but a program lowered for other sizes runs it."""
    program = fxwrap.verify(fxwrap.parse(NO_SLICE))
    rows = ROWS[:length]
    sums = [X[0] + rows[: number + 1].sum(0) for number in range(length)]
    for emitter in [
        name for name in COMPARED_EMITTERS if length or name != "fx"
    ]:  # torch's operators take no empty ones
        last, totals, stacked, mapped = emit(program, emitter)(X[0], rows)
        assert totals.shape == (length,) and stacked.shape == (length, 8)
        torch.testing.assert_close(last, sums[-1] if sums else X[0])
        torch.testing.assert_close(list(stacked), sums)
        torch.testing.assert_close(mapped, rows * X[0])
        assert last.data_ptr() != X.data_ptr()


@pytest.mark.parametrize("start", [3, 50])
def test_an_assert_in_a_body(start: int) -> None:
    """The message is the graph's own, in every emitter."""

    def write(graph: Graph, i: Any) -> Any:
        number = graph.call_function(torch.ops.aten._local_scalar_dense.default, (i,))
        small = graph.call_function(operator.lt, (number, 10))
        graph.call_function(torch.ops.aten._assert_scalar.default, (small, "it grew"))
        return (graph.call_function(torch.ops.aten.add.Tensor, (i, 1)),)

    graph = while_graph(condition(lambda i: i < 100, ZERO), build_graph(1, write), 1)
    program = fxwrap.lower(graph, [torch.tensor(start)])
    for emitter in COMPARED_EMITTERS:
        with pytest.raises(RuntimeError, match=r"^it grew$"):
            emit(program, emitter)(torch.tensor(start))


def test_a_function_that_two_graphs_share_is_lowered_once() -> None:
    layer = block(lambda x: (x * 2).sin(), X)

    def write(graph: Graph, x: Any) -> Any:
        for _ in range(3):
            call = graph.call_function(higher.invoke_subgraph, (graph.get_attr("layer"), "layer", x))
            (x,) = results(graph, call, 1)
        return (x,)

    wanted = X
    for _ in range(3):
        wanted = (wanted * 2).sin()
    program = agree(build_graph(1, write, {"layer": layer}), X, wanted=(wanted,))
    assert len(program.functions) == 1 and len(program.kernels) == 1


# --- exported ---------------------------------------------------------------------------------------------------------


class AllLineKinds(nn.Module):
    """All of control flow over parameters, buffers and constants; one buffer is overwritten."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", random(8, seed=3))

    def forward(self, x: Tensor) -> Any:
        self.calls.add_(1)
        y = torch.cond(x.sum() > 0, lambda a: self.linear(a) * self.scale, lambda a: a * torch.ones(8), (x,))
        z = while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, self.linear(a).sin()), (self.calls.clone(), y))[1]
        last, rows = scan(lambda c, row: ((c * self.scale + row).tanh(), row.sum()), x.new_zeros(8), z)
        return last, rows, map_over(lambda row, scale: row * scale, z, self.scale)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_an_exported_program(sign: int, dynamic: bool) -> None:
    torch.manual_seed(0)
    x = X.abs() * sign
    shapes = ({0: Dim("rows", min=2, max=64)},) if dynamic else None
    with torch.no_grad():
        exported = export(AllLineKinds(), (x,), dynamic_shapes=shapes)
    assert_emitters_agree(exported, (x,))
