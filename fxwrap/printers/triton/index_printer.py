"""Names, sizes and indices of Triton kernels as text."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import sympy
from typing_extensions import assert_never

from fxwrap.loop_ir import Atom, Axis, FloorDivide, Index, IndirectIndex, KernelError, Modulo, SizeAtom
from fxwrap.printers.triton.helpers import HELPERS
from fxwrap.symbolic import PythonPrinter, Size
from fxwrap.symbolic.printing import Precedence

_WORD = re.compile(r"[\w.]+(\([\w, .:]*\))?")
_RESERVED = frozenset({"tl", "triton", "libdevice", "kernel", *HELPERS, *dir(builtins), *keyword.kwlist})


def parenthesize(text: str) -> str:
    """Returns an expression in parentheses unless it is a name, a number or a call."""
    return text if _WORD.fullmatch(text) else f"({text})"


class _SizePrinter(PythonPrinter):
    """Prints sizes for Triton, which has no powers, and whose integer division rounds towards zero."""

    def power(self, base: sympy.Basic, exponent: int) -> tuple[str, Precedence]:
        if exponent < 1:
            raise KernelError(
                f"Triton has no form of {base}**{exponent} in an index; pass its value as a launch argument"
            )
        return "*".join([self.operand(base, Precedence.UNARY)] * exponent), Precedence.MULTIPLY

    def _ceiling_division(self, base: sympy.Basic, divisor: sympy.Basic) -> tuple[str, Precedence]:
        return self.call("tl.cdiv", (base, divisor))


@dataclass
class NameAllocator:
    """Creates legal, readable and unique names."""

    used: set[str] = field(default_factory=lambda: set(_RESERVED))

    def create_name(self, wanted: str) -> str:
        """Returns a legal form of a name, with a numeric suffix if the name is in use."""
        base = re.sub(r"\W", "_", wanted) or "value"
        base = f"_{base}" if base[0].isdigit() else base
        base = f"{base}_value" if base in _RESERVED else base
        name, number = base, 1
        while name in self.used:
            number += 1
            name = f"{base}_{number}"
        self.used.add(name)
        return name


@dataclass
class TritonIndexPrinter:
    """Prints indices and sizes as expressions.

    Fields: `names` of the axes; `value_of` returns the text of the operation that an indirect index names; `helpers`
    collects the helper functions in use; `integer` prints constants.
    """

    names: dict[Axis, str]
    value_of: Callable[[int], str]
    helpers: set[str]
    integer: Callable[[int], str] = str

    def __call__(self, index: Index) -> str:
        """Returns an index as an expression."""
        text = ""
        for monomial, coefficient in index.terms:
            factors = [self._atom(atom) for atom in monomial]
            if not factors or abs(coefficient) != 1:
                factors.append(self.integer(abs(coefficient)))
            sign = "-" if coefficient < 0 else "+"
            term = " * ".join(factors)
            text = f"{text} {sign} {term}" if text else (f"-{term}" if sign == "-" else term)
        return text or "0"

    def size(self, size: Size) -> str:
        """Returns a size as an expression over the kernel's scalar parameters."""
        return self.integer(size) if isinstance(size, int) else _SizePrinter().print(size)

    def size_operand(self, size: Size) -> str:
        """Returns a size as an operand of another operation."""
        return parenthesize(self.size(size))

    def _atom(self, atom: Atom) -> str:
        match atom:
            case Axis():
                return self.names[atom]
            case SizeAtom():
                return self.size_operand(atom.expression)
            case IndirectIndex():
                return parenthesize(self.value_of(atom.operation))
            case FloorDivide():
                return self._division("//", "floor_quotient", atom)
            case Modulo():
                return self._division("%", "floor_modulo", atom)
            case _:
                assert_never(atom)

    def _division(self, sign: str, helper: str, atom: FloorDivide | Modulo) -> str:
        base, divisor = self(atom.base), self(atom.divisor)
        varies = any(isinstance(inner, Axis | IndirectIndex) for inner in atom.base.atoms())
        if atom.base.is_nonnegative() or not varies:
            return f"({parenthesize(base)} {sign} {parenthesize(divisor)})"
        self.helpers.add(helper)
        return f"{helper}({base}, {divisor})"
