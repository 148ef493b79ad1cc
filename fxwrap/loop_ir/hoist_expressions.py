"""Hoisting of size expressions: a launch computes `s0//2` and passes its value to the kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import sympy

from fxwrap.loop_ir.index import Atom, Axis, FloorDivide, Index, IndirectIndex, Modulo, SizeAtom, as_index
from fxwrap.loop_ir.kernel import Kernel, SymbolicScalar, indices, map_operation
from fxwrap.symbolic import Size, canonicalize, expression_kind, make_symbol
from fxwrap.torch_compat import sympy_functions

_SYMBOL_PREFIXES = {"int": "n", "float": "f", "bool": "n"}


def hoist_expressions(kernel: Kernel) -> tuple[Kernel, dict[sympy.Symbol, sympy.Basic]]:
    """Returns a kernel whose sizes and scalars are plain symbols, and the expressions of its new symbols.

    Otherwise every thread would recompute quotients, maxima and conditions, in a language with a different division of
    negative numbers or a different precision. A condition is passed as 0 or 1.
    """
    names: dict[sympy.Basic, sympy.Symbol] = {}
    used_names = {str(symbol.name) for symbol in kernel.symbols}
    for expression in sorted(set(_compound_expressions(kernel)), key=str):
        prefix = _SYMBOL_PREFIXES[expression_kind(expression)]
        number = next(n for n in range(len(used_names) + 1) if f"{prefix}{n}" not in used_names)
        used_names.add(f"{prefix}{number}")
        names[expression] = make_symbol(f"{prefix}{number}")
    if not names:
        return kernel, {}
    arguments = {symbol: _launch_argument(expression) for expression, symbol in names.items()}
    return _ExpressionReplacer(names).kernel(kernel), arguments


def _launch_argument(expression: sympy.Basic) -> sympy.Basic:
    if expression_kind(expression) != "bool":
        return expression
    number: sympy.Basic = canonicalize(sympy_functions.Where(expression, sympy.S.One, sympy.S.Zero, evaluate=False))
    return number


def _compound_expressions(kernel: Kernel) -> Iterator[sympy.Basic]:
    """Yields the sizes and scalars of a kernel that are not plain symbols."""
    sizes = [as_index(axis.size) for axis in (*kernel.axes, *kernel.reduced)]
    sizes += [as_index(buffer.extent) for buffer in (*kernel.inputs, *kernel.outputs)]
    used = [index for operation in kernel.operations for index in indices(operation)]
    for index in (*sizes, *used):
        for atom in index.atoms():
            if isinstance(atom, IndirectIndex):
                yield from (
                    expression for item in as_index(atom.size).atoms() for expression in _compound_expression(item)
                )
            yield from _compound_expression(atom)
    for operation in kernel.operations:
        if isinstance(operation, SymbolicScalar):
            number = operation.expression
            if not isinstance(number, sympy.Symbol) or expression_kind(number) == "bool":
                yield number


def _compound_expression(atom: Atom) -> Iterator[sympy.Basic]:
    if isinstance(atom, SizeAtom) and not isinstance(atom.expression, sympy.Symbol):
        yield atom.expression


class _ExpressionReplacer:
    def __init__(self, names: dict[sympy.Basic, sympy.Symbol]) -> None:
        self.names = names

    def kernel(self, kernel: Kernel) -> Kernel:
        """Returns the kernel with expressions replaced by their symbols."""
        return Kernel(
            tuple([self._axis(axis) for axis in kernel.axes]),
            tuple([self._axis(axis) for axis in kernel.reduced]),
            tuple([replace(buffer, extent=self._size(buffer.extent)) for buffer in kernel.inputs]),
            tuple([replace(buffer, extent=self._size(buffer.extent)) for buffer in kernel.outputs]),
            tuple([
                self._scalar(item) if isinstance(item, SymbolicScalar) else map_operation(item, int, self._index)
                for item in kernel.operations
            ]),
        )  # fmt: skip

    def _scalar(self, operation: SymbolicScalar) -> SymbolicScalar:
        name = self.names.get(operation.expression)
        if name is None:
            return operation
        is_condition = expression_kind(operation.expression) == "bool"
        return replace(operation, expression=sympy.Ne(name, 0, evaluate=False) if is_condition else name)

    def _size(self, size: Size) -> Size:
        if isinstance(size, int):
            return size
        renamed: Size = canonicalize(size.xreplace(self.names))
        return renamed

    def _axis(self, axis: Axis) -> Axis:
        return replace(axis, size=self._size(axis.size))

    def _index(self, index: Index) -> Index:
        """Returns an index without simplification by the range of a plain symbol."""
        result = as_index(0)
        for monomial, coefficient in index.terms:
            product = as_index(coefficient)
            for atom in monomial:
                product = product * Index((((self._atom(atom),), 1),))
            result = result + product
        return result

    def _atom(self, atom: Atom) -> Atom:
        match atom:
            case Axis():
                return self._axis(atom)
            case SizeAtom():
                return SizeAtom(self.names.get(atom.expression, atom.expression))
            case IndirectIndex():
                return replace(atom, size=self._size(atom.size))
            case FloorDivide() | Modulo():
                return replace(atom, base=self._index(atom.base), divisor=self._index(atom.divisor))
