"""Expressions as Python source."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import sympy

from fxwrap.symbolic.functions import OPAQUE_FUNCTIONS, FunctionSpec
from fxwrap.symbolic.printing import ExpressionPrinter, Precedence, match_ceiling_division

PYTHON_IMPORTS = ("import math", "import operator")
"""The imports of `PythonPrinter`'s source."""

_CALLS = {
    "max": "max",
    "min": "min",
    "float_pow": "math.pow",
    "to_float": "float",
    "trunc_to_int": "math.trunc",
    "floor_to_int": "math.floor",
    "ceil_to_int": "math.ceil",
    "round_to_int": "round",
    **{name: f"math.{name}" for name in OPAQUE_FUNCTIONS},
}
_OPERATORS = {
    "floordiv": ("//", Precedence.MULTIPLY),
    "cleandiv": ("//", Precedence.MULTIPLY),
    "mod": ("%", Precedence.MULTIPLY),
    "python_mod": ("%", Precedence.MULTIPLY),
    "int_true_div": ("/", Precedence.MULTIPLY),
    "float_true_div": ("/", Precedence.MULTIPLY),
    "and": ("and", Precedence.AND),
    "or": ("or", Precedence.OR),
}
_BITWISE = {"bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^"}
_SPECIALS = {"true": "True", "false": "False", "inf": "math.inf", "int_inf": "math.inf", "nan": "math.nan"}


class PythonPrinter(ExpressionPrinter):
    """Prints expressions as Python source with the imports `PYTHON_IMPORTS`.

    Its value, type and errors equal those of `evaluate`.
    """

    def integer(self, value: int) -> str:
        return str(value)

    def real(self, value: float) -> str:
        return repr(value)

    def rational(self, value: Fraction) -> str:
        return f"{value.numerator} / {value.denominator}"

    def special(self, name: str) -> str:
        return _SPECIALS[name]

    def power(self, base: sympy.Basic, exponent: int) -> tuple[str, Precedence]:
        return f"{self.operand(base, Precedence.ATOM)}**{exponent}", Precedence.POWER

    def function(self, spec: FunctionSpec, operands: Sequence[sympy.Basic]) -> tuple[str, Precedence]:
        name = spec.name
        if name == "floordiv" and isinstance(operands[1], sympy.Integer):
            ceiling = match_ceiling_division(*operands)
            if ceiling is not None:
                return self._ceiling_division(ceiling, operands[1])
        if name in _CALLS:
            return self.call(_CALLS[name], operands)
        if name in _OPERATORS:
            return self._operator(*_OPERATORS[name], operands)
        if name in _BITWISE:
            return f"({self._joined(_BITWISE[name], operands, Precedence.UNARY)})", Precedence.ATOM
        return self._other(name, operands)

    def _other(self, name: str, operands: Sequence[sympy.Basic]) -> tuple[str, Precedence]:
        if name == "modular_indexing":
            base = self.operand(operands[0], Precedence.MULTIPLY)
            divisor, modulus = (self.operand(operand, Precedence.UNARY) for operand in operands[1:])
            return f"{base} // {divisor} % {modulus}", Precedence.MULTIPLY
        if name == "where":
            above = Precedence.OR
            condition, then = (self.operand(operand, above) for operand in operands[:2])
            return f"{then} if {condition} else {self.operand(operands[2], above)}", Precedence.CONDITIONAL
        if name == "not":
            return f"not {self.operand(operands[0], Precedence.NOT)}", Precedence.NOT
        if name == "pow_by_natural":
            base, exponent = (self.operand(operand, Precedence.ATOM) for operand in operands)
            return f"operator.index({base}**{exponent})", Precedence.ATOM
        if name == "trunc_to_float":
            return f"float(math.trunc({self.print(operands[0])}))", Precedence.ATOM
        if name == "round_decimal":
            return f"round(float({self.print(operands[0])}), {self.print(operands[1])})", Precedence.ATOM
        assert name == "identity", name
        return self._render(operands[0])

    def _operator(self, mark: str, precedence: Precedence, operands: Sequence[sympy.Basic]) -> tuple[str, Precedence]:
        """Prints a left-associative operator, whose right operands need a higher precedence."""
        left = self.operand(operands[0], precedence)
        rest = (self.operand(operand, Precedence(precedence + 1)) for operand in operands[1:])
        return f" {mark} ".join((left, *rest)), precedence

    def _joined(self, mark: str, operands: Sequence[sympy.Basic], least: Precedence) -> str:
        return f" {mark} ".join(self.operand(operand, least) for operand in operands)

    def _ceiling_division(self, base: sympy.Basic, divisor: sympy.Basic) -> tuple[str, Precedence]:
        negated = self.operand(sympy.Mul(-1, base), Precedence.MULTIPLY)
        return f"-({negated} // {self.operand(divisor, Precedence.UNARY)})", Precedence.UNARY
