"""Random programs, pooled and reordered: they are valid and equivalent, and never need more memory."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fxwrap
from fxwrap.compile import emit
from fxwrap.memory_planning import apply_plan, check_plan, plan_from_json, plan_memory, plan_to_json
from fxwrap.options import PLANNERS
from fxwrap.passes.reorder import reorder_for_peak_memory
from fxwrap.symbolic import Number
from fxwrap.wrapper_ir import Program, all_effects, live_bytes, verify
from tests.memory_planning.programs import cache_line, one, with_terms
from tests.support.long_form import sample_size
from tests.support.strategies.programs import RandomProgram, random_programs
from tests.support.value_equality import assert_same

SLOW = settings(max_examples=sample_size(25), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
COMPILED = settings(max_examples=5, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
ALLOCATING = random_programs(most_steps=20)
PLANNED = st.sampled_from(PLANNERS)


def assert_same_outputs(case: RandomProgram, changed: Program, emitter: str = "interpreter") -> None:
    """Runs a program by the interpreter and its transformed form by an emitter: outputs and inputs are equal."""
    theirs, ours = case.inputs(seed=5), case.inputs(seed=5)
    expected = fxwrap.run(case.program, theirs)
    result = emit(changed, emitter)(*ours)
    assert len(result) == len(expected)
    for actual, wanted in zip([*result, *ours], [*expected, *theirs], strict=True):
        assert_same(actual, wanted)


def _peak(program: Program, values: Mapping[str, Number]) -> int:
    """The peak for values of the inputs' symbols; symbols that the program computes are evaluated here."""
    return live_bytes(program, values).peak


@SLOW
@given(case=ALLOCATING, algorithm=PLANNED)
def test_pooled_programs_are_valid_and_equivalent(case: RandomProgram, algorithm: str) -> None:
    plan = plan_memory(case.program, alignment=cache_line, algorithm=algorithm, time_limit_s=0.1)
    for rows in (2, 3, 5, 8):
        check_plan(plan, alignment=cache_line, values={"s0": rows})
    assert plan.body.peak <= plan.body.lower_bound
    assert plan_from_json(plan_to_json(plan)) == plan
    assert_same_outputs(case, verify(apply_plan(case.program, plan)))


@SLOW
@given(case=ALLOCATING)
def test_planned_peaks_are_exact_and_never_above_unplanned(case: RandomProgram) -> None:
    plan = plan_memory(case.program, alignment=one, hints=case.symbols)
    before = _peak(case.program, case.symbols)
    after = _peak(apply_plan(case.program, plan), with_terms(plan, case.symbols))
    assert plan.body.lower_bound == before
    assert plan.body.peak == after <= before


@pytest.mark.parametrize("emitter", ["python", "fx", "cpp"])
@COMPILED
@given(case=ALLOCATING)
def test_emitters_follow_plans(emitter: str, case: RandomProgram) -> None:
    plan = plan_memory(case.program, alignment=cache_line)
    assert_same_outputs(case, apply_plan(case.program, plan), emitter)


@SLOW
@given(case=ALLOCATING)
def test_reordering_is_equivalent_and_never_raises_the_peak(case: RandomProgram) -> None:
    reordered = reorder_for_peak_memory(case.program)
    verify(reordered.program)
    assert reordered.peak_before == _peak(case.program, {})
    assert reordered.peak_after == _peak(reordered.program, {}) <= reordered.peak_before
    functions = dict(case.program.functions)
    effects = [[effect for line in program.body.lines for effect in all_effects(line, functions)]
               for program in (case.program, reordered.program)]  # fmt: skip
    assert effects[0] == effects[1]
    assert_same_outputs(case, reordered.program)


@SLOW
@given(case=ALLOCATING)
def test_reordering_with_pools(case: RandomProgram) -> None:
    ordered = reorder_for_peak_memory(case.program).program
    plan = plan_memory(ordered, alignment=cache_line)
    assert_same_outputs(case, verify(apply_plan(ordered, plan)))
