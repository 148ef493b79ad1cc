"""Profiler ranges: the pass, and its lines in all emitters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fxwrap
from fxwrap import Options
from fxwrap.artifact import parse
from fxwrap.compile import emit
from fxwrap.errors import InputError
from fxwrap.options import EMITTERS
from fxwrap.passes.profile_ranges import insert_profile_ranges, ranged_lines, remove_profile_ranges
from fxwrap.passes.provenance import assign_call_handles
from fxwrap.runtime import ranges
from fxwrap.wrapper_ir import Program, verify

PROGRAM = """
program @p(%x: borrowed f32[3, 3]@cpu, %flag: borrowed bool[]@cpu) {
  %buf = memory.alloc() : f32[3, 3]@cpu
  extern.call @aten.mm.out(%x, %x) outs=(%buf)
  %y = control.cond(%flag, %buf) : f32[3, 3]@cpu {
  ^then(%t: f32[3, 3]@cpu):
    %a = extern.call @aten.neg.default(%t) : f32[3, 3]@cpu
    control.yield(%a)
  ^else(%e: f32[3, 3]@cpu):
    %b = extern.call @aten.inverse.default(%e) : f32[3, 3]@cpu
    control.yield(%b)
  }
  memory.free(%buf)
  control.return(%y)
}
"""


def ranged() -> Program:
    return verify(insert_profile_ranges(assign_call_handles(parse(PROGRAM))))


def test_ranges_are_around_lines_that_compute_also_in_blocks() -> None:
    program = ranged()
    assert ranged_lines(program).keys() == {"aten.mm.out:1", "aten.neg:1", "aten.inverse:1"}
    names = [type(line).__name__ for line in program.body.lines]
    assert names[:4] == ["Alloc", "EnterRange", "ExternCall", "ExitRange"]


@pytest.mark.parametrize("emitter", EMITTERS)
def test_profilers_see_the_ranges_of_every_emitter(emitter: str) -> None:
    x, flag = torch.eye(3), torch.tensor(True)
    emitted = emit(ranged(), emitter)
    emitted(x, flag)
    with torch.profiler.profile(acc_events=True) as profile:
        (result,) = emitted(x, flag)
    torch.testing.assert_close(result, -x)
    events = {event.name: event for event in profile.events()}
    assert {"aten.mm.out:1", "aten.neg:1"} <= events.keys() and "aten.inverse:1" not in events
    call = next(event for event in profile.events() if event.name == "aten::neg")
    outer = events["aten.neg:1"].time_range
    assert outer.start <= call.time_range.start <= call.time_range.end <= outer.end


@pytest.mark.parametrize("emitter", ["python", "fx"])
def test_without_a_profiler_ranges_ask_its_flag_alone(emitter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(ranges, "enter_range", calls.append)
    emitted = emit(ranged(), emitter)
    if emitter == "fx":
        assert "torch.ops.profiler" not in emitted.source
    emitted(torch.eye(3), torch.tensor(True))
    assert not calls
    with torch.profiler.profile():
        emitted(torch.eye(3), torch.tensor(True))
    assert calls == ["aten.mm.out:1", "aten.neg:1"]


@pytest.mark.parametrize("emitter", EMITTERS)
def test_ranges_of_a_failed_run_are_closed(emitter: str) -> None:
    emitted = emit(ranged(), emitter)
    singular = torch.zeros(3, 3)
    with torch.profiler.profile(acc_events=True) as profile:
        with pytest.raises((RuntimeError, InputError)):
            emitted(singular, torch.tensor(False))
        emitted(torch.eye(3), torch.tensor(True))
    failed, later = [
        next(event for event in profile.events() if event.name == name) for name in ("aten.inverse:1", "aten.neg:1")
    ]
    assert failed.time_range.end <= later.time_range.start


def test_names_have_operators_and_source_lines() -> None:
    compiled = torch.compile(
        lambda x: torch.mm(x, x), backend="fxwrap", options={"fuse": False, "profile_ranges": True}
    )
    compiled(torch.eye(2))
    (record,) = fxwrap.inspect(compiled)
    (name,) = ranged_lines(record.program)
    assert name.startswith("aten.mm:1  aten.mm  test_profile_ranges.py:")
    assert record.stages[-1].pass_name == "insert_profile_ranges"


def test_exported_programs_have_no_ranges(tmp_path: Path) -> None:
    program = insert_profile_ranges(assign_call_handles(parse(PROGRAM)))
    assert remove_profile_ranges(program) == parse(PROGRAM)
    x = torch.randn(2, 8)
    exported = torch.export.export(torch.nn.Linear(8, 8), (x,))
    compiled = fxwrap.compile_graph(exported, options=Options(profile_ranges=True, fuse=False))
    torch.export.save(fxwrap.fx.export(compiled), tmp_path / "exported.pt2")
    torch.testing.assert_close(torch.export.load(tmp_path / "exported.pt2").module()(x), compiled(x))
