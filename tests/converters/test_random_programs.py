"""Random programs mean the same in every converter: outputs, and what becomes of the inputs."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

import fxwrap
from fxwrap.compile import emit
from tests.support.long_form import sample_size
from tests.support.strategies.programs import RandomProgram, random_programs
from tests.support.value_equality import assert_same


def assert_same_as_interpreter(case: RandomProgram, emitter: str) -> None:
    """Runs a program by the interpreter and by an emitter on equal inputs and compares everything, bit by bit."""
    theirs, ours = case.inputs(seed=5), case.inputs(seed=5)
    expected = fxwrap.run(case.program, theirs)
    result = emit(case.program, emitter)(*ours)
    assert len(result) == len(expected)
    for one, other in zip([*result, *ours], [*expected, *theirs], strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("emitter", ["python", "fx"])
@settings(max_examples=sample_size(40), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(case=random_programs())
def test_python_and_fx(emitter: str, case: RandomProgram) -> None:
    assert_same_as_interpreter(case, emitter)


@settings(max_examples=sample_size(12), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(case=random_programs())
def test_cpp(case: RandomProgram) -> None:
    """Few examples, because each is compiled."""
    assert_same_as_interpreter(case, "cpp")
