"""Index expressions as C++ text."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from typing_extensions import assert_never

from fxwrap.loop_ir import Atom, Axis, FloorDivide, Gathered, Index, Modulo, SizeAtom
from fxwrap.symbolic import CppPrinter, Size

_NAME = re.compile(r"[\w:.]*(<[\w, ]*>)?")


def grouped(text: str) -> str:
    """Returns an expression in parentheses, unless it is a name, a number, an element or a call."""
    rest = text[_NAME.match(text).end() :]  # type: ignore[union-attr]
    while rest and rest[0] in "([":
        depth = 0
        for place, letter in enumerate(rest):
            depth += (letter in "([") - (letter in ")]")
            if depth == 0:
                rest = rest[place + 1 :]
                break
    return f"({text})" if rest else text


def size_text(size: Size) -> str:
    """Returns a size as a C++ expression of type int64_t over the kernel's numbers."""
    return str(size) if isinstance(size, int) else CppPrinter().print(size)


@dataclass(frozen=True, slots=True)
class IndexText:
    """Prints indices. `value_of` gives the text of an operation that a gathered index names."""

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
                return grouped(size_text(atom.expression))
            case Gathered():
                return grouped(self.value_of(atom.operation))
            case FloorDivide():
                return self._divided("/", "fxwrap::floordiv", atom)
            case Modulo():
                return self._divided("%", "fxwrap::mod", atom)
            case _:
                assert_never(atom)

    def _divided(self, sign: str, function: str, atom: FloorDivide | Modulo) -> str:
        base, divisor = self(atom.base), self(atom.divisor)
        if atom.base.never_negative():
            return f"({grouped(base)} {sign} {grouped(divisor)})"
        return f"{function}({base}, {divisor})"
