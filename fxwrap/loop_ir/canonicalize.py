"""Canonical index spaces: axes are split until no index divides them, ordered by stride, and merged where possible.

Fusion builds a kernel over the axes of its definitions. After canonicalization equal kernels over different axes
compare equal, and printers see few axes, with the contiguous one of most accesses innermost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import sympy

from fxwrap.caching import bounded_cache
from fxwrap.loop_ir.atoms import Axis, IndirectIndex, SizeAtom, count_points
from fxwrap.loop_ir.body_operations import Load, Operation, Reduce, Store, SymbolicScalar, indices, map_operation
from fxwrap.loop_ir.index import Atom, FloorDivide, Index, IndexLike, Modulo, as_index
from fxwrap.loop_ir.kernel import Kernel
from fxwrap.loop_ir.operations import ORDERED_REDUCTIONS
from fxwrap.symbolic import Size, canonicalize, expression_kind, make_symbol, product
from fxwrap.torch_compat import sympy_functions

_MAX_AXES = 12


def canonicalize_axes(kernel: Kernel, hint: Callable[[Size], int]) -> Kernel:
    """Returns the kernel over its canonical index space. `hint` returns a typical value of a size."""
    kernel = _remove_unit_axes(kernel)
    kernel = _split_axes(kernel)
    kernel = _remove_unit_axes(reorder_axes(kernel, hint))
    return _order_reductions(rename_axes(_merge_axes(kernel)))


def replace_axes(
    kernel: Kernel, axes: Sequence[Axis], reduced: Sequence[Axis], mapping: Mapping[Atom, IndexLike]
) -> Kernel:
    """Returns the kernel over other axes, with its axes replaced by index expressions over them."""
    replaced = replace_indices(kernel, lambda index: index.substitute(mapping))
    return replace(replaced, axes=tuple(axes), reduced=tuple(reduced))


def replace_indices(kernel: Kernel, index: Callable[[Index], Index]) -> Kernel:
    """Returns the kernel with `index` applied to its index expressions."""
    operations = [map_operation(operation, lambda position: position, index) for operation in kernel.operations]
    return replace(kernel, operations=tuple(operations))


def _order_reductions(kernel: Kernel) -> Kernel:
    """Returns the kernel with the axes of each reduction in the kernel's order."""
    operations = [
        replace(item, axes=tuple([axis for axis in kernel.reduced if axis in item.axes]))
        if isinstance(item, Reduce) and item.axes
        else item
        for item in kernel.operations
    ]
    return replace(kernel, operations=tuple(operations))


def _remove_unit_axes(kernel: Kernel) -> Kernel:
    trivial: dict[Atom, IndexLike] = {axis: 0 for axis in (*kernel.axes, *kernel.reduced) if axis.size == 1}
    if not trivial:
        return kernel
    axes = [axis for axis in kernel.axes if axis not in trivial]
    partial = [item.axes for item in kernel.operations if isinstance(item, Reduce) and item.axes]
    needed = {over[0] for over in partial if trivial.keys() >= {*over}}
    if kernel.reduced and trivial.keys() >= {*kernel.reduced}:
        needed = needed or {kernel.reduced[0]}
    for axis in needed:  # a reduction needs an axis
        del trivial[axis]
    reduced = [axis for axis in kernel.reduced if axis not in trivial]
    return replace_axes(kernel, axes, reduced, trivial)


# --- splitting -------------------------------------------------------------------------------------------------------


def _split_axes(kernel: Kernel) -> Kernel:
    """Splits axes at the divisors of index expressions, so that the divisions simplify."""
    for number in range(_MAX_AXES):
        division = _find_axis_division(kernel)
        if division is None or (kernel.scans and division[0] in kernel.reduced):
            break
        axis, divisor = division
        outer = Axis(f"{axis.name}o{number}", int(axis.size) // divisor)
        inner = Axis(f"{axis.name}i{number}", divisor)
        parts = {axis: (outer, inner)}
        axes = [part for old in kernel.axes for part in parts.get(old, (old,))]
        reduced = [part for old in kernel.reduced for part in parts.get(old, (old,))]
        kernel = replace_axes(kernel, axes, reduced, {axis: as_index(outer) * divisor + inner})
    return kernel


def _find_axis_division(kernel: Kernel) -> tuple[Axis, int] | None:
    """Returns an axis that an index divides, with the smallest divisor that divides the axis's size."""
    smallest: tuple[Axis, int] | None = None
    for operation in kernel.operations:
        for index in indices(operation):
            for atom in index.atoms():
                division = _axis_divisor(atom) if isinstance(atom, FloorDivide | Modulo) else None
                if division is not None and (smallest is None or division[1] < smallest[1]):
                    smallest = division
    return smallest


def _axis_divisor(atom: FloorDivide | Modulo) -> tuple[Axis, int] | None:
    divisor = atom.divisor.constant
    if divisor is None:
        return None
    for monomial, coefficient in atom.base.terms:
        if len(monomial) == 1 and isinstance(monomial[0], Axis) and isinstance(monomial[0].size, int):
            axis, size = monomial[0], monomial[0].size
            if coefficient > 0 and divisor % coefficient == 0:
                step = divisor // coefficient
                if 1 < step < size and size % step == 0:
                    return axis, step
    return None


# --- ordering --------------------------------------------------------------------------------------------------------


def reorder_axes(kernel: Kernel, hint: Callable[[Size], int]) -> Kernel:
    """Orders axes by descending stride of the largest accesses. Reduced axes of argmax and scans keep their order."""
    moved = kernel.accesses
    weights: dict[Index, int] = {}
    for access in moved:
        weight = count_points(access.index.axes())
        bias = 2 if isinstance(access, Store) else 1
        weights[access.index] = weights.get(access.index, 0) + hint(weight) * bias
    ranked = sorted(weights, key=lambda index: -weights[index])

    def order(axes: Sequence[Axis]) -> list[Axis]:
        for index in ranked:
            strides = {axis: index.stride(axis) for axis in axes}
            if all(stride is not None and stride.terms for stride in strides.values()):
                return sorted(axes, key=lambda axis: -stride_magnitude(strides[axis], hint))
        return list(axes)

    fixed = bool(kernel.scans) or any(
        isinstance(operation, Reduce) and operation.kind in ORDERED_REDUCTIONS for operation in kernel.operations
    )
    reduced = kernel.reduced if fixed else tuple(order(kernel.reduced))
    return replace(kernel, axes=tuple(order(kernel.axes)), reduced=reduced)


def stride_magnitude(stride: Index | None, hint: Callable[[Size], int]) -> int:
    """Returns the typical absolute value of a stride; 0 for one that is not constant."""
    total = 0
    for monomial, coefficient in stride.terms if stride is not None else ():
        factor = coefficient
        for atom in monomial:
            factor *= hint(getattr(atom, "expression", 1))
        total += factor
    return abs(total)


# --- merging ---------------------------------------------------------------------------------------------------------


def _merge_axes(kernel: Kernel) -> Kernel:
    """Merges adjacent axes over which every index is contiguous."""
    position = 0
    while position < len(kernel.axes) + len(kernel.reduced) - 1:
        joined = [*kernel.axes, *kernel.reduced]
        outer, inner = joined[position], joined[position + 1]
        same_kind = (position + 1 < len(kernel.axes)) or position >= len(kernel.axes)
        if (
            not same_kind
            or inner.size == 0
            or not _reduced_together(kernel, outer, inner)
            or not all(
                can_merge_axes(index, outer, inner) for operation in kernel.operations for index in indices(operation)
            )
        ):
            position += 1
            continue
        merged = Axis(f"{outer.name}_{inner.name}", product((outer.size, inner.size)))
        whole = as_index(merged)
        mapping: dict[Atom, IndexLike] = {outer: whole // inner.size, inner: whole % inner.size}
        axes = [merged if axis == outer else axis for axis in kernel.axes if axis != inner]
        reduced = [merged if axis == outer else axis for axis in kernel.reduced if axis != inner]
        kernel = replace_axes(kernel, axes, reduced, mapping)
        position = max(position - 1, 0)
    return kernel


def _reduced_together(kernel: Kernel, outer: Axis, inner: Axis) -> bool:
    """Whether each reduction reduces both of two axes, or none."""
    reductions = [item for item in kernel.operations if isinstance(item, Reduce)]
    return all((outer in kernel.reduced_by(item)) == (inner in kernel.reduced_by(item)) for item in reductions)


def can_merge_axes(index: Index, outer: Axis, inner: Axis) -> bool:
    """Whether an index is contiguous over two axes, or varies along neither."""
    present = index.axes()
    if outer not in present and inner not in present:
        return True
    step, large_step = index.stride(inner), index.stride(outer)
    return step is not None and large_step is not None and large_step == step * as_index(inner.size)


def rename_axes(kernel: Kernel) -> Kernel:
    """Renames axes to p0, p1, ... and r0, r1, ..."""
    axes = [Axis(f"p{number}", axis.size) for number, axis in enumerate(kernel.axes)]
    reduced = [Axis(f"r{number}", axis.size) for number, axis in enumerate(kernel.reduced)]
    mapping: dict[Atom, IndexLike] = dict(zip((*kernel.axes, *kernel.reduced), (*axes, *reduced), strict=True))
    return replace_axes(kernel, axes, reduced, mapping)


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


@bounded_cache(1024)
def in_place_candidates(kernel: Kernel, output: str) -> tuple[str, ...]:
    """Returns the inputs whose memory an output may reuse, according to the kernel's accesses.

    Every load of such an input is of an element that the same iteration stores later. No later pass over the reduced
    axes follows a store, because it could load the input again. Dtypes are equal; callers check that the buffers have
    equal sizes.
    """
    stores = [(position, item) for position, item in enumerate(kernel.operations) if isinstance(item, Store)]
    own = [(position, item) for position, item in stores if item.buffer == output]
    if not own or any(item.mode != "set" or item.mask is not None for _, item in own):
        return ()
    first, varies = own[0][0], kernel.varying[own[0][0]]
    passes = [*kernel.reductions, *[other for other, _ in stores if kernel.varying[other]]]
    last_stage = max([kernel.stages[other] for other in passes], default=0)
    if kernel.scans or (varies and any(kernel.stages[position] < last_stage for position, _ in own)):
        return ()
    if any(kernel.varying[position] != varies for position, _ in own):
        return ()
    written = {item.index for _, item in own}
    dtype = next(buffer.dtype for buffer in kernel.outputs if buffer.name == output)
    candidates = []
    for buffer in kernel.inputs:
        loads = [
            (other, item) for other, item in enumerate(kernel.operations)
            if isinstance(item, Load) and item.buffer == buffer.name
        ]  # fmt: skip
        same = all(load.index in written and kernel.varying[other] == varies for other, load in loads)
        if buffer.dtype is dtype and loads and same and (len(own) == 1 or loads[-1][0] < first):
            candidates.append(buffer.name)
    return tuple(candidates)


def reinplace_output(kernel: Kernel, source: str, output: str) -> Kernel:
    """Returns the kernel with an input removed, and its loads reading from an output's buffer."""

    def moved(operation: Operation) -> Operation:
        if isinstance(operation, Load) and operation.buffer == source:
            return replace(operation, buffer=output)
        return operation

    inputs = tuple([buffer for buffer in kernel.inputs if buffer.name != source])
    return replace(kernel, inputs=inputs, operations=tuple([moved(item) for item in kernel.operations]))
