"""Expressions in IR text: printer and parser."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import sympy
from sympy.logic.boolalg import Boolean, BooleanAtom, BooleanFunction

from fxwrap import torch_compat
from fxwrap.caching import bounded_cache
from fxwrap.errors import ExpressionError
from fxwrap.symbolic.canonicalize import unwrap
from fxwrap.symbolic.printing import ExpressionPrinter, Precedence, match_ceiling_division
from fxwrap.symbolic.symbols import (
    FUNCTION_BY_NAME,
    RELATION_BY_OPERATOR,
    Expression,
    FunctionSpec,
    Size,
    apply,
    ceiling_division,
    compare,
    constant,
    constant_value,
    expression_kind,
    make_symbol,
    power,
)
from fxwrap.symbolic.tokens import Token, TokenStream

_CONSTANTS: dict[str, sympy.Basic] = {
    "true": sympy.true,
    "false": sympy.false,
    "inf": sympy.oo,
    "int_inf": torch_compat.int_oo,
    "nan": sympy.nan,
}
_MAX_EXPONENT = 1024
_CONNECTIVES = frozenset(["and", "or", "not"])
_CONDITION_FUNCTIONS = frozenset(["where", "identity", "bitwise_and", "bitwise_or", "bitwise_xor"])
_CONTINUATIONS = frozenset(["+", "-", "*", "/", "**", "(", *RELATION_BY_OPERATOR])


class TextPrinter(ExpressionPrinter):
    """Prints expressions as IR text, which `parse_expr` parses to an equal expression."""

    def rational(self, value: Fraction) -> str:
        return f"{value.numerator}/{value.denominator}"

    def special(self, name: str) -> str:
        return name

    def function(self, spec: FunctionSpec, operands: Sequence[sympy.Basic]) -> tuple[str, Precedence]:
        if spec.name == "floordiv":
            ceiling = match_ceiling_division(*operands)
            if ceiling is not None:
                return self.call("ceildiv", (ceiling, operands[1]))
        return self.call(spec.name, operands)


_PRINTER = TextPrinter()


def print_expr(expression: Expression) -> str:
    """Returns the IR text of a canonical size or condition, such as `64*s0 + 3` or `ceildiv(n0, 1024)`.

    `parse_expr` parses it to an equal expression, with exact floats.
    """
    if type(expression) is int:
        return str(expression)
    return _print_cached(expression)


@bounded_cache(65536)
def _print_cached(expression: sympy.Basic) -> str:
    return _PRINTER.print(expression)


def parse_expr(text: str) -> Expression:
    """Returns the canonical expression of a text. Raises `ParseError` with line and column."""
    stream = TokenStream(text)
    expression = read_expr(stream)
    stream.expect("end")
    return expression


def read_expr(stream: TokenStream) -> Expression:
    """Parses the longest size or condition at the stream's position. Raises `ParseError`."""
    atom = _read_lone_atom(stream)
    return atom if atom is not None else unwrap(_comparison(stream))


def read_size(stream: TokenStream) -> Size:
    """Parses the longest size, but no comparison marks (`<`, `>`, ...). Raises `ParseError`."""
    token, atom = stream.peek(), _read_lone_atom(stream)
    size = atom if atom is not None else unwrap(_sum(stream))
    if isinstance(size, bool | BooleanAtom | BooleanFunction):
        raise stream.error("expected a size, found a condition", token)
    return size


def _read_lone_atom(stream: TokenStream) -> Expression | None:
    """Returns an integer or symbol that no operator follows; most sizes are, so it needs no recursion."""
    token = stream.peek()
    if token.kind == "number":
        if token.text.isdigit() and stream.peek(1).kind not in _CONTINUATIONS:
            stream.next()
            return int(token.text)
    elif token.kind == "name" and stream.peek(1).kind not in _CONTINUATIONS:
        stream.next()
        return _named(stream, token)
    return None


def _comparison(stream: TokenStream) -> sympy.Basic:
    left = _sum(stream)
    mark = stream.peek().kind
    if mark not in RELATION_BY_OPERATOR:
        return left
    stream.next()
    return compare(mark, left, _sum(stream))


def _sum(stream: TokenStream) -> sympy.Basic:
    start = stream.peek()
    terms = [_product(stream, [])]
    while True:
        if stream.accept("+"):
            terms.append(_product(stream, []))
        elif stream.accept("-"):
            terms.append(_product(stream, [sympy.S.NegativeOne]))
        elif len(terms) == 1:
            return terms[0]
        else:
            return sympy.Add(*_numbers(stream, terms, start))


def _product(stream: TokenStream, signs: list[sympy.Basic]) -> sympy.Basic:
    start = stream.peek()
    factors = [*signs, *_factor(stream)]
    while True:
        if stream.accept("*"):
            factors.extend(_factor(stream))
        elif stream.at("/"):
            mark = stream.next()
            factors.extend(_reciprocal(stream, _factor(stream), mark))
        elif len(factors) == 1:
            return factors[0]
        else:
            return sympy.Mul(*_numbers(stream, factors, start))


def _reciprocal(stream: TokenStream, factors: list[sympy.Basic], mark: Token) -> list[sympy.Basic]:
    *signs, divisor = _numbers(stream, factors, mark)
    if constant_value(divisor) == 0:
        raise stream.error("division by the constant zero", mark)
    return [*signs, sympy.Pow(divisor, -1)]


def _factor(stream: TokenStream) -> list[sympy.Basic]:
    """Parses a power, with a -1 for each leading minus, so that a product is built in one step."""
    if stream.accept("-"):
        return [sympy.S.NegativeOne, *_factor(stream)]
    start = stream.peek()
    base = _atom(stream)
    if not stream.accept("**"):
        return [base]
    exponent = sympy.Mul(*_numbers(stream, _factor(stream), start))
    _numbers(stream, [base], start)
    if constant_value(base) == 0 and exponent.is_negative:
        raise stream.error("negative power of the constant zero", start)
    if isinstance(exponent, sympy.Integer) and abs(exponent) > _MAX_EXPONENT:
        raise stream.error(f"an exponent above {_MAX_EXPONENT}", start)
    return [power(base, exponent)]


def _numbers(stream: TokenStream, operands: list[sympy.Basic], start: Token) -> list[sympy.Basic]:
    """Returns the operands of an arithmetic operator. Raises `ParseError` for a condition."""
    for operand in operands:
        if isinstance(operand, Boolean) and not isinstance(operand, sympy.Symbol):
            raise stream.error(f"'{_print_cached(operand)}' is a condition, not a number", start)
    return operands


def _atom(stream: TokenStream) -> sympy.Basic:
    token = stream.peek()
    if token.kind == "number":
        stream.next()
        return constant(int(token.text) if token.text.isdigit() else float(token.text))
    if token.kind == "(":
        stream.next()
        inner = _comparison(stream)
        stream.expect(")")
        return inner
    if token.kind != "name":
        raise stream.error(f"expected an expression, found {token.describe()}")
    stream.next()
    return _call(stream, token) if stream.at("(") else _named(stream, token)


def _named(stream: TokenStream, token: Token) -> sympy.Basic:
    named_constant = _CONSTANTS.get(token.text)
    if named_constant is not None:
        return named_constant
    try:
        return make_symbol(token.text)
    except ExpressionError as error:
        raise stream.error(str(error), token) from None


def _call(stream: TokenStream, name: Token) -> sympy.Basic:
    spec = FUNCTION_BY_NAME.get(name.text)
    if spec is None and name.text != "ceildiv":
        known = ", ".join(sorted([*FUNCTION_BY_NAME, "ceildiv"]))
        raise stream.error(f"unknown function '{name.text}'; known: {known}", name)
    operands = _operands(stream)
    arity = 2 if spec is None else spec.arity
    if not operands or (arity is not None and len(operands) != arity):
        arity_text = "at least 1 operand" if arity is None else f"{arity} operand{'s' if arity > 1 else ''}"
        raise stream.error(f"{name.text} takes {arity_text}, not {len(operands)}", name)
    if spec is None:
        return ceiling_division(*_numbers(stream, operands, name))
    if spec.name in _CONNECTIVES:
        for operand in operands:
            if expression_kind(operand) != "bool":
                raise stream.error(f"{name.text} takes conditions, not '{print_expr(operand)}'", name)
    elif spec.name not in _CONDITION_FUNCTIONS:
        _numbers(stream, operands, name)
    try:
        return apply(spec, operands)
    except ExpressionError as error:
        raise stream.error(str(error), name) from None


def _operands(stream: TokenStream) -> list[sympy.Basic]:
    stream.expect("(")
    operands: list[sympy.Basic] = []
    while not stream.at(")"):
        operands.append(_comparison(stream))
        if not stream.accept(","):
            break
    stream.expect(")")
    return operands
