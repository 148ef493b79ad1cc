"""Hypothesis strategies for canonical expressions and for values of their symbols."""

from __future__ import annotations

import hypothesis.strategies as st
import sympy

from fxwrap.symbolic import Expression, Number, canonicalize, expression_kind, make_symbol
from fxwrap.symbolic.symbols import FUNCTION_BY_NAME, OPAQUE_FUNCTIONS, RELATION_BY_OPERATOR, apply, compare, constant

INTEGER_SYMBOLS = ("s0", "s1", "s12", "u0", "n0")
FLOAT_SYMBOLS = ("f0", "f1", "uf0")
BOOLEAN_SYMBOLS = ("b0", "b1")

_INTEGERS = st.one_of(st.integers(-9, 9), st.sampled_from([64, 1023, 1024, -4096, 2**31, 2**40 + 1]))
_FLOATS = st.one_of(
    st.sampled_from([0.1, 1.0, -2.5, 1e-7, 1e16, 5e-324, 1.7976931348623157e308]),
    st.floats(allow_nan=False, allow_infinity=False),
)
_INTEGER_PAIRS = ("floordiv", "cleandiv", "mod", "python_mod", "bitwise_and", "bitwise_or", "bitwise_xor")
_FLOAT_TO_INTEGER = ("trunc_to_int", "floor_to_int", "ceil_to_int", "round_to_int")
_OTHER_INTEGER = ("modular_indexing", "where", "identity", "pow_by_natural", *_FLOAT_TO_INTEGER)
_FLOAT_STEPS = ("add", "multiply", "mixed", "power", "divide", "opaque", "extreme", "other")
_OTHER_FLOAT = ("to_float", "trunc_to_float", "round_decimal", "float_pow", "where", "rational")

_EXPONENTS = st.one_of(st.sampled_from(INTEGER_SYMBOLS).map(make_symbol), st.integers(0, 5).map(constant))


def _function(name: str, *operands: sympy.Basic) -> sympy.Basic:
    return apply(FUNCTION_BY_NAME[name], operands)


def _integer_steps(draw: st.DrawFn, depth: int) -> sympy.Basic:
    def smaller() -> sympy.Basic:
        return draw(_nodes("int", depth - 1))

    step = draw(st.sampled_from(["add", "multiply", "subtract", "power", "pair", "extreme", "other"]))
    if step == "add":
        return sympy.Add(*(smaller() for _ in range(draw(st.integers(2, 3)))))
    if step == "multiply":
        return sympy.Mul(*(smaller() for _ in range(draw(st.integers(2, 3)))))
    if step == "subtract":
        return sympy.Add(smaller(), sympy.Mul(-1, smaller()))
    if step == "power":
        return sympy.Pow(smaller(), draw(st.integers(2, 3)))
    if step == "pair":
        return _function(draw(st.sampled_from(_INTEGER_PAIRS)), smaller(), smaller())
    if step == "extreme":
        return _function(draw(st.sampled_from(["max", "min"])), smaller(), smaller(), smaller())
    name = draw(st.sampled_from(_OTHER_INTEGER))
    if name == "modular_indexing":
        return _function(name, smaller(), smaller(), smaller())
    if name == "where":
        return _function(name, draw(_nodes("bool", depth - 1)), smaller(), smaller())
    if name == "identity":
        return _function(name, smaller())
    if name == "pow_by_natural":
        return _function(name, smaller(), draw(_EXPONENTS))
    return _function(name, draw(_nodes("float", depth - 1)))


def _float_steps(draw: st.DrawFn, depth: int) -> sympy.Basic:
    def smaller(kind: str = "float") -> sympy.Basic:
        return draw(_nodes(kind, depth - 1))

    step = draw(st.sampled_from(_FLOAT_STEPS))
    if step == "add":
        return sympy.Add(smaller(), smaller())
    if step == "multiply":
        return sympy.Mul(smaller(), smaller())
    if step == "mixed":
        return sympy.Add(smaller(), smaller("int"))
    if step == "power":
        return sympy.Pow(smaller(), draw(st.sampled_from([-2, -1, 2, 3])))
    if step == "divide":
        kind = draw(st.sampled_from(["int", "float"]))
        return _function(f"{kind}_true_div", smaller(kind), smaller(kind))
    if step == "opaque":
        return _function(draw(st.sampled_from(OPAQUE_FUNCTIONS)), smaller())
    if step == "extreme":
        return _function(draw(st.sampled_from(["max", "min"])), smaller(), smaller("int"), smaller())
    name = draw(st.sampled_from(_OTHER_FLOAT))
    if name == "to_float":
        return _function(name, smaller("int"))
    if name == "trunc_to_float":
        return _function(name, smaller())
    if name == "round_decimal":
        return _function(name, smaller(), sympy.Integer(draw(st.integers(0, 6))))
    if name == "float_pow":
        return _function(name, smaller(), smaller())
    if name == "where":
        return _function(name, smaller("bool"), smaller(), smaller("int"))
    return sympy.Mul(sympy.Rational(draw(st.integers(-7, 7)), draw(st.integers(2, 9))), smaller("int"))


def _boolean_steps(draw: st.DrawFn, depth: int) -> sympy.Basic:
    step = draw(st.sampled_from(["compare", "compare_mixed", "and", "or", "not"]))
    if step.startswith("compare"):
        kinds = ("int", "int") if step == "compare" else ("float", "int")
        left, right = (draw(_nodes(kind, depth - 1)) for kind in kinds)
        return compare(draw(st.sampled_from(sorted(RELATION_BY_OPERATOR))), left, right)
    count = 1 if step == "not" else draw(st.integers(2, 3))
    return _function(step, *(draw(_nodes("bool", depth - 1)) for _ in range(count)))


_STEPS = {"int": _integer_steps, "float": _float_steps, "bool": _boolean_steps}
_LEAVES = {
    "int": st.one_of(st.sampled_from(INTEGER_SYMBOLS).map(make_symbol), _INTEGERS.map(constant)),
    "float": st.one_of(st.sampled_from(FLOAT_SYMBOLS).map(make_symbol), _FLOATS.map(constant)),
    "bool": st.one_of(st.sampled_from(BOOLEAN_SYMBOLS).map(make_symbol), st.booleans().map(constant)),
}


@st.composite
def _nodes(draw: st.DrawFn, kind: str, depth: int) -> sympy.Basic:
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        return draw(_LEAVES[kind])
    return _STEPS[kind](draw, depth)


def _is_defined(expression: Expression) -> bool:
    """Whether sympy's folding met no undefined arithmetic on the way (0**-1, infinity minus infinity)."""
    if isinstance(expression, int):
        return True
    undefined = (sympy.zoo, sympy.nan, sympy.I)
    return not expression.has(*undefined) and all(node.is_commutative for node in expression.args)


@st.composite
def expressions(draw: st.DrawFn, kind: str = "int", depth: int = 3) -> Expression:
    """Canonical expressions built as a "int", "float" or "bool" one; a plain int where they fold to one.

    Folding by sympy can lose the float kind (`0.0*f0` is 0), so a "float" one may turn out an int.
    """
    node = draw(_nodes(kind, depth).filter(_is_defined))
    return canonicalize(node)


def any_expressions(depth: int = 3) -> st.SearchStrategy[Expression]:
    """Canonical expressions of every kind."""
    return st.sampled_from(["int", "float", "bool"]).flatmap(lambda kind: expressions(kind, depth))


def sizes(depth: int = 2) -> st.SearchStrategy[Expression]:
    """Canonical integer expressions."""
    return expressions("int", depth).filter(lambda size: expression_kind(size) == "int")


def environments() -> st.SearchStrategy[dict[str, Number]]:
    """A value for every symbol that `expressions` uses, negative integers and zero included."""
    values: dict[str, st.SearchStrategy[Number]] = {}
    for name in INTEGER_SYMBOLS:
        values[name] = st.one_of(st.integers(-9, 9), st.integers(1, 4096))
    for name in FLOAT_SYMBOLS:
        values[name] = st.one_of(st.sampled_from([0.5, -1.5, 2.5, 3.0]), st.floats(-100, 100))
    for name in BOOLEAN_SYMBOLS:
        values[name] = st.booleans()
    return st.fixed_dictionaries(values)
