"""Products of matrices in memory that the program allocates: which, and that numbers stay the same."""

from __future__ import annotations

import torch

import fxwrap
from fxwrap.memory_planning import apply_plan, plan_memory, program_ranges
from fxwrap.memory_planning.live_ranges import Keeper
from fxwrap.passes.given_memory import OUT_FORMS, fill_given_memory
from fxwrap.wrapper_ir import live_bytes, verify
from tests.memory_planning.programs import cache_line, parsed

_PRODUCTS = """
program @p(%x: borrowed f32[8, 8]@cpu, %i: borrowed f32[2, 8, 8]@cpu) {
  %a = extern.call @aten.mm.default(%x, %x) : f32[8, 8]@cpu
  %b = extern.call @aten.addmm.default(%x, %a, %x, beta=2) : f32[8, 8]@cpu
  memory.free(%a)
  %c = extern.call @aten.bmm.default(%i, %i) : f32[2, 8, 8]@cpu
  %d = extern.call @aten.sum.default(%c) : f32[]@cpu
  memory.free(%c)
  %t = extern.call @aten.mm.default(%b, %x) : f32[8, 8]@cpu
  memory.free(%b)
  control.return(%t, %d)
}
"""


def test_products_that_the_program_frees_are_written_into_its_memory() -> None:
    program = parsed(_PRODUCTS)
    changed = verify(fill_given_memory(program))
    assert "\n".join(str(changed).splitlines()[1:8]) == """\
  %a = memory.alloc() : f32[8, 8]@cpu
  extern.call @aten.mm.out(%x, %x) outs=(%a)
  %b = memory.alloc() : f32[8, 8]@cpu
  extern.call @aten.addmm.out(%x, %a, %x, beta=2) outs=(%b)
  memory.free(%a)
  %c = memory.alloc() : f32[2, 8, 8]@cpu
  extern.call @aten.bmm.out(%i, %i) outs=(%c)"""
    assert "%t = extern.call @aten.mm.default(%b, %x)" in str(changed)  # which is given back
    assert live_bytes(changed).peak == live_bytes(program).peak
    assert [item.name for item in program_ranges(changed) if item.keeper is Keeper.PROGRAM] == ["a", "b", "c"]


def test_results_are_the_same_to_the_bit() -> None:
    program = parsed(_PRODUCTS)
    filled = fill_given_memory(program)
    inputs = [torch.randn(8, 8), torch.randn(2, 8, 8)]
    planned = verify(apply_plan(filled, plan_memory(filled, alignment=cache_line)))
    for one, other in zip(fxwrap.run(planned, inputs), fxwrap.run(program, inputs), strict=True):
        assert torch.equal(one, other)


def test_results_with_gaps_or_of_their_own_strides_are_left_alone() -> None:
    transposed = _PRODUCTS.replace(
        "%a = extern.call @aten.mm.default(%x, %x) : f32[8, 8]@cpu",
        "%a = extern.call @aten.mm.default(%x, %x) : f32[8, 8 | 1, 8]@cpu",
    )
    assert "%a = extern.call @aten.mm.default" in str(fill_given_memory(parsed(transposed)))


def test_every_out_form_is_an_operator() -> None:
    for name in (*OUT_FORMS, *OUT_FORMS.values()):
        _, packet, overload = name.split(".")
        assert overload in getattr(torch.ops.aten, packet).overloads()
