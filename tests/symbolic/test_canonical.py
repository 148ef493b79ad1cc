"""Canonical expressions from what ShapeEnv writes, size arithmetic, kinds and bounds."""

from __future__ import annotations

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from fxwrap import torch_compat
from fxwrap.errors import ExpressionError
from fxwrap.symbolic import (
    Expression,
    SymbolInfo,
    bounds,
    canonicalize,
    ceiling_divide,
    evaluate,
    expression_kind,
    floor_divide,
    make_symbol,
    maximum,
    minimum,
    parse_expr,
    print_expr,
    product,
    remainder,
    symbol_kind,
    total,
)
from fxwrap.symbolic.symbols import FUNCTIONS
from fxwrap.torch_compat import sympy_functions
from tests.support.long_form import sample_size
from tests.support.strategies.expressions import INTEGER_SYMBOLS, sizes

S77 = sympy.Symbol("s77", positive=True, integer=True)
U0 = sympy.Symbol("u0", integer=True)
ZF3 = sympy.Symbol("zf3", real=True)


@pytest.mark.parametrize(
    ("foreign", "text"),
    [
        (64 * S77 + 3, "64*s77 + 3"),
        (sympy_functions.FloorDiv(S77, 2), "floordiv(s77, 2)"),
        (sympy_functions.CeilDiv(S77, 8), "ceildiv(s77, 8)"),
        (sympy_functions.Max(1, U0), "max(1, u0)"),
        (sympy.Max(1, U0), "max(1, u0)"),
        (sympy.Min(7, U0), "min(7, u0)"),
        (sympy.Mod(U0, 4), "python_mod(u0, 4)"),
        (sympy.floor(ZF3), "floor_to_int(f3)"),
        (sympy.ceiling(ZF3), "ceil_to_int(f3)"),
        (sympy.Abs(U0), "max(u0, -u0)"),
        (sympy.sqrt(S77), "sqrt(s77)"),
        (sympy.exp(ZF3), "exp(f3)"),
        (sympy.Pow(ZF3, sympy.Float(0.25)), "float_pow(f3, 0.25)"),
        (sympy.Pow(2, U0), "pow_by_natural(2, u0)"),
        (sympy_functions.LShift(U0, S77), "u0*pow_by_natural(2, s77)"),
        (sympy_functions.ToFloat(S77) * ZF3, "f3*to_float(s77)"),
        (sympy.Symbol("zuf1", real=True) + ZF3, "f3 + uf1"),
        (sympy.And(S77 < 4, U0 >= 2), "and(u0 >= 2, s77 < 4)"),
        (sympy.Eq(U0, 1), "u0 == 1"),
        (sympy.Piecewise((1, sympy.Eq(U0, -2)), (S77, U0 < 0), (0, True)), "where(u0 == -2, 1, where(u0 < 0, s77, 0))"),
        (sympy.Float("0.1", 40), "0.1"),
        (sympy.pi, "3.141592653589793"),
        (2.5, "2.5"),
        (True, "true"),
        (torch_compat.int_oo, "int_inf"),
    ],
)
def test_shape_env_expressions_are_canonicalised(foreign: sympy.Basic, text: str) -> None:
    result = canonicalize(foreign)
    assert print_expr(result) == text
    assert canonicalize(result) == result
    assert parse_expr(text) == result


def test_symbols_are_renamed_by_mapping_first() -> None:
    s0 = make_symbol("s0")
    assert canonicalize(S77 * U0, {S77: s0}) == s0 * make_symbol("u0")
    assert canonicalize(S77, {S77: s0}) is s0
    assert make_symbol("s0") is s0


def test_assumptions_of_shape_env_do_not_leak() -> None:
    assert canonicalize(S77) != S77
    assert canonicalize(S77).is_positive is None


@pytest.mark.parametrize(
    ("name", "kind"), [("s0", "int"), ("u12", "int"), ("n3", "int"), ("f0", "float"), ("uf0", "float"), ("b7", "bool")]
)
def test_prefix_fixes_kind(name: str, kind: str) -> None:
    assert symbol_kind(name) == kind
    assert expression_kind(make_symbol(name)) == kind


@pytest.mark.parametrize("name", ["x", "s", "s-1", "ss0", "0s", "s0x", ""])
def test_unknown_symbol_names_are_errors(name: str) -> None:
    with pytest.raises(ExpressionError, match="is not a symbol; symbols look like s0"):
        make_symbol(name)


@pytest.mark.parametrize(
    ("foreign", "message"),
    [
        (sympy.Function("g")(U0), "the expression language has no g"),
        (sympy.zoo, "the expression language has no constant zoo"),
        (sympy.Symbol("width"), "'width' is not a symbol"),
        (sympy_functions.FloorDiv(ZF3, 2, evaluate=False), "floordiv is defined on integers"),
    ],
)
def test_unsupported_functions_are_errors(foreign: sympy.Basic, message: str) -> None:
    with pytest.raises(ExpressionError, match=message):
        canonicalize(foreign)


def test_every_function_has_one_name_and_one_class() -> None:
    assert len({spec.name for spec in FUNCTIONS}) == len(FUNCTIONS)
    assert len({spec.sympy_class for spec in FUNCTIONS}) == len(FUNCTIONS)


def test_size_arithmetic_keeps_plain_ints() -> None:
    assert (product([2, 3]), product([]), total([2, 3]), total([])) == (6, 1, 5, 0)
    assert (floor_divide(-7, 2), ceiling_divide(-7, 2), remainder(-7, 4)) == (-4, -3, 1)
    assert (maximum(1, 3), minimum(1, 3)) == (3, 1)
    s0 = make_symbol("s0")
    assert type(total([s0, product([-1, s0])])) is int
    assert type(product([s0, 0])) is int


def test_size_arithmetic_on_symbols() -> None:
    s0 = make_symbol("s0")
    assert print_expr(product([2, s0, 4])) == "8*s0"
    assert print_expr(total([s0, 3, s0])) == "2*s0 + 3"
    assert floor_divide(64 * s0, 64) is s0
    assert print_expr(ceiling_divide(s0, 4)) == "ceildiv(s0, 4)"
    assert print_expr(remainder(s0, 4)) == "python_mod(s0, 4)"
    assert print_expr(maximum(s0, 1)) == "max(1, s0)"
    assert print_expr(minimum(s0, 1)) == "min(1, s0)"


INFOS = {"s0": SymbolInfo("s0", 2, 4096, hint=512), "s1": SymbolInfo("s1", 3, 100, divisor=8)}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7", (7, 7)),
        ("s0", (2, 4096)),
        ("s1", (8, 96)),
        ("64*s0 + 3", (131, 262147)),
        ("-s0", (-4096, -2)),
        ("floordiv(s0, 2)", (1, 2048)),
        ("ceildiv(s0, 1024)", (1, 4)),
        ("max(s0, 10)", (10, 4096)),
        ("mod(s0, 4)", (0, 3)),
        ("mod(s0 - 2, 64)", (0, 63)),
        ("mod(s0, -2)", (-1, 0)),
        ("s0 + u0", (None, None)),
        ("max(u0, 3)", (3, None)),
        ("s0 < 5000", (True, True)),
        ("s0 < 3", (False, True)),
        ("asinh(f0)", (None, None)),
        ("s0**-1", (None, None)),
        ("to_float(s0)", (2.0, 4096.0)),
    ],
)
def test_bounds(text: str, expected: tuple[object, object]) -> None:
    assert bounds(parse_expr(text), INFOS) == expected


@settings(max_examples=sample_size(200))
@given(sizes(), st.data())
def test_values_lie_within_bounds(size: Expression, data: st.DataObject) -> None:
    infos, values = {}, {}
    for name in INTEGER_SYMBOLS:
        lower, upper = sorted(data.draw(st.tuples(st.integers(1, 64), st.integers(1, 64))))
        infos[name] = SymbolInfo(name, lower, upper)
        values[name] = data.draw(st.integers(lower, upper))
    free = set() if isinstance(size, int) else {symbol.name for symbol in size.free_symbols}
    if not free <= set(INTEGER_SYMBOLS):
        return
    lower_bound, upper_bound = bounds(size, infos)
    try:
        value = evaluate(size, values)
    except (ArithmeticError, TypeError, ValueError):  # it has no value here
        return
    assert lower_bound is None or value >= lower_bound
    assert upper_bound is None or value <= upper_bound


@pytest.mark.parametrize("text", ["modular_indexing(s0 - s1, 1, 2)", "modular_indexing(s0 - 9, s1, 3)"])
def test_bounds_of_remainders_of_negative_numbers(text: str) -> None:
    size = parse_expr(text)
    lower, upper = bounds(size, {"s0": SymbolInfo("s0", 1, 1), "s1": SymbolInfo("s1", 1, 2)})
    values = [evaluate(size, {"s0": 1, "s1": s1}) for s1 in (1, 2)]
    assert lower is not None and lower <= min(values)
    assert upper is not None and upper >= max(values)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lower": 4, "upper": 2}, "symbol s0 has crossed bounds"),
        ({"divisor": 0}, "symbol s0 has divisor 0; a divisor is positive"),
        ({"lower": 2, "upper": 4, "hint": 8}, "symbol s0 has hint 8 outside"),
    ],
)
def test_contradicting_symbol_information_is_an_error(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ExpressionError, match=message):
        SymbolInfo("s0", **arguments)
