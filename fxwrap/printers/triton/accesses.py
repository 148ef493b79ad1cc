"""What the accesses of a kernel mean for Triton's blocks: contiguous axes, whole vectors, bytes of an element."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

import torch

from fxwrap.loop_ir import (
    ONE,
    Atom,
    Axis,
    Index,
    IndirectIndex,
    InterleavedAccess,
    Kernel,
    Load,
    Operation,
    Store,
    as_index,
    contiguity_scores,
    count_points,
    indices,
    interleaved_accesses,
    without_rotations,
)
from fxwrap.symbolic import Size

Hint: TypeAlias = Callable[[Size], int]
"""Returns a typical value of a size."""

VECTOR_BYTES = 16
"""The bytes that a thread transfers at once at most."""

MANY_LOADS, MAX_LOADED_ELEMENTS = 8, 32
"""The loads, as of a window, from which on a thread loads at most so many elements, to keep them in registers."""

MIN_TILE_SIDE = 16
"""The least size of both axes of a tile with contiguous accesses along each: shorter ones leave most of it empty."""


def count_varying_loads(kernel: Kernel) -> int:
    """Returns the number of loads that vary along the reduced axes."""
    pairs = zip(kernel.operations, kernel.varying, strict=True)
    return sum(isinstance(operation, Load) and varies for operation, varies in pairs)


def full_tile_loads(kernel: Kernel) -> list[Load]:
    """Returns the loads that vary along all axes."""
    whole = {*kernel.axes, *kernel.reduced}
    pairs = zip(kernel.operations, kernel.address_axes, strict=True)
    return [operation for operation, axes in pairs if isinstance(operation, Load) and whole <= axes]


def vector_elements(kernel: Kernel, inner: Axis) -> int | None:
    """Returns the elements along an axis that a thread loads at once where rows are not aligned to whole vectors."""
    elements = None
    for load in [item for item in kernel.operations if isinstance(item, Load)]:
        whole = max(VECTOR_BYTES // load.dtype.itemsize, 1)
        aligned = math.gcd(whole, *_coefficients(load.index, inner))
        if load.index.stride(inner) == ONE and aligned < whole:
            elements = min(aligned, elements or aligned)
    return elements


def _coefficients(index: Index, inner: Axis) -> list[int]:
    """Returns numbers that the parts of an index that vary along other axes are multiples of."""
    return [
        coefficient for monomial, coefficient in index.terms
        if monomial != (inner,) and any(not isinstance(atom, IndirectIndex) for atom in monomial)
    ]  # fmt: skip


def is_unaligned(kernel: Kernel, inner: Axis) -> bool:
    """Whether threads cannot load whole vectors along an axis."""
    return vector_elements(kernel, inner) is not None


def row_step(index: Index, axes: Sequence[Axis]) -> Index | None:
    """Returns the step of an index along the positions on all axes of a dimension; None if it is not linear in them."""
    step = index.stride(axes[-1])
    expected = step
    for axis in reversed(axes):
        if expected is None or index.stride(axis) != expected:
            return None
        expected = expected * as_index(axis.size)
    return step


def bytes_per_element(kernel: Kernel) -> int:
    """Returns the bytes that are loaded for each element of the iteration space."""
    return sum(item.dtype.itemsize for item in full_tile_loads(kernel))


def itemsize(kernel: Kernel, access: Load | Store) -> int:
    """Returns the bytes of an element in the memory that a load reads or a store writes."""
    if isinstance(access, Load):
        return access.dtype.itemsize
    stored = next(buffer.dtype for buffer in kernel.outputs if buffer.name == access.buffer)
    assert isinstance(stored, torch.dtype)
    return stored.itemsize


def joined_accesses(kernel: Kernel, inner: Axis) -> list[InterleavedAccess]:
    """Returns the interleaved accesses along an axis that are one in Triton, whose blocks split and join in halves.

    A thread has all their elements in one vector: halves of several vectors would be exchanged by threads.
    """
    accesses = [item for item in interleaved_accesses(kernel) if item.axis == inner and item.halves]
    return [item for item in accesses if _vector_bytes(kernel, item) <= VECTOR_BYTES and _is_joined(kernel, item)]


def _vector_bytes(kernel: Kernel, access: InterleavedAccess) -> int:
    first = kernel.operations[access.positions[0]]
    assert isinstance(first, Load | Store)
    return access.count * itemsize(kernel, first)


def _is_joined(kernel: Kernel, access: InterleavedAccess) -> bool:
    """Whether accesses can be one at the first load, or at the last store of one stage, after the stores between."""
    operations = kernel.operations
    first, last = min(access.positions), max(access.positions)
    between = [operations[at] for at in range(first, last) if at not in access.positions]
    is_direct = not any(isinstance(atom, IndirectIndex) for at in access.positions for atom in _atoms(operations[at]))
    is_load = isinstance(operations[first], Load)
    has_one_stage = len({kernel.stages[at] for at in access.positions}) == 1
    stores = [operations[at] for at in access.positions]
    is_last = all(not isinstance(item, Load | Store) or _is_elsewhere(item, stores) for item in between)
    return is_direct and has_one_stage and (is_load or is_last)


def _is_elsewhere(access: Operation, stores: Sequence[Operation]) -> bool:
    """Whether an access is a store to other elements than each of some stores to one buffer."""
    if not isinstance(access, Store):
        return False
    distances = [
        access.index - item.index for item in stores if isinstance(item, Store) and item.buffer == access.buffer
    ]
    return all(distance.constant not in (None, 0) for distance in distances)


def has_vectors(kernel: Kernel, axes: Sequence[Axis], joined: Collection[int]) -> bool:
    """Whether at least half of the accesses that vary along the last axis of a dimension of `axes` are of vectors.

    A thread has the same elements in all accesses: those of a vector are far from those of the next thread where they
    are accessed one by one. For atomic ones they would be copied to other threads. `joined` are the positions of
    accesses that are printed as one with others.
    """
    if len(axes) == 1 and not joined:
        return True
    inner, vectors, others = axes[-1], 0, 0
    for position, (access, varying) in enumerate(zip(kernel.operations, kernel.address_axes, strict=True)):
        if isinstance(access, Load | Store) and inner in varying:
            if isinstance(access, Store) and access.mode != "set" and access.index.stride(inner) != ONE:
                return False
            is_vector = position in joined or _is_vector(access, axes)
            vectors, others = vectors + is_vector, others + (not is_vector)
    return vectors >= others


def _is_vector(access: Load | Store, axes: Sequence[Axis]) -> bool:
    """Whether threads access whole vectors: along all axes of a dimension without a mask, or along an even last one.

    The elements of a rotated vector are beside each other, too.
    """
    inner, index = axes[-1], without_rotations(access.index)
    if access.mask is None and row_step(index, axes) == ONE:
        return True
    strides = [index.stride(axis) for axis in index.axes() - {inner}]
    lengths = [inner.size, *[None if stride is None else stride.constant for stride in strides]]
    return index.stride(inner) == ONE and all(isinstance(item, int) and item % 2 == 0 for item in lengths)


def _atoms(operation: Operation) -> set[Atom]:
    return {atom for index in indices(operation) for atom in index.atoms()}


def contiguous_axes(kernel: Kernel, hint: Hint, reduced: bool = True) -> tuple[Axis, Axis | None]:
    """Returns the axis with the most contiguous accesses, stores first, and a second one with many, if any.

    Many are a fifth of all or, where several stores may combine what an iteration reads, half of the loads. The second
    axis is as long as the side of a tile, if values are not combined with the axes that continue it; without `reduced`,
    the first one may do so.
    """
    scores = contiguity_scores(kernel, hint)
    written = [position for position, item in enumerate(kernel.operations) if isinstance(item, Store)]
    stores = contiguity_scores(kernel, hint, written) if reduced else {}
    ranked = sorted(kernel.axes, key=lambda axis: (stores.get(axis, 0), scores.get(axis, 0)), reverse=True)
    inner = ranked[0] if scores.get(ranked[0]) else kernel.axes[-1]
    read = [position for position, item in enumerate(kernel.operations) if isinstance(item, Load)]
    loads = contiguity_scores(kernel, hint, read) if kernel.combines_values else {}

    def has_many(axis: Axis) -> bool:
        return scores.get(axis, 0) * 5 >= sum(scores.values()) > 0 or 0 < sum(loads.values()) <= loads.get(axis, 0) * 2

    def is_wide(axis: Axis) -> bool:
        run = contiguous_run(kernel, axis, [inner]) if reduced and not kernel.combines_values else (axis,)
        return hint(count_points(run)) >= MIN_TILE_SIDE or (not reduced and _continues(kernel, axis, inner))

    wide = [axis for axis in kernel.axes if axis != inner and has_many(axis) and is_wide(axis)]
    return inner, max(wide, key=lambda axis: scores[axis], default=None)


def contiguous_run(kernel: Kernel, inner: Axis, others: Collection[Axis]) -> tuple[Axis, ...]:
    """Returns an axis after those that continue the accesses that are contiguous along it, without other axes.

    Along an axis that continues them, elements are as far from each other as those of the run before are many.
    """
    indices, run = [item.index for item in kernel.accesses if item.index.stride(inner) == ONE], [inner]
    while True:
        size = as_index(count_points(run))
        following = [
            axis for axis in kernel.axes
            if axis not in others and axis not in run and any(axis in index.axes() for index in indices)
            and all(index.stride(axis) == size for index in indices if axis in index.axes())
        ]  # fmt: skip
        if not following:
            return tuple(run)
        run.insert(0, following[-1])


def _continues(kernel: Kernel, axis: Axis, other: Axis) -> bool:
    """Whether stores are contiguous along an axis, and go on along the other one where it ends."""
    indices = [store.index for store in kernel.stores]
    return any(index.stride(axis) == ONE and index.stride(other) == as_index(axis.size) for index in indices)
