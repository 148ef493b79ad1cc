"""Segments of an axis that have one length share their iterations: each iteration computes an element of every segment.

A concatenation, or the rotated halves of a rotary embedding, otherwise select among their parts for each element, and
parts that read the same elements load them again. In polyhedral terms, index-set splitting is followed by fusion of the
resulting loops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial

from fxwrap.loop_ir.atoms import Axis
from fxwrap.loop_ir.body_operations import (
    DeviceAssert,
    IndexValue,
    Load,
    Operation,
    Store,
    map_operation,
    renumber_index,
)
from fxwrap.loop_ir.builder import eliminate_dead_operations
from fxwrap.loop_ir.index import ONE, Atom, Index, IndexLike, Modulo, as_index
from fxwrap.loop_ir.kernel import Kernel
from fxwrap.loop_ir.segments import MAX_SEGMENTS, axis_comparisons, comparisons_at, decide_comparisons
from fxwrap.loop_ir.split import reduces_columns
from fxwrap.loop_ir.traffic import NEAR_BYTES, TRANSFER_BYTES, access_bytes
from fxwrap.loop_ir.verify import verify_kernel
from fxwrap.symbolic import Size, floor_divide

MAX_UNROLLED = 4
"""The most elements of an axis that may each be a segment."""


def fuse_segments(kernel: Kernel, hint: Callable[[Size], int], near_bytes: int = NEAR_BYTES) -> Kernel:
    """Returns a pointwise kernel with segments of its axes fused where its accesses then transfer fewer bytes.

    Stores do not transfer more: scattered ones cost more than the loads that they save.

    The conditions on an axis must cut it into segments that provably have one length, which becomes the size of the
    axis; each segment has stores of its own, after all loads. An axis of up to MAX_UNROLLED elements has a segment for
    each element if loads or conditions rotate it, as in a cross product or the gradient of a strided slice, or if
    stores are contiguous along it, as those of a stack. Other kernels are returned unchanged. `hint` returns a typical
    value of a size; stores within `near_bytes` of each other transfer few more bytes than one.
    """
    if reduces_columns(kernel) or kernel.combines_values:
        return kernel
    for axis in kernel.axes:
        fused = _fuse_along(kernel, axis, hint, near_bytes)
        if fused is not None:
            return fuse_segments(fused, hint, near_bytes)
    return kernel


def _fuse_along(kernel: Kernel, axis: Axis, hint: Callable[[Size], int], near_bytes: int) -> Kernel | None:
    """Returns the kernel with the segments of an axis fused; None if lengths differ or no bytes are saved."""
    comparisons = axis_comparisons(kernel, axis)
    points = {point for comparison in comparisons.values() for point in comparison.points}
    is_repeated = near_bytes > TRANSFER_BYTES and _is_repeated(kernel, axis)
    is_unrolled = _is_short(axis) and (
        _is_rotated(kernel, axis) or (_is_interleaved(kernel, axis) and (bool(points) or is_repeated))
    )
    if is_unrolled:
        points |= {as_index(element) for element in range(1, int(axis.size))}
    ordinals = _equal_segments(axis, points)
    if not ordinals:
        return None
    count = max(ordinals.values())
    length = floor_divide(axis.size, count)
    segments = []
    for number in range(count):
        begins_before = partial(_begins_before, ordinals, number)
        results = {position: comparison.holds(begins_before) for position, comparison in comparisons.items()}
        if is_unrolled:
            results |= comparisons_at(kernel, axis, number)
        segments.append(decide_comparisons(kernel, results))
    live = [_live_accesses(segment) for segment in segments]
    inner = Axis(f"{axis.name}s", length)
    fused = merge_iterations(segments, axis, inner, lambda number: as_index(inner.size) * number + inner)
    shares: dict[int, float] = {}
    for position in set().union(*live):
        is_along = axis in kernel.address_axes[position]
        shares[position] = sum(position in accesses for accesses in live) / count if is_along else 1
    loaded, stored = access_bytes(kernel, shares, hint, near_bytes)
    fused_loaded, fused_stored = access_bytes(fused, dict.fromkeys(_live_accesses(fused), 1), hint, near_bytes)
    if fused_stored > stored:
        return None
    if is_unrolled:  # the elements of a row are in one sector, which stores that are not a vector transfer one by one
        repeats = 1 if count & (count - 1) == 0 or near_bytes > TRANSFER_BYTES else count
        return fused if fused_loaded + repeats * fused_stored <= loaded + stored else None
    return fused if fused_loaded + fused_stored < loaded + stored else None


def _is_short(axis: Axis) -> bool:
    return isinstance(axis.size, int) and axis.size <= MAX_UNROLLED


def _is_rotated(kernel: Kernel, axis: Axis) -> bool:
    """Whether a load or a condition rotates an axis, as rolls, cross products and gradients of strided slices do."""
    operations = [item for item in kernel.operations if isinstance(item, Load | IndexValue)]
    atoms = {atom for item in operations for atom in item.index.atoms()}
    return any(axis in atom.base.axes() for atom in atoms if isinstance(atom, Modulo))


def _is_interleaved(kernel: Kernel, axis: Axis) -> bool:
    """Whether stores are contiguous along an axis, as those of a stack of a last dimension."""
    return all(store.index.stride(axis) == ONE for store in kernel.stores)


def _is_repeated(kernel: Kernel, axis: Axis) -> bool:
    """Whether all elements along an axis are computed from the same loads, as those that a repetition stores."""
    loads = [item for item in kernel.operations if isinstance(item, Load)]
    return bool(loads) and not any(
        axis in kernel.address_axes[at] for at, item in enumerate(kernel.operations) if isinstance(item, Load)
    )


def _equal_segments(axis: Axis, points: Set[Index]) -> dict[Index, int]:
    """Returns the first segment at or after each point; {} unless segments provably have one length.

    The points at or beyond the end of the axis have the number of segments.
    """
    whole = as_index(axis.size)
    ordinals = {point: number for point in points if (number := _outside(point, whole)) is not None}
    count = len(points) - len(ordinals) + 1
    if not 1 < count <= MAX_SEGMENTS:
        return {}
    ordinals = {point: number * count for point, number in ordinals.items()}
    for number in range(1, count):
        matching = [point for point in points if point * count == whole * number]
        if not matching:
            return {}
        ordinals[matching[0]] = number
    if as_index(floor_divide(axis.size, count)) * count != whole:
        return {}
    return {as_index(axis.size): count, **ordinals}


def _begins_before(ordinals: Mapping[Index, int], segment: int, point: Index) -> bool:
    return segment < ordinals[point]


def _outside(point: Index, whole: Index) -> int | None:
    """Returns 0 for a point at or before the start of an axis, 1 for one at or beyond its end, else None."""
    if point == whole or (point - whole).is_nonnegative():
        return 1
    return 0 if (-point).is_nonnegative() else None


def _live_accesses(kernel: Kernel) -> set[int]:
    """Returns the loads and stores on which the kernel's results depend."""
    operations = kernel.operations
    sinks = [position for position, item in enumerate(operations) if isinstance(item, Store | DeviceAssert)]
    live = kernel.backward_slice(sinks)
    return {position for position in live if isinstance(operations[position], Load | Store)}


def merge_iterations(kernels: Sequence[Kernel], axis: Axis, inner: Axis, element: Callable[[int], Index]) -> Kernel:
    """Returns a kernel whose iterations along `inner` compute an element of each kernel along an axis.

    `element` returns that of the kernel of a number. Equal operations of several kernels are added once. The stores
    into one buffer follow each other.
    """
    operations: list[Operation] = []
    numbers: dict[Operation, int] = {}
    stores: list[Store] = []
    for number, kernel in enumerate(kernels):
        new: dict[int, int] = {}
        mapping: dict[Atom, IndexLike] = {axis: element(number)}
        index = partial(renumber_index, new.__getitem__, mapping)
        for position, operation in enumerate(eliminate_dead_operations(kernel).operations):
            moved = map_operation(operation, new.__getitem__, index)
            if isinstance(moved, Store):
                stores.append(moved)
                continue
            if moved not in numbers:
                numbers[moved] = len(operations)
                operations.append(moved)
            new[position] = numbers[moved]
    first = kernels[0]
    axes = tuple([inner if item == axis else item for item in first.axes])
    buffers = [item.name for item in first.outputs]
    stores.sort(key=lambda store: buffers.index(store.buffer))
    return verify_kernel(replace(first, axes=axes, operations=(*operations, *stores)))
