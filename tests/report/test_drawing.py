"""The drawing of a program for Graphviz: what it draws, and from which line each tensor comes."""

from __future__ import annotations

import re

from fxwrap.artifact import parse
from fxwrap.passes.provenance import assign_call_handles
from fxwrap.report import program_drawing
from fxwrap.wrapper_ir import KernelDefinition, verify

PROGRAM = """
program @p(%x: borrowed f32[4, 4]@cpu, %flag: borrowed bool[]@cpu) {
  %y = extern.call @aten.mm.default(%x, %x) : f32[4, 4]@cpu
  kernel.launch @relu_0() outs=(%y)
  %view = memory.view(%y) : f32[16]@cpu
  %z = control.cond(%flag, %view) : f32[16]@cpu {
  ^then(%t: f32[16]@cpu):
    %a = extern.call @aten.neg.default(%t) : f32[16]@cpu
    control.yield(%a)
  ^else(%e: f32[16]@cpu):
    %b = extern.call @aten.cos.default(%e) : f32[16]@cpu
    control.yield(%b)
  }
  memory.free(%y)
  control.return(%z)
}
"""
RELU = KernelDefinition("relu_0", "cpp", "source", ("*f32",))


def boxes_and_arrows() -> tuple[list[str], set[tuple[str, str, str]]]:
    """The labels of the boxes in order, and the arrows between labels with their types."""
    drawn = program_drawing(assign_call_handles(verify(parse(PROGRAM).replace(kernels=(RELU,)))))
    assert drawn.count("{") == drawn.count("}") and drawn.startswith('digraph "p" {')
    labels = dict(re.findall(r'(n\d+) \[label="([^"]*)", fillcolor', drawn))
    arrows = re.findall(r'(n\d+) -> (n\d+) \[label="([^"]*)"\]', drawn)
    clusters = re.findall(r'^\s+label="([^"]*)";', drawn, re.MULTILINE)
    return [*labels.values(), *clusters], {(labels[a], labels[b], type_) for a, b, type_ in arrows}


def test_calls_kernels_blocks_and_tensors_are_drawn() -> None:
    boxes, arrows = boxes_and_arrows()
    assert sorted(boxes) == sorted([
        "aten.mm:1", "relu_0:1", "control.cond", "aten.neg:1", "aten.cos:1", *["results"] * 3, "%x", "%flag", "%t",
        "%e", "control.cond: then", "control.cond: else",
    ])  # fmt: skip
    matrix, row = "f32[4, 4]@cpu", "f32[16]@cpu"
    assert arrows == {
        ("%x", "aten.mm:1", matrix), ("aten.mm:1", "relu_0:1", matrix), ("relu_0:1", "control.cond", row),
        ("%flag", "control.cond", "bool[]@cpu"), ("%t", "aten.neg:1", row), ("aten.neg:1", "results", row),
        ("%e", "aten.cos:1", row), ("aten.cos:1", "results", row), ("control.cond", "results", row),
    }  # fmt: skip
