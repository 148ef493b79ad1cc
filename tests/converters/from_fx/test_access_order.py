"""Graphs in the in-place form whose reads and writes of one memory a tool has exchanged."""

from __future__ import annotations

import operator

import pytest
import torch
from torch.fx import GraphModule, Node

import fxwrap
from fxwrap.errors import FxImportError
from tests.support.program_equality import assert_equal

TWO_WRITES = """
program @two_writes(%x: mutable f32[8]@cpu, %y: borrowed f32[8]@cpu) {
  extern.mutate @aten.mul_.Scalar(%x, 2.0) writes=(%x)
  %before = extern.call @aten.sum.default(%x) : f32[]@cpu
  extern.mutate @aten.add_.Tensor(%x, %y) writes=(%x)
  %after = extern.call @aten.sum.default(%x) : f32[]@cpu
  control.return(%before, %after)
}
"""

TWO_SLICES = """
program @two_slices(%x: mutable f32[8]@cpu, %y: borrowed f32[4]@cpu) {
  %low = memory.view(%x) : f32[4]@cpu
  extern.mutate @aten.copy_.default(%low, %y) writes=(%low)
  %high = memory.view(%x) : f32[4 | 1 | LOW]@cpu
  extern.mutate @aten.add_.Tensor(%high, %y) writes=(%high)
  control.return()
}
"""


TWO_MEMORIES = """
program @two_memories(%x: mutable f32[8]@cpu, %y: mutable f32[8]@cpu) {
  extern.mutate @aten.copy_.default(%y, %x) writes=(%y)
  extern.mutate @aten.add_.Tensor(%x, %y) writes=(%x)
  extern.mutate @aten.mul_.Scalar(%y, 2.0) writes=(%y)
  extern.mutate @aten.add_.Tensor(%x, %y) writes=(%x)
  control.return()
}
"""


def _graph(text: str) -> GraphModule:
    return fxwrap.to_fx(fxwrap.verify(fxwrap.parse(text))).graph_module


def _node(module: GraphModule, target: object, index: int = 0) -> Node:
    return list(module.graph.find_nodes(op="call_function", target=target))[index]


def test_memories_that_nodes_read_and_write_in_turns_do_not_conflict() -> None:
    program = fxwrap.verify(fxwrap.parse(TWO_MEMORIES))
    module = _graph(TWO_MEMORIES)
    assert_equal(program, fxwrap.from_fx(module))
    first, second = (_node(module, torch.ops.aten.add_.Tensor, index) for index in range(2))
    first.prepend(second)
    with pytest.raises(FxImportError, match=rf"node '{first.name}' .*: it writes the memory 'x' after '{second.name}'"):
        fxwrap.from_fx(module)


def test_two_writes_of_one_memory_are_exchanged() -> None:
    module = _graph(TWO_WRITES)
    first, second = _node(module, torch.ops.aten.mul_.Scalar), _node(module, torch.ops.aten.add_.Tensor)
    first.prepend(second)
    message = rf"node '{first.name}' \(aten.mul_.Scalar\): it writes the memory 'x' after '{second.name}' writes it"
    with pytest.raises(FxImportError, match=message):
        fxwrap.from_fx(module)


def test_a_read_is_moved_behind_a_write() -> None:
    module = _graph(TWO_WRITES)
    read, write = _node(module, torch.ops.aten.sum.default), _node(module, torch.ops.aten.add_.Tensor)
    write.append(read)
    message = rf"node '{read.name}' .*: it reads the memory 'x' after '{write.name}' writes it, but was emitted before"
    with pytest.raises(FxImportError, match=message):
        fxwrap.from_fx(module)


def test_a_read_is_moved_before_a_write() -> None:
    module = _graph(TWO_WRITES)
    read, write = _node(module, torch.ops.aten.sum.default, 1), _node(module, torch.ops.aten.add_.Tensor)
    write.prepend(read)
    with pytest.raises(
        FxImportError, match=rf"node '{write.name}' .*: it writes the memory 'x' after '{read.name}' reads"
    ):
        fxwrap.from_fx(module)


@pytest.mark.parametrize(("offset", "conflicts"), [(4, False), (3, True)])
def test_writes_of_parts_may_be_exchanged_if_these_are_disjoint(offset: int, conflicts: bool) -> None:
    module = _graph(TWO_SLICES.replace("LOW", str(offset)))
    first, second = _node(module, torch.ops.aten.copy_.default), _node(module, torch.ops.aten.add_.Tensor)
    first.prepend(second)
    first.prepend(second.args[0])  # type: ignore[arg-type]
    second.prepend(second.args[0])  # type: ignore[arg-type]
    if conflicts:
        with pytest.raises(FxImportError, match="it writes the memory 'x' after"):
            fxwrap.from_fx(module)
    else:
        fxwrap.from_fx(module)


def test_nodes_that_a_rewrite_adds_have_any_order() -> None:
    module = _graph(TWO_WRITES)
    last = _node(module, torch.ops.aten.sum.default, 1)
    with module.graph.inserting_before(last):
        module.graph.call_function(torch.ops.aten.neg_.default, (last.args[0],))
    x, y = torch.randn(8), torch.randn(8)
    _, after = fxwrap.to_python(fxwrap.from_fx(module))(x.clone(), y)
    torch.testing.assert_close(after, -(2 * x + y).sum())


def test_a_graph_may_run_twice_on_one_memory() -> None:
    inner = _graph(TWO_WRITES)
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    for item, placeholder in zip((x, y), inner.graph.find_nodes(op="placeholder"), strict=True):
        item.meta = dict(placeholder.meta)
    graph.call_module("inner", (x, y))
    second = graph.call_module("inner", (x, y))
    graph.output((graph.call_function(operator.getitem, (second, 1)),))
    program = fxwrap.from_fx(GraphModule({"inner": inner}, graph))
    a, b = torch.randn(8), torch.randn(8)
    (after,) = fxwrap.to_python(program)(a.clone(), b)
    torch.testing.assert_close(after, ((2 * a + b) * 2 + b).sum())


def test_the_functional_form_records_no_order() -> None:
    module = fxwrap.to_fx(fxwrap.parse(TWO_WRITES), form="functional").graph_module
    assert not any("fxwrap_access" in node.meta for node in module.graph.nodes)


SLICES_OF_A_POOL = """
program @slices(%x: borrowed f32[8]@cpu) {
  %pool = memory.pool() : u8[BYTES]@cpu
  %a = memory.pool_slice(%pool) : f32[8]@cpu
  extern.call @aten.sin.out(%x) outs=(%a)
  %before = extern.call @aten.sum.default(%a) : f32[]@cpu
  %b = memory.pool_slice(%pool) offset=OFFSET : f32[8]@cpu
  %end = memory.view(%b) : f32[4 | 1 | 4]@cpu
  extern.call @aten.cos.out(%x) outs=(%b)
  %after = extern.call @aten.sum.default(%end) : f32[]@cpu
  memory.free(%pool)
  control.return(%before, %after)
}
"""


@pytest.mark.parametrize(("offset", "conflicts"), [(32, False), (16, True)])
def test_slices_of_one_pool_conflict_where_they_overlap(offset: int, conflicts: bool) -> None:
    text = SLICES_OF_A_POOL.replace("BYTES", "64").replace("OFFSET", str(offset))
    module = _graph(text)
    read, write = _node(module, torch.ops.aten.sum.default), _node(module, torch.ops.aten.cos.out)
    write.append(read)
    if conflicts:
        message = rf"node '{read.name}' .*: it reads the memory 'pool' after '{write.name}' writes it.* bytes 16 to 31"
        with pytest.raises(FxImportError, match=message):
            fxwrap.from_fx(module)
    else:
        fxwrap.from_fx(module)


@pytest.mark.parametrize("offset", ["16", "0"])
def test_a_write_of_an_overlapping_slice_is_moved_up(offset: str) -> None:
    module = _graph(SLICES_OF_A_POOL.replace("BYTES", "64").replace("OFFSET", offset))
    first, second = _node(module, torch.ops.aten.sin.out), _node(module, torch.ops.aten.cos.out)
    first.prepend(second.kwargs["out"])  # type: ignore[arg-type]
    first.prepend(second)
    message = rf"node '{first.name}' .*: it writes the memory 'pool' after '{second.name}' writes it"
    with pytest.raises(FxImportError, match=message):
        fxwrap.from_fx(module)


SYMBOLIC_SLICES = """
program @slices(%x: borrowed f32[s0]@cpu) {
  s0 = symbol.size(%x) dim=0 range=(2, 100)
  %pool = memory.pool() : u8[8*s0]@cpu
  %a = memory.pool_slice(%pool) : f32[s0]@cpu
  extern.call @aten.sin.out(%x) outs=(%a)
  %b = memory.pool_slice(%pool) offset=OFFSET : f32[s0]@cpu
  extern.call @aten.cos.out(%x) outs=(%b)
  %sum = extern.call @aten.add.Tensor(%a, %b) : f32[s0]@cpu
  memory.free(%pool)
  control.return(%sum)
}
"""


@pytest.mark.parametrize(("offset", "conflicts"), [("4*s0", False), ("2*s0", True)])
def test_slices_at_symbolic_offsets_conflict_unless_they_are_disjoint(offset: str, conflicts: bool) -> None:
    module = _graph(SYMBOLIC_SLICES.replace("OFFSET", offset))
    first, second = _node(module, torch.ops.aten.sin.out), _node(module, torch.ops.aten.cos.out)
    second.append(first)
    if conflicts:
        with pytest.raises(FxImportError, match="it writes the memory 'pool' after 'cos' writes it"):
            fxwrap.from_fx(module)
    else:
        fxwrap.from_fx(module)
