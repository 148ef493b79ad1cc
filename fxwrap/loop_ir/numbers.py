"""Numbers that a launch computes: a kernel that has sizes like `s0//2` gets their values, not the formula."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import sympy

from fxwrap.loop_ir.index import Atom, Axis, FloorDivide, Gathered, Index, Modulo, SizeAtom, as_index
from fxwrap.loop_ir.kernel import Kernel, SizeValue, indices, map_operation
from fxwrap.symbolic import Size, canonical, expression_kind, make_symbol
from fxwrap.torch_compat import Where

_PREFIXES = {"int": "n", "float": "f", "bool": "n"}


def with_named_numbers(kernel: Kernel) -> tuple[Kernel, dict[sympy.Symbol, sympy.Basic]]:
    """Returns a kernel whose numbers are plain symbols, and what its new symbols stand for, in the launch's symbols.

    A quotient, a maximum or a choice would else be computed anew by every thread, in a language whose division of
    negative numbers or whose precision may be another one. A condition is passed as 0 or 1.
    """
    names: dict[sympy.Basic, sympy.Symbol] = {}
    taken = {str(symbol.name) for symbol in kernel.numbers}
    for expression in sorted(set(_formulas(kernel)), key=str):
        prefix = _PREFIXES[expression_kind(expression)]
        number = next(n for n in range(len(taken) + 1) if f"{prefix}{n}" not in taken)
        taken.add(f"{prefix}{number}")
        names[expression] = make_symbol(f"{prefix}{number}")
    if not names:
        return kernel, {}
    return _Renaming(names).kernel(kernel), {symbol: _passed(expression) for expression, symbol in names.items()}


def _passed(expression: sympy.Basic) -> sympy.Basic:
    if expression_kind(expression) != "bool":
        return expression
    found: sympy.Basic = canonical(Where(expression, sympy.S.One, sympy.S.Zero, evaluate=False))
    return found


def _formulas(kernel: Kernel) -> Iterator[sympy.Basic]:
    """Yields what is no plain symbol among a kernel's sizes and numbers."""
    sizes = [as_index(axis.size) for axis in (*kernel.axes, *kernel.reduced)]
    sizes += [as_index(buffer.extent) for buffer in (*kernel.inputs, *kernel.outputs)]
    used = [index for operation in kernel.operations for index in indices(operation)]
    for index in (*sizes, *used):
        for atom in index.atoms():
            if isinstance(atom, Gathered):
                yield from (found for item in as_index(atom.size).atoms() for found in _formula(item))
            yield from _formula(atom)
    for operation in kernel.operations:
        if isinstance(operation, SizeValue):
            number = operation.expression
            if not isinstance(number, sympy.Symbol) or expression_kind(number) == "bool":
                yield number


def _formula(atom: Atom) -> Iterator[sympy.Basic]:
    if isinstance(atom, SizeAtom) and not isinstance(atom.expression, sympy.Symbol):
        yield atom.expression


class _Renaming:
    def __init__(self, names: dict[sympy.Basic, sympy.Symbol]) -> None:
        self.names = names

    def kernel(self, kernel: Kernel) -> Kernel:
        """Returns a kernel with formulas replaced by their names."""
        return Kernel(
            tuple([self._axis(axis) for axis in kernel.axes]),
            tuple([self._axis(axis) for axis in kernel.reduced]),
            tuple([replace(buffer, extent=self._size(buffer.extent)) for buffer in kernel.inputs]),
            tuple([replace(buffer, extent=self._size(buffer.extent)) for buffer in kernel.outputs]),
            tuple([
                self._number(item) if isinstance(item, SizeValue) else map_operation(item, _same, self._index)
                for item in kernel.operations
            ]),
        )  # fmt: skip

    def _number(self, operation: SizeValue) -> SizeValue:
        name = self.names.get(operation.expression)
        if name is None:
            return operation
        is_condition = expression_kind(operation.expression) == "bool"
        return replace(operation, expression=sympy.Ne(name, 0, evaluate=False) if is_condition else name)

    def _size(self, size: Size) -> Size:
        if isinstance(size, int):
            return size
        renamed: Size = canonical(size.xreplace(self.names))
        return renamed

    def _axis(self, axis: Axis) -> Axis:
        return replace(axis, size=self._size(axis.size))

    def _index(self, index: Index) -> Index:
        """Returns an index as it stands: nothing is simplified by what a plain symbol would be known to be."""
        found = as_index(0)
        for monomial, coefficient in index.terms:
            product = as_index(coefficient)
            for atom in monomial:
                product = product * Index((((self._atom(atom),), 1),))
            found = found + product
        return found

    def _atom(self, atom: Atom) -> Atom:
        match atom:
            case Axis():
                return self._axis(atom)
            case SizeAtom():
                return SizeAtom(self.names.get(atom.expression, atom.expression))
            case Gathered():
                return replace(atom, size=self._size(atom.size))
            case FloorDivide() | Modulo():
                return replace(atom, base=self._index(atom.base), divisor=self._index(atom.divisor))


_same: Callable[[int], int] = int
