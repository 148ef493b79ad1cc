"""Canonical index spaces: axes are split until no index divides them, ordered by stride, and merged where possible.

Fusion builds a kernel over the axes of its definitions. After canonicalization equal kernels over different axes
compare equal, and printers see few axes, with the contiguous one of most accesses innermost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from fxwrap.loop_ir.index import Atom, Axis, FloorDivide, Index, IndexLike, Modulo, as_index
from fxwrap.loop_ir.kernel import Kernel, Load, Operation, Reduce, Store, indices, map_operation
from fxwrap.symbolic import Size, product

_MAX_AXES = 12
_ORDERED_REDUCTIONS = ("argmax", "argmin")


def canonicalize_axes(kernel: Kernel, hint: Callable[[Size], int]) -> Kernel:
    """Returns the kernel over its canonical index space. `hint` returns a typical value of a size."""
    kernel = _remove_unit_axes(kernel)
    kernel = _split_axes(kernel)
    kernel = _remove_unit_axes(_reorder_axes(kernel, hint))
    return _rename_axes(_merge_axes(kernel))


def replace_axes(
    kernel: Kernel, axes: Sequence[Axis], reduced: Sequence[Axis], mapping: Mapping[Atom, IndexLike]
) -> Kernel:
    """Returns the kernel over other axes, with its axes replaced by index expressions over them."""
    operations: list[Operation] = [
        map_operation(operation, lambda position: position, lambda index: index.substitute(mapping))
        for operation in kernel.operations
    ]
    return replace(kernel, axes=tuple(axes), reduced=tuple(reduced), operations=tuple(operations))


def accesses(kernel: Kernel) -> list[Load | Store]:
    """Returns the loads and stores of a kernel, in order."""
    return [operation for operation in kernel.operations if isinstance(operation, Load | Store)]


def _remove_unit_axes(kernel: Kernel) -> Kernel:
    trivial: dict[Atom, IndexLike] = {axis: 0 for axis in (*kernel.axes, *kernel.reduced) if axis.size == 1}
    if not trivial:
        return kernel
    axes = [axis for axis in kernel.axes if axis not in trivial]
    reduced = [axis for axis in kernel.reduced if axis not in trivial]
    if kernel.reduced and not reduced:  # a reduction needs an axis
        reduced = [kernel.reduced[0]]
        trivial.pop(reduced[0])
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


def _reorder_axes(kernel: Kernel, hint: Callable[[Size], int]) -> Kernel:
    """Orders axes by descending stride of the largest accesses. Reduced axes of argmax and scans keep their order."""
    moved = accesses(kernel)
    weights: dict[Index, int] = {}
    for access in moved:
        weight = product(axis.size for axis in access.index.axes())
        bias = 2 if isinstance(access, Store) else 1
        weights[access.index] = weights.get(access.index, 0) + hint(weight) * bias
    ranked = sorted(weights, key=lambda index: -weights[index])

    def order(axes: Sequence[Axis]) -> list[Axis]:
        for index in ranked:
            strides = {axis: index.stride(axis) for axis in axes}
            if all(stride is not None and stride.terms for stride in strides.values()):
                return sorted(axes, key=lambda axis: -_magnitude(strides[axis], hint))
        return list(axes)

    fixed = bool(kernel.scans) or any(
        isinstance(operation, Reduce) and operation.kind in _ORDERED_REDUCTIONS for operation in kernel.operations
    )
    reduced = kernel.reduced if fixed else tuple(order(kernel.reduced))
    return replace(kernel, axes=tuple(order(kernel.axes)), reduced=reduced)


def _magnitude(stride: Index | None, hint: Callable[[Size], int]) -> int:
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
            or not all(
                _can_merge_axes(index, outer, inner) for operation in kernel.operations for index in indices(operation)
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


def _can_merge_axes(index: Index, outer: Axis, inner: Axis) -> bool:
    present = index.axes()
    if outer not in present and inner not in present:
        return True
    step, large_step = index.stride(inner), index.stride(outer)
    return step is not None and large_step is not None and large_step == step * as_index(inner.size)


def _rename_axes(kernel: Kernel) -> Kernel:
    """Renames axes to p0, p1, ... and r0, r1, ..."""
    axes = [Axis(f"p{number}", axis.size) for number, axis in enumerate(kernel.axes)]
    reduced = [Axis(f"r{number}", axis.size) for number, axis in enumerate(kernel.reduced)]
    mapping: dict[Atom, IndexLike] = dict(zip((*kernel.axes, *kernel.reduced), (*axes, *reduced), strict=True))
    return replace_axes(kernel, axes, reduced, mapping)
