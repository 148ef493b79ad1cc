"""Copy coalescing on programs: which tensors are computed in the memory that they are copied into."""

from __future__ import annotations

import pytest

import fxwrap
from fxwrap.passes.coalesce_copies import coalesce_copies, coalesce_program_copies
from fxwrap.wrapper_ir import print_lines, program_arguments
from fxwrap.wrapper_ir.line import Block

INTO_AN_INPUT = """
  %y = memory.alloc() : f32[4]@cpu
  kernel.launch @k(%x) outs=(%y)
  extern.mutate @aten.copy_.default(%m, %y) writes=(%m)
  memory.free(%y)
  control.return()
"""


def _add(lines: str, before: str) -> str:
    return INTO_AN_INPUT.replace(before, lines + before)


def _body(lines: str, inputs: str) -> fxwrap.Program:
    return fxwrap.parse(f"program @p({inputs}) {{\n{lines}}}\n")


def _text(program: fxwrap.Program) -> list[str]:
    return [line.strip() for line in print_lines(program.body).splitlines()]


def test_a_tensor_is_computed_where_it_is_copied() -> None:
    program = _body(INTO_AN_INPUT, "%x: borrowed f32[4]@cpu, %m: mutable f32[4]@cpu")
    assert _text(coalesce_program_copies(program)) == ["kernel.launch @k(%x) outs=(%m)", "control.return()"]


X_AND_M = "%x: borrowed f32[4]@cpu, %m: mutable f32[4]@cpu"
SUM = "  %s = extern.call @aten.sum.default({}) : f32[]@cpu\n"
STAYING = {
    "the kernel reads it": (INTO_AN_INPUT.replace("@k(%x)", "@k(%m)"), "%m: mutable f32[4]@cpu"),
    "read in between": (_add(SUM.format("%m"), "  extern.mutate").replace("return()", "return(%s)"), X_AND_M),
    "returned too": (INTO_AN_INPUT.replace("  memory.free(%y)\n", "").replace("return()", "return(%y)"), X_AND_M),
    "other strides": (INTO_AN_INPUT, X_AND_M.replace("%m: mutable f32[4]", "%m: mutable f32[4 | 2]")),
    "changed, and the tensor read": (
        _add("  extern.mutate @aten.mul_.Scalar(%m, 2) writes=(%m)\n" + SUM.format("%y"), "  memory.free")
        .replace("return()", "return(%s)"), X_AND_M,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("lines", "inputs"), STAYING.values(), ids=STAYING)
def test_a_tensor_stays_a_copy(lines: str, inputs: str) -> None:
    program = _body(lines, inputs)
    assert coalesce_program_copies(program) == program


def test_a_tensor_is_computed_in_a_slice() -> None:
    lines = INTO_AN_INPUT.replace("%m, %y", "%s, %y").replace("writes=(%m)", "writes=(%s)")
    lines = lines.replace("  extern.mutate", "  %s = memory.view(%m) : f32[4 | 1 | 8]@cpu\n  extern.mutate")
    program = _body(lines, "%x: borrowed f32[4]@cpu, %m: mutable f32[16]@cpu")
    assert _text(coalesce_program_copies(program)) == [
        "%s = memory.view(%m) : f32[4 | | 8]@cpu", "kernel.launch @k(%x) outs=(%s)", "control.return()",
    ]  # fmt: skip


def _coalesced(lines: str, inputs: str, copies: tuple[str, ...], owned: tuple[str, ...] = ()) -> list[str]:
    program = _body(lines, inputs)
    result = coalesce_copies(program.body.lines, program_arguments(program), copies, (), owned)
    return [line.strip() for line in print_lines(Block((), tuple(result))).splitlines()]


OF_AN_OPERAND = """
  %y = extern.call @aten.clone.default(%x) : f32[4]@cpu
  extern.mutate @aten.mul_.Scalar(%y, 2) writes=(%y)
  %v = memory.view(%y) : f32[2 | 1 | 2]@cpu
  control.return(%v)
"""


def test_a_copy_of_a_tensor_that_is_used_no_more_is_that_tensor() -> None:
    assert _coalesced(OF_AN_OPERAND, "%x: owned f32[4]@cpu", ("y",), ("x",)) == [
        "extern.mutate @aten.mul_.Scalar(%x, 2) writes=(%x)", "%v = memory.view(%x) : f32[2 | | 2]@cpu",
        "control.return(%v)",
    ]  # fmt: skip


def test_a_copy_of_a_borrowed_input_stays_one() -> None:
    assert len(_coalesced(OF_AN_OPERAND, "%x: borrowed f32[4]@cpu", ("y",))) == 4


def test_other_clones_stay() -> None:
    assert len(_coalesced(OF_AN_OPERAND, "%x: owned f32[4]@cpu", ("z",), ("x",))) == 4


def test_a_copy_of_a_slice_that_is_copied_back_is_the_slice() -> None:
    lines = """
  %s = memory.view(%x) : f32[4 | 1 | 8]@cpu
  %y = extern.call @aten.clone.default(%s) : f32[4]@cpu
  %v = memory.view(%y) : f32[2 | 1 | 2]@cpu
  extern.mutate @aten.mul_.Scalar(%v, 2) writes=(%v)
  %new = extern.call @aten.clone.default(%x) : f32[16]@cpu
  %t = memory.view(%new) : f32[4 | 1 | 8]@cpu
  extern.mutate @aten.copy_.default(%t, %y) writes=(%t)
  extern.mutate @aten.copy_.default(%x, %new) writes=(%x)
  control.return()
"""
    assert _coalesced(lines, "%x: mutable f32[16]@cpu", ("y", "new")) == [
        "%s = memory.view(%x) : f32[4 | | 8]@cpu", "%v = memory.view(%s) : f32[2 | | 10]@cpu",
        "extern.mutate @aten.mul_.Scalar(%v, 2) writes=(%v)", "%t = memory.view(%x) : f32[4 | | 8]@cpu",
        "control.return()",
    ]  # fmt: skip


SLICES = """
  %pool = memory.pool() : u8[128]@cpu
  %a = memory.pool_slice(%pool) : f32[4]@cpu
  kernel.launch @k(%x) outs=(%a)
  %b = memory.pool_slice(%pool) offset=64 : f32[4]@cpu
  {write}
  %r = extern.call @aten.neg.default(%a) : f32[4]@cpu
  extern.mutate @aten.copy_.default(%{into}, %r) writes=(%{into})
  %s = extern.call @aten.sum.default(%{into}) : f32[]@cpu
  control.return(%s)
"""
WRITE = "kernel.launch @k(%x) outs=(%b)"


def _results_in_slices(into: str) -> list[str]:
    program = _body(SLICES.format(write=WRITE, into=into), X_AND_M)
    result = coalesce_copies(program.body.lines, program_arguments(program), (), ("r",))
    return [line.strip() for line in print_lines(Block((), tuple(result))).splitlines()]


def test_a_result_is_computed_in_the_slice_of_a_pool_that_it_came_from() -> None:
    lines = _results_in_slices("a")
    assert "extern.mutate @aten.neg_.default(%a) writes=(%a)" in lines
    assert not any("copy_" in line for line in lines)


def test_slices_of_a_pool_are_different_tensors() -> None:
    """Slices of equal types have one root; a result that is copied from one into another is not written by `neg_`."""
    assert _results_in_slices("b") == _text(_body(SLICES.format(write=WRITE, into="b"), X_AND_M))


@pytest.mark.parametrize("offset", ["8", "u0"])
def test_a_view_is_defined_early_if_its_numbers_are_known(offset: str) -> None:
    lines = f"""
  %y = memory.alloc() : f32[4]@cpu
  extern.call @aten.neg.out(%x) outs=(%y)
  u0 = symbol.item(%n) range=(0, 12)
  %row = memory.view(%m) : f32[4 | 1 | {offset}]@cpu
  extern.mutate @aten.copy_.default(%row, %y) writes=(%row)
  memory.free(%y)
  control.return()
"""
    program = _body(lines, "%x: borrowed f32[4]@cpu, %m: mutable f32[16]@cpu, %n: borrowed i64[]@cpu")
    coalesced = fxwrap.verify(coalesce_program_copies(program))
    assert (coalesced == program) == (offset == "u0")
