"""Another order of lines: what moves, what stays, and the peaks that are reported."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.lines import ExternCall
from fxwrap.passes.reorder import reorder_for_peak_memory
from fxwrap.passes.scheduling import SchedulingRegions
from fxwrap.wrapper_ir import FALLBACK_SIZE_HINT, Program, line_text, live_bytes, verify
from tests.memory_planning.programs import parsed

_MASSIVELY_PARALLEL = """
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
    return [line.target.split(".")[1] for line in program.body.lines if isinstance(line, ExternCall)]


def test_values_are_computed_near_their_use() -> None:
    program = parsed(_MASSIVELY_PARALLEL)
    reordered = reorder_for_peak_memory(program)
    assert (reordered.peak_before, reordered.peak_after) == (
        live_bytes(program).peak,
        live_bytes(verify(reordered.program)).peak,
    )
    assert (reordered.peak_before, reordered.peak_after) == (4 * 256 + 4, 2 * 256 + 3 * 4)
    x = torch.randn(64)
    assert all(
        torch.equal(one, other) for one, other in zip(fxwrap.run(reordered.program, [x]), fxwrap.run(program, [x]))
    )


def test_inputs_are_checked_before_they_are_read() -> None:
    """Also where a later assertion about a number that is read, which follows the checks, is scheduled first."""
    text = _MASSIVELY_PARALLEL.replace("f32[64]", "f32[s0]").replace("%c1)", "%c1, %n)")
    text = text.replace("  control", '''  %n = extern.call @aten.argmax.default(%x) : i64[]@cpu
  u0 = symbol.item(%n)
  symbol.assert() condition=u0 <= 9
  control''', 1)  # fmt: skip
    checks = """  s0 = symbol.size(%x) hint=64 dim=0 rank=1
  symbol.assert() condition=s0 >= 2 error="InputError"
  check.layout(%x) name="x" : f32[s0]@cpu
"""
    program = parsed(text.replace("  %a =", checks + "  %a =", 1))
    reordered = reorder_for_peak_memory(program)
    assert reordered.peak_after < reordered.peak_before
    assert list(map(line_text, reordered.program.body.lines[:3])) == list(map(line_text, program.body.lines[:3]))
    assert _calls(reordered.program) != _calls(program)


def test_schedules_without_hints_have_estimates() -> None:
    text = """
program @p(%x: borrowed f32[64]@cpu, %n: borrowed i64[]@cpu) {
  u0 = symbol.item(%n) range=(0, 12)
  %a = extern.call @aten.sin.default(%x) : f32[u0]@cpu
  control.return(%a)
}
"""
    assert SchedulingRegions(parsed(text), {}).sizes == {"a": 4 * FALLBACK_SIZE_HINT}


def test_slices_of_one_tensor_free_the_bytes_of_their_elements() -> None:
    """After the first slice, half of the tensor is live: the sum that frees the rest precedes the large result."""
    text = """
program @p(%q: owned f32[64, 8 | 16, 1]@cpu, %k: owned f32[64, 8 | 16, 1]@cpu) {
  %a = extern.call @aten.sum.default(%q) : f32[]@cpu
  memory.free(%q)
  %b = extern.call @aten.expand_copy.default(%a, [1024]) : f32[1024]@cpu
  %c = extern.call @aten.sum.default(%k) : f32[]@cpu
  memory.free(%k)
  control.return(%a, %b, %c)
}
"""
    result = reorder_for_peak_memory(parsed(text))
    assert (result.peak_before, result.peak_after) == (2048 + 4096 + 8, 4096 + 8)


def test_sizes_without_hints_are_estimated() -> None:
    """Numbers of rows that only a run brings: each result has the estimate's size."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = x.nonzero()
        computed = [call(rows.float()) for call in (torch.sin, torch.cos, torch.tan)]
        return tuple([item.sum() for item in computed])

    x = torch.randn(8)
    graph = make_fx(function, tracing_mode="symbolic")(x)
    program = fxwrap.lower(graph, [x], options=fxwrap.Options(fuse=False))
    reordered = reorder_for_peak_memory(program)
    assert reordered.peak_after < reordered.peak_before
    torch.testing.assert_close(fxwrap.run(verify(reordered.program), [x]), function(x))


def test_random_operators_stay_ordered() -> None:
    text = _MASSIVELY_PARALLEL.replace("aten.sin.default(%x)", "aten.rand_like.default(%x)")
    text = text.replace("aten.cos.default(%x)", "aten.randn_like.default(%x)")
    drawn = text.replace(
        "default(%x) : f32[64]@cpu\n  %b =", 'default(%x) effect_set=(random("cpu")) : f32[64]@cpu\n  %b ='
    )
    drawn = drawn.replace(
        "default(%x) : f32[64]@cpu\n  %c =", 'default(%x) effect_set=(random("cpu")) : f32[64]@cpu\n  %c ='
    )
    program = parsed(drawn)
    reordered = reorder_for_peak_memory(program)
    assert reordered.peak_after < reordered.peak_before
    order = _calls(reordered.program)
    assert order.index("rand_like") < order.index("randn_like")


def test_an_in_place_write_stays_between_its_reads() -> None:
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
    reordered = reorder_for_peak_memory(program)
    assert reordered.peak_after < reordered.peak_before
    x = torch.randn(64)
    expected, actual = fxwrap.run(program, [x.clone()]), fxwrap.run(reordered.program, [x.clone()])
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


def test_the_original_order_remains_without_improvement() -> None:
    program = reorder_for_peak_memory(parsed(_MASSIVELY_PARALLEL)).program
    again = reorder_for_peak_memory(program)
    assert again.program is program and again.peak_before == again.peak_after
    noise = _beside_weights(640000)
    assert reorder_for_peak_memory(noise).program is noise


@pytest.mark.parametrize(("count", "is_reordered"), [(32000, True), (640000, False)])
def test_orders_that_save_a_thousandth_of_the_memory_are_used(count: int, is_reordered: bool) -> None:
    reordered = reorder_for_peak_memory(_beside_weights(count))
    assert (reordered.peak_before - reordered.peak_after == 504) == is_reordered
    assert (reordered.peak_before <= 1024 * 504) == is_reordered


def _beside_weights(count: int) -> Program:
    weights = f"%x: borrowed f32[64]@cpu, %w: borrowed f32[{count}]@cpu"
    return parsed(_MASSIVELY_PARALLEL.replace("%x: borrowed f32[64]@cpu", weights))


def test_no_order_has_a_lower_peak_than_the_inputs_before_the_first_line() -> None:
    regions = SchedulingRegions(
        parsed("""
program @p(%x: owned f32[64]@cpu, %y: owned f32[64]@cpu, %z: owned f32[64]@cpu) {
  %a = extern.call @aten.sum.default(%x) : f32[]@cpu
  memory.free(%x)
  %b = extern.call @aten.sum.default(%y) : f32[]@cpu
  memory.free(%y)
  %c = extern.call @aten.sum.default(%z) : f32[]@cpu
  memory.free(%z)
  control.return(%a, %b, %c)
}
"""),
        {},
    )
    assert (regions.lower_bound, regions.peak(regions.program_order)) == (3 * 256, 3 * 256 + 4)


_BLOCK = """
program @p(%x: borrowed f32[16]@cpu) {
  %s = extern.call @aten.sin.default(%x) : f32[16]@cpu
  %t = extern.call @aten.cos.default(%s) : f32[16]@cpu
  %u = extern.call @aten.tan.default(%s) : f32[16]@cpu
  %shortcut = extern.call @aten.sum.default(%s) : f32[]@cpu
  memory.free(%s)
  %sum = extern.call @aten.add.Tensor(%t, %u) : f32[16]@cpu
  memory.free(%t)
  memory.free(%u)
  %wide = extern.call @aten.repeat.default(%x, [64]) : f32[1024]@cpu
  %narrow = extern.call @aten.sum.default(%wide) : f32[]@cpu
  memory.free(%wide)
  %mean = extern.call @aten.mean.default(%sum) : f32[]@cpu
  memory.free(%sum)
  control.return(%shortcut, %narrow, %mean)
}
"""


def test_only_lines_at_the_peak_are_reordered() -> None:
    """The mean, which frees an operand, runs before the peak; elsewhere an order of lower memory is not looked for."""
    program = parsed(_BLOCK)
    reordered = reorder_for_peak_memory(program)
    assert _calls(program) == ["sin", "cos", "tan", "sum", "add", "repeat", "sum", "mean"]
    assert _calls(verify(reordered.program)) == ["sin", "cos", "tan", "sum", "add", "mean", "repeat", "sum"]
    assert reordered.peak_before - reordered.peak_after == 64 - 4


def test_allocations_precede_their_first_use() -> None:
    """An earlier one would hold memory for longer; the functional form has no allocations to say where they were."""
    program = parsed("""
program @p(%x: borrowed f32[64]@cpu) {
  %small = memory.alloc() : f32[1]@cpu
  %other = memory.alloc() : f32[1]@cpu
  %a = extern.call @aten.sin.default(%x) : f32[64]@cpu
  %b = extern.call @aten.cos.default(%x) : f32[64]@cpu
  extern.call @aten.amax.out(%a, [0], true) outs=(%small)
  memory.free(%a)
  extern.call @aten.amin.out(%b, [0], true) outs=(%other)
  memory.free(%b)
  control.return(%other, %small)
}
""")
    reordered = reorder_for_peak_memory(program)
    assert (reordered.peak_before, reordered.peak_after) == (3 * 256 + 2 * 4, 2 * 256 + 2 * 4)
    texts = [line_text(line) for line in verify(reordered.program).body.lines]
    for number, text in enumerate(texts):
        if "memory.alloc" in text:
            assert f"outs=({text.split()[0]})" in texts[number + 1]
    x = torch.randn(64)
    torch.testing.assert_close(fxwrap.run(reordered.program, [x]), fxwrap.run(program, [x]))


def test_collectives_end_no_earlier() -> None:
    """The wait would free an operand before the peak, but nothing would run beside the collective."""
    program = parsed("""
program @p(%x: borrowed f32[16]@cpu) {
  %a = extern.call @aten.sin.default(%x) : f32[16]@cpu
  %s = collective.start @_c10d_functional.all_reduce.default(%a, "sum", "0") group="0" : f32[16]@cpu
  %wide = extern.call @aten.repeat.default(%x, [64]) : f32[1024]@cpu
  %narrow = extern.call @aten.sum.default(%wide) : f32[]@cpu
  memory.free(%wide)
  %r = collective.wait(%s) group="0" : f32[16]@cpu
  memory.free(%a)
  control.return(%r, %narrow)
}
""")
    assert reorder_for_peak_memory(program).program is program
