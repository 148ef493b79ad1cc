"""Roots, last uses, effects and live bytes, on programs small enough to count by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from fxwrap.errors import ExpressionError
from fxwrap.lines import CORE_LINES, Free
from fxwrap.wrapper_ir import (
    Block,
    Program,
    Tag,
    alias_roots,
    all_effects,
    last_uses,
    live_bytes,
    parse_program,
    program_arguments,
    random_effect,
    symbol_infos,
)
from tests.support.long_form import sample_size
from tests.support.samples import SAMPLES
from tests.support.strategies.programs import RandomProgram, random_programs


def _parse(text: str) -> Program:
    return parse_program(text, CORE_LINES)


def test_each_value_has_its_storage_root() -> None:
    program = SAMPLES["views_share_one_root"].program()
    root_of = alias_roots(program.body.lines, program_arguments(program))
    assert root_of == {"x": "x", "r": "r", "t": "r", "half": "r", "row": "x"}


def test_aliasing_results_have_the_operands_root() -> None:
    program = SAMPLES["aliases"].program()
    root_of = alias_roots(program.body.lines, program_arguments(program))
    assert root_of == {"x": "x", "z": "z", "bits": "x", "real": "z", "sum": "sum", "same": "sum"}


def test_a_root_is_last_used_through_any_of_its_views() -> None:
    program = SAMPLES["views_share_one_root"].program()
    assert last_uses(program.body.lines, program_arguments(program)) == {"x": 5, "r": 5}
    assert last_uses(program.body.lines[:-1], program_arguments(program)) == {"x": 4, "r": 3}


def test_an_unused_argument_has_no_last_use() -> None:
    program = _parse("program @p(%x: borrowed f32[4]@cpu) {\n  control.return()\n}\n")
    assert last_uses(program.body.lines, program_arguments(program)) == {"x": -1}


def test_a_collective_uses_its_operands_until_the_wait() -> None:
    program = SAMPLES["collectives"].program()
    lines = [line for line in program.body.lines if not isinstance(line, Free)]
    last = last_uses(lines, program_arguments(program))
    waits = {line.pending.name: index for index, line in enumerate(lines) if line.opcode == "collective.wait"}  # type: ignore[attr-defined]
    assert last["x"] == max(waits["sum"], waits["all"], waits["too"])
    assert last["own"] == len(lines) - 2  # by the addition, through the window that the wait gives


def test_effects_come_from_nested_blocks_and_functions() -> None:
    program = _parse(
        """
program @p(%x: borrowed f32[4]@cpu) {
  %y = control.cond(true, %x) : f32[4]@cpu {
  ^then(%t: f32[4]@cpu):
    %t1 = control.call @noise(%t) : f32[4]@cpu
    control.yield(%t1)
  ^else(%e: f32[4]@cpu):
    %e1 = extern.call @vendor.log.default(%e) effect_set=(output()) : f32[4]@cpu
    control.yield(%e1)
  }
  control.return(%y)
}
function @noise(%n: f32[4]@cpu) {
  %n1 = extern.call @aten.rand_like.default(%n) effect_set=(random("cpu")) : f32[4]@cpu
  control.yield(%n1)
}
"""
    )
    cond, end = program.body.lines
    functions = dict(program.functions)
    assert set(all_effects(cond, functions)) == {random_effect("cpu"), Tag("output")}
    assert all_effects(end, functions) == ()


def test_all_symbol_definitions_are_collected() -> None:
    infos = symbol_infos(SAMPLES["symbols_of_all_kinds"].program())
    assert list(infos) == ["s2", "f0", "b0", "s0", "s1", "n1", "n2", "u0", "uf0", "b1", "n0", "f1"]
    assert (infos["s2"].lower, infos["s2"].upper, infos["s2"].hint) == (1, 64, 3)


_CHAIN = """
program @chain(%x: borrowed f32[4, 8]@cpu, %o: owned f32[8]@cpu) {{
  %a = extern.call @aten.exp.default(%x) : f32[4, 8]@cpu
  memory.free(%o)
  %b = extern.call @aten.sin.default(%a) : f64[4, 8]@cpu
  memory.free(%a)
  {last}
  control.return(%c)
}}
constant %w: u8[10]@cpu
"""


def test_live_bytes_count_operands_and_results_of_each_line() -> None:
    program = _parse(_CHAIN.format(last="%c = memory.reuse(%b) : f32[2]@cpu"))
    live = live_bytes(program, include_constants=False)
    x, o, a, b = 128, 32, 128, 256
    assert live.at_line == (x + o + a, x + o + a, x + a + b, x + a + b, x + b, x + b)
    assert (live.peak, live.position) == (512, 2)
    assert live_bytes(program).peak == 512 + 10
    assert live_bytes(program, include_inputs=False, include_constants=False).peak == a + b


def test_the_caller_has_another_reference_to_shared_inputs() -> None:
    text = (
        "program @p(%x: {} f32[8]@cpu) {{\n  memory.free(%x)\n  %y = memory.alloc() : f32[4]@cpu\n"
        "  control.return(%y)\n}}\n"
    )
    shared = _parse(text.format("shared"))
    assert live_bytes(_parse(text.format("owned")), release_shared=False).at_line == (32, 16, 16)
    assert live_bytes(shared).at_line == (32, 16, 16)
    assert live_bytes(shared, release_shared=False).at_line == (32, 48, 48)


def test_slices_of_one_tensor_have_the_bytes_of_their_elements() -> None:
    text = (
        "program @p(%q: owned f32[4, 8 | 16, 1]@cpu, %k: shared f32[4, 8 | 16, 1]@cpu, %e: owned f32[9, 2 | 0, 1]@cpu) "
        "{\n  memory.free(%e)\n  memory.free(%q)\n  %y = memory.alloc() : f32[4, 8]@cpu\n  memory.free(%k)\n"
        "  control.return(%y)\n}\n"
    )
    assert live_bytes(_parse(text)).at_line == (264, 256, 256, 256, 128)


def test_reused_memory_keeps_its_bytes() -> None:
    program = _parse(_CHAIN.format(last="%c = memory.reuse(%b) : f32[2]@cpu"))
    assert live_bytes(program, include_inputs=False, include_constants=False).at_line[-1] == 256


def test_views_and_slices_take_no_memory() -> None:
    program = SAMPLES["views_share_one_root"].program()
    assert live_bytes(program, include_inputs=False).peak == 96


def test_the_bytes_of_a_strided_tensor_reach_to_its_last_element() -> None:
    program = _parse(
        "program @p(%x: borrowed f32[2, 3 | 100, 10]@cpu, %e: borrowed f32[0, 3]@cpu) {\n  control.return()\n}\n"
    )
    assert live_bytes(program).peak == (100 + 20 + 1) * 4


def test_passed_sizes_override_hints() -> None:
    program = SAMPLES["mlp"].program()
    fixed = 8 * 4 * 4  # the weight
    assert live_bytes(program).peak == fixed + 6 * (8 + 4 + 4) * 4
    assert live_bytes(program, {"s0": 10}).peak == fixed + 10 * (8 + 4 + 4) * 4


def test_a_symbol_without_a_value_is_an_error() -> None:
    with pytest.raises(ExpressionError, match="symbol u0 has no value"):
        live_bytes(SAMPLES["unbacked_results"].program())


def test_nested_blocks_count_at_their_peak() -> None:
    program = _parse(
        """
program @p(%x: borrowed f32[10]@cpu) {
  %y = control.cond(true, %x) : f32[10]@cpu {
  ^then(%t: f32[10]@cpu):
    %t1 = extern.call @aten.sin.default(%t) : f32[10]@cpu
    control.yield(%t1)
  ^else(%e: f32[10]@cpu):
    %e1 = control.call @wide(%e) : f32[10]@cpu
    %e2 = extern.call @aten.sin.default(%e1) : f32[10]@cpu
    memory.free(%e1)
    control.yield(%e2)
  }
  control.return(%y)
}
function @wide(%f: f32[10]@cpu) {
  %f1 = extern.call @aten.outer.default(%f, %f) : f32[10, 10]@cpu
  %f2 = extern.call @aten.sum.dim_IntList(%f1, [0]) : f32[10]@cpu
  memory.free(%f1)
  control.yield(%f2)
}
"""
    )
    assert live_bytes(program).at_line == (40 + 400 + 40, 40 + 40)


@settings(max_examples=sample_size(50))
@given(random_programs())
def test_without_frees_live_bytes_never_shrink(random: RandomProgram) -> None:
    program = random.program
    others = tuple(line for line in program.body.lines if not isinstance(line, Free))
    without = program.replace(body=Block((), others))
    assert live_bytes(program, random.symbols).peak <= live_bytes(without, random.symbols).peak
