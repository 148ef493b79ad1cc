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
from fxwrap.compile import emit
from fxwrap.lines import CallFunction, ExternCall, ReadItem
from fxwrap.passes.partition import CaptureCheck, partition
from fxwrap.wrapper_ir import LineBase, Ownership, Program, canonicalize_program, print_line, verify
from tests.memory_planning.programs import parsed
from tests.runtime.cuda_graphs.cpu_graph_capturer import cpu_with_graph_capture
from tests.support.long_form import sample_size
from tests.support.strategies.programs import RandomProgram, random_programs
from tests.support.value_equality import assert_same

_CPU = torch.device("cpu")


def _any_but(*operators: str) -> CaptureCheck:
    """Takes every line on the CPU but calls of these operators."""

    def can_capture(line: LineBase) -> torch.device | str:
        is_chosen = isinstance(line, ExternCall) and line.target.split(".")[1] in operators
        return "it is chosen" if is_chosen else _CPU

    return can_capture


def _by_hash(salt: int) -> CaptureCheck:
    """Takes two of three lines, whichever."""

    def can_capture(line: LineBase) -> torch.device | str:
        digest = hashlib.sha256(f"{salt} {print_line(line)}".encode()).digest()
        return "not this one" if digest[0] % 3 == 0 else _CPU

    return can_capture


def _calls(program: Program) -> list[str]:
    return [
        line.function if isinstance(line, CallFunction) else line.target.split(".")[1]
        for line in program.body.lines
        if isinstance(line, ExternCall | CallFunction)
    ]


def _compare(case: RandomProgram, result: Any, ours: list[Any], expected: Any, theirs: list[Any]) -> None:
    """Compares outputs, and inputs afterwards; the content of memory that the program owns may differ."""
    borrowed = [item.ownership is not Ownership.OWNED for item in case.program.inputs]
    ours, theirs = list(itertools.compress(ours, borrowed)), list(itertools.compress(theirs, borrowed))
    for one, other in zip([*result, *ours], [*expected, *theirs], strict=True):
        assert_same(one, other)


def _check_same(case: RandomProgram, can_capture: CaptureCheck, emitter: str) -> None:
    cut = verify(partition(case.program, can_capture, min_calls=1))
    assert fxwrap.parse(str(cut)) == cut
    theirs, ours = case.inputs(seed=5), case.inputs(seed=5)
    _compare(case, emit(cut, emitter)(*ours), ours, fxwrap.run(case.program, theirs), theirs)
    if emitter == "fx":
        assert canonicalize_program(fxwrap.from_fx(fxwrap.to_fx(cut))) == canonicalize_program(cut)


_SETTINGS = {"suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large], "deadline": None}


@pytest.mark.parametrize("emitter", ["interpreter", "python"])
@settings(max_examples=sample_size(20), **_SETTINGS)  # type: ignore[arg-type]
@given(case=random_programs(), salt=st.integers(0, 1000))
def test_partitioned_programs_are_equivalent(emitter: str, case: RandomProgram, salt: int) -> None:
    _check_same(case, _by_hash(salt), emitter)


@pytest.mark.parametrize("emitter", ["python"])
@settings(max_examples=sample_size(10), **_SETTINGS)  # type: ignore[arg-type]
@given(case=random_programs(), salt=st.integers(0, 1000))
def test_replayed_programs_are_equivalent(emitter: str, case: RandomProgram, salt: int) -> None:
    cut = partition(
        case.program, _by_hash(salt), min_calls=1, static_inputs=[item.name for item in case.program.inputs[1:2]]
    )
    with cpu_with_graph_capture() as recorder, warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = emit(cut, emitter)
        for seed in range(4):
            theirs, ours = case.inputs(seed), case.inputs(seed)
            result = compiled(*ours)
            _compare(case, result, ours, fxwrap.run(case.program, theirs), theirs)
            del result
    calls = [line for line in cut.body.lines if isinstance(line, CallFunction) and line.max_captures]
    numbers_change = any(isinstance(line, ReadItem) for line in cut.lines())
    assert numbers_change or recorder.replayed == 3 * len(calls)


_WRITES = """
program @p(%x: borrowed f32[s0, 3]@cpu, %w: mutable f32[3]@cpu) {
  s0 = symbol.size(%x) dim=0
  %y = control.call @part(%x, %w) writes=(%w) max_captures=8 static_operands=(%w) : f32[s0, 3]@cpu
  %z = extern.call @aten.mul.Scalar(%y, s0) : f32[s0, 3]@cpu
  memory.free(%y)
  control.return(%z)
}
function @part(%part_x: f32[s0, 3]@cpu, %part_w: f32[3]@cpu) {
  extern.mutate @aten.add_.Scalar(%part_w, 1) writes=(%part_w)
  %part_y = extern.call @aten.mul.Tensor(%part_x, %part_w) : f32[s0, 3]@cpu
  control.yield(%part_y)
}
"""


@pytest.mark.parametrize("emitter", ["interpreter", "python", "fx", "cpp"])
def test_each_emitter_replays_a_function_that_writes(emitter: str) -> None:
    program, w, twin = parsed(_WRITES), torch.zeros(3), torch.zeros(3)
    with cpu_with_graph_capture() as recorder:
        compiled = emit(program, emitter)
        for step in range(7):
            x = torch.randn(2 + step % 2, 3)
            (expected,) = fxwrap.run(program, [x, twin])
            version = w._version
            (result,) = compiled(x, w)
            torch.testing.assert_close((result, w), (expected, twin), rtol=0, atol=0)
            assert w._version > version
    assert (recorder.recorded, recorder.replayed) == ((0, 0) if emitter == "interpreter" else (2, 5))


def test_lines_outside_partitions_run_before_or_after() -> None:
    """One call in the middle that cannot be recorded, and needs nothing, goes first; one that needs something cuts."""
    program = parsed("""
program @p(%x: borrowed f32[4]@cpu) {
  %a = extern.call @aten.sin.default(%x) : f32[4]@cpu
  %first = extern.call @aten.cos.default(%x) : f32[4]@cpu
  %b = extern.call @aten.tanh.default(%a) : f32[4]@cpu
  memory.free(%a)
  %second = extern.call @aten.cos.default(%b) : f32[4]@cpu
  %c = extern.call @aten.mul.Tensor(%b, %first) : f32[4]@cpu
  memory.free(%first)
  memory.free(%b)
  %d = extern.call @aten.mul.Tensor(%c, %second) : f32[4]@cpu
  memory.free(%c)
  memory.free(%second)
  control.return(%d)
}
""")
    cut = verify(partition(program, _any_but("cos"), min_calls=1))
    assert _calls(cut) == ["cos", "partition_0", "cos", "partition_1"]
    assert [len(block.lines) for _, block in cut.functions] == [5, 2]
    assert partition(program, _any_but("cos"), min_calls=4) is program
    x = torch.randn(4)
    assert_same(fxwrap.run(cut, [x])[0], fxwrap.run(program, [x])[0])
