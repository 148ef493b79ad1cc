"""Guards and events: the rules of `insert_device_guards` and `insert_stream_events`, one golden file each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import fxwrap
from fxwrap import rewrite as rw
from fxwrap.errors import VerifyError
from fxwrap.lines import Free
from fxwrap.passes.device_guards import insert_device_guards
from fxwrap.passes.reorder import reorder_for_peak_memory
from fxwrap.passes.reuse import reuse_memory
from fxwrap.passes.stream_events import insert_stream_events
from fxwrap.wrapper_ir import Program
from tests.support.golden import check_golden, read_section, sections
from tests.support.samples import SAMPLES

GOLDENS = Path(__file__).parent / "golden"
PASSES: dict[str, Callable[[Program], Program]] = {
    "insert_device_guards": insert_device_guards,
    "insert_stream_events": insert_stream_events,
}
RULES = sorted(path.stem for path in GOLDENS.glob("insert_*.txt"))


@pytest.mark.parametrize("rule", RULES)
def test_golden_text(rule: str, update_golden: bool) -> None:
    path = GOLDENS / f"{rule}.txt"
    text = read_section(path, "input")
    name = next(name for name in PASSES if rule.startswith(name))
    program = fxwrap.parse(text)
    changed = fxwrap.verify(PASSES[name](program))
    assert PASSES[name](changed) == changed
    if name == "insert_stream_events" and changed != program:
        with pytest.raises(VerifyError, match="race"):
            fxwrap.verify(program)
    check_golden(path, sections([("input", text), (f"after {name}", str(changed))]), update_golden)


@pytest.mark.parametrize("name", list(SAMPLES))
def test_guard_placement_is_valid_and_idempotent(name: str) -> None:
    program = SAMPLES[name].program()
    guarded = fxwrap.verify(insert_device_guards(program))
    assert insert_device_guards(guarded) is guarded
    if not any(kernel.language != "cpp" for kernel in program.kernels) and name != "devices_and_streams":
        assert guarded is program


STREAMS = """
program @p(%x: borrowed f32[4]@cuda:0) {
  %t = memory.alloc() : f32[4]@cuda:0
  extern.call @aten.sin.out(%x) outs=(%t)
  %begun = device.record() device="cuda:0" : opaque<Event>
  device.wait(%begun) device="cuda:0" stream=1
  %a = extern.call @aten.exp.default(%t) stream=1 : f32[4]@cuda:0
  memory.free(%t) stream=1
  %u = memory.alloc() : f32[4]@cuda:0
  extern.call @aten.cos.out(%x) outs=(%u)
  %done = device.record() device="cuda:0" stream=1 : opaque<Event>
  device.wait(%done) device="cuda:0"
  %b = extern.call @aten.add.Tensor(%a, %u) : f32[4]@cuda:0
  memory.free(%a)
  memory.free(%u)
  control.return(%b)
}
"""


def test_passes_do_not_reuse_memory_read_by_another_stream() -> None:
    program = fxwrap.verify(fxwrap.parse(STREAMS))
    assert reuse_memory(program) == program  # %u would fit into %t, and %b into what the call left
    assert reorder_for_peak_memory(program).program is program
    alone = fxwrap.parse(STREAMS.replace(" stream=1", ""))
    assert reuse_memory(alone) != alone


def test_rewrites_preserve_frees_that_wait_for_a_stream() -> None:
    program = fxwrap.verify(fxwrap.parse(STREAMS))
    x, y = rw.tensors("x y")
    changed = rw.rewrite(program, rw.call("aten.add.Tensor", x, y), rw.call("aten.sub.Tensor", x, y))
    assert changed.matches
    frees = {line.root.name: line.stream for line in fxwrap.verify(changed.program).lines() if isinstance(line, Free)}
    assert frees["t"] == 1 and frees["a"] == 0
