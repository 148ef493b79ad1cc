"""Configurations of contractions of few rows that sum groups of quantised weights, or parts of the sums of bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fxwrap.devices import DeviceSpec
from fxwrap.loop_ir import (
    ContractionForm,
    GroupedSums,
    count_points,
    find_grouped_sums,
    row_precision,
    split_sums,
    sum_groups,
)
from fxwrap.printers.triton.accesses import Hint
from fxwrap.printers.triton.contraction_queries import (
    MAX_FEW_ROWS,
    MIN_PADDED_ROWS,
    adds_zeros,
    can_use_dot,
    column_loads,
    few_rows_bytes,
    is_wide,
    preferred_first,
)
from fxwrap.printers.triton.fragments import FragmentTile, fragment_configurations
from fxwrap.printers.triton.tiling import (
    BatchedDotConfiguration,
    FragmentConfiguration,
    GroupSumConfiguration,
    RowGroupSumConfiguration,
    next_power_of_2,
)


class _Tile(NamedTuple):
    """A program's columns, its groups of 64 elements (or parts of sums) in a step, its warps and pipeline stages."""

    columns: int
    groups: int
    warps: int
    stages: int


_TILE = _Tile(32, 4, 4, 3)
_FEW_COLUMNS_TILE = _Tile(16, 16, 4, 3)
_SIXTEEN_ROWS_TILE = _Tile(32, 8, 4, 3)
_MANY_ROWS_TILE = _Tile(64, 4, 4, 3)
_SEVERAL_SUMS_TILE = _Tile(32, 4, 2, 3)
"""The best tiles of quantised matmuls that sum groups: of one sum of up to 8 rows and many columns, of few columns, of
one sum of up to 16 rows, of more rows and many columns, and of several sums of up to 8 rows and many columns."""

_GROUP_SUM_TILES = (
    _TILE, _FEW_COLUMNS_TILE, _SIXTEEN_ROWS_TILE, _MANY_ROWS_TILE, _Tile(16, 8, 2, 4), _Tile(16, 16, 4, 4),
    _Tile(32, 16, 8, 3), _SEVERAL_SUMS_TILE,
)  # fmt: skip

_ROW_TILE = _Tile(4, 16, 1, 1)
_SEVERAL_SUMS_ROW_TILE = _Tile(4, 32, 2, 1)
_FEW_COLUMNS_ROW_TILE = _Tile(4, 64, 4, 1)
_LONG_ROW_TILE = _Tile(8, 32, 2, 3)
"""The best tiles of one row without dots: of one sum of many columns, of several sums of many columns, of few columns,
and of few columns of long rows."""

_ROW_TILES = (_ROW_TILE, _SEVERAL_SUMS_ROW_TILE, _FEW_COLUMNS_ROW_TILE, _LONG_ROW_TILE)

_LONG_ROW_GROUPS = 128
"""The number of groups of 64 elements from which on a row is long: a program has many steps."""

_FRAGMENT_TILE = FragmentTile(16, 2, 1, True, 128)
_SEVERAL_SUMS_FRAGMENT_TILE = FragmentTile(16, 4, 1, True, 168)
_ONE_STEP_FRAGMENT_TILE = FragmentTile(16, 4, 2, False, 128)
_MASKED_STEP_FRAGMENT_TILE = FragmentTile(16, 4, 2, False, 168)
"""The best tiles of fragments of up to 4 rows: of one sum of many columns, of several sums, and of one sum of few
columns and groups, which are loaded at once, all of a step or fewer: masks take registers."""

_LOOPING_FRAGMENT_TILES = (
    FragmentTile(16, 8, 1, False, 128, looping=True), FragmentTile(8, 8, 1, False, 128, looping=True),
)  # fmt: skip
"""Those of programs that go through many columns, of one sum and of two. Timing alone chooses them, as it varies."""

_RESIDENT_FRAGMENT_TILES = (
    FragmentTile(16, 8, 1, True, 128), FragmentTile(16, 4, 1, True, 160), FragmentTile(16, 4, 1, True, 128),
    FragmentTile(16, 2, 1, True, 160),
)  # fmt: skip
"""Those of one sum if all programs of a multiprocessor run at once: up to 2, 3, 4, or 6. With more registers a thread,
or more warps, they would not."""

_FRAGMENT_TILES = (
    _FRAGMENT_TILE, _SEVERAL_SUMS_FRAGMENT_TILE, _ONE_STEP_FRAGMENT_TILE, _MASKED_STEP_FRAGMENT_TILE,
    *_RESIDENT_FRAGMENT_TILES, FragmentTile(16, 1, 1, True, 104), FragmentTile(16, 8, 1, False, 0),
    FragmentTile(16, 2, 1, False, 0), *_LOOPING_FRAGMENT_TILES,
)  # fmt: skip

_FULL_FRAGMENT_TILE = FragmentTile(16, 2, 4, False, 128)
_HALF_STEP_FULL_FRAGMENT_TILE = FragmentTile(16, 2, 2, False, 128)
_FEW_COLUMNS_FULL_FRAGMENT_TILE = FragmentTile(16, 4, 4, False, 128)
_HALF_STEP_FEW_COLUMNS_FULL_FRAGMENT_TILE = FragmentTile(16, 4, 2, False, 128)
_LONG_FULL_FRAGMENT_TILE = FragmentTile(16, 8, 4, True, 128)
_MANY_COLUMNS_FULL_FRAGMENT_TILE = FragmentTile(32, 2, 4, False, 128)
"""The best tiles of 5 to 8 rows: of several sums and of few columns, each also where its last step would be half empty,
of few columns of long rows, and of one sum of many columns, whose programs then read the rows half as often."""

_FULL_FRAGMENT_TILES = (
    _FULL_FRAGMENT_TILE, _FEW_COLUMNS_FULL_FRAGMENT_TILE, _LONG_FULL_FRAGMENT_TILE, _HALF_STEP_FULL_FRAGMENT_TILE,
    _HALF_STEP_FEW_COLUMNS_FULL_FRAGMENT_TILE, _MANY_COLUMNS_FULL_FRAGMENT_TILE, FragmentTile(16, 8, 8, False, 128),
    FragmentTile(16, 1, 4, False, 128), FragmentTile(32, 2, 4, False, 0),
)  # fmt: skip

_SPLIT_SUM_TILE = _Tile(16, 8, 4, 3)
_FEW_COLUMNS_SPLIT_SUM_TILE = _Tile(16, 8, 2, 4)
"""The best tiles of weights of one byte, with parts of the products of a column as groups: of many columns, of few."""

_SPLIT_SUM_TILES = (
    _SPLIT_SUM_TILE, _FEW_COLUMNS_SPLIT_SUM_TILE, _Tile(16, 8, 8, 4), _Tile(32, 4, 4, 3), _Tile(64, 4, 4, 3),
    _Tile(32, 8, 8, 3),
)  # fmt: skip

_SPLIT_SUM_PRODUCTS = 64
"""The number of products in a part."""

_MOST_PADDED = 1.125
"""The groups of all steps for each group, beyond which steps are shorter."""

_ROW_BYTES = 2
"""The bytes of an element of the rows of such matmuls."""

_MIN_GROUP_BYTES = 32
"""The fewest bytes of a group that a dot of tensor cores multiplies as they are in registers."""


def group_sum_configurations(
    contraction: ContractionForm, hint: Hint, spec: DeviceSpec
) -> Sequence[GroupSumConfiguration]:
    """Returns configurations that sum groups of quantised weights of few rows; none for other contractions.

    The first of these has few columns a program where all are few, so that programs occupy the device.
    """
    rows = hint(contraction.row_count)
    summed = sum_groups(contraction) if rows <= MAX_FEW_ROWS and can_use_dot(contraction) else None
    if summed is None:
        return []
    form = find_grouped_sums(summed, contraction)
    count, size = count_points(form.groups), form.contraction.summed_count
    if not isinstance(count, int) or not isinstance(size, int) or size & (size - 1):
        return []
    fragments = _fragment_configurations(contraction, form, hint, spec)
    if size < _MIN_GROUP_BYTES:
        return fragments
    padded = max(next_power_of_2(rows), MIN_PADDED_ROWS)
    dots = []
    packed = hint(contraction.summed_count) // (count * size)
    for tile in preferred_first(_GROUP_SUM_TILES, _best_group_sum_tile(contraction, padded, hint)):
        block = _groups_of_step(tile, size, count, adds_zeros(form, from_loads=True))
        stage = block * size * (padded * packed * _ROW_BYTES + tile.columns * len(contraction.sums))
        if stage * (tile.stages - 1) <= few_rows_bytes(spec):
            dots.append(_batched_dots(contraction, form, padded, size, tile, block))
    of_row = _row_group_sum_configurations(contraction, form, hint)
    known = [*of_row, *(dots[:1] if of_row and fragments else dots)]
    return [*fragments, *known] if _prefers_fragments(contraction, fragments, hint) else [*known, *fragments]


def _best_group_sum_tile(contraction: ContractionForm, padded_rows: int, hint: Hint) -> _Tile:
    has_one_sum = len(contraction.sums) == 1
    if padded_rows == 2 * MIN_PADDED_ROWS and has_one_sum:
        return _SIXTEEN_ROWS_TILE
    if not is_wide(contraction, hint):
        return _FEW_COLUMNS_TILE
    if padded_rows > MIN_PADDED_ROWS:
        return _MANY_ROWS_TILE
    return _TILE if has_one_sum else _SEVERAL_SUMS_TILE


def _groups_of_step(tile: _Tile, size: int, count: int, may_be_fewer: bool = False) -> int:
    """Returns the number of groups of `size` bytes that have the bytes of the tile's, and divide all `count`.

    Where the last step may have fewer, they need not divide these if steps are filled: each takes as long as another.
    """
    groups = max(tile.groups * _MIN_GROUP_BYTES // size, 1)
    if not may_be_fewer:
        return math.gcd(groups, count)
    groups = min(groups, next_power_of_2(count))
    sizes = [groups >> number for number in range(groups.bit_length() - 1)] or [1]  # two groups at least
    filled = [size for size in sizes if _padded(count, size) <= _MOST_PADDED * count]
    return filled[0] if filled else min(sizes, key=lambda size: _padded(count, size))


def _padded(count: int, groups: int) -> int:
    """Returns the groups of all steps of so many."""
    return -(-count // groups) * groups


def _batched_dots(
    contraction: ContractionForm, form: GroupedSums, rows: int, size: int, tile: _Tile, block: int
) -> BatchedDotConfiguration:
    """Returns a configuration whose dots have a batch of a `block` of groups, or parts of sums, of `size` products."""
    return BatchedDotConfiguration(
        x=contraction.rows, y=contraction.columns, p=form.groups, x_block=rows, y_block=tile.columns, p_block=block,
        r_block=size, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _fragment_configurations(
    contraction: ContractionForm, form: GroupedSums, hint: Hint, spec: DeviceSpec
) -> list[FragmentConfiguration]:
    """Returns configurations of fragments."""
    if hint(contraction.row_count) > MIN_PADDED_ROWS // 2:
        best = _best_full_fragment_tile(contraction, form, hint, spec)
        return fragment_configurations(contraction, form, preferred_first(_FULL_FRAGMENT_TILES, best), spec)
    best = _best_fragment_tile(contraction, form, hint, spec)
    return fragment_configurations(contraction, form, preferred_first(_FRAGMENT_TILES, best), spec)


def _best_full_fragment_tile(
    contraction: ContractionForm, form: GroupedSums, hint: Hint, spec: DeviceSpec
) -> FragmentTile:
    """Returns the best tile of 5 to 8 rows."""
    tiles = (_FULL_FRAGMENT_TILE, _HALF_STEP_FULL_FRAGMENT_TILE)
    if not is_wide(contraction, hint):
        if _is_long(form, hint):
            return _LONG_FULL_FRAGMENT_TILE
        tiles = (_FEW_COLUMNS_FULL_FRAGMENT_TILE, _HALF_STEP_FEW_COLUMNS_FULL_FRAGMENT_TILE)
    elif len(contraction.sums) == 1:
        tiles = (_MANY_COLUMNS_FULL_FRAGMENT_TILE, _HALF_STEP_FULL_FRAGMENT_TILE)
    count = hint(count_points(form.groups))
    steps = [item.p_block for tile in tiles for item in fragment_configurations(contraction, form, [tile], spec)]
    if len(steps) == len(tiles) and _padded(count, steps[0]) > max(_MOST_PADDED * count, _padded(count, steps[1])):
        return tiles[1]
    return tiles[0]


def _best_fragment_tile(contraction: ContractionForm, form: GroupedSums, hint: Hint, spec: DeviceSpec) -> FragmentTile:
    """Returns the best tile of up to 4 rows.

    Queries, keys and values have one tile in most models, so that `combo_kernels` makes them one launch.
    """
    if len(contraction.sums) > 1:
        return _SEVERAL_SUMS_FRAGMENT_TILE
    columns = hint(count_points(contraction.columns))
    programs = math.ceil(columns / (_FRAGMENT_TILE.columns * spec.multiprocessors))
    two, three, four, six = _RESIDENT_FRAGMENT_TILES
    if programs > 2:
        return {3: three, 4: four, 5: six, 6: six}.get(programs, _FRAGMENT_TILE)
    for item in fragment_configurations(contraction, form, [_ONE_STEP_FRAGMENT_TILE], spec):
        groups = hint(count_points(form.groups))
        if item.p_block >= groups:
            return _ONE_STEP_FRAGMENT_TILE if item.p_block == groups else _MASKED_STEP_FRAGMENT_TILE
    return two if _is_long(form, hint) else three


def _prefers_fragments(contraction: ContractionForm, fragments: Sequence[FragmentConfiguration], hint: Hint) -> bool:
    """Whether fragments are first: of one row, and of 5 to 8 for several sums, few columns, or digits."""
    rows = hint(contraction.row_count)
    if rows <= MIN_PADDED_ROWS // 2:
        return rows == 1
    has_digits = bool(fragments) and fragments[0].raw_digits
    return len(contraction.sums) > 1 or not is_wide(contraction, hint) or has_digits


def _is_long(form: GroupedSums, hint: Hint) -> bool:
    """Whether the groups of a row are many."""
    count = count_points(form.groups)
    return hint(count * form.contraction.summed_count) >= _LONG_ROW_GROUPS * _MIN_GROUP_BYTES


def _row_group_sum_configurations(
    contraction: ContractionForm, form: GroupedSums, hint: Hint
) -> list[RowGroupSumConfiguration]:
    """Returns configurations of one row of bfloat16 without dots, for blocks that divide columns and groups.

    Those of one stage load all of a step before they compute.
    """
    columns, size = count_points(contraction.columns), int(form.contraction.summed_count)
    count = int(count_points(form.groups))
    is_bfloat16 = row_precision(contraction, contraction.sums[0]) is torch.bfloat16
    if contraction.rows or contraction.batch or not is_bfloat16 or not isinstance(columns, int):
        return []
    if is_wide(contraction, hint):
        best = _ROW_TILE if len(contraction.sums) == 1 else _SEVERAL_SUMS_ROW_TILE
    else:
        best = _LONG_ROW_TILE if _is_long(form, hint) else _FEW_COLUMNS_ROW_TILE
    return [
        RowGroupSumConfiguration(
            y=contraction.columns, p=form.groups, y_block=tile.columns, p_block=_groups_of_step(tile, size, count),
            r_block=size, num_warps=tile.warps, num_stages=tile.stages, loads_first=tile.stages == 1,
        )
        for tile in preferred_first(_ROW_TILES, best) if columns % tile.columns == 0
    ]  # fmt: skip


def split_sum_configurations(contraction: ContractionForm, hint: Hint) -> list[BatchedDotConfiguration]:
    """Returns configurations of few rows times weights of one byte, whose warps share out the products of a column.

    Where columns are few, a program's warps would otherwise compute the same products.
    """
    rows, loads = hint(contraction.row_count), column_loads(contraction)
    if rows > MAX_FEW_ROWS or not all(item.dtype.itemsize == 1 for item in loads):
        return []
    split = split_sums(contraction, _SPLIT_SUM_PRODUCTS)
    if split is None:
        return []
    form, padded = find_grouped_sums(split, contraction), max(next_power_of_2(rows), MIN_PADDED_ROWS)
    count = form.groups[0].size
    best = _SPLIT_SUM_TILE if is_wide(contraction, hint) else _FEW_COLUMNS_SPLIT_SUM_TILE
    return [
        _batched_dots(contraction, form, padded, _SPLIT_SUM_PRODUCTS, tile, tile.groups)
        for tile in preferred_first(_SPLIT_SUM_TILES, best) if isinstance(count, int) and not count % tile.groups
    ]  # fmt: skip
