"""Random programs with pools, and in other orders: they hold, mean the same, and never take more memory."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fxwrap
from fxwrap.compiler import emit
from fxwrap.memory_planning import apply_plan, check_plan, plan_from_json, plan_memory, plan_to_json
from fxwrap.options import PLANNERS
from fxwrap.passes.order import reorder_for_peak_memory
from fxwrap.symbolic import Scalar
from fxwrap.wrapper_ir import Program, all_effects, live_bytes, verify
from tests.converters.test_random_programs import assert_same
from tests.memory_planning.programs import cache_line, one, with_terms
from tests.strategies.programs import RandomProgram, random_programs

SLOW = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
COMPILED = settings(max_examples=5, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
ALLOCATING = random_programs(most_steps=20)
PLANNED = st.sampled_from(PLANNERS)


def assert_same_outputs(made: RandomProgram, changed: Program, emitter: str = "interpreter") -> None:
    """Runs a program by the interpreter, and what became of it by an emitter: outputs and inputs are equal."""
    theirs, ours = made.inputs(seed=5), made.inputs(seed=5)
    wanted = fxwrap.run(made.program, theirs)
    result = emit(changed, emitter)(*ours)
    assert len(result) == len(wanted)
    for given_, expected in zip([*result, *ours], [*wanted, *theirs], strict=True):
        assert_same(given_, expected)


def _peak(program: Program, values: Mapping[str, Scalar]) -> int:
    """The peak by the values of inputs' symbols; what the program computes from them is computed here."""
    return live_bytes(program, values).peak


@SLOW
@given(made=ALLOCATING, algorithm=PLANNED)
def test_pools_hold_and_mean_the_same(made: RandomProgram, algorithm: str) -> None:
    plan = plan_memory(made.program, alignment=cache_line, algorithm=algorithm, time_limit_s=0.1)
    for rows in (2, 3, 5, 8):
        check_plan(plan, alignment=cache_line, values={"s0": rows})
    assert plan.body.peak <= plan.body.lower_bound
    assert plan_from_json(plan_to_json(plan)) == plan
    assert_same_outputs(made, verify(apply_plan(made.program, plan)))


@SLOW
@given(made=ALLOCATING)
def test_planned_peaks_are_the_programs_and_never_above_the_unplanned(made: RandomProgram) -> None:
    plan = plan_memory(made.program, alignment=one, hints=made.symbols)
    before = _peak(made.program, made.symbols)
    after = _peak(apply_plan(made.program, plan), with_terms(plan, made.symbols))
    assert plan.body.lower_bound == before
    assert plan.body.peak == after <= before


@pytest.mark.parametrize("emitter", ["python", "fx", "cpp"])
@COMPILED
@given(made=ALLOCATING)
def test_emitters_follow_plans(emitter: str, made: RandomProgram) -> None:
    plan = plan_memory(made.program, alignment=cache_line)
    assert_same_outputs(made, apply_plan(made.program, plan), emitter)


@SLOW
@given(made=ALLOCATING)
def test_another_order_means_the_same_and_takes_no_more(made: RandomProgram) -> None:
    found = reorder_for_peak_memory(made.program)
    verify(found.program)
    assert found.before == _peak(made.program, {})
    assert found.after == _peak(found.program, {}) <= found.before
    functions = dict(made.program.functions)
    effects = [[effect for line in program.body.lines for effect in all_effects(line, functions)]
               for program in (made.program, found.program)]  # fmt: skip
    assert effects[0] == effects[1]
    assert_same_outputs(made, found.program)


@SLOW
@given(made=ALLOCATING)
def test_another_order_with_pools(made: RandomProgram) -> None:
    ordered = reorder_for_peak_memory(made.program).program
    plan = plan_memory(ordered, alignment=cache_line)
    assert_same_outputs(made, verify(apply_plan(ordered, plan)))
