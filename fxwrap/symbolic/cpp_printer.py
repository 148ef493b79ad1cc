"""Expressions as C++ source, and the helper functions that it calls."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from pathlib import Path

import sympy

from fxwrap.symbolic.printing import ExpressionPrinter, Precedence, match_ceiling_division
from fxwrap.symbolic.symbols import OPAQUE_FUNCTIONS, FunctionSpec, expression_kind

_INTEGER_CALLS = {
    "floordiv": "fxwrap::floordiv",
    "cleandiv": "fxwrap::floordiv",
    "mod": "fxwrap::mod",
    "python_mod": "fxwrap::mod",
    "modular_indexing": "fxwrap::modular_indexing",
    "pow_by_natural": "fxwrap::natural_power",
}
_FLOAT_CALLS = {
    "int_true_div": "fxwrap::truediv",
    "float_true_div": "fxwrap::truediv",
    "float_pow": "fxwrap::power",
    "trunc_to_float": "fxwrap::trunc",
    **{name: f"fxwrap::{name}" for name in OPAQUE_FUNCTIONS},
}
_ROUNDINGS = {
    "trunc_to_int": "fxwrap::trunc",
    "floor_to_int": "fxwrap::floor",
    "ceil_to_int": "fxwrap::ceil",
    "round_to_int": "fxwrap::nearbyint",
}
_OPERATORS = {"and": ("&&", Precedence.AND), "or": ("||", Precedence.OR)}
_BITWISE = {"bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^"}
_SPECIALS = {
    "true": "true",
    "false": "false",
    "inf": "fxwrap::infinity",
    "int_inf": "INT64_MAX",
    "nan": "fxwrap::not_a_number",
}


@cache
def cpp_prelude() -> str:
    """Returns the includes and helper functions (namespace `fxwrap`) of `CppPrinter`'s source: `expressions.h`."""
    return Path(__file__).with_name("expressions.h").read_text(encoding="utf-8")


class CppPrinter(ExpressionPrinter):
    """Prints expressions as C++17 over `int64_t`, `double` and `bool` variables, below `cpp_prelude()`.

    Integer division has Python's floor semantics; integers must fit 64 bits. Division by zero throws a `KernelFailure`
    of the kind ZeroDivisionError, a float too large for an integer one of the kind OverflowError. Integers that are
    combined with a float are rounded to double, which above 2**53 can differ from Python's exact comparison and
    division.
    """

    def integer(self, value: int) -> str:
        if value == -(2**63):
            return "INT64_MIN"
        return f"INT64_C({value})" if abs(value) >= 2**31 else str(value)

    def real(self, value: float) -> str:
        return repr(value)

    def rational(self, value: Fraction) -> str:
        return f"{value.numerator}.0 / {value.denominator}.0"

    def special(self, name: str) -> str:
        return _SPECIALS[name]

    def power(self, base: sympy.Basic, exponent: int) -> tuple[str, Precedence]:
        if expression_kind(base) != "float" and exponent >= 0:
            return f"fxwrap::natural_power({self.print(base)}, {exponent})", Precedence.ATOM
        return f"fxwrap::power({self.print(base)}, {exponent})", Precedence.ATOM

    def function(self, spec: FunctionSpec, operands: Sequence[sympy.Basic]) -> tuple[str, Precedence]:
        name = spec.name
        if name == "floordiv" and isinstance(operands[1], sympy.Integer):
            ceiling = match_ceiling_division(*operands)
            if ceiling is not None:
                return self.call("fxwrap::ceildiv", (ceiling, operands[1]))
        if name in _INTEGER_CALLS:
            return self.call(_INTEGER_CALLS[name], operands)
        if name in _FLOAT_CALLS:
            texts = ", ".join(self._as_double(operand) for operand in operands)
            return f"{_FLOAT_CALLS[name]}({texts})", Precedence.ATOM
        if name in _ROUNDINGS:
            if expression_kind(operands[0]) != "float":
                return self._render(operands[0])
            return f"fxwrap::to_int({_ROUNDINGS[name]}({self.print(operands[0])}))", Precedence.ATOM
        if name in ("max", "min"):
            return self._extreme(f"fxwrap::{name}", operands)
        if name in _OPERATORS:
            mark, precedence = _OPERATORS[name]
            least = Precedence(precedence + 1)
            return f" {mark} ".join(self.operand(operand, least) for operand in operands), precedence
        return self._other(name, operands)

    def _other(self, name: str, operands: Sequence[sympy.Basic]) -> tuple[str, Precedence]:
        if name in _BITWISE:
            left, right = (self.operand(operand, Precedence.UNARY) for operand in operands)
            return f"({left} {_BITWISE[name]} {right})", Precedence.ATOM
        if name == "to_float":
            return self._as_double(operands[0]), Precedence.ATOM
        if name == "round_decimal":
            number, digits = self._as_double(operands[0]), self.print(operands[1])
            return f"fxwrap::round_decimal({number}, {digits})", Precedence.ATOM
        if name == "where":
            condition, then, otherwise = (self.operand(operand, Precedence.OR) for operand in operands)
            return f"{condition} ? {then} : {otherwise}", Precedence.CONDITIONAL
        if name == "not":
            return f"!{self.operand(operands[0], Precedence.ATOM)}", Precedence.UNARY
        assert name == "identity", name
        return self._render(operands[0])

    def _extreme(self, helper: str, operands: Sequence[sympy.Basic]) -> tuple[str, Precedence]:
        floating = any(expression_kind(operand) == "float" for operand in operands)
        text = ""
        for operand in operands:
            part = self._as_double(operand) if floating else self.print(operand)
            text = f"{helper}<{'double' if floating else 'int64_t'}>({text}, {part})" if text else part
        return text, Precedence.ATOM

    def _as_double(self, node: sympy.Basic) -> str:
        text = self.print(node)
        return text if expression_kind(node) == "float" else f"static_cast<double>({text})"
