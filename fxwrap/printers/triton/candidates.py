"""Candidate configurations of kernels: the choice among the modules that return those of one form of kernel.

The first configuration of a kernel is the default; autotuning times all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from fxwrap.devices import CUDA, WARP_LANES, DeviceSpec
from fxwrap.loop_ir import (
    Kernel,
    Load,
    ScheduleError,
    find_contraction,
    find_grouped_contraction,
    find_rows_and_columns,
)
from fxwrap.printers.triton.accesses import MANY_LOADS, MAX_LOADED_ELEMENTS, Hint
from fxwrap.printers.triton.column_configuration import is_outer_reduction, outer_reduction_configurations
from fxwrap.printers.triton.contraction_queries import can_use_dot, has_integer_columns
from fxwrap.printers.triton.dot_configuration import (
    dot_configurations,
    grouped_dot_configurations,
    matvec_configurations,
)
from fxwrap.printers.triton.group_sum_configuration import group_sum_configurations, split_sum_configurations
from fxwrap.printers.triton.pointwise_configuration import pointwise_configurations
from fxwrap.printers.triton.row_configuration import inner_reduction_configurations, row_part_configurations
from fxwrap.printers.triton.streaming_configuration import streaming_configurations
from fxwrap.printers.triton.tiling import Configuration, TileConfiguration, next_power_of_2
from fxwrap.symbolic import Size, evaluate_size

_MOST_WARPS = 16
"""The warps among which the elements of a tile with many loads are divided."""


def _default_hint(size: Size) -> int:
    """Returns a size for symbols of 1024."""
    return size if isinstance(size, int) else evaluate_size(size, {str(symbol): 1024 for symbol in size.free_symbols})


def configurations(
    kernel: Kernel,
    hint: Hint | None = None,
    spec: DeviceSpec = CUDA,
    *,
    is_matmul: bool = False,
    is_interpreted: bool = False,
) -> tuple[Configuration, ...]:
    """Returns candidate configurations of a kernel for a device, the default one first; all are correct.

    Args:
        kernel: the kernel.
        hint: returns a typical value of a size; by default symbols are 1024.
        spec: the device's capabilities.
        is_matmul: whether the kernel computes a matmul, which is a library call unless a schedule computes it in tiles.
        is_interpreted: whether Triton's interpreter runs the kernel, which multiplies no blocks of half precision.

    Raises ScheduleError for a matmul without such a schedule, and where none fits the device's shared memory, and
    KernelError for a kernel that reduces some of its reduced axes and has no schedule.
    """
    hint = hint or _default_hint
    contraction, form = find_contraction(kernel), find_rows_and_columns(kernel)
    has_tiles = contraction is not None and (not contraction.row_reductions or can_use_dot(contraction))
    if is_matmul and not has_tiles:
        reason = "the kernel is no contraction" if contraction is None else "no tile has all columns that a row needs"
        raise ScheduleError(reason)
    candidates: Sequence[Configuration]
    if form is not None:
        candidates = row_part_configurations(kernel, form, hint, spec)
    elif kernel.reduces_in_steps and not has_tiles:
        candidates = streaming_configurations(kernel, hint, is_interpreted, spec)
    elif contraction is not None and contraction.row_reductions:
        candidates = dot_configurations(contraction, hint, spec)
    elif not kernel.reduced:
        candidates = pointwise_configurations(kernel, hint, spec)
    elif contraction is not None and contraction.rows and can_use_dot(contraction):
        candidates = dot_configurations(contraction, hint, spec)
    elif (grouped := find_grouped_contraction(kernel)) is not None and can_use_dot(grouped):
        candidates = grouped_dot_configurations(grouped, hint, spec)
    elif contraction is not None and not contraction.rows and not is_outer_reduction(kernel, hint):
        grouped_sums = group_sum_configurations(contraction, hint, spec)
        rows = matvec_configurations(kernel, hint, spec)
        split = split_sum_configurations(contraction, hint) if can_use_dot(contraction) else []
        first, second = (split, rows) if has_integer_columns(contraction) else (rows, split)
        candidates = [*grouped_sums, *rows[:1]] if grouped_sums else [*first, *second]
    elif is_outer_reduction(kernel, hint):
        candidates = [_for_windows(kernel, tile) for tile in outer_reduction_configurations(kernel, hint, spec)]
    else:
        candidates = [_for_windows(kernel, tile) for tile in inner_reduction_configurations(kernel, hint, spec)]
    return tuple(dict.fromkeys(candidates))


def _for_windows(kernel: Kernel, tile: TileConfiguration) -> TileConfiguration:
    """Returns a reduction's tile with few elements a thread if an element has many loads, as of a window."""
    loads = Counter([item.buffer for item in kernel.operations if isinstance(item, Load)])
    if max(loads.values(), default=0) < MANY_LOADS:
        return tile
    elements = max(MAX_LOADED_ELEMENTS // next_power_of_2(loads.total()), 2)
    while tile.x_block * tile.y_block * tile.r_block > elements * WARP_LANES * tile.num_warps:
        if tile.y_block > 1:
            tile = replace(tile, y_block=tile.y_block // 2)
        elif tile.num_warps < _MOST_WARPS:
            tile = replace(tile, num_warps=2 * tile.num_warps)
        elif tile.looped and tile.r_block > WARP_LANES:
            tile = replace(tile, r_block=tile.r_block // 2)
        else:
            break
    return tile
