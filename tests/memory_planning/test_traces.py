"""Memory over lines as traces: their totals are those of the plan, in Perfetto's format and in torch's."""

from __future__ import annotations

import json
import pickle
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest
import torch
from torch.cuda import _memory_viz

import fxwrap
from fxwrap import Options
from fxwrap.artifact import parse
from fxwrap.compile import plan_program_memory
from fxwrap.memory_planning import MemoryPlan, MemoryTrace, apply_plan, plan_svg
from fxwrap.passes.out_variants import use_out_variants
from fxwrap.symbolic import evaluate
from fxwrap.wrapper_ir import Program

SVG = "{http://www.w3.org/2000/svg}"
CHAIN = """
program @chain(%x: borrowed f32[s0, 16]@cpu, %w: borrowed f32[16, 16]@cpu) {
  s0 = symbol.size(%x) dim=0 range=(2, 100) hint=9
  %a = memory.alloc() : f32[s0, 16]@cpu
  extern.call @aten.mm.out(%x, %w) outs=(%a)
  %b = memory.alloc() : f32[s0, 16]@cpu
  extern.call @aten.mm.out(%a, %w) outs=(%b)
  memory.free(%a)
  %v = memory.view(%b) : f32[16, s0 | 1, 16]@cpu
  %c = memory.alloc() : f32[s0, 16]@cpu
  extern.call @aten.mm.out(%b, %w) outs=(%c)
  %d = extern.call @aten.sum.default(%v) : f32[]@cpu
  memory.free(%b)
  %e = extern.call @aten.mul.Tensor(%c, %d) : f32[s0, 16]@cpu
  memory.free(%c)
  memory.free(%d)
  control.return(%e)
}
"""


def planned(text: str = CHAIN) -> tuple[Program, MemoryPlan]:
    program = parse(text)
    plan = plan_program_memory(program, Options(memory_planning="auto").resolve_devices())
    return apply_plan(program, plan), plan


def compiled(training: bool) -> list[tuple[Program, MemoryPlan]]:
    """The programs and plans of a layer with norms, softmax and matmuls."""
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    function = torch.compile(layer, backend="fxwrap", options={"memory_planning": "auto", "fuse": False})
    y = function(torch.randn(2, 3, 8))
    if training:
        y.sum().backward()
    records = fxwrap.inspect(function)
    return [(record.program, record.plan) for record in records if record.plan is not None]


def counters(trace: MemoryTrace) -> dict[str, dict[int, int]]:
    """The values of the counter tracks by line."""
    tracks: dict[str, dict[int, int]] = {}
    for event in json.loads(trace.perfetto())["traceEvents"]:
        if event["ph"] == "C":
            tracks.setdefault(event["name"], {})[event["ts"] // 1000] = event["args"]["bytes"]
    return tracks


@pytest.mark.sampled(2)
@pytest.mark.parametrize("training", [False, True])
def test_the_peak_is_that_of_the_plan(training: bool) -> None:
    programs = compiled(training)
    assert len(programs) == 1 + training
    for program, plan in programs:
        assert max(MemoryTrace.of(program).live) == plan.body.peak


def test_symbols_have_their_hints_or_other_values() -> None:
    program, plan = planned()
    assert max(MemoryTrace.of(program).live) == plan.body.peak
    larger = max(MemoryTrace.of(program, {"s0": 90}).live)
    assert larger > 5 * plan.body.peak


def test_perfetto_has_counters_and_the_lines_with_their_origins() -> None:
    program, plan = planned()
    trace = MemoryTrace.of(program)
    tracks = counters(trace)
    assert max(tracks["live bytes"].values()) == plan.body.peak and tracks["live bytes"][len(program.body.lines)] == 0
    (pool,) = plan.body.pools
    used = tracks[f"bytes in use of {pool.name}"]
    assert max(used.values()) == 9 * 16 * 4 and list(used.values())[-1] == 0
    slices = [event for event in json.loads(trace.perfetto())["traceEvents"] if event["ph"] == "X"]
    assert [event["args"]["line"] for event in slices] == list(range(len(program.body.lines)))
    assert any("extern.call @aten.mm.out(%x, %w)" in event["args"]["text"] for event in slices)


def live_of_snapshot(snapshot: Any) -> int:
    """The largest sum of live bytes in the first device's trace."""
    live = peak = 0
    for event in snapshot["device_traces"][0]:
        live += {"alloc": event["size"], "free_completed": -event["size"]}.get(event["action"], 0)
        peak = max(peak, live)
    return peak


def test_the_snapshot_is_one_that_torch_reads() -> None:
    program, plan = planned()
    snapshot = pickle.loads(MemoryTrace.of(program).snapshot())
    assert live_of_snapshot(snapshot) == plan.body.peak
    page = _memory_viz.trace_plot(snapshot)
    assert "Active Memory Timeline" in page
    assert "segments: 1" in _memory_viz.segsum(snapshot)
    text = _memory_viz.trace(snapshot)
    assert "free" in text
    frames = [event["frames"][0] for event in snapshot["device_traces"][0] if event["action"] == "alloc"]
    assert {"name": "%x", "filename": "@chain", "line": 0} in frames


def test_the_drawing_has_names_axes_and_one_scale() -> None:
    program, plan = planned(use_two_pools())
    values = MemoryTrace.of(program).values
    small, large = sorted(plan.body.pools, key=lambda pool: int(evaluate(pool.size, values)))
    root = ElementTree.fromstring(plan_svg(plan, values))
    texts = [element.text or "" for element in root.iter(f"{SVG}text")]
    assert {"line of the program", "0"} <= {*texts} and any(text.endswith("KiB") for text in texts)
    areas = [element for element in root.iter(f"{SVG}rect") if element.get("fill") == "#f4f4f4"]
    heights = sorted([float(element.get("height", 0)) for element in areas])
    ratio = evaluate(small.size, values) / evaluate(large.size, values)
    assert heights[0] / heights[-1] == pytest.approx(float(ratio), rel=0.02) and ratio < 1
    names = {item.range.name for item in large.allocations}
    assert {f"%{name}" for name in names} <= {*texts}


def use_two_pools() -> str:
    """A program whose pools differ in size: the second one's sizes are known later."""
    return """
program @two(%x: borrowed f32[64, 64]@cpu, %n: borrowed i64[]@cpu) {
  %a = memory.alloc() : f32[64, 64]@cpu
  extern.call @aten.mm.out(%x, %x) outs=(%a)
  %b = memory.alloc() : f32[64, 64]@cpu
  extern.call @aten.mm.out(%a, %x) outs=(%b)
  memory.free(%a)
  %c = memory.alloc() : f32[64, 64]@cpu
  extern.call @aten.mm.out(%b, %x) outs=(%c)
  memory.free(%b)
  u0 = symbol.item(%n) range=(0, 64) hint=32
  %p = memory.alloc() : f32[u0, 64]@cpu
  extern.call @aten.full.out([u0, 64], 1.0) outs=(%p)
  %q = memory.alloc() : f32[u0, 64]@cpu
  extern.call @aten.neg.out(%p) outs=(%q)
  memory.free(%p)
  %r = memory.alloc() : f32[u0, 64]@cpu
  extern.call @aten.neg.out(%q) outs=(%r)
  memory.free(%q)
  %y = extern.call @aten.mm.default(%r, %c) : f32[u0, 64]@cpu
  memory.free(%c)
  memory.free(%r)
  control.return(%y)
}
"""


def test_drawings_of_no_pool_and_of_out_variants() -> None:
    program = use_out_variants(parse(CHAIN))
    plan = plan_program_memory(program, Options(memory_planning="auto").resolve_devices())
    titles = [item.text or "" for item in ElementTree.fromstring(plan_svg(plan)).iter(f"{SVG}title")]
    assert [title.partition(":")[0] for title in titles] == ["%a", "%c"]
    empty = ElementTree.fromstring(plan_svg(MemoryPlan((plan.body.__class__("body", (), 0, 0),))))
    assert [item.text for item in empty.iter(f"{SVG}text")] == ["peak 0 bytes, lower bound 0, 0 pools"]
