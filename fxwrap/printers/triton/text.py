"""Names, sizes and indices of generated Triton kernels as text."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import sympy
from typing_extensions import assert_never

from fxwrap.loop_ir import Atom, Axis, FloorDivide, Gathered, Index, KernelError, Modulo, SizeAtom
from fxwrap.printers.triton.helpers import HELPERS
from fxwrap.symbolic import PythonPrinter, Size
from fxwrap.symbolic.printing import Precedence

_WORD = re.compile(r"[\w.]+(\([\w, .:]*\))?")
_RESERVED = frozenset({"tl", "triton", "libdevice", "kernel", *HELPERS, *dir(builtins), *keyword.kwlist})


def grouped(text: str) -> str:
    """Returns an expression in parentheses, unless it is a name, a number or a call."""
    return text if _WORD.fullmatch(text) else f"({text})"


def size_text(size: Size) -> str:
    """Returns a size as an expression over the kernel's numbers."""
    return str(size) if isinstance(size, int) else _SizePrinter().print(size)


class _SizePrinter(PythonPrinter):
    """Prints sizes for Triton, which has no powers, and whose integer division rounds towards zero, unlike Python's."""

    def power(self, base: sympy.Basic, exponent: int) -> tuple[str, Precedence]:
        if exponent < 1:
            raise KernelError(f"a kernel computes no {base}**{exponent}: a launch has to pass its value")
        return "*".join([self.operand(base, Precedence.UNARY)] * exponent), Precedence.MULTIPLY

    def _ceiling_division(self, base: sympy.Basic, divisor: sympy.Basic) -> tuple[str, Precedence]:
        return self.call("tl.cdiv", (base, divisor))


@dataclass
class Names:
    """Hands out names that are legal, readable and used once."""

    taken: set[str] = field(default_factory=lambda: set(_RESERVED))

    def new(self, wanted: str) -> str:
        """Returns the wanted name, made legal, with a number behind it where it is taken."""
        base = re.sub(r"\W", "_", wanted) or "value"
        base = f"_{base}" if base[0].isdigit() else base
        base = f"{base}_value" if base in _RESERVED else base
        name, number = base, 1
        while name in self.taken:
            number += 1
            name = f"{base}_{number}"
        self.taken.add(name)
        return name


@dataclass
class IndexText:
    """Prints indices; `value_of` gives the text of an operation that a gathered index names. `helpers` collects."""

    names: dict[Axis, str]
    value_of: Callable[[int], str]
    helpers: set[str]

    def __call__(self, index: Index) -> str:
        """Returns the index as an expression."""
        text = ""
        for monomial, coefficient in index.terms:
            factors = [self._atom(atom) for atom in monomial]
            if not factors or abs(coefficient) != 1:
                factors.append(str(abs(coefficient)))
            sign = "-" if coefficient < 0 else "+"
            term = " * ".join(factors)
            text = f"{text} {sign} {term}" if text else (f"-{term}" if sign == "-" else term)
        return text or "0"

    def _atom(self, atom: Atom) -> str:
        match atom:
            case Axis():
                return self.names[atom]
            case SizeAtom():
                return grouped(size_text(atom.expression))
            case Gathered():
                return grouped(self.value_of(atom.operation))
            case FloorDivide():
                return self._divided("//", "floor_quotient", atom)
            case Modulo():
                return self._divided("%", "floor_modulo", atom)
            case _:
                assert_never(atom)

    def _divided(self, sign: str, helper: str, atom: FloorDivide | Modulo) -> str:
        base, divisor = self(atom.base), self(atom.divisor)
        if atom.base.never_negative() or not _varies(atom.base):
            return f"({grouped(base)} {sign} {grouped(divisor)})"
        self.helpers.add(helper)
        return f"{helper}({base}, {divisor})"


def _varies(index: Index) -> bool:
    return any(isinstance(atom, Axis | Gathered) for atom in index.atoms())
