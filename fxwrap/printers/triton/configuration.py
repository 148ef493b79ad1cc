"""Configurations of kernels of elements, of reductions of rows, and of rows whose columns are accumulated.

`candidates.py` returns the configurations of a kernel. The heuristics come from sweeps over memory-bound kernels on an
H200.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from fxwrap.devices import DeviceSpec
from fxwrap.loop_ir import ONE, OPERATIONS, Axis, Compute, IndirectIndex, Kernel, Load, Reduce, RowsAndColumns, Store
from fxwrap.printers.triton.accesses import (
    LANES,
    MIN_TILE_SIDE,
    VECTOR_BYTES,
    Hint,
    bytes_per_element,
    contiguous_axes,
    count_varying_loads,
    full_tile_loads,
    is_unaligned,
    itemsize,
    joined_accesses,
    row_step,
    vector_elements,
)
from fxwrap.printers.triton.tiling import RowPartConfiguration, TileConfiguration
from fxwrap.symbolic import product

_ROW_TILE = 1024
"""The elements of the rows of a program of one warp."""

_SHORT_ROW = 2048
"""The elements of the rows of a program of several rows, and of the longest row that is never read in a loop."""

STEP_ELEMENTS = 8
"""The elements of a thread in a step of a loop that loads them one by one: more masks do not fit predicates."""

_LONG_ROW_STEP = 4
"""The same of long rows of several tensors that are read twice: more warps then hide each other's latency."""

_MIN_COST = 20
"""The instructions of an element from which on a thread has registers for few elements in a step of a loop."""

MAX_PERSISTENT_ELEMENTS = 16384
"""Largest number of elements of a row held in registers. Longer rows are read once for each stage."""

_ROW_ELEMENTS, _GATHERED_ELEMENTS = 8, 4
"""The elements of a thread at indirect indices: of rows, whose elements are contiguous, and of single elements."""

_MIN_ROW_BLOCK = 128
"""The least columns of a block of rows at indirect indices: a vector of four for each thread of a warp."""

_MIN_PROGRAM_BYTES = 4096
"""The bytes that a program moves at least: an H200 starts no more than 1.6 programs in a nanosecond."""

_WINDOW_LOADS, _WINDOW_ELEMENTS = 4, 8
"""The loads of one tensor, as of a window, beyond which a thread has at most so many elements that take long."""

_MANY_LOADS, _MAX_LOADED_ELEMENTS = 8, 32
"""The loads, as of a window, from which on a thread loads at most so many elements, to keep them in registers."""

_TILES = ((64, 64, 8), (64, 32, 8), (32, 64, 8), (32, 32, 4), (128, 32, 8))
"""Rows, columns and warps of tiles for kernels with contiguous accesses along two axes."""

_ROW_PART_TILES = (
    (16, 4, 3), (32, 4, 3), (16, 4, 1), (16, 8, 3), (32, 8, 3), (32, 4, 1), (16, 8, 1), (16, 16, 1), (8, 16, 1),
)  # fmt: skip
"""Elements of a thread, warps and stages of programs that reduce rows and accumulate columns."""

_LONG_ROW_PART_TILES = (
    (32, 4, 3), (32, 8, 3), (16, 4, 3), (16, 8, 3), (32, 4, 1), (16, 4, 1), (16, 8, 1), (16, 16, 1), (8, 16, 1),
)  # fmt: skip
"""The same of rows of more than `_ROW_TILE` elements, of which fewer programs run beside each other."""

_UNALIGNED_ROW_PART_TILES = ((16, 4, 1), (16, 8, 1), (8, 4, 1), (32, 4, 1), (16, 16, 1), (8, 16, 1))
"""The same of rows that are not aligned to whole vectors."""

_MOST_WARPS = 16
"""The most warps of a program that has rows in registers, or elements of several tensors."""

_ROW_PART_REGISTERS = 160
"""The most registers of a thread of such a program for elements of loaded rows and of sums of columns."""

_CHUNK_KINDS = frozenset({"sum", "prod", "max", "min", "any", "all"})
"""The kinds of reductions that reduce chunks of a row first."""


def programs_of_a_wave(spec: DeviceSpec) -> int:
    """Returns the number of programs that occupy a device: two for each multiprocessor."""
    return 2 * spec.multiprocessors


# --- pointwise ------------------------------------------------------------------------------------------------------


def pointwise_configurations(kernel: Kernel, hint: Hint, spec: DeviceSpec) -> list[TileConfiguration]:
    """Returns configurations of a kernel without reduced axes, the default one first."""
    if not kernel.axes:
        return [TileConfiguration(num_warps=1)]
    inner, other = contiguous_axes(kernel, hint)
    if other is not None and hint(inner.size) >= MIN_TILE_SIDE:
        return [_transposed_tile(inner, other, hint, *shape) for shape in _TILES]
    block, warps = _pointwise_block(kernel, inner, hint, programs_of_a_wave(spec))
    rows = _broadcast_rows(kernel, inner, hint)
    shared = [_pointwise_tile(kernel, inner, hint, block // 4, warps, 8)] if rows >= 8 and block >= 1024 else []
    sizes = [(block, warps), (2 * block, warps), (2 * block, 2 * warps), (max(block // 2, 32), warps)]
    sizes.append((4 * block, 2 * warps))
    return [*shared, *[_pointwise_tile(kernel, inner, hint, *size) for size in sizes]]


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


def _pointwise_block(kernel: Kernel, inner: Axis, hint: Hint, wave: int) -> tuple[int, int]:
    """Returns the block size and warps: 16 bytes of the smallest dtype a thread, more to hide latency.

    Interleaved accesses have 16 bytes together.
    """
    moved = _accesses(kernel)
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
    has_windows = overlaps or max(loads.values(), default=0) >= _MANY_LOADS
    if loads.total() >= _MANY_LOADS and (gathers or has_windows):
        elements = max(_MAX_LOADED_ELEMENTS // next_power_of_2(loads.total()), 2)
    moved_bytes = sum(itemsize(kernel, access) for access in moved if inner in access.index.axes())
    if 128 * elements * moved_bytes < _MIN_PROGRAM_BYTES:
        elements *= 2
    block = 128 * elements
    total = hint(kernel.count)
    while block > 128 and total < block * wave:
        block //= 2
    return min(block, next_power_of_2(total)), 4


def _accesses(kernel: Kernel) -> list[Load | Store]:
    return [item for item in kernel.operations if isinstance(item, Load | Store)]


def _is_gather(access: Load | Store) -> bool:
    """Whether an access is at an indirect index."""
    return any(isinstance(atom, IndirectIndex) for atom in access.index.atoms())


def _gathers_rows(kernel: Kernel, inner: Axis) -> bool:
    """Whether all indirect indices select rows: none of them varies along the inner axis."""
    varies = kernel.varying_along((inner,))
    atoms = [atom for item in _accesses(kernel) for atom in item.index.atoms()]
    return not any(isinstance(atom, IndirectIndex) and varies[atom.operation] for atom in atoms)


def _is_costly(kernel: Kernel) -> bool:
    """Whether elements take many instructions, as transcendental functions do."""
    costs = [OPERATIONS[item.name].cost for item in kernel.operations if isinstance(item, Compute)]
    return sum(costs) >= 15 and max(costs) >= 12


def has_long_iterations(kernel: Kernel) -> bool:
    """Whether an element takes so many instructions that a thread has registers for few in a step of a loop."""
    cost = sum(OPERATIONS[item.name].cost for item in kernel.operations if isinstance(item, Compute))
    return cost >= _MIN_COST


def _has_overlapping_loads(kernel: Kernel) -> bool:
    """Whether a buffer has several loads, one of them masked, as the halves of a row in a rotary embedding."""
    loads = [item for item in kernel.operations if isinstance(item, Load)]
    return any(sum(one.buffer == other.buffer for other in loads) > 1 for one in loads if one.mask is not None)


def _transposed_tile(inner: Axis, other: Axis, hint: Hint, y_block: int, x_block: int, warps: int) -> TileConfiguration:
    """Returns a tile with whole cache lines in both directions."""
    x_block = min(x_block, next_power_of_2(hint(inner.size)))
    y_block = min(y_block, next_power_of_2(hint(other.size)))
    return TileConfiguration(x=(inner,), y=(other,), x_block=x_block, y_block=y_block, num_warps=warps)


def _pointwise_tile(
    kernel: Kernel, inner: Axis, hint: Hint, block: int, warps: int, rows: int = 1
) -> TileConfiguration:
    """Returns a flat block, or rows by columns if the inner axis fills its blocks, which saves divisions.

    Rows that are not aligned to whole vectors are a flat block where all accesses are linear: then these are vectors.
    Those at indirect indices have narrower blocks, which they fill: in a flat block, an index differs for each element.
    """
    rest = tuple([axis for axis in kernel.axes if axis != inner])
    size = hint(inner.size)
    x_block = min(block, next_power_of_2(size))
    filled = -(-size // x_block) * x_block
    is_row = any(_is_gather(item) for item in _accesses(kernel)) and _gathers_rows(kernel, inner)
    while is_row and filled * 4 > size * 5 and x_block > _MIN_ROW_BLOCK:
        x_block //= 2
        filled = -(-size // x_block) * x_block
    has_vectors = is_unaligned(kernel, inner) and _is_linear(kernel)
    if not rest or has_vectors or (filled * 4 > size * 5 and isinstance(inner.size, int)):
        return TileConfiguration(x=kernel.axes, x_block=block, num_warps=warps)
    y_block = max(block // x_block, 1) * rows
    return TileConfiguration(x=(inner,), y=rest, x_block=x_block, y_block=y_block, num_warps=warps)


def _is_linear(kernel: Kernel) -> bool:
    """Whether all accesses are of adjacent elements in adjacent iterations, over all axes, without masks."""
    return all(
        item.mask is None and not _is_gather(item) and row_step(item.index, kernel.axes) == ONE
        for item in _accesses(kernel)
    )


# --- reductions -----------------------------------------------------------------------------------------------------


def inner_reduction_configurations(kernel: Kernel, hint: Hint, spec: DeviceSpec) -> list[TileConfiguration]:
    """Returns persistent configurations for rows that fit registers, and looped ones for long rows."""
    block = next_power_of_2(hint(kernel.reduced_count))
    persistent, looped = _persistent_rows(kernel, hint, spec), _looped_rows(kernel, hint, spec)
    return [*persistent, *looped] if not persistent or block > _SHORT_ROW else persistent


def _persistent_limit(kernel: Kernel) -> int:
    """Returns the largest number of elements of a row in registers: fewer if several tensors have them."""
    return MAX_PERSISTENT_ELEMENTS if count_varying_loads(kernel) <= 2 else MAX_PERSISTENT_ELEMENTS // 2


def _persistent_rows(kernel: Kernel, hint: Hint, spec: DeviceSpec) -> list[TileConfiguration]:
    """Returns configurations of whole rows in registers; none for rows that are too long, or of symbolic length."""
    size, count, wave = kernel.reduced_count, hint(kernel.count), programs_of_a_wave(spec)
    if not isinstance(size, int) or next_power_of_2(size) > _persistent_limit(kernel):
        return []
    block = next_power_of_2(size)
    rows = max(_SHORT_ROW // block, 1) if kernel.axes else 1
    while rows > 1 and count < rows * wave:
        rows //= 2
    tile = rows * block
    warps = warps_of_tile(tile, 16 if tile <= _SHORT_ROW else _elements_per_thread(kernel, count >= wave))
    whole = TileConfiguration(y=kernel.axes, y_block=rows, r_block=block, num_warps=warps)
    candidates = []
    vector = vector_elements(kernel, kernel.reduced[-1])
    if rows > 1 and vector is not None and LANES * vector < block:
        # Warps would share out each row, and combine their sums in shared memory.
        elements = _ROW_TILE if _bytes_of_row_elements(kernel) * _ROW_TILE >= _MIN_PROGRAM_BYTES else 2 * _ROW_TILE
        candidates.append(replace(whole, y_block=min(rows, max(elements // block, 1)), num_warps=1))
    candidates.append(whole)
    candidates += [replace(whole, num_warps=other) for other in (warps * 2, max(warps // 2, 1)) if other <= _MOST_WARPS]
    if rows > 1:
        candidates.append(replace(whole, y_block=rows // 2))
    if count >= 2 * rows * wave and tile <= 2 * _SHORT_ROW:
        candidates.append(replace(whole, y_block=rows * 2, num_warps=min(warps * 2, _MOST_WARPS)))
    return candidates


def _looped_rows(kernel: Kernel, hint: Hint, spec: DeviceSpec) -> list[TileConfiguration]:
    """Returns configurations of loops over rows, of which a program has one."""
    count, wave = hint(kernel.count), programs_of_a_wave(spec)
    block, is_twice = next_power_of_2(hint(kernel.reduced_count)), kernel.is_multi_pass
    unaligned = is_unaligned(kernel, kernel.reduced[-1])
    loop = min(block, 8192)
    is_narrow = bytes_per_element(kernel) <= 2 and not is_twice and block > 8192
    shapes = [(16384, 16) if is_narrow else (loop, 16 if is_twice else 8), (max(loop // 2, 1), 8)]
    if count >= 2 * wave:  # rows of one multiprocessor hide each other's latency
        shapes.reverse()
    shapes.append((max(loop // 4, 1), 8))
    looped = [
        TileConfiguration(y=kernel.axes, r_block=r, looped=True, num_warps=min(warps, warps_of_tile(r, 8)))
        for r, warps in shapes
    ]
    warps = 8 if count >= 4 * wave else _MOST_WARPS
    step = STEP_ELEMENTS * LANES * warps
    if (unaligned or has_long_iterations(kernel)) and not is_twice and loop >= step:
        looped.insert(0, TileConfiguration(y=kernel.axes, r_block=step, looped=True, num_warps=warps))
    if is_twice and count >= 2 * wave:
        if block > MAX_PERSISTENT_ELEMENTS:
            # few rows at a time, so that the second pass reads from the cache
            looped.insert(0, replace(looped[0], r_block=4096, num_warps=32))
        if block > _persistent_limit(kernel) and unaligned and count_varying_loads(kernel) > 2:
            step = _LONG_ROW_STEP * LANES * _MOST_WARPS
            looped.insert(0, replace(looped[0], r_block=step, num_warps=_MOST_WARPS))
    return [*looped, replace(looped[-1], num_stages=3)]


def _bytes_of_row_elements(kernel: Kernel) -> int:
    """Returns the bytes that are loaded and stored for each element of the iteration space."""
    stores = [store for store in kernel.stores if {*kernel.axes, *kernel.reduced} <= store.index.axes()]
    return bytes_per_element(kernel) + sum(itemsize(kernel, store) for store in stores)


def _elements_per_thread(kernel: Kernel, has_many_rows: bool) -> int:
    """Returns the number of elements of a row in a thread: fewer if it also has elements of several vectors."""
    vectors = count_varying_loads(kernel) - len(full_tile_loads(kernel))
    element_bytes = bytes_per_element(kernel)
    if count_varying_loads(kernel) > 1 and (vectors or element_bytes > 4):
        return 16
    return 64 if element_bytes <= 2 and not kernel.is_multi_pass and has_many_rows else 32


def row_part_configurations(
    kernel: Kernel, form: RowsAndColumns, hint: Hint, spec: DeviceSpec
) -> list[RowPartConfiguration]:
    """Returns configurations of whole rows in a loop, whose columns are accumulated.

    Unaligned rows are first in chunks, as are others later, where each element is an access of its own.
    """
    block = next_power_of_2(hint(product([axis.size for axis in form.columns])))
    size = next_power_of_2(hint(product([axis.size for axis in form.rows])))
    whole_vector = max([max(VECTOR_BYTES // load.dtype.itemsize, 1) for load in full_tile_loads(kernel)], default=1)
    vector = vector_elements(kernel, form.columns[-1])
    reductions = [kernel.operations[position] for position in form.row_reductions]
    has_chunks = all(isinstance(item, Reduce) and item.kind in _CHUNK_KINDS for item in reductions)
    live = len(form.column_reductions) + len(full_tile_loads(kernel))
    plain, chunked = list[RowPartConfiguration](), list[RowPartConfiguration]()
    tiles = _ROW_PART_TILES if block <= _ROW_TILE else _LONG_ROW_PART_TILES
    for elements, warps, stages in tiles if vector is None else _UNALIGNED_ROW_PART_TILES:
        rows = min(max(LANES * warps * elements // block, 1), size)
        chunk = LANES * (vector or whole_vector) * max(warps // rows, 1)
        if rows * block * live > LANES * warps * _ROW_PART_REGISTERS and (rows > 1 or warps < _MOST_WARPS):
            continue
        copied = (stages - 1) * rows * block * bytes_per_element(kernel)
        if block <= LANES * whole_vector or copied > spec.shared_memory_bytes // 2:
            stages = 1  # a warp has whole rows, but not if they are copied to shared memory first
        whole = RowPartConfiguration(rows=form.rows, row_block=rows, r_block=block, num_warps=warps, num_stages=stages)
        plain.append(whole)
        if chunk < block and has_chunks:
            chunked.append(replace(whole, chunk=chunk, num_stages=1))
    return [*plain, *chunked] if vector is None else [*chunked, *plain]


# --- sizes ----------------------------------------------------------------------------------------------------------


def next_power_of_2(size: int) -> int:
    """Returns the smallest power of two that is at least the size, and at least 1."""
    return 1 << max(size - 1, 0).bit_length()


def warps_of_tile(tile: int, elements: int) -> int:
    """Returns the warps of a program whose threads have so many elements of its tile."""
    return min(max(next_power_of_2(tile // (LANES * elements)), 1), 16)
