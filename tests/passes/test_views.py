"""Folding views: the rules, one golden file each; the result means the same and never has more lines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import fxwrap
from fxwrap.lines import View
from fxwrap.passes import fold_views
from fxwrap.wrapper_ir import Program
from tests.support.golden import check_golden, read_section, sections
from tests.support.long_form import sample_size
from tests.support.samples import SAMPLES
from tests.support.strategies.programs import RandomProgram, random_programs
from tests.support.value_equality import assert_same

GOLDENS = Path(__file__).parent / "golden"
RULES = sorted(path.stem for path in GOLDENS.glob("fold_views_*.txt"))


def views(program: Program) -> int:
    return sum(isinstance(line, View) for line in program.lines())


@pytest.mark.parametrize("rule", RULES)
def test_golden_text(rule: str, update_golden: bool) -> None:
    path = GOLDENS / f"{rule}.txt"
    text = read_section(path, "input")
    program = fxwrap.verify(fxwrap.parse(text))
    folded = fxwrap.verify(fold_views(program))
    assert views(folded) < views(program)
    check_golden(path, sections([("input", text), ("after fold_views", str(folded))]), update_golden)
    inputs = [torch.randn(item.value.tensor_type.sizes) for item in program.inputs]
    inputs = [x > 0 if item.value.tensor_type.dtype == torch.bool else x for x, item in zip(inputs, program.inputs)]
    for emitter in ("interpreter", "python"):
        result = fxwrap.compile.emit(folded, emitter)(*[x.clone() for x in inputs])
        assert_results(result, fxwrap.run(program, [x.clone() for x in inputs]))


def assert_results(mine: tuple, theirs: tuple) -> None:
    assert len(mine) == len(theirs)
    for one, other in zip(mine, theirs, strict=True):
        assert_same(one, other)


def test_golden_files_exist() -> None:
    assert len(RULES) >= 6


def run_seeded(program: Program, name: str) -> tuple:
    torch.manual_seed(1)
    return fxwrap.run(program, SAMPLES[name].inputs(3))


@pytest.mark.parametrize("name", list(SAMPLES))
def test_folding_is_valid_and_idempotent(name: str) -> None:
    program = SAMPLES[name].program()
    folded = fxwrap.verify(fold_views(program))
    assert fold_views(folded) == folded
    if SAMPLES[name].cpu_runnable:
        assert_results(run_seeded(folded, name), run_seeded(program, name))


@settings(max_examples=sample_size(100), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(case=random_programs())
def test_random_programs_are_equivalent(case: RandomProgram) -> None:
    folded = fxwrap.verify(fold_views(case.program))
    assert views(folded) <= views(case.program)
    ours, theirs = case.inputs(seed=5), case.inputs(seed=5)
    assert_results(fxwrap.run(folded, ours), fxwrap.run(case.program, theirs))
    assert_results(tuple(ours), tuple(theirs))


def test_allocations_use_no_symbol_before_its_definition() -> None:
    lines = """  %y = memory.alloc() : f32[24]@cpu
  kernel.launch @twice(%x, 24) outs=(%y)
  u0 = symbol.item(%n)
  %rows = memory.view(%y) : f32[1, 24 | u0, 1]@cpu
  %e = extern.call @aten.exp.default(%rows) : f32[1, 24 | u0, 1]@cpu
  memory.free(%y)
  control.return(%e)
}
"""
    kernel = read_section(GOLDENS / "fold_views_kernels_read_the_base.txt", "input").partition("\n}\n")[2]
    head = "program @later(%x: borrowed f32[24]@cpu, %n: borrowed i64[]@cpu) {\n"
    program = fxwrap.verify(fxwrap.parse(head + lines + kernel))
    assert fxwrap.verify(fold_views(program)) == program
