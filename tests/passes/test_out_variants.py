"""Products of matrices in memory that the program allocates: which, and that numbers stay the same."""

from __future__ import annotations

import torch

import fxwrap
from fxwrap.memory_planning import apply_plan, plan_memory, program_live_ranges
from fxwrap.memory_planning.live_ranges import MemoryOwner
from fxwrap.passes.out_variants import OUT_VARIANTS, use_out_variants
from fxwrap.wrapper_ir import live_bytes, verify
from tests.memory_planning.programs import cache_line, parsed

_MATMULS = """
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


def test_freed_matmul_results_use_out_variants() -> None:
    program = parsed(_MATMULS)
    changed = verify(use_out_variants(program))
    assert (
        "\n".join(str(changed).splitlines()[1:8])
        == """\
  %a = memory.alloc() : f32[8, 8]@cpu
  extern.call @aten.mm.out(%x, %x) outs=(%a)
  %b = memory.alloc() : f32[8, 8]@cpu
  extern.call @aten.addmm.out(%x, %a, %x, beta=2) outs=(%b)
  memory.free(%a)
  %c = memory.alloc() : f32[2, 8, 8]@cpu
  extern.call @aten.bmm.out(%i, %i) outs=(%c)"""
    )
    assert "%t = extern.call @aten.mm.default(%b, %x)" in str(changed)  # returned
    assert live_bytes(changed).peak == live_bytes(program).peak
    assert [item.name for item in program_live_ranges(changed) if item.owner is MemoryOwner.PROGRAM] == ["a", "b", "c"]


def test_results_are_bitwise_equal() -> None:
    program = parsed(_MATMULS)
    filled = use_out_variants(program)
    inputs = [torch.randn(8, 8), torch.randn(2, 8, 8)]
    planned = verify(apply_plan(filled, plan_memory(filled, alignment=cache_line)))
    for one, other in zip(fxwrap.run(planned, inputs), fxwrap.run(program, inputs), strict=True):
        assert torch.equal(one, other)


def test_results_with_gaps_or_custom_strides_are_unchanged() -> None:
    transposed = _MATMULS.replace(
        "%a = extern.call @aten.mm.default(%x, %x) : f32[8, 8]@cpu",
        "%a = extern.call @aten.mm.default(%x, %x) : f32[8, 8 | 1, 8]@cpu",
    )
    assert "%a = extern.call @aten.mm.default" in str(use_out_variants(parsed(transposed)))


def test_every_out_variant_is_an_operator() -> None:
    for name in (*OUT_VARIANTS, *OUT_VARIANTS.values()):
        _, packet, overload = name.split(".")
        assert overload in getattr(torch.ops.aten, packet).overloads()
