"""Configurations of reductions and scans of columns: tiles of rows by columns, and loops over columns."""

from __future__ import annotations

from dataclasses import replace

from fxwrap.devices import DeviceSpec
from fxwrap.loop_ir import Axis, Kernel, Load, Store
from fxwrap.printers.triton.accesses import (
    LANES,
    Hint,
    contiguity_scores,
    contiguous_axes,
    full_tile_loads,
    is_multi_pass,
    is_unaligned,
    vector_elements,
)
from fxwrap.printers.triton.configuration import (
    MAX_PERSISTENT_ELEMENTS,
    STEP_ELEMENTS,
    Configuration,
    has_long_iterations,
    next_power_of_2,
    programs_of_a_wave,
    warps_of_tile,
)

_STEP_LOADS = 16
"""The elements of several tensors that a thread loads at most in a step of a loop."""

_MOST_COLUMNS = 64
_FEWEST_COLUMNS = 16
"""The columns of a program: at most, and at least, so that its loads are of whole sectors of memory."""

_BUSY_WARPS = 16
"""The warps of a multiprocessor that hide each other's latency, if programs load few elements at a time."""

_FEW_ROWS = 8
"""The most rows of an outer reduction whose elements of a column one thread has in registers."""

_FEW_COLUMNS = 64
"""The columns for each multiprocessor up to which outer reductions have fewer of them in a program."""

_NARROW_BLOCK = 16
"""The columns of such a program, which waits once for all rows, not for one block of them after another."""


def outer_reduction_configurations(kernel: Kernel, hint: Hint, spec: DeviceSpec) -> list[Configuration]:
    """Returns tiles of rows by columns with three pipeline stages; one stage if several buffers are loaded.

    A few rows are summed within threads, which have whole vectors of columns.
    """
    inner, _ = contiguous_axes(kernel, hint, reduced=False)
    size = kernel.reduced_count
    widest = next_power_of_2(hint(inner.size))
    candidates = []
    if isinstance(size, int) and size <= _FEW_ROWS:
        elements = 8 if next_power_of_2(size) * max(len(full_tile_loads(kernel)), 1) <= 2 * _FEW_ROWS else 4
        width = min(128 * elements, widest)
        while width > 64 and hint(kernel.count) < width * programs_of_a_wave(spec):
            width //= 2
        if width > 64:
            rows = next_power_of_2(size)
            candidates.append(
                Configuration(x=(inner,), x_block=width, r_block=rows, num_warps=max(width // (LANES * elements), 1))
            )
    if isinstance(size, int):
        height = next_power_of_2(size)
        width = min(_whole_columns(kernel, inner, height, hint, spec), widest)
        if height * width <= MAX_PERSISTENT_ELEMENTS:
            warps = warps_of_tile(height * width, 16)
            candidates.append(Configuration(x=(inner,), x_block=width, r_block=height, num_warps=warps))
    whole, is_stepwise = list(candidates), _has_column_steps(kernel, inner)
    shapes = [(64, 64, 3), (128, 32, 3), (64, 32, 3), (64, 64, 1)]
    if len(full_tile_loads(kernel)) > 1:
        shapes = [shapes[3], *shapes[:3]]
        if vector_elements(kernel, inner) is not None:  # each element takes a thread registers for its address
            shapes.insert(0, (64, 32, 1))
    if kernel.scans and is_stepwise:
        candidates += _column_scan_configurations(inner, kernel, hint)
    elif is_stepwise:
        candidates += _column_configurations(kernel, inner, hint, spec)
    if not is_stepwise and len(full_tile_loads(kernel)) > 1 and is_unaligned(kernel, inner):
        if _has_masked_elements(kernel) and widest >= LANES:
            candidates.append(Configuration((inner,), (), LANES, 1, LANES, looped=True, num_warps=4))
    for width, height, stages in shapes:
        block = min(width, _widest_columns(kernel, inner, hint, spec))
        rows = min(height * (width // block), next_power_of_2(hint(size)))
        warps = min(warps_of_tile(block * rows, 16), 4)
        candidates.append(Configuration((inner,), (), block, 1, rows, looped=True, num_warps=warps, num_stages=stages))
    is_padded = hint(size) > 32 and 3 * hint(size) <= 2 * next_power_of_2(hint(size))
    is_looped = hint(size) > 128 or (is_padded and is_stepwise and not _stores_elements(kernel))
    if whole and is_looped and not is_multi_pass(kernel):
        candidates = [*candidates[len(whole) :], *whole]
    height, width = next_power_of_2(hint(size)), min(_NARROW_BLOCK, widest)
    has_few = hint(kernel.count) <= _FEW_COLUMNS * spec.multiprocessors
    if has_few and 128 < height <= 1024 and not is_multi_pass(kernel):
        tile = Configuration((inner,), (), width, 1, height, num_warps=warps_of_tile(height * width, 16))
        candidates.insert(0, tile if isinstance(size, int) else replace(tile, looped=True))
    return candidates


def _has_column_steps(kernel: Kernel, inner: Axis) -> bool:
    """Whether loops over columns should have few elements a thread in a step, without copies to shared memory."""
    loads = full_tile_loads(kernel)
    if is_unaligned(kernel, inner) and (len(loads) == 1 or kernel.scans):
        return True
    is_half = bool(loads) and all(load.dtype.itemsize <= 2 for load in loads)
    return has_long_iterations(kernel) or (is_half and _stores_elements(kernel) and not is_multi_pass(kernel))


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
    if height <= 32 and is_multi_pass(kernel) and programs >= 2 * programs_of_a_wave(spec):
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


def _column_configurations(kernel: Kernel, inner: Axis, hint: Hint, spec: DeviceSpec) -> list[Configuration]:
    """Returns loops over columns of few elements a thread in a step, with as many warps as occupy the device.

    They load elements one by one, as rows demand that are not aligned to whole vectors: asynchronous copies of single
    elements to shared memory are slow. Loads with masks of their own, as in parts of which the last is shorter, wait
    for each other less if a warp has all columns; so do several loads of single elements of four bytes, fewer a thread.
    """
    width, loads = min(_MOST_COLUMNS, _widest_columns(kernel, inner, hint, spec)), full_tile_loads(kernel)
    elements = STEP_ELEMENTS if len(loads) * STEP_ELEMENTS <= _STEP_LOADS else 4
    is_masked, is_uneven = _has_masked_elements(kernel), is_unaligned(kernel, inner)
    if len(loads) > 1 and all(load.dtype.itemsize >= 4 for load in loads) and (is_masked or is_uneven):
        width, elements = min(width, LANES), 4
    elif is_masked and (len(loads) > 1 or is_uneven):
        width = min(width, LANES)
    programs = _column_programs(kernel, inner, hint, width)
    size, warps = next_power_of_2(hint(kernel.reduced_count)), 4
    step = LANES * elements
    while warps < 16 and programs * warps < _BUSY_WARPS * spec.multiprocessors and warps * step < size * width:
        warps *= 2
    shapes = dict.fromkeys([(warps, 1), (min(2 * warps, 16), 1), (max(warps // 2, 4), 1), (4, 2)])
    tiles = [(max(min(step * count * times // width, size), 1), count) for count, times in shapes]
    return [Configuration((inner,), (), width, 1, rows, looped=True, num_warps=count) for rows, count in tiles]


def _column_scan_configurations(inner: Axis, kernel: Kernel, hint: Hint) -> list[Configuration]:
    """Returns loops over columns of which each thread has one by itself, and scans it without shared memory."""
    size = next_power_of_2(hint(kernel.reduced_count))
    shapes = ((LANES, 64, 1), (LANES, 32, 1), (4 * LANES, 32, 4))
    return [
        Configuration((inner,), (), width, 1, min(rows, size), looped=True, num_warps=warps)
        for width, rows, warps in shapes if width <= hint(inner.size)
    ]  # fmt: skip


def is_outer_reduction(kernel: Kernel, hint: Hint) -> bool:
    """Whether most accesses to elements are contiguous along a parallel axis, as in a sum of columns."""
    pairs = zip(kernel.operations, kernel.address_axes, strict=True)
    has_elements = any(isinstance(item, Load | Store) and not axes.isdisjoint(kernel.reduced) for item, axes in pairs)
    scores = contiguity_scores(kernel, hint) if has_elements else {}
    parallel = max([scores.get(axis, 0) for axis in kernel.axes], default=0)
    return parallel > max([scores.get(axis, 0) for axis in kernel.reduced], default=0)
