"""The bytes that the accesses of a kernel transfer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TypeAlias

from fxwrap.loop_ir.atoms import Axis, count_points
from fxwrap.loop_ir.body_operations import Load, Store
from fxwrap.loop_ir.canonicalize import replace_indices, stride_magnitude
from fxwrap.loop_ir.index import ONE, Atom, FloorDivide, Index, IndexLike, Modulo, as_index
from fxwrap.loop_ir.interleaved import InterleavedAccess, interleaved_accesses
from fxwrap.loop_ir.kernel import Kernel
from fxwrap.symbolic import Size

TRANSFER_BYTES = 32
"""The smallest piece of memory that is transferred: a sector of a GPU's cache, half a cache line of a CPU."""

NEAR_BYTES = 8
"""The largest stride of interleaved accesses that transfer few more sectors than one access, if they are not one.

On a CPU, whose caches write a line when all its elements are stored, the limit is `CACHE_LINE_BYTES`.
"""

CACHE_LINE_BYTES = 64

MAX_NEAR = 4
"""The most such accesses: compilers for CPUs vectorise no more, unless their number is a power of two."""

_Hint: TypeAlias = Callable[[Size], int]


def accessed_bytes(kernel: Kernel, hint: _Hint) -> int:
    """Returns the bytes of the elements that a kernel accesses, masked ones included; those it reads and writes twice.

    Of a buffer that indices reach, these are no more than the accesses. `hint` returns a typical value of a size.
    """
    counts: dict[tuple[str, bool], int] = {}
    for operation, axes in zip(kernel.operations, kernel.address_axes, strict=True):
        if isinstance(operation, Load | Store):
            key = (operation.buffer, isinstance(operation, Store))
            counts[key] = counts.get(key, 0) + hint(count_points(axes))
    buffers = [*kernel.inputs, *kernel.outputs]
    return sum([
        min(hint(item.extent), counts.get((item.name, stores), 0)) * item.dtype.itemsize
        for item in buffers for stores in (False, True)
    ])  # fmt: skip


def access_bytes(
    kernel: Kernel, shares: Mapping[int, float], hint: _Hint, near_bytes: int = NEAR_BYTES
) -> tuple[float, float]:
    """Returns the bytes that loads transfer, and those of stores.

    `shares` are the operations that count, by position, each with the share of iterations that run it. Interleaved
    accesses are one contiguous access if their number is a power of two, as GPUs' vectors are, or if their elements are
    within `near_bytes`. An axis that is rotated counts as the axis itself. `hint` returns a typical value of a size.
    """
    kernel = replace_indices(kernel, without_rotations)
    interleaved = {kernel.operations[at]: item for item in interleaved_accesses(kernel) for at in item.positions}
    loaded = stored = 0.0
    for position, share in shares.items():
        access = interleaved.get(kernel.operations[position])
        is_one = access is not None and (access.halves or _is_near(access, _itemsize(kernel, position), near_bytes))
        count = access.count if access is not None and is_one else 1
        transferred = transferred_bytes(kernel, position, hint, count) * share
        if isinstance(kernel.operations[position], Store):
            stored += transferred
        else:
            loaded += transferred
    return loaded, stored


def _is_near(access: InterleavedAccess, itemsize: int, near_bytes: int) -> bool:
    return access.count <= MAX_NEAR and access.count * itemsize <= near_bytes


def transferred_bytes(kernel: Kernel, position: int, hint: _Hint, interleaved: int = 1) -> int:
    """Returns the bytes that a load or store transfers in all iterations, masked ones included.

    An element counts once for each point of the axes that its address depends on. Short runs of contiguous elements
    transfer whole sectors of `TRANSFER_BYTES`. `hint` returns a typical value of a size; `interleaved` is the number of
    accesses that are one with this (`InterleavedAccess`), which counts its share.
    """
    access = kernel.operations[position]
    assert isinstance(access, Load | Store), "other operations access no memory"
    itemsize = _itemsize(kernel, position)
    axes = kernel.address_axes[position]
    count = hint(count_points(axes))
    run, step = _contiguous_run(access.index, sorted(axes, key=lambda axis: axis.name), hint, interleaved)
    transferred = min(max(run * itemsize, TRANSFER_BYTES), step * itemsize)
    return count * transferred // run


def _itemsize(kernel: Kernel, position: int) -> int:
    access = kernel.operations[position]
    assert isinstance(access, Load | Store), "other operations access no memory"
    return next(item.dtype.itemsize for item in (*kernel.inputs, *kernel.outputs) if item.name == access.buffer)


def without_rotations(index: Index) -> Index:
    """Returns an index with axes in place of their rotations, which reach the same elements."""
    rotations: dict[Atom, IndexLike] = {}
    for atom in [item for item in index.atoms() if isinstance(item, Modulo)]:
        for axis in atom.base.axes():
            if atom.base.stride(axis) == ONE and as_index(axis.size) == atom.divisor:
                rotations[atom] = axis
    return index.substitute(rotations)


def _contiguous_run(index: Index, axes: list[Axis], hint: _Hint, run: int) -> tuple[int, int]:
    """Returns the number of contiguous elements that an index reaches in runs, and the distance to the next ones."""
    strides = {axis: index.stride(axis) for axis in axes}
    steps = {axis: stride_magnitude(stride, hint) for axis, stride in strides.items() if stride is not None}
    pending = sorted([(step, hint(axis.size)) for axis, step in steps.items() if step and hint(axis.size) > 1])
    for step, size in pending:
        if step > run:
            return run, step
        run = max(run, step * size)
    return run, run


# --- contiguous axes -------------------------------------------------------------------------------------------------

_MIN_RUN = 32
"""The fewest contiguous elements of an axis that an index divides: those of a GPU's warp."""

_MIN_TRANSPOSED_ROW, _MIN_TRANSPOSED_COLUMNS = 65, 16
"""The least length of rows of which a program has too few to fill sectors across them, and the least number of rows."""

FEWEST_CONTIGUOUS = 5
"""Of so many accesses, one is contiguous along an axis if that should be a side of a tile."""


def contiguity_scores(kernel: Kernel, hint: _Hint, only: Collection[int] | None = None) -> dict[Axis, int]:
    """Returns for each axis the bytes of the accesses that are contiguous along it, alone or interleaved.

    With `only`, the operations at these positions count.
    """
    scores: dict[Axis, int] = {}
    interleaved = {at: item.axis for item in interleaved_accesses(kernel) for at in item.positions}
    for position, (access, axes) in enumerate(zip(kernel.operations, kernel.address_axes, strict=True)):
        if not isinstance(access, Load | Store) or (only is not None and position not in only):
            continue
        weight = _itemsize(kernel, position)
        for axis in axes:
            weight *= max(hint(axis.size), 1)
        for axis in access.index.axes():
            if _steps_by_one(access.index, axis) or axis == interleaved.get(position):
                scores[axis] = scores.get(axis, 0) + weight
    return scores


def _steps_by_one(index: Index, axis: Axis) -> bool:
    """Whether an index grows by one along an axis, except where it starts again after a run at least."""
    if index.stride(axis) == ONE:
        return True
    divisions = [atom for atom in index.atoms() if isinstance(atom, FloorDivide | Modulo) and axis in atom.base.axes()]
    if not divisions or any((item.divisor.constant or 0) < _MIN_RUN for item in divisions):
        return False
    runs: dict[Atom, IndexLike] = {item: item.base if isinstance(item, Modulo) else 0 for item in divisions}
    return index.substitute(runs).stride(axis) == ONE


def has_contiguous_columns(kernel: Kernel, hint: _Hint) -> bool:
    """Whether a tile of a reduction needs contiguous elements across rows: accesses to elements are mostly so.

    A fifth of them is enough in long rows, of which a program has few: each of these accesses would transfer a sector.
    """
    _, columns, scores = _contiguous_columns(kernel, hint)
    if columns > max([scores.get(axis, 0) for axis in kernel.reduced], default=0):
        return True
    is_long = hint(kernel.reduced_count) >= _MIN_TRANSPOSED_ROW and not kernel.scans
    return is_long and has_accesses_across_rows(kernel, hint)


def has_accesses_across_rows(kernel: Kernel, hint: _Hint) -> bool:
    """Whether a fifth of the accesses to a reduction's elements are contiguous across rows."""
    across, columns, scores = _contiguous_columns(kernel, hint)
    if across is None or hint(across.size) < _MIN_TRANSPOSED_COLUMNS:
        return False
    return 0 < sum(scores.values()) <= columns * FEWEST_CONTIGUOUS


def _contiguous_columns(kernel: Kernel, hint: _Hint) -> tuple[Axis | None, int, dict[Axis, int]]:
    """Returns the parallel axis along which most accesses to elements are contiguous, their score and all scores."""
    elements = [not axes.isdisjoint(kernel.reduced) for axes in kernel.address_axes]
    scores = contiguity_scores(kernel, hint, [at for at, is_element in enumerate(elements) if is_element])
    across = max(kernel.axes, key=lambda axis: scores.get(axis, 0), default=None)
    return across, 0 if across is None else scores.get(across, 0), scores
