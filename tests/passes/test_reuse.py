"""Reuse of freed memory: eligible buffers, excluded ones, and the peak."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from torch import nn

import fxwrap
from fxwrap.converters.interpreter import CheckedInterpreter
from fxwrap.lines import Reuse
from fxwrap.passes.reuse import reuse_memory
from fxwrap.testing import assert_emitters_agree
from fxwrap.wrapper_ir import Program, live_bytes, verify
from tests.memory_planning.programs import RULES, parsed
from tests.support.long_form import sample_size
from tests.support.strategies.programs import RandomProgram, random_programs
from tests.support.value_equality import assert_same


def _reused(program: Program) -> list[tuple[str, str]]:
    """What takes whose memory, by name, nested blocks included."""
    changed = verify(reuse_memory(program))
    assert live_bytes(changed, {"u0": 5}).peak <= live_bytes(program, {"u0": 5}).peak
    return [(line.result.name, line.root.name) for line in changed.lines() if isinstance(line, Reuse)]


def test_a_freed_buffer_is_reused_for_equal_or_smaller_allocations() -> None:
    assert _reused(parsed(RULES["allocations_of_one_device_share_a_pool"])) == [("c", "a")]


def test_symbolic_sizes_must_be_equal() -> None:
    assert _reused(parsed(RULES["sizes_without_a_common_factor_are_stacked"])) == []
    assert _reused(parsed(RULES["unbacked_sizes_get_a_later_pool"])) == [("e", "c")]


def test_donated_inputs_are_reused_and_shared_ones_are_not() -> None:
    text = """
program @p(%x: owned f32[16]@cpu, %k: shared f32[16]@cpu) {
  %a = extern.call @aten.add.Tensor(%x, %k) : f32[16]@cpu
  memory.free(%x)
  memory.free(%k)
  %b = memory.alloc() : f32[16]@cpu
  extern.call @aten.sin.out(%a) outs=(%b)
  %c = memory.alloc() : f32[16]@cpu
  extern.call @aten.cos.out(%b) outs=(%c)
  memory.free(%b)
  %y = extern.call @aten.add.Tensor(%a, %c) : f32[16]@cpu
  memory.free(%a)
  memory.free(%c)
  control.return(%y)
}
"""
    assert _reused(parsed(text)) == [("b", "x")]


def test_memory_idle_at_the_peak_is_not_reused() -> None:
    text = """
program @p(%x: borrowed f32[16]@cpu) {
  %a = memory.alloc() : f32[16]@cpu
  extern.call @aten.sin.out(%x) outs=(%a)
  %s = extern.call @aten.sum.default(%a) : f32[]@cpu
  memory.free(%a)
  %large = extern.call @aten.cat.default([%x, %x, %x]) : f32[48]@cpu
  %t = extern.call @aten.sum.default(%large) : f32[]@cpu
  memory.free(%large)
  %b = memory.alloc() : f32[16]@cpu
  extern.call @aten.add.out(%x, %s) outs=(%b)
  %y = extern.call @aten.add.Tensor(%b, %t) : f32[16]@cpu
  memory.free(%b)
  memory.free(%s)
  memory.free(%t)
  control.return(%y)
}
"""
    assert _reused(parsed(text)) == []


def test_returned_memory_is_not_reused() -> None:
    for rule in (
        "returned_values_are_not_pooled",
        "function_results_are_not_pooled",
        "memory_reused_by_extension_lines_is_not_pooled",
    ):
        assert _reused(parsed(RULES[rule])) == [], rule


def test_blocks_reuse_only_their_own_memory() -> None:
    text = RULES["blocks_and_loops_have_separate_pools"]
    assert _reused(parsed(text)) == []  # the last value of ^then is returned
    longer = text.replace(
        "    %t3 = memory.alloc() : f32[16]@cpu\n    extern.call @aten.sin.out(%t2) outs=(%t3)\n    memory.free(%t2)\n",
        "    %tm = memory.alloc() : f32[16]@cpu\n    extern.call @aten.sin.out(%t2) outs=(%tm)\n    memory.free(%t2)\n"
        "    %t3 = memory.alloc() : f32[16]@cpu\n    extern.call @aten.sin.out(%tm) outs=(%t3)\n    memory.free(%tm)\n",
    )
    assert _reused(parsed(longer)) == [("tm", "t1")]


@settings(max_examples=sample_size(25), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(case=random_programs(most_steps=20))
def test_random_programs_are_equivalent_and_never_raise_the_peak(case: RandomProgram) -> None:
    changed = verify(reuse_memory(case.program))
    assert live_bytes(changed, case.symbols).peak <= live_bytes(case.program, case.symbols).peak
    expected = fxwrap.run(case.program, case.inputs(seed=5))
    for one, other in zip(CheckedInterpreter(changed).run(case.inputs(seed=5)), expected, strict=True):
        assert_same(one, other)


def test_models_train_with_reused_memory_in_every_emitter() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.Softmax(-1), nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 4))
    assert_emitters_agree(model, (torch.randn(8, 16),), training=True, options={"memory_planning": "reuse"})


def test_donated_slices_with_gaps_are_not_reused() -> None:
    """The elements of `b` would be where another slice of the same tensor, `z`, has some."""
    text = """
program @p(%x: owned f32[4, 4 | 8, 1]@cpu, %z: owned f32[4, 4 | 8, 1]@cpu) {
  %a = extern.call @aten.sin.default(%x) : f32[4, 4 | 8, 1]@cpu
  memory.free(%x)
  %b = memory.alloc() : f32[4, 4]@cpu
  extern.call @aten.add.out(%a, %z) outs=(%b)
  memory.free(%z)
  memory.free(%a)
  %y = extern.call @aten.sum.default(%b) : f32[]@cpu
  memory.free(%b)
  control.return(%y)
}
"""
    assert _reused(parsed(text)) == []
