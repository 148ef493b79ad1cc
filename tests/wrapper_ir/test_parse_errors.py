"""Text that is no program: the error's message, line and column."""

from __future__ import annotations

import pytest

from fxwrap.errors import ParseError
from fxwrap.lines import CORE_LINES
from fxwrap.wrapper_ir import parse_program
from tests.support.samples import SAMPLES

CASES = {
    "unknown opcode": ("%y = memory.allocate() : f32[4]@cpu", 2, 8, "unknown line 'memory.allocate'"),
    "unknown element type": ("%y = memory.alloc() : q99[4]@cpu", 2, 25, "unknown dtype 'q99'"),
    "unknown type": ("%y = memory.alloc() : tensor", 2, 25, "unknown type 'tensor'"),
    "unknown device": ("%y = memory.alloc() : f32[4]@gpu", 2, 31, "unknown device 'gpu'"),
    "a condition for a size": ("%y = memory.alloc() : f32[true]@cpu", 2, 29, "expected a size, found a condition"),
    "wrong number of strides": ("%y = memory.alloc() : f32[4, 2 | 1]@cpu", 2, 28, "2 sizes need 2 strides and one"),
    "missing parenthesis": ("memory.free(%x", 3, 1, "expected ')', found '}'"),
    "undefined value": ("memory.free(%z)", 2, 15, "%z is not defined"),
    "value defined twice": ("%x = memory.alloc() : f32[4]@cpu", 2, 3, "%x is defined twice"),
    "duplicate attribute": ("memory.free(%x) stream=1 stream=2", 2, 28, "'stream' is repeated"),
    "unknown attribute": ("memory.free(%x) flow=1", 2, 19, "'memory.free' has no attribute 'flow'"),
    "missing attribute": ("s0 = symbol.size(%x)", 2, 8, "'symbol.size' needs 'dim'"),
    "missing operand": ("memory.free()", 2, 3, "'memory.free' needs the operand 'root'"),
    "too many operands": ("memory.free(%x, %x)", 2, 3, "'memory.free' has too many operands"),
    "operand of a wrong class": ("memory.free(3)", 2, 3, "'root' of memory.free takes Value, not int"),
    "attribute of a wrong class": ("memory.free(%x) stream=\"a\"", 2, 3, "'stream' of memory.free takes int, not str"),
    "item of a wrong class": ("extern.call @aten.exp.out(%x) outs=(2)", 2, 3, "'outs' of extern.call takes Value, not"),
    "result without type": ("%y = memory.alloc()", 2, 8, "1 results have 0 types"),
    "type without result": ("memory.free(%x) : f32[4]@cpu", 2, 3, "'memory.free' defines nothing"),
    "two results of one": ("%y, %z = memory.alloc() : f32[4]@cpu, int", 2, 12, "'memory.alloc' defines one value"),
    "absent result with type": ("_ = extern.call @aten.exp.default(%x) : int", 2, 3, "a result is '%name', or '_'"),
    "symbol of no kind": ("q0 = symbol.size(%x) dim=0", 2, 3, "invalid symbol 'q0'"),
    "crossed bounds": ("s0 = symbol.size(%x) dim=0 range=(9, 2)", 2, 3, "crossed bounds"),
    "a value where a symbol is": ("%y = symbol.size(%x) dim=0", 2, 8, "defines one symbol"),
    "missing type": ("check.layout(%x)", 2, 3, "'check.layout' takes one type"),
    "missing target": ("extern.call(%x)", 2, 14, "expected an @name"),
    "missing block": ("control.cond(true) {\n  ^then():\n    control.yield()\n  }", 2, 3, "needs block ^else"),
    "unknown block": ("control.cond(true) {\n  ^maybe():\n    control.yield()\n  }", 3, 3, "has no block ^maybe"),
    "unknown dtype literal": ("control.return(dtype(f33))", 2, 24, "unknown dtype 'f33'"),
    "unknown layout": ("control.return(layout(\"load\"))", 2, 18, "torch has no layout 'load'"),
    "unknown symbol function": ("control.return(f0(2) + 1)", 2, 18, "'f0' is not an operand"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_bad_line_is_shown_with_its_place(case: str) -> None:
    text, line, column, reason = CASES[case]
    with pytest.raises(ParseError) as caught:
        parse_program(f"program @p(%x: borrowed f32[4]@cpu) {{\n  {text}\n}}\n", CORE_LINES)
    assert reason in caught.value.reason
    assert (caught.value.line, caught.value.column) == (line, column)


PROGRAM_CASES = {
    "missing brace": ("program @p() {\n  control.return()\n", 1, 14, "this '{' is never closed"),
    "wrong ownership": ("program @p(%x: stolen f32[4]@cpu) {\n}", 1, 16, "expected an ownership (borrowed, mutable"),
    "input of no kind": ("program @p(x: int) {\n}", 1, 12, "expected a %value or a symbol such as s0"),
    "symbol of another kind": ("program @p(s0: float) {\n}", 1, 16, "symbol s0 is of kind int"),
    "unknown section": ("program @p() {\n}\nweights %w", 3, 1, "expected 'constant', 'function' or 'kernel'"),
    "no program": ("kernel @k", 1, 1, "expected 'program'"),
    "unclosed string": ('program @p() target="cpu {\n}', 1, 21, "string that is not closed"),
}


@pytest.mark.parametrize("case", PROGRAM_CASES)
def test_a_bad_program_is_shown_with_its_place(case: str) -> None:
    text, line, column, reason = PROGRAM_CASES[case]
    with pytest.raises(ParseError) as caught:
        parse_program(text, CORE_LINES)
    assert reason in caught.value.reason
    assert (caught.value.line, caught.value.column) == (line, column)


def test_a_kernel_hash_mismatch_is_rejected() -> None:
    text = SAMPLES["mlp"].full_text().replace("in0[i] > 0", "in0[i] > 1")
    with pytest.raises(
        ParseError, match=r"kernel @relu does not have this hash; its content has the hash [0-9a-f]{64}"
    ) as caught:
        parse_program(text, CORE_LINES)
    assert caught.value.text.startswith('kernel @relu("*f32, *f32, i64") language=cpp hash="')
    assert caught.value.text[caught.value.column - 1 :].startswith('"')


def test_an_extension_is_unknown_without_its_class() -> None:
    with pytest.raises(ParseError, match=r"unknown line 'abacus\.copy'"):
        parse_program(SAMPLES["extension"].full_text(), CORE_LINES)
