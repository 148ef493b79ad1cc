"""The base class of expression printers: operators, their order and their parentheses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from fractions import Fraction

import sympy

from fxwrap import torch_compat
from fxwrap.errors import ExpressionError
from fxwrap.symbolic.symbols import FUNCTION_BY_CLASS, OPAQUE_FUNCTIONS, RELATION_BY_CLASS, Expression, FunctionSpec


class Precedence(IntEnum):
    """The precedence of the outermost operator of a printed expression."""

    CONDITIONAL = 0
    OR = 1
    AND = 2
    NOT = 3
    COMPARE = 4
    ADD = 5
    MULTIPLY = 6
    UNARY = 7
    POWER = 8
    ATOM = 9


def ordered_terms(node: sympy.Add) -> tuple[sympy.Basic, ...]:
    """Returns the terms of a sum in the order of printers and the evaluator: the constant last."""
    first, *others = node.args
    return (*others, first) if isinstance(first, sympy.Number) else node.args


def match_ceiling_division(base: sympy.Basic, divisor: sympy.Basic) -> sympy.Basic | None:
    """Returns x if floordiv(base, divisor) is torch's form of ceil(x / divisor), base = x + divisor - 1, else None."""
    if not isinstance(base, sympy.Add):
        return None
    if isinstance(divisor, sympy.Integer) and divisor > 1 and divisor - 1 in base.args:
        removed: tuple[sympy.Basic, ...] = (divisor - 1,)
    elif isinstance(divisor, sympy.Symbol) and divisor in base.args and sympy.S.NegativeOne in base.args:
        removed = (divisor, sympy.S.NegativeOne)
    else:
        return None
    rest = [argument for argument in base.args if argument not in removed]
    return sympy.Add(*rest) if rest else None


class ExpressionPrinter(ABC):
    """Prints canonical expressions in one language. `names` replaces the names of symbols."""

    def __init__(self, names: Mapping[str, str] | None = None) -> None:
        self._names = {} if names is None else names

    def print(self, expression: Expression) -> str:
        """Returns the text of a size or condition. Raises `ExpressionError` for a node that is not canonical."""
        if type(expression) is int:
            return self.integer(expression)
        return self._render(expression)[0]

    def integer(self, value: int) -> str:
        """An integer constant; negative ones begin with '-'."""
        return str(value)

    def real(self, value: float) -> str:
        """A finite float constant; negative ones begin with '-'."""
        return repr(value)

    @abstractmethod
    def rational(self, value: Fraction) -> str:
        """A positive rational constant that is not an integer, as a quotient."""

    @abstractmethod
    def special(self, name: str) -> str:
        """One of `true`, `false`, `inf`, `int_inf`, `nan`."""

    def power(self, base: sympy.Basic, exponent: int) -> tuple[str, Precedence]:
        """A power with a constant integer exponent."""
        return f"{self.operand(base, Precedence.ATOM)}**{exponent}", Precedence.POWER

    @abstractmethod
    def function(self, spec: FunctionSpec, operands: Sequence[sympy.Basic]) -> tuple[str, Precedence]:
        """A function of the table `FUNCTIONS` on its operands."""

    def operand(self, node: sympy.Basic, least: Precedence) -> str:
        """Returns the text of a subexpression, in parentheses if its precedence is below `least`."""
        text, precedence = self._render(node)
        return text if precedence >= least else f"({text})"

    def call(self, name: str, operands: Sequence[sympy.Basic]) -> tuple[str, Precedence]:
        """Returns the text `name(operands)`."""
        return f"{name}({', '.join(self._render(operand)[0] for operand in operands)})", Precedence.ATOM

    def _render(self, node: sympy.Basic) -> tuple[str, Precedence]:
        node_class = type(node)
        if node_class is sympy.Symbol:
            return self._names.get(node.name, node.name), Precedence.ATOM
        if isinstance(node, sympy.Number) or node is sympy.true or node is sympy.false:
            return self._constant(node)
        if node_class is sympy.Add:
            return self._sum(node), Precedence.ADD
        if node_class is sympy.Mul:
            negative, text = self._signed(node)
            return ("-" if negative else "") + text, Precedence.MULTIPLY
        if node_class is sympy.Pow:
            base, exponent = node.args
            return self.power(base, int(exponent))
        relation = RELATION_BY_CLASS.get(node_class)
        if relation is not None:
            left, right = (self.operand(side, Precedence.ADD) for side in node.args)
            return f"{left} {relation.mark} {right}", Precedence.COMPARE
        spec = FUNCTION_BY_CLASS.get(node_class)
        if spec is None:
            raise ExpressionError(f"the expression language has no {node_class.__name__} (in {node})")
        return self.function(spec, node.args)

    def _constant(self, node: sympy.Basic) -> tuple[str, Precedence]:
        if node in _SPECIALS:
            return self.special(_SPECIALS[node]), Precedence.ATOM
        negative, magnitude = _split_sign(node)
        if magnitude in _SPECIALS:
            text, precedence = self.special(_SPECIALS[magnitude]), Precedence.ATOM
        elif isinstance(node, sympy.Integer | sympy.Float):
            text = self.integer(int(node)) if isinstance(node, sympy.Integer) else self.real(float(node))
            return text, Precedence.UNARY if negative else Precedence.ATOM
        else:
            text, precedence = self.rational(Fraction(magnitude.p, magnitude.q)), Precedence.MULTIPLY
        if not negative:
            return text, precedence
        return f"-{text}", min(precedence, Precedence.UNARY)

    def _sum(self, node: sympy.Add) -> str:
        text = ""
        for term in ordered_terms(node):
            negative, magnitude = self._signed(term)
            if not text:
                text = f"-{magnitude}" if negative else magnitude
            else:
                text += f" {'-' if negative else '+'} {magnitude}"
        return text

    def _signed(self, term: sympy.Basic) -> tuple[bool, str]:
        """Returns whether a term of a sum is negative, and the text of its magnitude."""
        if isinstance(term, sympy.Mul):
            return self._product(term)
        if isinstance(term, sympy.Number):
            negative, magnitude = _split_sign(term)
            return negative, self.operand(magnitude, Precedence.MULTIPLY)
        return False, self.operand(term, Precedence.MULTIPLY)

    def _product(self, node: sympy.Mul) -> tuple[bool, str]:
        factors: Iterator[sympy.Basic] = iter(node.args)
        first = next(factors)
        texts: list[str] = []
        negative = False
        if isinstance(first, sympy.Number):
            negative, magnitude = _split_sign(first)
            if magnitude is not sympy.S.One:
                texts.append(self.operand(magnitude, Precedence.MULTIPLY))
        else:
            texts.append(self.operand(first, Precedence.MULTIPLY))
        for factor in factors:
            texts.append(self.operand(factor, Precedence.UNARY))
        return negative, "*".join(texts)


_SPECIALS: dict[sympy.Basic, str] = {
    sympy.true: "true",
    sympy.false: "false",
    sympy.oo: "inf",
    torch_compat.int_oo: "int_inf",
    sympy.nan: "nan",
}


def _split_sign(number: sympy.Number) -> tuple[bool, sympy.Number]:
    negative = number in (-sympy.oo, -torch_compat.int_oo) or bool(number.is_negative)
    return negative, -number if negative else number


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
_PYTHON_SPECIALS = {"true": "True", "false": "False", "inf": "math.inf", "int_inf": "math.inf", "nan": "math.nan"}


class PythonPrinter(ExpressionPrinter):
    """Prints expressions as Python source with the imports `PYTHON_IMPORTS`.

    Its value, type and errors equal those of `evaluate`.
    """

    def rational(self, value: Fraction) -> str:
        return f"{value.numerator} / {value.denominator}"

    def special(self, name: str) -> str:
        return _PYTHON_SPECIALS[name]

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
            texts = [self.operand(operand, Precedence.UNARY) for operand in operands]
            return f"({f' {_BITWISE[name]} '.join(texts)})", Precedence.ATOM
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

    def _ceiling_division(self, base: sympy.Basic, divisor: sympy.Basic) -> tuple[str, Precedence]:
        negated = self.operand(sympy.Mul(-1, base), Precedence.MULTIPLY)
        return f"-({negated} // {self.operand(divisor, Precedence.UNARY)})", Precedence.UNARY
