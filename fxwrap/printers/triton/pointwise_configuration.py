"""Configurations of kernels without reduced axes: flat blocks, rows by columns, and transposed tiles.

The heuristics come from sweeps over memory-bound kernels on an H200.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence

from fxwrap.devices import WARP_LANES, DeviceSpec
from fxwrap.loop_ir import (
    ONE,
    OPERATIONS,
    TRANSFER_BYTES,
    Axis,
    Compute,
    Index,
    IndirectIndex,
    Kernel,
    Load,
    Store,
    as_index,
    count_points,
)
from fxwrap.printers.triton.accesses import (
    MANY_LOADS,
    MAX_LOADED_ELEMENTS,
    MIN_TILE_SIDE,
    VECTOR_BYTES,
    Hint,
    contiguous_axes,
    contiguous_run,
    full_tile_loads,
    has_vectors,
    is_unaligned,
    itemsize,
    joined_accesses,
    row_step,
)
from fxwrap.printers.triton.tiling import TileConfiguration, next_power_of_2, programs_of_a_wave

_ROW_ELEMENTS, _GATHERED_ELEMENTS = 8, 4
"""The elements of a thread at indirect indices: of rows, whose elements are contiguous, and of single elements."""

_MIN_GATHERED_LOADS = 4
"""The fewest loads at computed indices whose rows and columns share what they compute."""

_GATHERED_TILES = ((128, 4, 1), (64, 32, 4), (32, 64, 4), (16, 128, 4))
"""Columns, rows and warps of tiles of such loads, the widest first; of many loads they have half of the elements."""

_SINGLE_ELEMENTS = 4
"""The elements of a thread that accesses them one by one: more need registers for addresses, and save nothing."""

_MIN_ROW_BLOCK = 128
"""The least columns of a block of rows at indirect indices: a vector of four for each thread of a warp."""

_WINDOW_LOADS, _WINDOW_ELEMENTS = 4, 8
"""The loads of one tensor, as of a window, beyond which a thread has at most so many elements that take long."""

_WINDOW_WARPS = 2
"""The warps of a program of windows with few loads, whose threads have twice as many elements."""

_MOST_RUN_BYTES = 96
"""The bytes of a run of stores from which on few of them share a sector with others."""

_FILLED_SIDE = 32
"""The least size of a tile's side of several axes, of which a fifth of the elements may be empty."""

_TILES = ((64, 64, 8), (64, 32, 8), (32, 64, 8), (32, 32, 4), (128, 32, 8))
"""Rows, columns and warps of tiles for kernels with contiguous accesses along two axes."""

_FEW_LOADS_TILES = ((64, 32, 8), (32, 32, 8), (32, 32, 4), (64, 64, 8))
_MANY_LOADS_TILES = ((32, 32, 16), (32, 32, 8), (64, 32, 16))
"""The same where an element has loads as of a small or a large window: a thread has eight elements, or two."""


def pointwise_configurations(kernel: Kernel, hint: Hint, spec: DeviceSpec) -> list[TileConfiguration]:
    """Returns configurations of a kernel without reduced axes, the default one first."""
    if not kernel.axes:
        return [TileConfiguration(num_warps=1)]
    inner, other = contiguous_axes(kernel, hint)
    run = (inner,) if kernel.combines_values or other is None else contiguous_run(kernel, inner, [other])
    joined = max([item.count for item in joined_accesses(kernel, inner)], default=1)
    if other is not None and hint(count_points(run)) * joined >= MIN_TILE_SIDE:
        return [_transposed_tile(kernel, inner, other, hint, *shape) for shape in _tiles(kernel)]
    gathered = _gathered_tiles(kernel, inner, hint) if joined == 1 else []
    block, warps = _pointwise_block(kernel, inner, hint, spec)
    if _has_single_elements(kernel, _pointwise_tile(kernel, inner, hint, block, warps)):
        block = min(block, WARP_LANES * max(warps, 4) * _SINGLE_ELEMENTS)
    if vector := _vector_of_shared_sectors(kernel, inner):
        block = min(block, WARP_LANES * warps * vector)
    rows = _broadcast_rows(kernel, inner, hint)
    shared = [_pointwise_tile(kernel, inner, hint, block // 4, warps, 8)] if rows >= 8 and block >= 1024 else []
    sizes = [(block, warps), (2 * block, warps), (2 * block, 2 * warps), (max(block // 2, 32), warps)]
    sizes.append((4 * block, 2 * warps))
    return [*gathered, *shared, *[_pointwise_tile(kernel, inner, hint, *size) for size in sizes]]


def _gathered_tiles(kernel: Kernel, inner: Axis, hint: Hint) -> list[TileConfiguration]:
    """Returns tiles of rows by columns for loads at indices of rows and of columns, as of the corners around a pixel.

    What depends on a row, or on a column, is computed once for each in a thread, not for each element. Columns are the
    tile's first dimension: where Triton knows no contiguous elements, those along it are in neighbouring threads.
    """
    rest = tuple([axis for axis in kernel.axes if axis != inner])
    loads = [item for item in kernel.operations if isinstance(item, Load) and _is_gather(item)]
    if not rest or len(loads) < _MIN_GATHERED_LOADS or kernel.combines_values:
        return []
    by_column, by_row = kernel.varying_along((inner,)), kernel.varying_along(rest)
    atoms = [atom for item in kernel.accesses for atom in item.index.atoms()]
    indices = {atom.operation for atom in atoms if isinstance(atom, IndirectIndex)}
    size = hint(inner.size)
    padded = {shape: -(-size // shape[0]) * shape[0] for shape in _GATHERED_TILES}
    shapes = [shape for shape in _GATHERED_TILES if padded[shape] * 4 <= size * 5]
    shapes.sort(key=lambda shape: (shape[0] < WARP_LANES, padded[shape]))  # fewest beyond a row, of equals the widest
    if not any(by_column[item] for item in indices) or any(by_column[item] and by_row[item] for item in indices):
        return []
    parts = 1 if len(loads) < MANY_LOADS else 2
    return [
        TileConfiguration(x=rest, y=(inner,), x_block=rows // parts, y_block=columns, num_warps=warps)
        for columns, rows, warps in shapes
    ]


def _tiles(kernel: Kernel) -> Sequence[tuple[int, int, int]]:
    """Returns rows, columns and warps of tiles: those of few elements a thread where an element has many loads."""
    count = sum(isinstance(item, Load) for item in kernel.operations)
    if count < MANY_LOADS:
        return _TILES
    return _FEW_LOADS_TILES if count <= 2 * MANY_LOADS else _MANY_LOADS_TILES


def _has_single_elements(kernel: Kernel, tile: TileConfiguration) -> bool:
    """Whether threads access elements of several axes one by one, except at indirect indices."""
    joined = {at for item in joined_accesses(kernel, tile.x[-1]) for at in item.positions}
    return not any(map(_is_gather, kernel.accesses)) and not has_vectors(kernel, tile.x, joined)


def _vector_of_shared_sectors(kernel: Kernel, inner: Axis) -> int:
    """Returns the elements of a vector of stores to the same sectors of memory; 0 if no sector has several stores.

    A thread has one vector of each, so that they follow each other: then the cache combines them. Parts of more vectors
    would be written one by one, as the elements of a cross product or the halves of a short row.
    """
    joined = {at for item in joined_accesses(kernel, inner) for at in item.positions}
    buffers: dict[str, list[Index]] = {}
    for position, store in enumerate(kernel.operations):
        if isinstance(store, Store) and position not in joined and store.mask is None and inner in store.index.axes():
            buffers.setdefault(store.buffer, []).append(store.index)
    vectors = []
    for buffer in kernel.outputs:
        first, *others = buffers.get(buffer.name, [as_index(0)])
        distances = [(index - first).constant for index in others]
        strides = [first.stride(axis) for axis in first.axes()]
        numbers = [None if stride is None else stride.constant for stride in strides]
        run = inner.size if first.stride(inner) == ONE else 1
        if not distances or None in (*distances, *numbers) or not isinstance(run, int):
            continue
        run_bytes = run * buffer.dtype.itemsize
        if run_bytes % TRANSFER_BYTES and run_bytes < _MOST_RUN_BYTES:
            lengths = [abs(int(number)) for number in (*distances, *numbers) if number not in (None, 0, 1)]
            vectors.append(math.gcd(max(VECTOR_BYTES // buffer.dtype.itemsize, 1), run, *lengths))
    return min(vectors, default=0)


def _broadcast_rows(kernel: Kernel, inner: Axis, hint: Hint) -> int:
    """Returns the number of rows that share the vectors along the inner axis; 1 if these are smaller than a row."""
    vectors = rows = 0
    for access in kernel.operations:
        if isinstance(access, Load | Store) and inner in access.index.axes():
            if isinstance(access, Load) and access.index.axes() == {inner} and not _is_gather(access):
                vectors += itemsize(kernel, access)
            else:
                rows += itemsize(kernel, access)
    return hint(kernel.count) // max(hint(inner.size), 1) if vectors >= rows else 1


def _pointwise_block(kernel: Kernel, inner: Axis, hint: Hint, spec: DeviceSpec) -> tuple[int, int]:
    """Returns the block size and warps: 16 bytes of the smallest dtype a thread, more to hide latency.

    Interleaved accesses have 16 bytes together.
    """
    moved = kernel.accesses
    smallest = min([itemsize(kernel, access) for access in moved], default=4)
    joined = max([item.count for item in joined_accesses(kernel, inner)], default=1)
    elements = min(16 // smallest, 8) if joined == 1 else max(16 // smallest // joined, 1)
    gathers, overlaps = any(map(_is_gather, moved)), _has_overlapping_loads(kernel)
    loads = Counter([item.buffer for item in moved if isinstance(item, Load)])
    if gathers:
        elements = min(4 * elements, _ROW_ELEMENTS) if _gathers_rows(kernel, inner) else _GATHERED_ELEMENTS
    elif _is_costly(kernel) or overlaps:
        is_window = max(loads.values(), default=0) > _WINDOW_LOADS
        elements = min(2 * elements, _WINDOW_ELEMENTS) if is_window else 2 * elements
    has_windows = overlaps or max(loads.values(), default=0) >= MANY_LOADS
    count = len(full_tile_loads(kernel))  # those along a side of a tile, as of tables of indices, are few
    if count >= MANY_LOADS and (gathers or has_windows):
        elements = max(MAX_LOADED_ELEMENTS // next_power_of_2(count), 2)
    is_window = not gathers and min(loads.values(), default=0) >= _WINDOW_LOADS  # others have values beside it
    warps = _WINDOW_WARPS if is_window and MANY_LOADS <= count <= 2 * MANY_LOADS else 4
    moved_bytes = sum(itemsize(kernel, access) for access in moved if inner in access.index.axes())
    if 128 * elements * moved_bytes < spec.min_program_bytes:
        elements *= 2
    block = 128 * elements  # of four warps; fewer of a window have more elements each
    total, wave = hint(kernel.count), programs_of_a_wave(spec)
    while block > 128 and total < block * wave:
        block //= 2
    return min(block, next_power_of_2(total)), warps


def _is_gather(access: Load | Store) -> bool:
    """Whether an access is at an indirect index."""
    return any(isinstance(atom, IndirectIndex) for atom in access.index.atoms())


def _gathers_rows(kernel: Kernel, inner: Axis) -> bool:
    """Whether all indirect indices select rows: none of them varies along the inner axis."""
    varies = kernel.varying_along((inner,))
    atoms = [atom for item in kernel.accesses for atom in item.index.atoms()]
    return not any(isinstance(atom, IndirectIndex) and varies[atom.operation] for atom in atoms)


def _is_costly(kernel: Kernel) -> bool:
    """Whether elements take many instructions, as transcendental functions do."""
    costs = [OPERATIONS[item.name].cost for item in kernel.operations if isinstance(item, Compute)]
    return sum(costs) >= 15 and max(costs) >= 12


def _has_overlapping_loads(kernel: Kernel) -> bool:
    """Whether a buffer has several loads, one of them masked, as the halves of a row in a rotary embedding."""
    loads = [item for item in kernel.operations if isinstance(item, Load)]
    return any(sum(one.buffer == other.buffer for other in loads) > 1 for one in loads if one.mask is not None)


def _transposed_tile(
    kernel: Kernel, inner: Axis, other: Axis, hint: Hint, y_block: int, x_block: int, warps: int
) -> TileConfiguration:
    """Returns a tile with whole cache lines in both directions."""
    y, y_block = _tile_side(kernel, other, [inner], hint, y_block)
    x, x_block = _tile_side(kernel, inner, y, hint, x_block)
    return TileConfiguration(x=x, y=y, x_block=x_block, y_block=y_block, num_warps=warps)


def _tile_side(
    kernel: Kernel, inner: Axis, others: Collection[Axis], hint: Hint, block: int
) -> tuple[tuple[Axis, ...], int]:
    """Returns the axes of a side of a tile, and its block: more axes than the inner one if they fill the block.

    A fifth of its elements may be empty.
    """
    run = (inner,) if kernel.combines_values else contiguous_run(kernel, inner, others)
    for count in range(1, len(run) + 1):
        size = hint(count_points(run[-count:]))
        side = min(block, next_power_of_2(size))
        if side >= min(block, _FILLED_SIDE) and -(-size // side) * side * 4 <= size * 5:
            return run[-count:], side
    axes = (inner,) if hint(inner.size) >= MIN_TILE_SIDE else run
    return axes, min(block, next_power_of_2(hint(count_points(axes))))


def _pointwise_tile(
    kernel: Kernel, inner: Axis, hint: Hint, block: int, warps: int, rows: int = 1
) -> TileConfiguration:
    """Returns a flat block, or rows by columns if the inner axis fills its blocks, which saves divisions.

    Rows that are not aligned to whole vectors are a flat block where all accesses are linear: then these are vectors.
    Those at indirect indices have narrower blocks, which they fill: in a flat block, an index differs for each element.
    Where stores combine values at indices that order no axes, the inner axis is the last one of a flat block.
    """
    rest = tuple([axis for axis in kernel.axes if axis != inner])
    size = hint(inner.size)
    x_block = min(block, next_power_of_2(size))
    filled = -(-size // x_block) * x_block
    is_row = any(_is_gather(item) for item in kernel.accesses) and _gathers_rows(kernel, inner)
    while is_row and filled * 4 > size * 5 and x_block > _MIN_ROW_BLOCK:
        x_block //= 2
        filled = -(-size // x_block) * x_block
    is_linear = is_unaligned(kernel, inner) and _is_linear(kernel)
    if not rest or is_linear or (filled * 4 > size * 5 and isinstance(inner.size, int)):
        flat = (*rest, inner) if kernel.combines_values else kernel.axes
        return TileConfiguration(x=flat, x_block=block, num_warps=warps)
    y_block = max(block // x_block, 1) * rows
    return TileConfiguration(x=(inner,), y=rest, x_block=x_block, y_block=y_block, num_warps=warps)


def _is_linear(kernel: Kernel) -> bool:
    """Whether all accesses are of adjacent elements in adjacent iterations, over all axes, without masks."""
    return all(
        item.mask is None and not _is_gather(item) and row_step(item.index, kernel.axes) == ONE
        for item in kernel.accesses
    )
