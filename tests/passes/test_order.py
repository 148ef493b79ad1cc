"""Another order of lines: what moves, what stays, and the peaks that are reported."""

from __future__ import annotations

import torch

import fxwrap
from fxwrap.lines import Call
from fxwrap.passes.order import reorder_for_peak_memory
from fxwrap.wrapper_ir import Program, live_bytes, verify
from tests.memory_planning.programs import parsed

_WIDE = """
program @p(%x: borrowed f32[64]@cpu) {
  %a = extern.call @aten.sin.default(%x) : f32[64]@cpu
  %b = extern.call @aten.cos.default(%x) : f32[64]@cpu
  %c = extern.call @aten.tan.default(%x) : f32[64]@cpu
  %a1 = extern.call @aten.sum.default(%a) : f32[]@cpu
  memory.free(%a)
  %b1 = extern.call @aten.sum.default(%b) : f32[]@cpu
  memory.free(%b)
  %c1 = extern.call @aten.sum.default(%c) : f32[]@cpu
  memory.free(%c)
  control.return(%a1, %b1, %c1)
}
"""


def _calls(program: Program) -> list[str]:
    return [line.target.split(".")[1] for line in program.body.lines if isinstance(line, Call)]


def test_what_is_used_soon_is_computed_late() -> None:
    program = parsed(_WIDE)
    found = reorder_for_peak_memory(program)
    assert (found.before, found.after) == (live_bytes(program).peak, live_bytes(verify(found.program)).peak)
    assert (found.before, found.after) == (4 * 256 + 4, 2 * 256 + 3 * 4)
    x = torch.randn(64)
    assert all(torch.equal(one, other) for one, other in zip(fxwrap.run(found.program, [x]), fxwrap.run(program, [x])))


def test_random_numbers_stay_in_their_order() -> None:
    text = _WIDE.replace("aten.sin.default(%x)", "aten.rand_like.default(%x)")
    text = text.replace("aten.cos.default(%x)", "aten.randn_like.default(%x)")
    drawn = text.replace(
        "default(%x) : f32[64]@cpu\n  %b =", 'default(%x) effect_set=(random("cpu")) : f32[64]@cpu\n  %b ='
    )
    drawn = drawn.replace(
        "default(%x) : f32[64]@cpu\n  %c =", 'default(%x) effect_set=(random("cpu")) : f32[64]@cpu\n  %c ='
    )
    program = parsed(drawn)
    found = reorder_for_peak_memory(program)
    assert found.after < found.before
    order = _calls(found.program)
    assert order.index("rand_like") < order.index("randn_like")


def test_a_write_in_place_stays_between_the_reads_around_it() -> None:
    program = parsed("""
program @p(%x: mutable f32[64]@cpu) {
  %a = extern.call @aten.sin.default(%x) : f32[64]@cpu
  extern.mutate @aten.mul_.Scalar(%x, 2) writes=(%x)
  %b = extern.call @aten.cos.default(%x) : f32[64]@cpu
  %a1 = extern.call @aten.sum.default(%a) : f32[]@cpu
  memory.free(%a)
  %b1 = extern.call @aten.sum.default(%b) : f32[]@cpu
  memory.free(%b)
  control.return(%a1, %b1)
}
""")
    found = reorder_for_peak_memory(program)
    assert found.after < found.before
    x = torch.randn(64)
    wanted, got = fxwrap.run(program, [x.clone()]), fxwrap.run(found.program, [x.clone()])
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))


def test_the_programs_own_order_is_kept_where_no_other_is_better() -> None:
    program = reorder_for_peak_memory(parsed(_WIDE)).program
    again = reorder_for_peak_memory(program)
    assert again.program is program and again.before == again.after
