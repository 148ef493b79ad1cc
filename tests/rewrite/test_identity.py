"""Rewrites that must change nothing: each call rebuilt, two calls rebuilt as one, copies inserted and elided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import given, settings

import fxwrap
from fxwrap import rewrite as rw
from fxwrap.lines import ExternCall, Mutate
from fxwrap.wrapper_ir import Program, canonicalize_program
from tests.support.long_form import sample_size
from tests.support.strategies.programs import RandomProgram, random_programs


def rebuild_line(line: Any, builder: rw.LineBuilder, operands: dict[str, Any] | None = None) -> tuple[Any, ...]:
    """Repeats a call, and returns the values of its results and of the tensors that it writes."""
    results = builder.clone_call(line, operands)
    results = results if isinstance(results, tuple) else () if results is None else (results,)
    written = line.writes if isinstance(line, Mutate) else line.outs
    return (*results, *[(operands or {}).get(value.name, value) for value in written])


def results_of(line: Any) -> tuple[Any, ...]:
    return (*line.results, *(line.writes if isinstance(line, Mutate) else line.outs))


def assert_same_meaning(random: RandomProgram, changed: Program) -> None:
    """Compares results and the writes into inputs, by the interpreter."""
    ours, theirs = random.inputs(0), random.inputs(0)
    for result, wanted in zip(fxwrap.run(changed, ours), fxwrap.run(random.program, theirs), strict=True):
        torch.testing.assert_close(result, wanted, equal_nan=True)
    torch.testing.assert_close(tensors(ours), tensors(theirs), equal_nan=True)


def tensors(inputs: Sequence[Any]) -> list[torch.Tensor]:
    return [item for item in inputs if isinstance(item, torch.Tensor)]


UNARY = ("aten.sin.default", "aten.tanh.default", "aten.neg.default", "aten.sigmoid.default")


def match_any_line(line: Any) -> bool:
    return True


@settings(max_examples=sample_size(25))
@given(random_programs())
def test_rebuilding_each_call_is_the_identity(random: RandomProgram) -> None:
    every_call = rw.call(match_any_line, ...)
    done = rw.rewrite(random.program, every_call, lambda match, builder: rebuild_line(match.lines[0], builder))
    assert canonicalize_program(done.program) == canonicalize_program(random.program)
    calls = [line for line in random.program.lines() if isinstance(line, ExternCall | Mutate)]
    assert len(done.matches) == len(calls) and not done.match_failures, done.report()


def rebuild_both(match: rw.Match, builder: rw.LineBuilder) -> Any:
    """Makes the two calls of a match where one of them stood."""
    first, second = match.line("first"), match.line("second")
    values = rebuild_line(first, builder)
    new = {old.name: value for old, value in zip(results_of(first), values, strict=True) if value is not None}
    return rebuild_line(second, builder, new)


@settings(max_examples=sample_size(40))
@given(random_programs(most_steps=24))
def test_rebuilding_two_calls_together_is_equivalent(random: RandomProgram) -> None:
    first = rw.call(match_any_line, ...).named("first")
    pattern = rw.with_operands_anywhere(rw.call(match_any_line, first)).named("second")
    assert_same_meaning(random, rw.rewrite(random.program, pattern, rebuild_both).program)


@settings(max_examples=sample_size(40))
@given(random_programs(most_steps=24))
def test_rebuilding_two_outputs_together_is_equivalent(random: RandomProgram) -> None:
    """Two calls that read one tensor, wherever they are."""
    x = rw.tensor("x")
    pattern = rw.call(UNARY, x).named("first"), rw.call(UNARY, x).named("second")

    def both(match: rw.Match, builder: rw.LineBuilder) -> Any:
        return [builder.call(match.line(name).target, match["x"]) for name in ("first", "second")]

    assert_same_meaning(random, rw.rewrite(random.program, pattern, both).program)


@settings(max_examples=sample_size(25))
@given(random_programs())
def test_inserting_and_removing_copies_is_equivalent(random: RandomProgram) -> None:
    x = rw.tensor("x")
    unary = rw.call(UNARY, x)

    def with_copies(match: rw.Match, builder: rw.LineBuilder) -> Any:
        (line,) = match.lines
        result = builder.call(line.target, builder.call("aten.clone.default", match["x"]))
        return builder.call("aten.clone.default", result)

    longer = rw.rewrite(random.program, unary, with_copies)
    assert_same_meaning(random, longer.program)
    shorter = rw.rewrite(longer.program, rw.call("aten.clone.default", x), lambda match, builder: match["x"])
    assert_same_meaning(random, shorter.program)
