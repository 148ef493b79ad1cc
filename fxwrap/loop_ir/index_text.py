"""Index expressions as text, and back: each term and atom as it is, without simplification."""

from __future__ import annotations

import re
from collections.abc import Mapping

import sympy
from typing_extensions import assert_never

from fxwrap.errors import ParseError
from fxwrap.loop_ir.atoms import Axis, IndirectIndex, SizeAtom
from fxwrap.loop_ir.index import Atom, FloorDivide, Index, Modulo, Monomial
from fxwrap.symbolic import Size, parse_expr, print_expr


def print_index(index: Index) -> str:
    """Returns the text of an index, which `parse_index` parses to an equal one: `4*p0 + (%3<7>)//2`."""
    return " + ".join([_term_text(*term) for term in index.terms]).replace("+ -", "- ") or "0"


def _term_text(monomial: Monomial, coefficient: int) -> str:
    atoms = "*".join(map(_atom_text, monomial))
    if not atoms:
        return str(coefficient)
    return atoms if coefficient == 1 else f"-{atoms}" if coefficient == -1 else f"{coefficient}*{atoms}"


def _atom_text(atom: Atom) -> str:
    match atom:
        case Axis():
            return atom.name
        case SizeAtom():
            return print_expr(atom.expression)
        case IndirectIndex():
            return f"%{atom.operation}<{print_expr(atom.size)}>"
        case FloorDivide():
            return f"({print_index(atom.base)})//({print_index(atom.divisor)})"
        case Modulo():
            return f"({print_index(atom.base)})%({print_index(atom.divisor)})"
        case _:
            assert_never(atom)


def parse_index(text: str, axes: Mapping[str, Axis]) -> Index:
    """Returns the index of a text. Names are those of axes, else of symbols. Raises ParseError."""
    parser = _IndexParser(text, axes)
    index = parser.index()
    if parser.position < len(text):
        raise parser.error("expected the end of the index")
    return index


def parse_size(text: str) -> Size:
    """Returns the size of a text. Raises ParseError."""
    size = parse_expr(text)
    if isinstance(size, int | sympy.Expr):
        return size
    raise ParseError(f"'{text}' is a condition, not a size", 1, 1, text)


_NUMBER, _NAME, _INDIRECT = re.compile(r"\d+"), re.compile(r"[A-Za-z_]\w*"), re.compile(r"%(\d+)<")


class _IndexParser:
    def __init__(self, text: str, axes: Mapping[str, Axis]) -> None:
        self.text = text
        self.axes = axes
        self.position = 0

    def error(self, reason: str) -> ParseError:
        return ParseError(reason, 1, self.position + 1, self.text)

    def index(self) -> Index:
        terms: list[tuple[Monomial, int]] = []
        sign = -1 if self._accept("-") else 1
        while True:
            terms.append(self._term(sign))
            if self._accept(" + "):
                sign = 1
            elif self._accept(" - "):
                sign = -1
            else:
                return Index(tuple([term for term in terms if term[1]]))

    def _term(self, coefficient: int) -> tuple[Monomial, int]:
        atoms: list[Atom] = []
        while True:
            number = self._match(_NUMBER) if not atoms else None
            if number is not None:
                coefficient *= int(number[0])
            else:
                atoms.append(self._atom())
            if not self._accept("*"):
                return tuple(atoms), coefficient

    def _atom(self) -> Atom:
        indirect = self._match(_INDIRECT)
        if indirect is not None:
            return IndirectIndex(int(indirect[1]), parse_size(self._until(">")))
        if self._accept("("):
            base = self._rest_of_parentheses()
            atom = FloorDivide if self._accept("//") else Modulo
            if atom is Modulo:
                self._expect("%")
            self._expect("(")
            return atom(base, self._rest_of_parentheses())
        start, name = self.position, self._match(_NAME)
        if name is None:
            raise self.error("expected an axis, a size, '%' or '('")
        if name[0] in self.axes:
            return self.axes[name[0]]
        if self._accept("("):
            self._until(")")
        return SizeAtom(sympy.sympify(parse_size(self.text[start : self.position])))

    def _rest_of_parentheses(self) -> Index:
        index = self.index()
        self._expect(")")
        return index

    def _until(self, mark: str) -> str:
        """Returns the text before a mark outside of parentheses, and moves behind it."""
        start, depth = self.position, 0
        for position in range(start, len(self.text)):
            letter = self.text[position]
            if letter == mark and depth == 0:
                self.position = position + 1
                return self.text[start:position]
            depth += {"(": 1, ")": -1}.get(letter, 0)
        raise self.error(f"there is no '{mark}'")

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.match(self.text, self.position)
        if match is not None:
            self.position = match.end()
        return match

    def _accept(self, mark: str) -> bool:
        if not self.text.startswith(mark, self.position):
            return False
        self.position += len(mark)
        return True

    def _expect(self, mark: str) -> None:
        if not self._accept(mark):
            raise self.error(f"expected '{mark}'")
