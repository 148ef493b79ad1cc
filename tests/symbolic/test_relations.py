"""Quotients and rests of symbolic sizes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxwrap.symbolic import evaluate, is_equal, parse_expr, product, split_multiple, total

SIZES = ("s0", "s1", "s1 + 1", "s0*(s1 + 1)", "s0*s1", "3*s0", "floordiv(s0, 2)*s1", "s0**2*(s1 + 1)", "5", "1")


@pytest.mark.parametrize(
    ("size", "divisor", "expected"),
    [
        ("17", "5", ("3", "2")),
        ("9*s0", "4*s0", ("2", "s0")),
        ("9*s0 + 3", "4*s0", ("2", "s0 + 3")),
        ("s0*(s1 + 1)", "s0*(s1 + 1)", ("1", "0")),
        ("9*s0*(s1 + 1)", "4*s0*(s1 + 1)", ("2", "s0*(s1 + 1)")),
        ("s0*(s1 + 1) + s1 + 2", "s0*(s1 + 1)", ("1", "s1 + 2")),
        ("2*s1 + 1", "s1 + 1", ("1", "s1")),
        ("s1 + 2", "s0*(s1 + 1)", ("0", "s1 + 2")),
        ("floordiv(s0, 2) + s1", "floordiv(s0, 2)", ("1", "s1")),
    ],
)
def test_quotients_and_rests(size: str, divisor: str, expected: tuple[str, str]) -> None:
    parts = split_multiple(parse_expr(size), parse_expr(divisor))
    assert all(map(is_equal, parts, map(parse_expr, expected))), parts


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(SIZES)), min_size=1, max_size=4), st.sampled_from(SIZES))
def test_parts_add_up(terms: list[tuple[int, str]], divisor: str) -> None:
    size = total([product((number, parse_expr(text))) for number, text in terms])
    quotient, rest = split_multiple(size, parse_expr(divisor))
    for values in itertools.product((1, 2, 7, 12), repeat=2):
        symbols = dict(zip(("s0", "s1"), values, strict=True))
        parts = [evaluate(item, symbols) for item in (quotient, rest, parse_expr(divisor), size)]
        assert parts[0] * parts[2] + parts[1] == parts[3]
        assert parts[1] >= 0
