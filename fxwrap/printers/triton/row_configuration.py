"""Configurations of reductions and scans of rows, and of rows whose columns are accumulated.

The heuristics come from sweeps over memory-bound kernels on an H200.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fxwrap.devices import WARP_LANES, DeviceSpec
from fxwrap.loop_ir import (
    ONE,
    OPERATIONS,
    Compute,
    Kernel,
    Load,
    Reduce,
    RowsAndColumns,
    count_points,
    has_accesses_across_rows,
)
from fxwrap.printers.triton.accesses import (
    VECTOR_BYTES,
    Hint,
    bytes_per_element,
    count_varying_loads,
    full_tile_loads,
    is_unaligned,
    itemsize,
    vector_elements,
)
from fxwrap.printers.triton.tiling import (
    RowPartConfiguration,
    TileConfiguration,
    next_power_of_2,
    programs_of_a_wave,
    warps_of_tile,
)

_ROW_TILE = 1024
"""The elements of the rows of a program of one warp."""

_SHORT_ROW = 2048
"""The elements of the rows of a program of several rows, and of the longest row that is never read in a loop."""

_MIN_ROWS_ACROSS, _MAX_ROW_ACROSS, _WARP_TILE = 16, 64, 512
"""The fewest rows, the longest ones and the elements of a program whose accesses are contiguous across rows."""

_WARP_ROW = 256
"""The elements of a row that a warp by itself reduces in least time, and up to twice as many."""

STEP_ELEMENTS = 8
"""The elements of a thread in a step of a loop that loads them one by one: more masks do not fit predicates."""

_SEVERAL_TENSORS = 3
"""The fewest tensors of which a thread has `STEP_ELEMENTS` in a step of a loop that reads them once, aligned or not."""

_LONG_ROW_STEP = 4
"""The same of long rows of several tensors that are read twice: more warps then hide each other's latency."""

_MIN_COST = 20
"""The instructions of an element from which on a thread has registers for few elements in a step of a loop."""

MAX_PERSISTENT_ELEMENTS = 16384
"""Largest number of elements of a row held in registers. Longer rows are read once for each stage."""

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

_SHARED_ROW_TILES = ((16, 256), (4, 2048), (8, 1024))
"""Rows and elements of a step of programs of rows that share all that they load; the second one is for few rows."""

_SHARED_STEP = 256
"""The most elements of rows that share them and are one step."""

_CHUNK_KINDS = frozenset({"sum", "prod", "max", "min", "any", "all"})
"""The kinds of reductions that reduce chunks of a row first."""


def inner_reduction_configurations(kernel: Kernel, hint: Hint, spec: DeviceSpec) -> list[TileConfiguration]:
    """Returns persistent configurations for rows that fit registers, and looped ones for long rows."""
    block = next_power_of_2(hint(kernel.reduced_count))
    persistent, looped = _persistent_rows(kernel, hint, spec), _looped_rows(kernel, hint, spec)
    shared = _rows_of_shared_elements(kernel, hint, spec)
    return [*shared, *persistent, *looped] if not persistent or block > _SHORT_ROW else [*shared, *persistent]


def _rows_of_shared_elements(kernel: Kernel, hint: Hint, spec: DeviceSpec) -> list[TileConfiguration]:
    """Returns configurations of several long rows of which all load the same elements, as those that are counted."""
    pairs = zip(kernel.operations, kernel.address_axes, strict=True)
    loaded = [axes for item, axes in pairs if isinstance(item, Load) and not axes.isdisjoint(kernel.reduced)]
    is_shared = kernel.axes and loaded and all(axes <= {*kernel.reduced} for axes in loaded)
    block = next_power_of_2(hint(kernel.reduced_count))
    if not is_shared or kernel.is_multi_pass or block <= _SHARED_STEP:
        return []
    many, few, other = [
        TileConfiguration(y=kernel.axes, y_block=rows, r_block=min(step, block), looped=True)
        for rows, step in _SHARED_ROW_TILES
    ]  # fmt: skip
    has_many = hint(kernel.count) * 2 >= many.y_block * spec.multiprocessors * 3
    return [many, few, other] if has_many else [few, many, other]


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
    is_split = vector is not None and WARP_LANES * vector < block
    fills_program = _bytes_of_row_elements(kernel) * _ROW_TILE >= spec.min_program_bytes
    is_cached = count * size * _bytes_of_row_elements(kernel) <= spec.cache_bytes // 2
    if rows > 1 and (is_split or (fills_program and is_cached and _WARP_ROW <= block <= 2 * _WARP_ROW)):
        # Warps would share out each row, and combine their sums in shared memory; or, where rows are in the cache, wait
        # for each other in a program.
        elements = _ROW_TILE if fills_program else 2 * _ROW_TILE
        candidates.append(replace(whole, y_block=min(rows, max(elements // block, 1)), num_warps=1))
    elif rows >= _MIN_ROWS_ACROSS and block <= _MAX_ROW_ACROSS and _is_spread_across(kernel, hint):
        # The lanes of a warp have adjacent rows, and several warps would share out each of them.
        candidates.append(replace(whole, y_block=max(_WARP_TILE // block, _MIN_ROWS_ACROSS), num_warps=1))
    candidates.append(whole)
    candidates += [replace(whole, num_warps=other) for other in (warps * 2, max(warps // 2, 1)) if other <= _MOST_WARPS]
    if rows > 1:
        candidates.append(replace(whole, y_block=rows // 2))
    if count >= 2 * rows * wave and tile <= 2 * _SHORT_ROW:
        candidates.append(replace(whole, y_block=rows * 2, num_warps=min(warps * 2, _MOST_WARPS)))
    return candidates


def _is_spread_across(kernel: Kernel, hint: Hint) -> bool:
    """Whether lanes go along a block's rows: accesses are contiguous across these, or masked elements of a row each."""
    pairs = zip(kernel.operations, kernel.address_axes, strict=True)
    loads = [item for item, axes in pairs if isinstance(item, Load) and axes and axes.isdisjoint(kernel.reduced)]
    has_masked = any(load.mask is not None and kernel.varying[load.mask] for load in loads)
    return has_masked or has_accesses_across_rows(kernel, hint)


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
    if len(full_tile_loads(kernel)) >= _SEVERAL_TENSORS and not is_twice and count >= wave:
        shapes.insert(0, (min(loop, STEP_ELEMENTS * WARP_LANES * 8), 8))  # registers for more programs
    shapes = [*dict.fromkeys([(_filled_block(kernel, r), warps) for r, warps in shapes])]
    looped = [
        TileConfiguration(y=kernel.axes, r_block=r, looped=True, num_warps=min(warps, warps_of_tile(r, 8)))
        for r, warps in shapes
    ]
    warps = 8 if count >= 4 * wave else _MOST_WARPS
    step = STEP_ELEMENTS * WARP_LANES * warps
    if (unaligned or has_long_iterations(kernel)) and not is_twice and loop >= step:
        looped.insert(0, TileConfiguration(y=kernel.axes, r_block=step, looped=True, num_warps=warps))
    if is_twice and count >= 2 * wave:
        if block > MAX_PERSISTENT_ELEMENTS:
            # few rows at a time, so that the second pass reads from the cache
            looped.insert(0, replace(looped[0], r_block=4096, num_warps=32))
        if block > _persistent_limit(kernel) and unaligned and count_varying_loads(kernel) > 2:
            step = _LONG_ROW_STEP * WARP_LANES * _MOST_WARPS
            looped.insert(0, replace(looped[0], r_block=step, num_warps=_MOST_WARPS))
    return [*looped, replace(looped[-1], num_stages=3)]


def has_long_iterations(kernel: Kernel) -> bool:
    """Whether an element takes so many instructions that a thread has registers for few in a step of a loop."""
    cost = sum(OPERATIONS[item.name].cost for item in kernel.operations if isinstance(item, Compute))
    return cost >= _MIN_COST


def _filled_block(kernel: Kernel, block: int) -> int:
    """Returns the block, or a smaller one whose steps along rows of a known length are less empty.

    Each step takes as long as a full one, and threads of large blocks have registers for few programs.
    """
    size = kernel.reduced_count
    while isinstance(size, int) and block > _SHORT_ROW and -(-size // block) * block * 4 > size * 5:
        block //= 2
    return block


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

    Unaligned rows are first in chunks, as are others later, where each element is an access of its own. Loads at
    quotients and remainders, as of windows, are first without a pipeline. Where accesses are contiguous across rows,
    most rows at once are first, so that accesses are of whole sectors.
    """
    block = next_power_of_2(hint(count_points(form.columns)))
    size = next_power_of_2(hint(count_points(form.rows)))
    whole_vector = max([max(VECTOR_BYTES // load.dtype.itemsize, 1) for load in full_tile_loads(kernel)], default=1)
    vector = vector_elements(kernel, form.columns[-1])
    reductions = [kernel.operations[position] for position in form.row_reductions]
    has_chunks = all(isinstance(item, Reduce) and item.kind in _CHUNK_KINDS for item in reductions)
    live = len(form.column_reductions) + len(full_tile_loads(kernel))
    plain, chunked = list[RowPartConfiguration](), list[RowPartConfiguration]()
    tiles: Sequence[tuple[int, int, int]] = _ROW_PART_TILES if block <= _ROW_TILE else _LONG_ROW_PART_TILES
    if any(load.index.stride(axis) is None for load in full_tile_loads(kernel) for axis in load.index.axes()):
        tiles = sorted(tiles, key=lambda tile: tile[2])
    across = [load.index.stride(form.rows[-1]) == ONE for load in full_tile_loads(kernel)]
    if 2 * sum(across) > len(across):
        tiles = sorted(tiles, key=lambda tile: -tile[0] * tile[1] if tile[2] == 1 else 0)
    for elements, warps, stages in tiles if vector is None else _UNALIGNED_ROW_PART_TILES:
        rows = min(max(WARP_LANES * warps * elements // block, 1), size)
        chunk = WARP_LANES * (vector or whole_vector) * max(warps // rows, 1)
        if rows * block * live > WARP_LANES * warps * _ROW_PART_REGISTERS and (rows > 1 or warps < _MOST_WARPS):
            continue
        copied = (stages - 1) * rows * block * bytes_per_element(kernel)
        if block <= WARP_LANES * whole_vector or copied > spec.shared_memory_bytes // 2:
            stages = 1  # a warp has whole rows, but not if they are copied to shared memory first
        whole = RowPartConfiguration(rows=form.rows, row_block=rows, r_block=block, num_warps=warps, num_stages=stages)
        plain.append(whole)
        if chunk < block and has_chunks:
            chunked.append(replace(whole, chunk=chunk, num_stages=1))
    return [*plain, *chunked] if vector is None else [*chunked, *plain]
