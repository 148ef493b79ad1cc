"""Configurations of contractions: of one row, of few rows, of many, and of rows in groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from fxwrap.devices import DeviceSpec
from fxwrap.loop_ir import FLOAT8, ContractionForm, Kernel, Load, count_points, has_ascending_groups
from fxwrap.printers.triton.accesses import Hint, full_tile_loads
from fxwrap.printers.triton.column_configuration import is_outer_reduction
from fxwrap.printers.triton.contraction_queries import (
    MAX_FEW_ROWS,
    MIN_DOT_BLOCK,
    MIN_PADDED_ROWS,
    few_rows_bytes,
    has_integer_columns,
    is_wide,
    preferred_first,
)
from fxwrap.printers.triton.group_sum_configuration import group_sum_configurations, split_sum_configurations
from fxwrap.printers.triton.row_configuration import inner_reduction_configurations
from fxwrap.printers.triton.shared_memory import fitting
from fxwrap.printers.triton.tiling import (
    Configuration,
    DotConfiguration,
    GroupBlockConfiguration,
    TileConfiguration,
    next_power_of_2,
)

C = TypeVar("C", bound=DotConfiguration)

_MATVEC_BLOCKS = ((1, 4096, 8, 1), (1, 2048, 4, 1), (4, 512, 4, 3), (2, 2048, 8, 1))
"""Columns, elements of a column, warps and stages of products with one row."""

_MAX_PERSISTENT_MATVEC = 8192
"""The longest row of a product that is read at once."""

_MAX_SUMMED_ROWS = 2
"""The largest number of rows whose products are summed element by element, faster than a dot of padded rows."""

_FEW_ROWS_TILES = (
    (16, 512, 2, 3), (32, 128, 2, 3), (32, 256, 2, 5), (128, 128, 8, 3), (64, 64, 4, 4), (16, 256, 2, 5),
    (64, 128, 4, 4), (32, 256, 4, 6),
)  # fmt: skip
"""Columns, elements of a column, warps and stages of products with few rows."""

_WIDE_TILES = {8: (32, 128, 2, 3), 16: (128, 128, 8, 3), 32: (64, 128, 4, 4), 64: (64, 64, 4, 4)}
"""By the padded number of rows, the best one of these for matrices of many columns; of few, it is the first."""

_WIDE_BYTES_TILE = (64, 256, 4, 4)
"""The best tile of up to 8 rows times matrices of many columns whose elements are integers of one byte."""

_GROUPED_TILES = (
    (64, 128, 4, 4), (32, 256, 4, 4), (16, 256, 4, 5), (128, 128, 8, 3), (32, 128, 4, 5), (16, 256, 2, 4),
    (64, 256, 4, 3), (16, 128, 2, 5),
)  # fmt: skip
"""The same as `_FEW_ROWS_TILES` of rows in groups."""

_MIN_GROUP_ROWS = 4
"""The average rows of a group from which on blocks of rows have one group."""

_GROUP_BLOCK_TILES = (
    (128, 256, 64, 8, 4), (128, 128, 64, 8, 4), (128, 128, 64, 8, 3), (64, 128, 64, 4, 4), (64, 64, 64, 4, 4),
    (32, 64, 128, 4, 4), (32, 128, 64, 4, 4), (16, 64, 128, 4, 4),
)  # fmt: skip
"""Rows, columns, elements of a row, warps and stages of blocks of one group; those of 256 columns have one sum."""

_GROUP_BLOCK_ROWS = ((48, 128), (24, 64), (13, 32), (0, 16))
"""By the least average rows of a group, the rows of a block, which most groups do not exceed."""

_GROUP_BAND_ROWS = 1024
"""The most rows of a band of blocks of one group each, of which few share weights."""

_MAX_POINTER_ROWS = 128
"""The largest average rows of a group with which loads by pointers are as fast as those by tensor descriptors."""

_TAILS = (64, 32)
"""Rows of the blocks of a group's last rows, where descriptors load blocks of more."""

_MIN_WIDE_WAVES = 2
"""The number of waves of full blocks from which on these have as many columns as fit: the last wave takes as long."""

_GROUPED_ROW_BLOCK = (4, 1024, 2)
"""Columns, elements of a column and warps of a row that has a matrix of its own."""

_DOT_TILES = (
    (128, 128, 64, 8, 3), (128, 256, 64, 8, 3), (64, 128, 64, 4, 4), (128, 64, 64, 4, 4), (64, 64, 64, 4, 4),
    (128, 128, 32, 4, 4),
)  # fmt: skip
"""Rows, columns, elements of a row, warps and stages of products with many rows."""


def matvec_configurations(kernel: Kernel, hint: Hint, spec: DeviceSpec) -> list[TileConfiguration]:
    """Returns configurations of one row: those of a reduction, and blocks of columns, first if rows are long.

    Elements of two bytes are read by several columns at once first where rows are long, or have two sums.
    """
    plain = inner_reduction_configurations(kernel, hint, spec)
    longest = next_power_of_2(hint(kernel.reduced_count))
    blocks = [
        TileConfiguration(
            y=kernel.axes, y_block=columns, r_block=block, looped=True, num_warps=warps, num_stages=stages
        )
        for columns, block, warps, stages in _MATVEC_BLOCKS if block < longest
    ]  # fmt: skip
    is_long, has_several = longest > _MAX_PERSISTENT_MATVEC, len(kernel.reductions) > 1
    preferred: list[TileConfiguration] = []
    if is_long != has_several and all(load.dtype.itemsize == 2 for load in full_tile_loads(kernel)):
        preferred = [item for item in blocks if item.y_block == (4 if is_long else 2)]
        blocks = [item for item in blocks if item not in preferred]
    return [*preferred, *blocks, *plain] if is_long else [*preferred, *plain, *blocks]


def dot_configurations(contraction: ContractionForm, hint: Hint, spec: DeviceSpec) -> Sequence[Configuration]:
    """Returns configurations of several rows. A program has all of few rows, padded to a block of the dot.

    It has all columns that row reductions reduce.
    """
    rows, reduced = hint(contraction.row_count), hint(contraction.summed_count)
    columns, few = contraction.reduced_columns or contraction.columns, contraction.rows
    narrow = 2 if _has_float8_operands(contraction) else 1
    longest, whole = max(next_power_of_2(reduced), MIN_DOT_BLOCK * narrow), 0
    if contraction.row_reductions:
        whole = max(next_power_of_2(hint(contraction.reduced_column_count)), MIN_DOT_BLOCK)
    if rows > MAX_FEW_ROWS:
        many = [
            DotConfiguration(
                x=columns, y=few, x_block=whole or x, y_block=y, r_block=min(r * narrow, longest), num_warps=warps,
                num_stages=stages,
            )
            for y, x, r, warps, stages in _DOT_TILES
        ]  # fmt: skip
        banded = [replace(item, band=_band(contraction, item, hint, spec)) for item in many]
        return fitting(banded, partial(_shared_bytes, contraction), _smaller, spec)
    padded = max(next_power_of_2(rows), MIN_PADDED_ROWS)
    wide, has_bytes = is_wide(contraction, hint), has_integer_columns(contraction) and padded == MIN_PADDED_ROWS
    best = _WIDE_TILES[padded] if wide else _FEW_ROWS_TILES[0]
    tiles_of_few = preferred_first(_FEW_ROWS_TILES, _WIDE_BYTES_TILE if wide and has_bytes else best)
    all_rows = DotConfiguration(x=few, y=columns, x_block=padded)
    sized = [
        replace(all_rows, y_block=whole or y, r_block=r, num_warps=warps, num_stages=stages)
        for y, r, warps, stages in tiles_of_few
    ]
    small = [item for item in sized if _shared_bytes(contraction, item) <= few_rows_bytes(spec)]
    small = small or [replace(all_rows, y_block=whole or 16, r_block=64, num_warps=2, num_stages=2)]
    dots = [replace(item, r_block=min(item.r_block, longest)) for item in small]
    dots = fitting(dots, partial(_shared_bytes, contraction), _smaller, spec)
    grouped = group_sum_configurations(contraction, hint, spec)
    if grouped:
        return [*grouped, *dots[:1]]
    split = split_sum_configurations(contraction, hint)
    by_dots: list[Configuration] = [*split, *dots] if has_bytes and not wide else [*dots, *split]
    if rows > _MAX_SUMMED_ROWS or whole:
        return by_dots
    x_block = max(next_power_of_2(rows), 2)
    summed = TileConfiguration(x=few, y=columns, x_block=x_block, y_block=4, r_block=min(256, longest), looped=True)
    return [*by_dots[:1], replace(summed, num_stages=3), summed, *by_dots[1:]]


def grouped_dot_configurations(contraction: ContractionForm, hint: Hint, spec: DeviceSpec) -> Sequence[Configuration]:
    """Returns configurations of rows in groups: tiles of about the rows of a group, and rows by themselves if few.

    Tiles are first unless they would be too few to occupy a GPU; those of ascending groups of several rows have one
    group each. Programs of single rows read several columns.
    """
    assert contraction.group is not None
    kernel, rows, columns = contraction.kernel, contraction.rows, contraction.columns
    in_group = hint(contraction.row_count) // max(hint(contraction.group.size), 1)
    block = min(max(next_power_of_2(in_group), MIN_DOT_BLOCK), 128)
    longest = max(next_power_of_2(hint(kernel.reduced_count)), MIN_DOT_BLOCK)
    wide = [
        DotConfiguration(
            x=columns, y=rows, x_block=x_block, y_block=y_block, r_block=min(r_block, longest), num_warps=warps,
            num_stages=stages,
        )
        for y_block, x_block, r_block, warps, stages in _DOT_TILES if y_block <= block
    ]  # fmt: skip
    narrow = [
        DotConfiguration(
            x=rows, y=columns, x_block=min(block, 64), y_block=y_block, r_block=min(r_block, longest), num_warps=warps,
            num_stages=stages,
        )
        for y_block, r_block, warps, stages in _GROUPED_TILES if y_block >= 64 or block == MIN_DOT_BLOCK
    ]  # fmt: skip
    banded = [replace(item, band=_band(contraction, item, hint, spec)) for item in (*wide, *narrow)]
    dots = fitting(banded, partial(_shared_bytes, contraction), _smaller, spec)
    if in_group >= _MIN_GROUP_ROWS and has_ascending_groups(contraction):
        return [*_group_block_configurations(contraction, in_group, hint, spec), *dots[:1]]
    if in_group > _MAX_SUMMED_ROWS or is_outer_reduction(kernel, hint):
        return dots
    blocks = hint(count_points(columns)) // _GROUPED_TILES[0][0]
    tiles = -(-hint(contraction.row_count) // MIN_DOT_BLOCK) * blocks * len(contraction.sums)
    y_block, r_block, warps = _GROUPED_ROW_BLOCK
    single_row = TileConfiguration(
        y=kernel.axes, y_block=y_block, r_block=min(r_block, longest), looped=True, num_warps=warps
    )
    single = [single_row, *matvec_configurations(kernel, hint, spec)]
    return [*dots, *single] if tiles >= _saturating_programs(spec) else [*single, *dots]


def _group_block_configurations(
    contraction: ContractionForm, in_group: int, hint: Hint, spec: DeviceSpec
) -> list[GroupBlockConfiguration]:
    """Returns configurations with blocks of one group each: those of about the rows of a group."""
    assert contraction.group is not None
    rows = next(block for least, block in _GROUP_BLOCK_ROWS if in_group >= least)
    sizes = contraction.summed_count, count_points(contraction.columns)
    longest, widest = [max(next_power_of_2(hint(size)), MIN_DOT_BLOCK) for size in sizes]
    blocks = [
        GroupBlockConfiguration(
            x=contraction.columns, y=contraction.rows, x_block=min(x_block, widest), y_block=y_block,
            r_block=min(r_block, longest), num_warps=warps, num_stages=stages, rows=contraction.rows,
            groups=contraction.group.size,
        )
        for y_block, x_block, r_block, warps, stages in _GROUP_BLOCK_TILES
        if rows // 2 <= y_block <= 2 * rows and (x_block < 256 or len(contraction.sums) == 1)
    ]  # fmt: skip
    preferred = sorted(blocks, key=lambda item: item.y_block != rows)
    bands = [min(_band(contraction, item, hint, spec), _GROUP_BAND_ROWS // item.y_block) for item in preferred]
    banded = [replace(item, band=band) for item, band in zip(preferred, bands, strict=True)]
    fit = fitting(banded, partial(_shared_bytes, contraction), _smaller, spec)
    if in_group <= _MAX_POINTER_ROWS or not spec.supports_tensor_descriptors:
        return fit
    described = [_described(item) for item in fit]
    count = hint(contraction.row_count) * hint(count_points(contraction.columns))
    waves = count / (described[0].x_block * described[0].y_block * spec.multiprocessors)
    is_short = waves < _MIN_WIDE_WAVES
    narrower = [item for item in described[1:2] if is_short and item.y_block < described[0].y_block]
    return [*narrower, *[item for item in described if item not in narrower], fit[0]]


def _described(item: GroupBlockConfiguration) -> GroupBlockConfiguration:
    """Returns blocks whose operands descriptors load: of columns by rows, which tensor cores also multiply if few."""
    swapped = replace(item, x=item.y, y=item.x, x_block=item.y_block, y_block=item.x_block)
    return replace(swapped, descriptors=True, tails=tuple([rows for rows in _TAILS if rows < item.y_block]))


def _saturating_programs(spec: DeviceSpec) -> int:
    """Returns the number of programs with few rows that reach a device's bandwidth: five for six multiprocessors."""
    return spec.multiprocessors * 5 // 6


def _band(contraction: ContractionForm, configuration: DotConfiguration, hint: Hint, spec: DeviceSpec) -> int:
    """Returns the number of blocks of rows whose operands fit a third of the device's cache."""
    kernel = contraction.kernel
    block = configuration.y_block if configuration.y == contraction.rows else configuration.x_block
    used = {at for item in contraction.sums for at in contraction.prologue(item.row_operand)}
    is_summed = kernel.varying_along(contraction.summed)
    loads = [kernel.operations[at] for at in used if is_summed[at]]
    row_bytes = hint(contraction.summed_count) * sum(item.dtype.itemsize for item in loads if isinstance(item, Load))
    blocks = -(-hint(contraction.row_count) // block)
    return max(min(spec.cache_bytes // 3 // max(row_bytes * block, 1), blocks), 1)


def _has_float8_operands(contraction: ContractionForm) -> bool:
    """Whether all operands are loaded in float8, of which a block has twice the elements for the same bytes."""
    kernel = contraction.kernel
    used = [position for item in contraction.sums for position in (item.row_operand, item.column_operand)]
    loads = [kernel.operations[at] for position in used for at in contraction.prologue(position) if kernel.varying[at]]
    return all(item.dtype in FLOAT8 for item in loads if isinstance(item, Load))


def _shared_bytes(contraction: ContractionForm, configuration: DotConfiguration) -> int:
    """Returns the bytes of the operands of a block, once for each stage."""
    kernel = contraction.kernel
    blocks = ((configuration.x, configuration.x_block), (configuration.y, configuration.y_block))
    used = [position for item in contraction.sums for position in (item.row_operand, item.column_operand)]
    size = 0
    for position in {at for operand in used for at in contraction.prologue(operand) if kernel.varying[at]}:
        operation = kernel.operations[position]
        if isinstance(operation, Load):
            axes = operation.index.axes()
            extent = math.prod([block for own, block in blocks if not axes.isdisjoint(own)])
            size += extent * configuration.r_block * operation.dtype.itemsize
    return size * configuration.num_stages


def _smaller(item: C) -> C | None:
    """Returns a configuration that needs less shared memory, by fewer stages, then smaller blocks; else None."""
    if item.num_stages > 1:
        return replace(item, num_stages=item.num_stages - 1)
    if item.r_block > 2 * MIN_DOT_BLOCK:
        return replace(item, r_block=item.r_block // 2)
    return None
