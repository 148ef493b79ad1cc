"""Small programs for memory planning, one a rule, and the alignments that tests plan with."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fxwrap.lines import CORE_LINES
from fxwrap.memory_planning import MemoryPlan
from fxwrap.symbolic import Number, evaluate
from fxwrap.wrapper_ir import Program, parse_program
from tests.support.samples import EXTENSIONS

RULES: dict[str, str] = {
    "allocations_of_one_device_share_a_pool": """
program @p(%x: borrowed f32[16]@cpu) {
  %a = memory.alloc() : f32[16]@cpu
  extern.call @aten.sin.out(%x) outs=(%a)
  %b = memory.alloc() : f32[16]@cpu
  extern.call @aten.cos.out(%a) outs=(%b)
  memory.free(%a)
  %c = memory.alloc() : f32[8]@cpu
  %head = memory.view(%b) : f32[8]@cpu
  extern.call @aten.neg.out(%head) outs=(%c)
  memory.free(%b)
  %y = extern.call @aten.exp.default(%c) : f32[8]@cpu
  memory.free(%c)
  %more = extern.call @aten.cat.default([%y, %y, %y, %y, %y, %y, %y, %y, %y, %y]) : f32[80]@cpu
  control.return(%y, %more)
}
""",
    "views_and_in_place_writes_belong_to_their_root": """
program @p(%x: borrowed f32[4, 8]@cpu) {
  %a = memory.alloc() : f32[4, 8]@cpu
  extern.call @aten.sin.out(%x) outs=(%a)
  %top = memory.view(%a) : f32[2, 8]@cpu
  %bottom = memory.view(%a) : f32[2, 8 | 8, 1 | 16]@cpu
  extern.mutate @aten.mul_.Scalar(%top, 2) writes=(%top)
  %b = memory.alloc() : f32[2, 8]@cpu
  extern.call @aten.neg.out(%top) outs=(%b)
  extern.mutate @aten.mul_.Scalar(%bottom, 3) writes=(%bottom)
  %y = extern.call @aten.add.Tensor(%b, %bottom) : f32[2, 8]@cpu
  memory.free(%a)
  memory.free(%b)
  control.return(%y)
}
""",
    "donated_inputs_and_their_reuse_are_not_pooled": """
program @p(%x: owned f32[16]@cpu, %k: shared f32[16]@cpu) {
  %a = memory.alloc() : f32[16]@cpu
  extern.call @aten.add.out(%x, %k) outs=(%a)
  memory.free(%k)
  %r = memory.reuse(%x) : f32[16]@cpu
  extern.call @aten.sin.out(%a) outs=(%r)
  memory.free(%a)
  %b = memory.alloc() : f32[16]@cpu
  extern.call @aten.cos.out(%r) outs=(%b)
  memory.free(%r)
  %y = extern.call @aten.exp.default(%b) : f32[16]@cpu
  memory.free(%b)
  control.return(%y)
}
""",
    "returned_values_are_not_pooled": """
program @p(%x: borrowed f32[16]@cpu) {
  %a = memory.alloc() : f32[16]@cpu
  extern.call @aten.sin.out(%x) outs=(%a)
  %b = memory.alloc() : f32[16]@cpu
  extern.call @aten.cos.out(%a) outs=(%b)
  %c = memory.alloc() : f32[16]@cpu
  extern.call @aten.neg.out(%b) outs=(%c)
  memory.free(%b)
  %part = memory.view(%a) : f32[8]@cpu
  %d = extern.call @aten.exp.default(%c) : f32[16]@cpu
  memory.free(%c)
  control.return(%part, %d)
}
""",
    "unbacked_sizes_get_a_later_pool": """
program @p(%x: borrowed f32[64]@cpu, %n: borrowed i64[]@cpu) {
  %a = memory.alloc() : f32[64]@cpu
  extern.call @aten.sin.out(%x) outs=(%a)
  %b = memory.alloc() : f32[64]@cpu
  extern.call @aten.cos.out(%a) outs=(%b)
  u0 = symbol.item(%n) range=(2, 64)
  %head = memory.view(%b) : f32[u0]@cpu
  %c = memory.alloc() : f32[u0]@cpu
  extern.call @aten.neg.out(%head) outs=(%c)
  memory.free(%a)
  memory.free(%b)
  %d = memory.alloc() : f32[u0]@cpu
  extern.call @aten.sin.out(%c) outs=(%d)
  memory.free(%c)
  %e = memory.alloc() : f32[u0]@cpu
  extern.call @aten.cos.out(%d) outs=(%e)
  memory.free(%d)
  %y = extern.call @aten.exp.default(%e) : f32[u0]@cpu
  memory.free(%e)
  %more = extern.call @aten.cat.default([%y, %y, %y, %y]) : f32[4*u0]@cpu
  control.return(%y, %more)
}
""",
    "blocks_and_loops_have_separate_pools": """
program @p(%i: borrowed f32[16]@cpu, %flag: borrowed bool[]@cpu) {
  %a = memory.alloc() : f32[16]@cpu
  extern.call @aten.sin.out(%i) outs=(%a)
  %y = control.cond(%flag, %a) : f32[16]@cpu {
  ^then(%t: f32[16]@cpu):
    %t1 = memory.alloc() : f32[16]@cpu
    extern.call @aten.cos.out(%t) outs=(%t1)
    %t2 = memory.alloc() : f32[16]@cpu
    extern.call @aten.neg.out(%t1) outs=(%t2)
    memory.free(%t1)
    %t3 = memory.alloc() : f32[16]@cpu
    extern.call @aten.sin.out(%t2) outs=(%t3)
    memory.free(%t2)
    control.yield(%t3)
  ^else(%e: f32[16]@cpu):
    %e1 = extern.call @aten.clone.default(%e) : f32[16]@cpu
    control.yield(%e1)
  }
  %b = memory.alloc() : f32[16]@cpu
  extern.call @aten.mul.out(%a, %y) outs=(%b)
  memory.free(%a)
  memory.free(%y)
  %start = extern.call @aten.sum.default(%b) : f32[]@cpu
  memory.free(%b)
  %end = control.while(%start) : f32[]@cpu {
  ^cond(%c: f32[]@cpu):
    %go = extern.call @aten.lt.Scalar(%c, 50) : bool[]@cpu
    control.yield(%go)
  ^body(%r: f32[]@cpu):
    %r1 = memory.alloc() : f32[]@cpu
    extern.call @aten.abs.out(%r) outs=(%r1)
    %r2 = memory.alloc() : f32[]@cpu
    extern.call @aten.exp.out(%r1) outs=(%r2)
    %next = extern.call @aten.add.Tensor(%r1, %r2) : f32[]@cpu
    memory.free(%r1)
    memory.free(%r2)
    control.yield(%next)
  }
  memory.free(%start)
  control.return(%end)
}
""",
    "function_results_are_not_pooled": """
program @p(%x: borrowed f32[16]@cpu) {
  %y = control.call @part(%x) : f32[16]@cpu
  %z = control.call @part(%y) : f32[16]@cpu
  memory.free(%y)
  %s = extern.call @aten.sum.default(%z) : f32[]@cpu
  memory.free(%z)
  control.return(%s)
}
function @part(%t: f32[16]@cpu) {
  %t1 = memory.alloc() : f32[16]@cpu
  extern.call @aten.cos.out(%t) outs=(%t1)
  %t2 = memory.alloc() : f32[16]@cpu
  extern.call @aten.neg.out(%t1) outs=(%t2)
  memory.free(%t1)
  %t3 = memory.alloc() : f32[16]@cpu
  extern.call @aten.sin.out(%t2) outs=(%t3)
  memory.free(%t2)
  %more = extern.call @aten.cat.default([%t3, %t3, %t3, %t3]) : f32[64]@cpu
  memory.free(%more)
  control.yield(%t3)
}
""",
    "pools_are_split_around_the_peak": """
program @p(%x: borrowed f32[64]@cpu) {
  %a = memory.alloc() : f32[64]@cpu
  extern.call @aten.sin.out(%x) outs=(%a)
  %b = memory.alloc() : f32[64]@cpu
  extern.call @aten.cos.out(%a) outs=(%b)
  memory.free(%a)
  %c = memory.alloc() : f32[16]@cpu
  %part = memory.view(%b) : f32[16]@cpu
  extern.call @aten.neg.out(%part) outs=(%c)
  memory.free(%b)
  %large = extern.call @aten.cat.default([%x, %x, %x]) : f32[192]@cpu
  %s = extern.call @aten.sum.default(%large) : f32[]@cpu
  memory.free(%large)
  %d = memory.alloc() : f32[16]@cpu
  extern.call @aten.add.out(%c, %s) outs=(%d)
  memory.free(%s)
  memory.free(%c)
  %e = memory.alloc() : f32[64]@cpu
  extern.call @aten.cat.out([%d, %d, %d, %d]) outs=(%e)
  memory.free(%d)
  %f = memory.alloc() : f32[64]@cpu
  extern.call @aten.sin.out(%e) outs=(%f)
  memory.free(%e)
  %y = extern.call @aten.sum.default(%f) : f32[]@cpu
  memory.free(%f)
  control.return(%y)
}
""",
    "reused_memory_is_one_allocation": """
program @p(%x: borrowed f32[32]@cpu) {
  %a = memory.alloc() : f32[32]@cpu
  extern.call @aten.sin.out(%x) outs=(%a)
  %b = memory.alloc() : f32[32]@cpu
  extern.call @aten.cos.out(%a) outs=(%b)
  %c = memory.reuse(%a) : f32[4, 4]@cpu
  %part = memory.view(%b) : f32[4, 4]@cpu
  extern.call @aten.neg.out(%part) outs=(%c)
  memory.free(%b)
  %d = memory.reuse(%c) : i32[16]@cpu
  extern.mutate @aten.fill_.Scalar(%d, 3) writes=(%d)
  %y = extern.call @aten.neg.default(%d) : i32[16]@cpu
  memory.free(%d)
  %more = extern.call @aten.cat.default([%y, %y, %y, %y, %y, %y, %y, %y, %y, %y]) : i32[160]@cpu
  control.return(%y, %more)
}
""",
    "a_pool_is_split_where_one_would_raise_the_peak": """
program @p(%x: borrowed f32[64]@cpu) {
  %a = memory.alloc() : f32[64]@cpu
  extern.call @aten.sin.out(%x) outs=(%a)
  %b = memory.alloc() : f32[64]@cpu
  extern.call @aten.cos.out(%a) outs=(%b)
  memory.free(%a)
  %kept = extern.call @aten.exp.default(%b) : f32[64]@cpu
  memory.free(%b)
  %more = extern.call @aten.cat.default([%kept, %kept, %kept]) : f32[192]@cpu
  %c = memory.alloc() : f32[16]@cpu
  %head = memory.view(%kept) : f32[16]@cpu
  extern.call @aten.cos.out(%head) outs=(%c)
  %d = memory.alloc() : f32[16]@cpu
  extern.call @aten.cos.out(%c) outs=(%d)
  memory.free(%c)
  extern.mutate @aten.add_.Tensor(%head, %d) writes=(%head)
  memory.free(%d)
  control.return(%kept, %more)
}
""",
    "offsets_are_multiples_of_a_common_factor": """
program @p(%x: borrowed f32[s0, 16]@cpu) {
  s0 = symbol.size(%x) dim=0 range=(2, 100) hint=5
  %a = memory.alloc() : f32[s0, 16]@cpu
  extern.call @aten.sin.out(%x) outs=(%a)
  %b = memory.alloc() : f32[2*s0, 16]@cpu
  extern.call @aten.cat.out([%a, %a]) outs=(%b)
  memory.free(%a)
  %c = memory.alloc() : f32[2*s0, 16]@cpu
  extern.call @aten.cos.out(%b) outs=(%c)
  memory.free(%b)
  %y = extern.call @aten.exp.default(%c) : f32[2*s0, 16]@cpu
  memory.free(%c)
  %more = extern.call @aten.cat.default([%y, %y, %y, %y]) : f32[8*s0, 16]@cpu
  control.return(%y, %more)
}
""",
    "sizes_without_a_common_factor_are_stacked": """
program @p(%x: borrowed f32[s0, 16]@cpu, %z: borrowed f32[50]@cpu) {
  s0 = symbol.size(%x) dim=0 range=(2, 100) hint=5
  %a = memory.alloc() : f32[s0, 16]@cpu
  extern.call @aten.sin.out(%x) outs=(%a)
  %b = memory.alloc() : f32[50]@cpu
  extern.call @aten.cos.out(%z) outs=(%b)
  %c = memory.alloc() : f32[s0, 50]@cpu
  extern.mutate @aten.fill_.Scalar(%c, 1.0) writes=(%c)
  extern.mutate @aten.mul_.Tensor(%c, %b) writes=(%c)
  memory.free(%b)
  %d = memory.alloc() : f32[s0, 16]@cpu
  extern.call @aten.neg.out(%a) outs=(%d)
  memory.free(%a)
  %y = extern.call @aten.cat.default([%c, %d], 1) : f32[s0, 66]@cpu
  memory.free(%c)
  memory.free(%d)
  control.return(%y)
}
""",
    "memory_used_on_another_stream_is_not_pooled": """
program @p(%x: borrowed f32[16]@cuda:0) {
  %a = memory.alloc() : f32[16]@cuda:0
  extern.call @aten.sin.out(%x) outs=(%a)
  %b = memory.alloc() : f32[16]@cuda:0
  %begun = device.record() device="cuda:0" : opaque<Event>
  device.wait(%begun) device="cuda:0" stream=1
  extern.call @aten.cos.out(%a) outs=(%b) stream=1
  %c = memory.alloc() : f32[16]@cuda:0
  extern.call @aten.cos.out(%x) outs=(%c)
  %d = memory.alloc() : f32[16]@cuda:0
  extern.call @aten.neg.out(%c) outs=(%d)
  memory.free(%a) stream=1
  memory.free(%b) stream=1
  memory.free(%c)
  %y = extern.call @aten.exp.default(%d) : f32[16]@cuda:0
  memory.free(%d)
  %done = device.record() device="cuda:0" stream=1 : opaque<Event>
  device.wait(%done) device="cuda:0"
  control.return(%y)
}
""",
    "memory_of_collectives_is_reused_after_the_wait": """
program @p(%x: borrowed f32[16]@cpu) {
  %a = memory.alloc() : f32[16]@cpu
  extern.call @aten.sin.out(%x) outs=(%a)
  %sum = collective.start @_c10d_functional.all_reduce.default(%a, "sum", "0") group="0" : f32[16]@cpu
  %b = memory.alloc() : f32[16]@cpu
  extern.call @aten.cos.out(%x) outs=(%b)
  %ready = collective.wait(%sum) group="0" : f32[16]@cpu
  memory.free(%a)
  %c = memory.alloc() : f32[16]@cpu
  extern.call @aten.add.out(%b, %ready) outs=(%c)
  memory.free(%sum)
  memory.free(%b)
  %y = extern.call @aten.neg.default(%c) : f32[16]@cpu
  memory.free(%c)
  control.return(%y)
}
""",
    "memory_reused_by_extension_lines_is_not_pooled": """
program @p(%x: borrowed f32[16]@cpu) {
  %a = memory.alloc() : f32[16]@cpu
  %copy = abacus.copy(%a, %x) : f32[16]@cpu
  %b = memory.alloc() : f32[16]@cpu
  extern.call @aten.sin.out(%copy) outs=(%b)
  memory.free(%copy)
  %y = extern.call @aten.neg.default(%b) : f32[16]@cpu
  memory.free(%b)
  control.return(%y)
}
""",
}
"""Programs by the rule that they show."""


def parsed(text: str) -> Program:
    """Returns a program from its text."""
    return parse_program(text.lstrip(), (*CORE_LINES, *EXTENSIONS))


def one(device: torch.device) -> int:
    """An alignment: none."""
    return 1


def cache_line(device: torch.device) -> int:
    """An alignment of 64 bytes."""
    return 64


def with_terms(plan: MemoryPlan, values: Mapping[str, Number]) -> dict[str, Number]:
    """Returns values of symbols with those of the terms in a plan's offsets."""
    values_with_terms = dict(values)
    for block in plan.blocks:
        for pool in block.pools:
            for name, term in pool.terms:
                values_with_terms[name] = term if isinstance(term, int) else evaluate(term, values_with_terms)
    return values_with_terms
