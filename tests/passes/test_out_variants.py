"""Products of matrices in memory that the program allocates: which, and that numbers stay the same."""

from __future__ import annotations

import torch
import torch.distributed._functional_collectives  # the rules for fake tensors of its operators
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.lines import Alloc, Free, PoolSlice, StartCollective
from fxwrap.memory_planning import apply_plan, plan_memory, program_live_ranges
from fxwrap.memory_planning.live_ranges import MemoryOwner
from fxwrap.passes.out_variants import OUT_VARIANTS, run_collectives_in_place, use_out_variants
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


COLLECTIVES = """
program @p(%x: borrowed f32[4]@cpu) {
  %a = extern.call @aten.sin.default(%x) : f32[4]@cpu
  %s = collective.start @_c10d_functional.all_reduce.default(%a, "sum", "0") group="0" : f32[4]@cpu
  %w = collective.wait(%s) group="0" : f32[4]@cpu
  memory.free(%a)
  %b = extern.call @aten.cos.default(%w) : f32[4]@cpu
  [%t, %u] = collective.start @_c10d_functional.all_reduce_coalesced.default([%b, %w], "sum", "0") group="0" : [f32[4]@cpu, f32[4]@cpu]
  %v = collective.wait(%t) group="0" : f32[4]@cpu
  %y = collective.wait(%u) group="0" : f32[4]@cpu
  memory.free(%s)
  memory.free(%b)
  %z = extern.call @aten.add.Tensor(%v, %y) : f32[4]@cpu
  memory.free(%t)
  memory.free(%u)
  %r = collective.start @_c10d_functional.broadcast.default(%x, 0, "0") group="0" : f32[4]@cpu
  %q = collective.wait(%r) group="0" : f32[4]@cpu
  %o = extern.call @aten.mul.Tensor(%q, %z) : f32[4]@cpu
  memory.free(%r)
  memory.free(%z)
  control.return(%o)
}
"""  # noqa: E501


def test_collectives_run_in_their_operand_or_in_a_copy() -> None:
    """In %a and %b, which nothing uses later; in copies of a view, whose root is a result, and of an input."""
    changed = verify(use_out_variants(parsed(COLLECTIVES)))
    starts = [line for line in changed.lines() if isinstance(line, StartCollective)]
    assert [line.operator.split(".")[1] for line in starts] == ["all_reduce_", "all_reduce_coalesced_", "broadcast_"]
    assert [[value.name for value in line.writes] for line in starts] == [["a"], ["b", "u_buffer"], ["r_buffer"]]
    assert [line.result.name for line in changed.lines() if isinstance(line, Alloc)] == ["u_buffer", "r_buffer"]
    freed = [line.root.name for line in changed.lines() if isinstance(line, Free)]
    assert freed == ["a", "b", "u_buffer", "r_buffer", "z"]


def test_collectives_run_in_place_without_pools() -> None:
    """The copy of a functional form is missing, at the peak too; matmuls and all_gathers return new memory."""
    program = parsed(COLLECTIVES)
    changed = verify(run_collectives_in_place(program))
    assert str(changed) == str(use_out_variants(program))
    assert live_bytes(changed).peak < live_bytes(program).peak
    for text in (_MATMULS, COALESCED):
        assert str(run_collectives_in_place(parsed(text))) == str(parsed(text))


def test_compiled_programs_run_collectives_in_place() -> None:
    """Emitted graphs keep the functional form, which users' patterns match."""

    def reduced(x: torch.Tensor) -> torch.Tensor:
        c10d = torch.ops._c10d_functional
        summed: torch.Tensor = c10d.wait_tensor(c10d.all_reduce(x.sin(), "sum", "0")).cos()
        return summed

    graph = make_fx(reduced, tracing_mode="fake")(torch.rand(8))
    for emitter, operator in (("python", "all_reduce_"), ("cpp", "all_reduce_"), ("fx", "all_reduce")):
        options = fxwrap.Options(emitter=emitter, fuse=False, memory_planning="none")
        program = fxwrap.compile_graph(graph, [torch.rand(8)], options=options).program
        (start,) = [line for line in program.lines() if isinstance(line, StartCollective)]
        assert start.operator == f"_c10d_functional.{operator}.default"


def test_buffers_of_a_coalesced_collective_live_until_its_last_wait() -> None:
    early = '  %y = collective.wait(%u) group="0" : f32[4]@cpu\n'
    text = COLLECTIVES.replace(early, "").replace("(%v, %y)", "(%v, %v)").replace("  memory.free(%u)\n", "")
    text = text.replace(
        "  %v = coll", early + "  %e = extern.call @aten.sum.default(%y) : f32[]@cpu\n  memory.free(%u)\n  %v = coll"
    )
    changed = verify(use_out_variants(parsed(text.replace("control.return(%o)", "control.return(%o, %e)"))))
    assert '%v = collective.wait(%t) group="0" : f32[4]@cpu\n  memory.free(%u_buffer)\n' in str(changed)


def test_a_returned_result_has_memory_of_its_own() -> None:
    text = COLLECTIVES.replace("  memory.free(%r)\n", "").replace("control.return(%o)", "control.return(%o, %q)")
    changed = verify(use_out_variants(parsed(text)))
    last = [line for line in changed.lines() if isinstance(line, StartCollective)][-1]
    assert last.operator == "_c10d_functional.broadcast.default" and not last.writes


def test_operands_that_are_used_later_or_twice_are_copied() -> None:
    sums = "%b = extern.call @aten.add.Tensor(%w, %a) : f32[4]@cpu\n"
    text = COLLECTIVES.replace("  memory.free(%a)\n", "").replace("[%b, %w]", "[%b, %b]")
    text = text.replace("%b = extern.call @aten.cos.default(%w) : f32[4]@cpu\n", sums + "  memory.free(%a)\n")
    changed = verify(use_out_variants(parsed(text)))
    starts = [line for line in changed.lines() if isinstance(line, StartCollective)]
    assert [[value.name for value in line.writes] for line in starts][:2] == [["s_buffer"], ["t_buffer", "u_buffer"]]


def test_operands_that_a_collective_in_flight_reads_are_copied() -> None:
    """An all_reduce starts while another group gathers its operand."""
    gather = (
        '  %g = collective.start @_c10d_functional.all_gather_into_tensor.default(%a, 2, "1") group="1" : f32[8]@cpu\n'
    )
    text = COLLECTIVES.replace("  %s = coll", gather + "  %s = coll")
    text = text.replace("  memory.free(%a)\n", '  %h = collective.wait(%g) group="1" : f32[8]@cpu\n  memory.free(%a)\n')
    changed = verify(use_out_variants(parsed(text.replace("control.return(%o)", "control.return(%o, %h)"))))
    starts = [line for line in changed.lines() if isinstance(line, StartCollective)]
    assert [[value.name for value in line.writes] for line in starts][:2] == [[], ["s_buffer"]]


COALESCED = """
program @p(%x: borrowed f32[8, 8]@cpu) {
  %a = extern.call @aten.mm.default(%x, %x) : f32[8, 8]@cpu
  %s = extern.call @aten.sum.default(%a) : f32[]@cpu
  memory.free(%a)
  [%g, %h] = collective.start @_c10d_functional.all_gather_into_tensor_coalesced.default([%x, %x], 2, "0") group="0" : [f32[16, 8]@cpu, f32[16, 8]@cpu]
  %v = collective.wait(%g) group="0" : f32[16, 8]@cpu
  %m = extern.call @aten.sum.default(%v) : f32[]@cpu
  %w = collective.wait(%h) group="0" : f32[16, 8]@cpu
  %n = extern.call @aten.sum.default(%w) : f32[]@cpu
  memory.free(%g)
  memory.free(%h)
  %b = extern.call @aten.mm.default(%x, %x) : f32[8, 8]@cpu
  [%r, %q] = collective.start @_c10d_functional.reduce_scatter_tensor_coalesced.default([%b, %x], "avg", 2, "0") group="0" : [f32[4, 8]@cpu, f32[4, 8]@cpu]
  %y = collective.wait(%q) group="0" : f32[4, 8]@cpu
  %z = collective.wait(%r) group="0" : f32[4, 8]@cpu
  memory.free(%b)
  %o = extern.call @aten.add.Tensor(%y, %z) : f32[4, 8]@cpu
  memory.free(%r)
  memory.free(%q)
  control.return(%s, %m, %n, %o)
}
"""  # noqa: E501


def test_coalesced_collectives_write_slices_of_a_pool() -> None:
    """The gathered tensors, 1024 bytes, are the peak: nothing else is allocated meanwhile."""
    filled = verify(use_out_variants(parsed(COALESCED)))
    starts = [line for line in filled.lines() if isinstance(line, StartCollective)]
    operators = ["fxwrap.all_gather_into_tensors.default", "fxwrap.reduce_scatter_into_tensors.default"]
    assert [line.operator for line in starts] == operators
    assert [[value.name for value in line.writes] for line in starts] == [
        ["g_buffer", "h_buffer"], ["r_buffer", "q_buffer"]
    ]  # fmt: skip
    assert all(line.writes == line.aliases == line.arguments[-1] for line in starts)
    frees = [line.root.name for line in filled.lines() if isinstance(line, Free)]
    assert frees == ["a", "g_buffer", "h_buffer", "b", "r_buffer", "q_buffer"]
    planned = verify(apply_plan(filled, plan_memory(filled, alignment=cache_line)))
    assert 1024 <= live_bytes(planned, include_inputs=False).peak < 1024 + 64
    slices = {line.result.name for line in planned.lines() if isinstance(line, PoolSlice)}
    assert slices == {"a", "g_buffer", "h_buffer", "b", "r_buffer", "q_buffer"}
