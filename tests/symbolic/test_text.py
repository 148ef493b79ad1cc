"""The text form of expressions: exact round trip, style, and errors with line and column."""

from __future__ import annotations

import math
from functools import partial

import pytest
import sympy
from hypothesis import given, settings

from fxwrap.errors import ParseError
from fxwrap.symbolic import (
    Expression,
    TokenStream,
    canonicalize,
    make_symbol,
    parse_expr,
    print_expr,
    read_expr,
    read_size,
)
from fxwrap.torch_compat import sympy_functions
from tests.support.long_form import sample_size
from tests.support.strategies.expressions import any_expressions

tree = partial(sympy.srepr, order="none")
"""The text of a tree. To put terms into another order, SymPy computes them, some of them for ever."""


@settings(max_examples=sample_size(300))
@given(any_expressions())
def test_parse_of_print_is_the_same_expression(expression: Expression) -> None:
    parsed = parse_expr(print_expr(expression))
    assert parsed == expression
    assert type(parsed) is type(expression)
    assert tree(parsed) == tree(expression)


@settings(max_examples=sample_size(300))
@given(any_expressions())
def test_canonical_is_idempotent(expression: Expression) -> None:
    again = canonicalize(expression)
    assert tree(again) == tree(expression)


@pytest.mark.parametrize(
    "text",
    [
        "64*s0 + 3",
        "s0 - 3",
        "-s0 - 64*s1 + 3",
        "-2*s1*(s0 + 1)",
        "floordiv(s0, 2)",
        "ceildiv(n0, 1024)",
        "ceildiv(n0, s0)",
        "mod(s0, 4)",
        "modular_indexing(s0, 4, 8)",
        "max(3, s0, s1)",
        "min(7, 2*s0)",
        "s0**2",
        "(s0 + 1)**2",
        "-s0**2",
        "s0**81",
        "min(0, where(b0, 1, 0))**-2",
        "f0*min(0, where(b0, 1, 0))**-1",
        "inf",
        "-inf",
        "int_inf",
        "-int_inf",
        "s0 + int_inf",
        "s0 + min(2, identity(3))",
        "s0 <= 4",
        "s0 == -4",
        "and(s0 < 4, or(b0, s1 > 2))",
        "not(s0 != 3)",
        "1/2*s0",
        "-1/2",
        "f0 - 1e-07",
        "1.5*f0",
        "where(s0 < 4, f0, 2)",
        "float_pow(f0, 0.5)",
        "sqrt(f0)",
        "floordiv(1, 0)",
        "true",
        "-5",
        "0",
    ],
)
def test_the_text_form_prints_as_written(text: str) -> None:
    assert print_expr(parse_expr(text)) == text


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("3 + 64*s0", "64*s0 + 3"),
        ("s0 - s0", "0"),
        ("2 + 3*4", "14"),
        ("(-3)**2", "9"),
        ("--s0", "s0"),
        ("floordiv(-7, 2)", "-4"),
        ("floordiv(64*s0 + 6, 4)", "16*s0 + 1"),
        ("floordiv(6*s0, 4)", "floordiv(3*s0, 2)"),
        ("floordiv(s0, -1)", "-s0"),
        ("mod(-7, 4)", "1"),
        ("max(3, max(s0, 5))", "max(5, s0)"),
        ("max(s0, s0)", "s0"),
        ("and(b0, true)", "b0"),
        ("or(b0, true)", "true"),
        ("not(not(b0))", "b0"),
        ("4 < 3", "false"),
        ("identity(s0)", "identity(s0)"),
    ],
)
def test_hand_written_text_becomes_canonical(text: str, same: str) -> None:
    assert print_expr(parse_expr(text)) == same


def test_integer_constants_are_plain_ints() -> None:
    assert type(parse_expr("1 + 2")) is int
    assert type(parse_expr("-7")) is int
    assert type(canonicalize(sympy.Integer(4))) is int


@pytest.mark.parametrize("value", [0.1, 1e300, 5e-324, 1 / 3, -2.5e-7, 2.0**70, math.pi])
def test_floats_round_trip_bitwise(value: float) -> None:
    parsed = parse_expr(print_expr(canonicalize(value)))
    assert float(parsed).hex() == value.hex()


def test_ceildiv_reads_as_torch_writes_it() -> None:
    n0 = make_symbol("n0")
    assert parse_expr("ceildiv(n0, 1024)") == sympy_functions.FloorDiv(n0 + 1023, 1024)


@pytest.mark.parametrize(
    ("text", "column", "reason"),
    [
        ("s0 +", 5, "expected an expression, found end of text"),
        ("64*s0 + $", 9, "character '$' starts no token"),
        ("4 + width", 5, "'width' is not a symbol"),
        ("2*foo(s0)", 3, "unknown function 'foo'"),
        ("1 + floordiv(s0)", 5, "floordiv takes 2 operands, not 1"),
        ("max()", 1, "max takes at least 1 operand, not 0"),
        ("(s0 + 1", 8, "expected ')', found end of text"),
        ("s0 < 3 < 4", 8, "expected end of text, found '<'"),
        ("s0 - (s1 < 3)", 6, "'s1 < 3' is a condition, not a number"),
        ("max(s0 < 1, 2)", 1, "'s0 < 1' is a condition, not a number"),
        ("and(s0, b0)", 1, "and takes conditions, not 's0'"),
        ("s0 + 1/0", 7, "division by the constant zero"),
        ("0**-1", 1, "negative power of the constant zero"),
        ("0.0**-1", 1, "negative power of the constant zero"),
        ("2/(1 - 1)", 2, "division by the constant zero"),
        ("s0**1025", 1, "an exponent above 1024"),
        ("mod(f0, 2)", 1, "mod is defined on integers"),
        ("s0 s1", 4, "expected end of text, found 's1'"),
        ("%x + 1", 1, "expected an expression, found '%x'"),
    ],
)
def test_errors_have_line_and_column(text: str, column: int, reason: str) -> None:
    with pytest.raises(ParseError) as caught:
        parse_expr(text)
    assert (caught.value.line, caught.value.column) == (1, column)
    assert reason in caught.value.reason
    assert caught.value.text == text


def test_expressions_end_at_program_syntax() -> None:
    stream = TokenStream("[2*s0 | 1, s0] expr=64*s0 range=(2, 4096)")
    stream.expect("[")
    assert print_expr(read_expr(stream)) == "2*s0"
    stream.expect("|")
    assert read_expr(stream) == 1
    stream.expect(",")
    assert print_expr(read_expr(stream)) == "s0"
    stream.expect("]")
    stream.expect("name", "expr")
    stream.expect("=")
    assert print_expr(read_expr(stream)) == "64*s0"
    stream.expect("name", "range")


def test_read_size_stops_at_comparison_operators() -> None:
    stream = TokenStream("s0 + 1 > s1")
    assert print_expr(read_size(stream)) == "s0 + 1"
    assert stream.at(">")
