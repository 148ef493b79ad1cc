"""Rebuilding every call of a program leaves the program as it was."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings

from fxwrap import rewrite as rw
from fxwrap.lines import Call, Mutate
from fxwrap.wrapper_ir import Program, canonical
from tests.strategies.programs import RandomProgram, random_programs


def rebuilt(match: rw.Match, builder: rw.LineBuilder) -> Any:
    """Makes the only line of a match again."""
    (line,) = match.lines
    results = builder.again(line)
    if isinstance(line, Mutate):
        return (*(results or ()), *match.outputs[len(line.results) :])
    return match.outputs if line.outs else results


def calls_of(program: Program) -> int:
    return sum(isinstance(line, Call | Mutate) for line in program.lines())


@settings(max_examples=60)
@given(random_programs())
def test_each_call_of_a_random_program_rebuilt_is_the_same_program(random: RandomProgram) -> None:
    every_call = rw.call(lambda line: True, ...)
    done = rw.rewrite(random.program, every_call, rebuilt)
    assert canonical(done.program) == canonical(random.program)
    assert len(done.matches) + len(done.refusals) == calls_of(random.program)
    assert not done.refusals, done.report()
