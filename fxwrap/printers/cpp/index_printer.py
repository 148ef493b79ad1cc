"""Index expressions as C++ text."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from typing_extensions import assert_never

from fxwrap.loop_ir import Atom, Axis, FloorDivide, Index, IndirectIndex, Modulo, SizeAtom
from fxwrap.symbolic import CppPrinter, Size

_NAME = re.compile(r"[\w:.]*(<[\w, ]*>)?")


def parenthesize(text: str) -> str:
    """Returns an expression in parentheses unless it is a name, a number, an element or a call."""
    rest = text[_NAME.match(text).end() :]  # type: ignore[union-attr]
    while rest and rest[0] in "([":
        depth = 0
        for position, letter in enumerate(rest):
            depth += (letter in "([") - (letter in ")]")
            if depth == 0:
                rest = rest[position + 1 :]
                break
    return f"({text})" if rest else text


def print_size(size: Size) -> str:
    """Returns a size as a C++ expression of type int64_t over the kernel's scalar parameters."""
    return str(size) if isinstance(size, int) else CppPrinter().print(size)


@dataclass(frozen=True, slots=True)
class CppIndexPrinter:
    """Prints indices. `value_of` returns the text of the operation that an indirect index names."""

    value_of: Callable[[int], str]

    def __call__(self, index: Index) -> str:
        """Returns the index as a C++ expression of type int64_t."""
        text = ""
        for monomial, coefficient in sorted(index.terms, key=lambda term: (not term[0], -abs(term[1]))):
            factors = [self._atom(atom) for atom in monomial]
            if not factors or abs(coefficient) != 1:
                factors.insert(0, str(abs(coefficient)))
            sign = "-" if coefficient < 0 else "+"
            term = " * ".join(factors)
            text = f"{text} {sign} {term}" if text else (f"-{term}" if sign == "-" else term)
        return text or "0"

    def _atom(self, atom: Atom) -> str:
        match atom:
            case Axis():
                return atom.name
            case SizeAtom():
                return parenthesize(print_size(atom.expression))
            case IndirectIndex():
                return parenthesize(self.value_of(atom.operation))
            case FloorDivide():
                return self._division("/", "fxwrap::floordiv", atom)
            case Modulo():
                return self._division("%", "fxwrap::mod", atom)
            case _:
                assert_never(atom)

    def _division(self, sign: str, function: str, atom: FloorDivide | Modulo) -> str:
        base, divisor = self(atom.base), self(atom.divisor)
        if atom.base.is_nonnegative():
            return f"({parenthesize(base)} {sign} {parenthesize(divisor)})"
        return f"{function}({base}, {divisor})"
