"""Symbols at key paths into lists of any length: elements of lists, of lists in lists, numbers in lists."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.library import Library

import fxwrap
from fxwrap.compile import emit
from fxwrap.errors import FxImportError
from fxwrap.options import EMITTERS
from fxwrap.wrapper_ir import canonicalize_program


def _measures(x: Tensor) -> tuple[list[int], list[bool], list[float]]:
    return list(x.shape), [bool(total > 0) for total in x.sum(1)], x.sum(1).tolist()


@pytest.fixture(scope="module", autouse=True)
def operators() -> Iterator[None]:
    """Operators whose lists have as many items as a tensor has rows."""
    library = Library("fxwrap_lists", "DEF")
    for schema, function in {
        "measures(Tensor x) -> (SymInt[], bool[], float[])": _measures,
        "prefixes(Tensor x) -> Tensor[][]": lambda x: [[row[:size] + 0 for size in range(len(row))] for row in x],
        "every_other(Tensor x) -> Tensor?[]": lambda x: [None if place % 2 else row * 2 for place, row in enumerate(x)],
        "count(Tensor[] rows) -> int": len,
    }.items():
        library.define(schema)
        library.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")
    yield
    library._destroy()


TEXT = """
program @lists(%x: borrowed f32[s0, 5]@cpu, %choose: borrowed bool[]@cpu) {
  s0 = symbol.size(%x) dim=0
  %shape, %signs, %sums = extern.call @fxwrap_lists.measures.default(%x) : list<int>, list<bool>, list<float>
  u0 = symbol.bind(%shape) path=(element(1))
  u1 = symbol.bind(%signs) path=(element(-1), truth())
  b0 = symbol.bind(%signs) path=(element(0))
  uf0 = symbol.bind(%sums) path=(element(2))
  %prefixes = extern.call @fxwrap_lists.prefixes.default(%x) : list<list<f32[u2]@cpu>>
  u2 = symbol.bind(%prefixes) path=(element(-1), element(4), size(0), divide(2))
  memory.free(%sums)
  memory.free(%shape)
  %some = extern.call @fxwrap_lists.every_other.default(%x) : list<optional<f32[u3]@cpu>>
  u3 = symbol.bind(%some) path=(element(2), size(0))
  u4 = symbol.bind(%some) path=(element(2), stride(0))
  memory.free(%some)
  %rows = extern.call @aten.unbind_copy.int(%x) : list<f32[5]@cpu>
  %picked = control.cond(%choose, %rows) : f32[5]@cpu {
  ^then(%same: list<f32[5]@cpu>):
    u5 = symbol.bind(%same) path=(element(1), size(0))
    %ones = extern.call @aten.ones.default([u5]) : f32[5]@cpu
    control.yield(%ones)
  ^else(%other: list<f32[5]@cpu>):
    %zeros = extern.call @aten.zeros.default([5]) : f32[5]@cpu
    control.yield(%zeros)
  }
  %counted = extern.call @fxwrap_lists.count.default(%rows) : int
  u6 = symbol.bind(%counted)
  memory.free(%rows)
  memory.free(%signs)
  memory.free(%prefixes)
  control.return(%picked, u0, u1, b0, uf0, u2, u3, u4, u6)
}
"""


@pytest.mark.parametrize("emitter", EMITTERS)
def test_symbols_are_bound_from_list_elements(emitter: str) -> None:
    program = fxwrap.verify(fxwrap.parse(TEXT))
    run = emit(program, emitter)
    for rows in (3, 6):
        x = torch.randn(rows, 5)
        for choose in (True, False):
            picked, *numbers = run(x, torch.tensor(choose))
            assert torch.equal(picked, torch.full((5,), float(choose)))
            _, signs, sums = _measures(x)
            assert numbers == [5, int(signs[-1]), signs[0], sums[2], 2, 5, 1, rows]
            assert [type(number) for number in numbers[:4]] == [int, int, bool, float]


SHORT = """
program @short(%x: borrowed f32[s0, 5]@cpu) {{
  s0 = symbol.size(%x) dim=0
  %rows = extern.call @aten.unbind_copy.int(%x) : list<f32[5]@cpu>
  u0 = symbol.bind(%rows) path=(element({position}), size(0))
  memory.free(%rows)
  control.return(u0)
}}
"""


@pytest.mark.parametrize("emitter", EMITTERS)
def test_a_missing_element_is_an_index_error(emitter: str) -> None:
    for position in (3, -4):
        run = emit(fxwrap.parse(SHORT.format(position=position)), emitter)
        assert run(torch.ones(4, 5)) == (5,)
        with pytest.raises(IndexError, match="index out of range"):
            run(torch.ones(3, 5))


RETURNED = """
program @returned(%x: borrowed f32[s0, 5]@cpu) {
  s0 = symbol.size(%x) dim=0
  %rows = extern.call @aten.unbind_copy.int(%x) : list<f32[5]@cpu>
  control.return(%rows, s0)
}
"""
LIST_INPUTS = """
program @list_inputs(%rows: borrowed list<f32[5]@cpu>, %sizes: borrowed list<int>) {
  %y = extern.call @aten.stack.default(%rows, 1) : f32[5, 3]@cpu
  %z = extern.call @aten.view_copy.default(%y, %sizes) : f32[3, 5]@cpu
  memory.free(%y)
  control.return(%z, %rows)
}
"""


@pytest.mark.parametrize("emitter", ["python", "cpp", "interpreter"])
def test_programs_return_and_take_lists(emitter: str) -> None:
    x = torch.arange(15.0).reshape(3, 5)
    returned, count = emit(fxwrap.verify(fxwrap.parse(RETURNED)), emitter)(x)
    rows = list(returned)
    assert count == 3
    torch.testing.assert_close(rows, list(x.unbind()))
    program = emit(fxwrap.verify(fxwrap.parse(LIST_INPUTS)), emitter)
    for run in (program, lambda *inputs: program.boxed([*inputs])):
        result, same = run(rows, [3, 5])
        torch.testing.assert_close(result, torch.stack(rows, 1).reshape(3, 5))
        assert all(one is other for one, other in zip(same, rows, strict=True))


def test_lists_round_trip() -> None:
    program = fxwrap.verify(fxwrap.parse(TEXT))
    assert canonicalize_program(fxwrap.from_fx(fxwrap.to_fx(program))) == canonicalize_program(program)


def test_element_symbols_are_imported_from_a_rewritten_graph() -> None:
    emitted = fxwrap.to_fx(fxwrap.parse(SHORT.format(position=0))).graph_module
    (size,) = emitted.graph.find_nodes(op="call_function", target=torch.ops.aten.sym_size.int)[-1:]
    output = emitted.graph.output_node()
    with emitted.graph.inserting_before(output):
        more = emitted.graph.call_function(torch.ops.aten.sym_stride.int, (size.args[0], 0))
        both = emitted.graph.call_function(operator.add, (size, more))
    output.args = ((both,),)
    emitted.recompile()
    for emitter in ("interpreter", "cpp"):
        assert emit(fxwrap.from_fx(emitted), emitter)(torch.ones(3, 5)) == (6,)
    with emitted.graph.inserting_before(output):
        whole = emitted.graph.call_function(torch.ops.aten.neg.default, (size.args[0],))
    output.args = ((whole,),)
    with pytest.raises(FxImportError, match=r"an element of a list, which no line has\. Pass the whole list"):
        fxwrap.from_fx(emitted)
