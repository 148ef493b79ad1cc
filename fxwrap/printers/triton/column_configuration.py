"""Configurations of reductions and scans of columns: tiles of rows by columns, and loops over columns."""

from __future__ import annotations

from dataclasses import replace

from fxwrap.devices import WARP_LANES, DeviceSpec
from fxwrap.loop_ir import (
    MIN_WINDOW_LOADS,
    ONE,
    TRANSFER_BYTES,
    Axis,
    IndirectIndex,
    Kernel,
    Store,
    has_contiguous_columns,
)
from fxwrap.printers.triton.accesses import (
    MIN_TILE_SIDE,
    Hint,
    contiguous_axes,
    full_tile_loads,
    is_unaligned,
    itemsize,
)
from fxwrap.printers.triton.row_configuration import MAX_PERSISTENT_ELEMENTS, STEP_ELEMENTS, has_long_iterations
from fxwrap.printers.triton.tiling import TileConfiguration, next_power_of_2, programs_of_a_wave, warps_of_tile

_STEP_LOADS = 16
"""The elements of several tensors that a thread loads at most in a step of a loop."""

_MOST_COLUMNS = 64
_FEWEST_COLUMNS = 16
"""The columns of a program: at most, and at least, so that its loads are of whole sectors of memory."""

_BUSY_WARPS = 16
"""The warps of a multiprocessor that hide each other's latency, if programs load few elements at a time."""

_FEW_ROWS = 8
"""The most rows of an outer reduction whose elements of a column one thread has in registers."""

_MANY_ROWS = 128
"""The rows of a column from which on a loop over them is faster than a block of all."""

_SUMMED_ELEMENTS = 32
"""The elements of a thread that only sums columns of many rows: more warps would combine more sums."""

_MIN_NARROW_ROWS, _MAX_NARROW_ROWS = 64, 1024
"""The fewest and the most rows that a program of few columns has at once."""

_SCANNED_ELEMENTS = 64
"""The elements of a thread that scans columns: more warps would each add what those before them have."""

_FEWEST_SCANNED_COLUMNS, _SCANNED_BLOCK = 4, 4096
"""The fewest columns of a program that scans them in blocks, and the elements of such a block."""

_TRANSPOSED_COLUMNS, _TRANSPOSED_ROWS, _TRANSPOSED_STEP = 128, 128, 32
"""The columns along two axes of a program, the most rows of which it has all at once, and the rows of a step."""

_TRANSPOSED_ELEMENTS = 8192
"""The elements of such a program at least, if there are so many."""

_WINDOW_ROWS = 16
"""The rows of a step of a loop whose iterations load many elements, as those of windows."""

_FEW_COLUMNS = 64
"""The columns for each multiprocessor up to which outer reductions have fewer of them in a program."""

_NARROW_BLOCK = 16
"""The columns of such a program, which waits once for all rows, not for one block of them after another."""


def outer_reduction_configurations(kernel: Kernel, hint: Hint, spec: DeviceSpec) -> list[TileConfiguration]:
    """Returns tiles of rows by columns, of whole columns or in a loop over them, the default one first."""
    inner, other = contiguous_axes(kernel, hint, reduced=False)
    narrow = _narrow_tiles(kernel, inner, hint, spec)
    if other is not None and hint(kernel.reduced_count) > _FEW_ROWS:
        narrow = [_transposed_tile(kernel, inner, other, hint), *narrow]
    if _loads_windows(kernel):
        narrow.insert(0, _window_tile(kernel, inner, hint))
    whole = _whole_tiles(kernel, inner, hint, spec)
    loops = _loops(kernel, inner, hint, spec)
    return [*narrow, *loops, *whole] if _prefers_loops(kernel, inner, hint) else [*narrow, *whole, *loops]


def _prefers_loops(kernel: Kernel, inner: Axis, hint: Hint) -> bool:
    """Whether loops are faster than whole columns: these are long, or a third of their block is beyond them."""
    rows = hint(kernel.reduced_count)
    if kernel.is_multi_pass:
        return False
    is_padded = rows > 32 and 3 * rows <= 2 * next_power_of_2(rows)
    return rows > _MANY_ROWS or (is_padded and _has_column_steps(kernel, inner) and not _stores_elements(kernel))


def _transposed_tile(kernel: Kernel, inner: Axis, other: Axis, hint: Hint) -> TileConfiguration:
    """Returns a tile of columns along two axes, of which each has contiguous accesses: of whole sectors along both.

    Where accesses along one of them were of single elements, each would transfer a sector.
    """
    itemsizes = [itemsize(kernel, store) for store in kernel.stores if other in store.index.axes()]
    height = next_power_of_2(hint(kernel.reduced_count))
    looped = not isinstance(kernel.reduced_count, int) or height > _TRANSPOSED_ROWS
    rows = min(height, _TRANSPOSED_STEP) if looped else height
    widest = {axis: next_power_of_2(hint(axis.size)) for axis in (inner, other)}
    y_block = min(max(TRANSFER_BYTES // min(itemsizes, default=4), MIN_TILE_SIDE // 2), widest[other])
    x_block = min(_TRANSPOSED_COLUMNS // y_block, widest[inner])
    elements = x_block * y_block * rows
    while elements < _TRANSPOSED_ELEMENTS and (2 * x_block <= widest[inner] or 2 * y_block <= widest[other]):
        if 2 * x_block <= widest[inner] and (x_block <= y_block or 2 * y_block > widest[other]):
            x_block *= 2
        else:
            y_block *= 2
        elements *= 2
    warps = min(warps_of_tile(elements, WARP_LANES if looped else _scanned_elements(kernel) if kernel.scans else 16), 8)
    tile = TileConfiguration(x=(inner,), y=(other,), x_block=x_block, y_block=y_block, r_block=rows)
    return replace(tile, looped=looped, num_warps=warps)


def _loads_windows(kernel: Kernel) -> bool:
    """Whether an iteration loads more elements than a thread has in a step, of windows in few buffers."""
    buffers = [load.buffer for load in full_tile_loads(kernel)]
    return len(buffers) > max(_STEP_LOADS, MIN_WINDOW_LOADS * len(set(buffers)))


def _window_tile(kernel: Kernel, inner: Axis, hint: Hint) -> TileConfiguration:
    """Returns a loop in whose steps each thread has few columns of one row, and loads windows of their elements."""
    width = min(WARP_LANES, next_power_of_2(hint(inner.size)))
    rows = min(_WINDOW_ROWS * (WARP_LANES // width), next_power_of_2(hint(kernel.reduced_count)))
    return TileConfiguration(x=(inner,), x_block=width, r_block=rows, looped=True, num_warps=4)


def _scanned_elements(kernel: Kernel) -> int:
    """Returns the elements of scanned columns in a thread: fewer of those that are gathered, or cost much."""
    if any(isinstance(atom, IndirectIndex) for item in kernel.accesses for atom in item.index.atoms()):
        return _SCANNED_ELEMENTS // 4
    return _SCANNED_ELEMENTS // 2 if has_long_iterations(kernel) else _SCANNED_ELEMENTS


def _narrow_tiles(kernel: Kernel, inner: Axis, hint: Hint, spec: DeviceSpec) -> list[TileConfiguration]:
    """Returns the tile of many rows of so few columns that wider ones would leave multiprocessors idle, if they are."""
    rows, width = kernel.reduced_count, min(_NARROW_BLOCK, next_power_of_2(hint(inner.size)))
    height = next_power_of_2(hint(rows))
    has_few = hint(kernel.count) <= _FEW_COLUMNS * spec.multiprocessors
    if not has_few or not _MIN_NARROW_ROWS <= height <= _MAX_NARROW_ROWS or kernel.is_multi_pass:
        return []
    warps = warps_of_tile(height * width, 16)
    looped = not isinstance(rows, int)
    return [TileConfiguration(x=(inner,), x_block=width, r_block=height, looped=looped, num_warps=warps)]


def _whole_tiles(kernel: Kernel, inner: Axis, hint: Hint, spec: DeviceSpec) -> list[TileConfiguration]:
    """Returns tiles of whole columns. Threads sum a few rows by themselves, with whole vectors of columns."""
    rows, widest = kernel.reduced_count, next_power_of_2(hint(inner.size))
    if not isinstance(rows, int):
        return []
    height, tiles = next_power_of_2(rows), list[TileConfiguration]()
    if rows <= _FEW_ROWS:
        elements = 8 if height * max(len(full_tile_loads(kernel)), 1) <= 2 * _FEW_ROWS else 4
        width = min(128 * elements, widest)
        while width > _MOST_COLUMNS and hint(kernel.count) < width * programs_of_a_wave(spec):
            width //= 2
        if width > _MOST_COLUMNS:
            warps = max(width // (WARP_LANES * elements), 1)
            tiles.append(TileConfiguration(x=(inner,), x_block=width, r_block=height, num_warps=warps))
    width = min(_whole_columns(kernel, inner, height, hint, spec), widest)
    if height * width <= MAX_PERSISTENT_ELEMENTS:
        has_sums_alone = height >= _MIN_NARROW_ROWS and not kernel.is_multi_pass and not _stores_elements(kernel)
        elements = _scanned_elements(kernel) if kernel.scans else _SUMMED_ELEMENTS if has_sums_alone else 16
        warps = warps_of_tile(height * width, elements)
        tiles.append(TileConfiguration(x=(inner,), x_block=width, r_block=height, num_warps=warps))
    return tiles


def _loops(kernel: Kernel, inner: Axis, hint: Hint, spec: DeviceSpec) -> list[TileConfiguration]:
    """Returns loops over columns: first those of few elements a thread in a step, where they are faster.

    The others have three pipeline stages, but one first if several buffers are loaded.
    """
    has_several, loops = len(full_tile_loads(kernel)) > 1, list[TileConfiguration]()
    shapes = [(64, 64, 3), (128, 32, 3), (64, 32, 3), (64, 64, 1)]
    if has_several:
        shapes = [shapes[3], *shapes[:3]]
        if is_unaligned(kernel, inner):  # each element takes a thread registers for its address
            shapes.insert(0, (64, 32, 1))
    if _has_column_steps(kernel, inner):
        if kernel.scans:
            loops += _column_scan_configurations(kernel, inner, hint, spec)
        else:
            loops += _column_configurations(kernel, inner, hint, spec)
    elif has_several and is_unaligned(kernel, inner) and _has_masked_elements(kernel):
        if next_power_of_2(hint(inner.size)) >= WARP_LANES:
            loops.append(TileConfiguration(x=(inner,), x_block=WARP_LANES, r_block=WARP_LANES, looped=True))
    widest = _widest_columns(kernel, inner, hint, spec)
    for width, height, stages in shapes:
        block = min(width, widest)
        rows = min(height * (width // block), next_power_of_2(hint(kernel.reduced_count)))
        warps = min(warps_of_tile(block * rows, 16), 4)
        tile = TileConfiguration(x=(inner,), x_block=block, r_block=rows, looped=True)
        loops.append(replace(tile, num_warps=warps, num_stages=stages))
    return loops


def _has_column_steps(kernel: Kernel, inner: Axis) -> bool:
    """Whether loops over columns should have few elements a thread in a step, without copies to shared memory."""
    loads = full_tile_loads(kernel)
    if is_unaligned(kernel, inner) and (len(loads) == 1 or kernel.scans):
        return True
    is_half = bool(loads) and all(load.dtype.itemsize <= 2 for load in loads)
    return has_long_iterations(kernel) or (is_half and _stores_elements(kernel) and not kernel.is_multi_pass)


def _has_masked_elements(kernel: Kernel) -> bool:
    """Whether a load of elements has a mask of its own, as in parts of which the last is shorter."""
    return any(load.mask is not None for load in full_tile_loads(kernel))


def _stores_elements(kernel: Kernel) -> bool:
    """Whether a store depends on the reduced axes."""
    pairs = zip(kernel.operations, kernel.varying, strict=True)
    return any(isinstance(item, Store) and varies for item, varies in pairs)


def _whole_columns(kernel: Kernel, inner: Axis, height: int, hint: Hint, spec: DeviceSpec) -> int:
    """Returns the number of columns of a program that has all of their elements in registers."""
    programs = _column_programs(kernel, inner, hint, 2 * _MOST_COLUMNS)
    if height <= 32 and kernel.is_multi_pass and programs >= 2 * programs_of_a_wave(spec):
        return 2 * _MOST_COLUMNS
    return _MOST_COLUMNS if height <= 128 else 32 if height <= 512 else 16


def _column_programs(kernel: Kernel, inner: Axis, hint: Hint, width: int) -> int:
    """Returns the number of programs with so many columns."""
    return hint(kernel.count) // max(hint(inner.size), 1) * -(-hint(inner.size) // width)


def _widest_columns(kernel: Kernel, inner: Axis, hint: Hint, spec: DeviceSpec) -> int:
    """Returns the most columns of a program: fewer where programs would leave multiprocessors idle."""
    width = next_power_of_2(hint(inner.size))
    if _column_programs(kernel, inner, hint, _MOST_COLUMNS) >= spec.multiprocessors:
        return width
    return min(width, _FEWEST_COLUMNS)


def _column_configurations(kernel: Kernel, inner: Axis, hint: Hint, spec: DeviceSpec) -> list[TileConfiguration]:
    """Returns loops over columns of few elements a thread in a step, with as many warps as occupy the device.

    They load elements one by one, as rows demand that are not aligned to whole vectors: asynchronous copies of single
    elements to shared memory are slow. Loads with masks of their own, as in parts of which the last is shorter, wait
    for each other less if a warp has all columns; so do several loads of single elements of four bytes, fewer a thread.
    Loads that are contiguous along the column are brought to their threads one after the other: then steps are longer.
    """
    width, loads = min(_MOST_COLUMNS, _widest_columns(kernel, inner, hint, spec)), full_tile_loads(kernel)
    elements = STEP_ELEMENTS if len(loads) * STEP_ELEMENTS <= _STEP_LOADS else 4
    is_masked, is_uneven = _has_masked_elements(kernel), is_unaligned(kernel, inner)
    if len(loads) > 1 and all(load.dtype.itemsize >= 4 for load in loads) and (is_masked or is_uneven):
        width, elements = min(width, WARP_LANES), 4
    elif is_masked and (len(loads) > 1 or is_uneven):
        width = min(width, WARP_LANES)
    programs = _column_programs(kernel, inner, hint, width)
    size, warps = next_power_of_2(hint(kernel.reduced_count)), 4
    if len(loads) > 1 and any(load.index.stride(kernel.reduced[-1]) == ONE for load in loads):
        elements, warps = STEP_ELEMENTS, 8
    step = WARP_LANES * elements
    while warps < 16 and programs * warps < _BUSY_WARPS * spec.multiprocessors and warps * step < size * width:
        warps *= 2
    shapes = dict.fromkeys([(warps, 1), (min(2 * warps, 16), 1), (max(warps // 2, 4), 1), (4, 2)])
    tiles = [(max(min(step * count * times // width, size), 1), count) for count, times in shapes]
    whole = TileConfiguration(x=(inner,), x_block=width, looped=True)
    return [replace(whole, r_block=rows, num_warps=count) for rows, count in tiles]


def _column_scan_configurations(kernel: Kernel, inner: Axis, hint: Hint, spec: DeviceSpec) -> list[TileConfiguration]:
    """Returns loops over columns of which each thread has one by itself, and scans it without shared memory.

    Where these are too few threads, the threads of a program scan blocks of few columns together.
    """
    size = next_power_of_2(hint(kernel.reduced_count))
    shapes = [(WARP_LANES, 64, 1), (WARP_LANES, 32, 1), (4 * WARP_LANES, 32, 4)]
    if _column_programs(kernel, inner, hint, WARP_LANES) < 2 * spec.multiprocessors:
        width = _FEWEST_COLUMNS
        while width > _FEWEST_SCANNED_COLUMNS and _column_programs(kernel, inner, hint, width) < spec.multiprocessors:
            width //= 2
        shapes.insert(0, (width, _SCANNED_BLOCK // width, 8))
    return [
        TileConfiguration(x=(inner,), x_block=width, r_block=min(rows, size), looped=True, num_warps=warps)
        for width, rows, warps in shapes if width <= hint(inner.size)
    ]  # fmt: skip


def is_outer_reduction(kernel: Kernel, hint: Hint) -> bool:
    """Whether accesses to elements are contiguous along a parallel axis, as in a sum of columns.

    Not where a block of all rows by the elements of that axis is smaller than a warp: rows are flattened instead.
    """
    if not has_contiguous_columns(kernel, hint):
        return False
    inner, _ = contiguous_axes(kernel, hint, reduced=False)
    return next_power_of_2(hint(inner.size)) * next_power_of_2(hint(kernel.reduced_count)) >= WARP_LANES
