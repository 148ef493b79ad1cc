"""Cutting programs into functions that can be recorded: they mean the same, and there are as few as can be."""

from __future__ import annotations

import hashlib
import itertools
import warnings
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

import fxwrap
from fxwrap.compiler import emit
from fxwrap.lines import Call, CallFunction, Item
from fxwrap.passes.partition import Judge, partition
from fxwrap.wrapper_ir import LineBase, Ownership, Program, canonical, print_line, verify
from tests.converters.test_random_programs import assert_same
from tests.cuda_graphs.recorder import cpu_that_records
from tests.strategies.programs import RandomProgram, random_programs

_CPU = torch.device("cpu")


def _any_but(*operators: str) -> Judge:
    """Takes every line on the CPU but calls of these operators."""

    def judge(line: LineBase) -> torch.device | str:
        is_chosen = isinstance(line, Call) and line.target.split(".")[1] in operators
        return "it is chosen" if is_chosen else _CPU

    return judge


def _by_hash(salt: int) -> Judge:
    """Takes two of three lines, whichever."""

    def judge(line: LineBase) -> torch.device | str:
        digest = hashlib.sha256(f"{salt} {print_line(line)}".encode()).digest()
        return "not this one" if digest[0] % 3 == 0 else _CPU

    return judge


def _calls(program: Program) -> list[str]:
    return [
        line.function if isinstance(line, CallFunction) else line.target.split(".")[1]
        for line in program.body.lines
        if isinstance(line, Call | CallFunction)
    ]


def _compare(made: RandomProgram, result: Any, ours: list[Any], wanted: Any, theirs: list[Any]) -> None:
    """Compares outputs, and inputs afterwards; what is left in memory that the program owns is nobody's business."""
    kept = [item.ownership is not Ownership.OWNED for item in made.program.inputs]
    ours, theirs = list(itertools.compress(ours, kept)), list(itertools.compress(theirs, kept))
    for one, other in zip([*result, *ours], [*wanted, *theirs], strict=True):
        assert_same(one, other)


def _check_same(made: RandomProgram, judge: Judge, emitter: str) -> None:
    cut = verify(partition(made.program, judge, fewest=1))
    assert fxwrap.parse(str(cut)) == cut
    theirs, ours = made.inputs(seed=5), made.inputs(seed=5)
    _compare(made, emit(cut, emitter)(*ours), ours, fxwrap.run(made.program, theirs), theirs)
    if emitter == "fx":
        assert canonical(fxwrap.from_fx(fxwrap.to_fx(cut))) == canonical(cut)


_SETTINGS = {"suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large], "deadline": None}


@pytest.mark.parametrize("emitter", ["interpreter", "python"])
@settings(max_examples=30, **_SETTINGS)  # type: ignore[arg-type]
@given(made=random_programs(), salt=st.integers(0, 1000))
def test_a_program_in_parts_means_the_same(emitter: str, made: RandomProgram, salt: int) -> None:
    _check_same(made, _by_hash(salt), emitter)


@pytest.mark.parametrize("emitter", ["python"])
@settings(max_examples=15, **_SETTINGS)  # type: ignore[arg-type]
@given(made=random_programs(), salt=st.integers(0, 1000))
def test_a_program_that_is_replayed_means_the_same(emitter: str, made: RandomProgram, salt: int) -> None:
    cut = partition(made.program, _by_hash(salt), fewest=1, fixed=[item.name for item in made.program.inputs[1:2]])
    with cpu_that_records() as recorder, warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = emit(cut, emitter)
        for seed in range(4):
            theirs, ours = made.inputs(seed), made.inputs(seed)
            result = compiled(*ours)
            _compare(made, result, ours, fxwrap.run(made.program, theirs), theirs)
            del result
    calls = [line for line in cut.body.lines if isinstance(line, CallFunction) and line.replay]
    numbers_change = any(isinstance(line, Item) for line in cut.lines())
    assert numbers_change or recorder.replayed == 3 * len(calls)
