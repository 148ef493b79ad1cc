"""The text of a Triton kernel by parts."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import sympy
from typing_extensions import assert_never

from fxwrap.devices.kernel_names import make_function_name
from fxwrap.loop_ir import Atom, Axis, FloorDivide, Index, IndirectIndex, KernelError, Modulo, SizeAtom
from fxwrap.printers.printed_kernel import PrintedKernel
from fxwrap.printers.triton.helpers import HELPERS, helper_sources
from fxwrap.symbolic import PythonPrinter, Size
from fxwrap.symbolic.printing import Precedence

MAX_SLOT_VALUE = 2**31 - 1
"""Largest integer of index arithmetic that may be a variable: variables are int32."""


@dataclass
class IntegerSlots:
    """Prints integers of index arithmetic as numbered slots, and records their values."""

    values: list[int] = field(default_factory=list)

    def __call__(self, value: int) -> str:
        if value > MAX_SLOT_VALUE:
            return str(value)
        self.values.append(value)
        return f"#{len(self.values)}"  # no text of a kernel that is combined has a name or a literal like this


@dataclass(frozen=True)
class BodyParameters:
    """The parts of a kernel's body that a combo kernel replaces.

    Fields: `integer` prints an integer constant of index arithmetic; `program` is the index of the program within its
    launch; `comments` are the origin comments to print, None for all.
    """

    integer: Callable[[int], str] = str
    program: str = "tl.program_id(0)"
    comments: frozenset[str] | None = None

    @property
    def is_combined(self) -> bool:
        """Whether integers may differ between the kernels of a combo kernel."""
        return self.integer is not str


@dataclass(frozen=True)
class TritonKernelText:
    """The text of a Triton kernel by parts.

    Fields: `helpers` are the helper functions that it calls; `parameters` are those that a launch passes, with their
    types in `signature`; `constants` are compile-time parameters, with their values among `options`; `names` are all
    names that the body uses or must not redefine; `functions` are the definitions of the other functions that it calls.
    """

    helpers: frozenset[str]
    parameters: tuple[str, ...]
    constants: tuple[str, ...]
    body: str
    signature: tuple[str, ...]
    options: tuple[tuple[str, str | int | float | bool], ...]
    num_programs: Size
    names: frozenset[str] = field(compare=False, repr=False)
    functions: tuple[str, ...] = ()

    @property
    def head(self) -> str:
        """The text before the function's name: imports, and the functions that it calls."""
        functions = "".join([f"{text}\n\n\n" for text in (*helper_sources(self.helpers), *self.functions)])
        library = "from triton.language.extra import libdevice\n" if "libdevice." in functions + self.body else ""
        return f"import triton\nimport triton.language as tl\n{library}\n\n{functions}@triton.jit\n"

    def printed(self, name: str) -> PrintedKernel:
        """Returns the kernel with a function that is named after what it computes and after its content."""
        function = f"({', '.join([*self.parameters, *self.constants])}):\n{self.body}"
        source = f"{self.head}def {make_function_name(name, f'{function}{self.options}')}{function}"
        return PrintedKernel("triton", source, self.signature, self.options, (self.num_programs, 1, 1))


def comment_lines(origin: str) -> list[str]:
    """Returns the comment lines that show an operation's origin."""
    return [" ".join(line.split()) for line in origin.splitlines()]


_WORD = re.compile(r"[\w.]+(\([\w, .:]*\))?")
RESERVED_WORDS = frozenset({"tl", "triton", "libdevice", "kernel", *HELPERS, *dir(builtins), *keyword.kwlist})


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
class TritonIndexPrinter:
    """Prints indices and sizes as expressions.

    Fields: `names` of the axes; `value_of` returns the text of the operation that an indirect index names; `helpers`
    collects the helper functions in use; `integer` prints constants.
    """

    names: Mapping[Axis, str]
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
                return self._rotation(atom) or self._division("%", "floor_modulo", atom)
            case _:
                assert_never(atom)

    def _rotation(self, atom: Modulo) -> str:
        """Returns a remainder of less than twice the divisor, as in a roll, without a division; "" for others."""
        limits, divisor = atom.base.bounds(), atom.divisor.constant
        highest = None if limits is None or not atom.base.is_nonnegative() else limits[1].constant
        if divisor is None or highest is None or highest >= 2 * divisor:
            return ""
        base, rest = self(atom.base), self(atom.base - divisor)
        return f"tl.where({base} < {self.integer(divisor)}, {base}, {rest})"

    def _division(self, sign: str, helper: str, atom: FloorDivide | Modulo) -> str:
        base, divisor = self(atom.base), self(atom.divisor)
        if atom.base.is_nonnegative():
            return f"({parenthesize(base)} {sign} {parenthesize(divisor)})"
        self.helpers.add(helper)
        return f"{helper}({base}, {divisor})"
