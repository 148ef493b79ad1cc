"""Candidate configurations of kernels: those of contractions, and a choice among those of `configuration.py`.

The first configuration of a kernel is the default; autotuning times all.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch

from fxwrap.devices import CUDA, DeviceSpec
from fxwrap.loop_ir import (
    FLOAT8,
    MAX_COLUMN_BLOCK,
    ContractionForm,
    GroupedSums,
    Kernel,
    Load,
    find_contraction,
    find_grouped_contraction,
    find_grouped_sums,
    find_rows_and_columns,
    has_groups,
    row_precision,
    split_sums,
    sum_groups,
)
from fxwrap.printers.triton.accesses import Hint, full_tile_loads
from fxwrap.printers.triton.column_configuration import is_outer_reduction, outer_reduction_configurations
from fxwrap.printers.triton.configuration import (
    Configuration,
    inner_reduction_configurations,
    next_power_of_2,
    pointwise_configurations,
    row_part_configurations,
)
from fxwrap.printers.triton.fragments import fragment_configurations
from fxwrap.printers.triton.shared_memory import fitting
from fxwrap.symbolic import Size, evaluate, product

_MATVEC_BLOCKS = ((1, 4096, 8, 1), (1, 2048, 4, 1), (4, 512, 4, 3), (2, 2048, 8, 1))
"""Columns, elements of a column, warps and stages of products with one row."""

_MAX_PERSISTENT_MATVEC = 8192
"""The longest row of a product that is read at once."""

MIN_DOT_BLOCK = 16
"""The smallest size of a block that Triton's dot multiplies."""

_MAX_FEW_ROWS = 64
_FEWEST_ROWS = 8
"""The smallest number of rows that a dot is padded to: that of tensor cores, whose other operand has more."""
_WIDE_COLUMNS = 8192
"""The number of columns from which on few of them a program occupy a large GPU several times."""
_MIN_DOT_PROGRAMS = 110
"""Number of programs with few rows that reach the bandwidth of a large GPU."""
_MAX_SUMMED_ROWS = 2
"""The largest number of rows whose products are summed element by element, faster than a dot of padded rows."""

_FEW_ROWS_TILES = (
    (16, 512, 2, 3), (32, 128, 2, 3), (32, 256, 2, 5), (128, 128, 8, 3), (64, 64, 4, 4), (16, 256, 2, 5),
    (64, 128, 4, 4), (32, 256, 4, 6),
)  # fmt: skip
"""Columns, elements of a column, warps and stages of products with few rows."""

_WIDE_TILES = {8: (32, 128, 2, 3), 16: (128, 128, 8, 3), 32: (64, 128, 4, 4), 64: (64, 64, 4, 4)}
"""By the number of rows, the best one of these for matrices of many columns."""

_GROUP_SUM_TILES = (
    (32, 4, 4, 3), (16, 16, 4, 3), (32, 8, 4, 3), (64, 4, 4, 3), (16, 8, 2, 4), (16, 16, 4, 4), (32, 16, 8, 3),
    (32, 4, 2, 3),
)  # fmt: skip
"""Columns, groups of 64 elements, warps and stages of quantised matmuls that sum groups.

The first of these is the best one of up to 8 rows and many columns, the second of few columns, the third of up to 16
rows, the fourth of more rows and many columns, and the last of several sums of up to 8 rows and many columns.
"""

_LONG_ROW_GROUPS = 128
"""The number of groups of 64 elements from which on a row is long: a program has many steps."""

_LONG_ROW_TILE = (8, 32, 2, 3)
"""The same of one row whose products are summed without dots: the best of few columns of long rows."""

_LOADS_FIRST_TILES = ((4, 16, 1, 1), (4, 32, 2, 1), (4, 64, 4, 1))
"""The same of steps that load first: the best of one sum of many columns, of several sums, and of few columns."""

_FRAGMENT_TILES = (
    (16, 1, 1, True, 104), (16, 4, 1, True, 168), (16, 4, 1, True, 160), (16, 2, 1, True, 128), (16, 8, 1, False, 0),
    (16, 2, 1, False, 0), (16, 4, 1, False, 128),
)  # fmt: skip
"""Columns, warps, groups of a warp one after another, and registers of fragments of up to 4 rows.

The fourth entry says whether a step loads the next one. The first of these is for one sum of many
columns, the second for several sums, and the third for few columns.
"""

_FULL_FRAGMENT_TILES = (
    (16, 2, 4, False, 128), (16, 8, 4, True, 128), (16, 4, 4, False, 128), (16, 8, 8, False, 128),
    (16, 1, 4, False, 128), (32, 2, 4, False, 0),
)  # fmt: skip
"""The same of 5 to 8 rows: the first is for many columns, the second for few columns."""

_SPLIT_SUM_TILES = ((16, 8, 4, 3), (16, 8, 2, 4), (16, 8, 8, 4), (32, 4, 4, 3), (64, 4, 4, 3), (32, 8, 8, 3))
"""Columns, parts of the products of a column, warps and stages of weights of one byte.

The first of these is the best one of many columns, the second of few.
"""

_WIDE_BYTES_TILE = (64, 256, 4, 4)
"""The best tile of up to 8 rows times matrices of many columns whose elements are integers of one byte."""

_SPLIT_SUM_PRODUCTS = 64
"""The number of products in a part."""

_ROW_BYTES = 2
"""The bytes of an element of the rows of such matmuls."""

_MIN_GROUP_BYTES = 32
"""The fewest bytes of a group that a dot of tensor cores multiplies as they are in registers."""

_GROUPED_TILES = (
    (64, 128, 4, 4), (32, 256, 4, 4), (16, 256, 4, 5), (128, 128, 8, 3), (32, 128, 4, 5), (16, 256, 2, 4),
    (64, 256, 4, 3), (16, 128, 2, 5),
)  # fmt: skip
"""The same of rows in groups."""

_GROUPED_ROW_BLOCK = (4, 1024, 2)
"""Columns, elements of a column and warps of a row that has a matrix of its own."""

_DOT_TILES = (
    (128, 128, 64, 8, 3), (128, 256, 64, 8, 3), (64, 128, 64, 4, 4), (128, 64, 64, 4, 4), (64, 64, 64, 4, 4),
    (128, 128, 32, 4, 4),
)  # fmt: skip
"""Rows, columns, elements of a row, warps and stages of products with many rows."""

_BAND_BYTES = 16 << 20
"""The bytes of the rows that programs read for each block of columns in turn."""


def _default_hint(size: Size) -> int:
    """Returns a size for symbols of 1024."""
    return size if isinstance(size, int) else int(evaluate(size, {str(symbol): 1024 for symbol in size.free_symbols}))


def configurations(kernel: Kernel, hint: Hint | None = None, spec: DeviceSpec = CUDA) -> tuple[Configuration, ...]:
    """Returns candidate configurations of a kernel for a device, the default one first; all are correct."""
    hint = hint or _default_hint
    contraction = find_contraction(kernel)
    form = find_rows_and_columns(kernel)
    if form is not None:
        candidates = row_part_configurations(kernel, form, hint, spec)
    elif contraction is not None and contraction.row_reductions:
        assert can_use_dot(contraction), "callers check that a kernel with row reductions has a schedule"
        candidates = _dot_configurations(contraction, hint, spec)
    elif not kernel.reduced:
        candidates = pointwise_configurations(kernel, hint, spec)
    elif contraction is not None and contraction.rows and can_use_dot(contraction):
        candidates = _dot_configurations(contraction, hint, spec)
    elif (grouped := find_grouped_contraction(kernel)) is not None and can_use_dot(grouped):
        candidates = _grouped_configurations(grouped, hint, spec)
    elif contraction is not None and not contraction.rows and not is_outer_reduction(kernel, hint):
        grouped_sums = _group_sum_configurations(contraction, hint, spec)
        rows = _matvec_configurations(kernel, hint, spec)
        split = _split_sum_configurations(contraction, hint) if can_use_dot(contraction) else []
        first, second = (split, rows) if _has_integer_columns(contraction) else (rows, split)
        candidates = [*grouped_sums, *rows[:1]] if grouped_sums else [*first, *second]
    elif is_outer_reduction(kernel, hint):
        candidates = outer_reduction_configurations(kernel, hint, spec)
    else:
        candidates = inner_reduction_configurations(kernel, hint, spec)
    return tuple(dict.fromkeys(candidates))


def can_use_dot(contraction: ContractionForm) -> bool:
    """Whether Triton's dot has the dtype of the sums, and a tile all columns that row reductions reduce.

    Few rows whose groups of weights are summed have no row reductions.
    """
    if contraction.row_reductions:
        is_few = isinstance(contraction.row_count, int) and contraction.row_count <= _MAX_FEW_ROWS
        if is_few and has_groups(contraction):
            return False
        count = contraction.reduced_column_count
        if not contraction.rows or not isinstance(count, int) or not 0 < count <= MAX_COLUMN_BLOCK:
            return False
    return contraction.dtype is torch.float32


def _matvec_configurations(kernel: Kernel, hint: Hint, spec: DeviceSpec) -> list[Configuration]:
    """Returns configurations of one row: those of a reduction, and blocks of columns, first if rows are long.

    Elements of two bytes are read by several columns at once first where rows are long, or have two sums.
    """
    plain = inner_reduction_configurations(kernel, hint, spec)
    longest = next_power_of_2(hint(kernel.reduced_count))
    blocks = [
        Configuration(y=kernel.axes, y_block=columns, r_block=block, looped=True, num_warps=warps, num_stages=stages)
        for columns, block, warps, stages in _MATVEC_BLOCKS if block < longest
    ]  # fmt: skip
    is_long, has_several = longest > _MAX_PERSISTENT_MATVEC, len(kernel.reductions) > 1
    preferred: list[Configuration] = []
    if is_long != has_several and all(load.dtype.itemsize == 2 for load in full_tile_loads(kernel)):
        preferred = [item for item in blocks if item.y_block == (4 if is_long else 2)]
        blocks = [item for item in blocks if item not in preferred]
    return [*preferred, *blocks, *plain] if is_long else [*preferred, *plain, *blocks]


def _group_sum_configurations(contraction: ContractionForm, hint: Hint, spec: DeviceSpec) -> list[Configuration]:
    """Returns configurations that sum groups of quantised weights of few rows; none for other contractions.

    The first of these has few columns a program where all are few, so that programs occupy the device.
    """
    rows = hint(contraction.row_count)
    summed = sum_groups(contraction) if rows <= _MAX_FEW_ROWS and can_use_dot(contraction) else None
    if summed is None:
        return []
    form = find_grouped_sums(summed, contraction)
    count, size = product([axis.size for axis in form.groups]), form.contraction.summed_count
    if not isinstance(count, int) or not isinstance(size, int) or size & (size - 1):
        return []
    fragments = _fragment_configurations(contraction, form, hint)
    if size < _MIN_GROUP_BYTES:
        return fragments
    padded = max(next_power_of_2(rows), _FEWEST_ROWS)
    is_wide, has_one_sum = _is_wide(contraction, hint), len(contraction.sums) == 1
    if padded == 2 * _FEWEST_ROWS and has_one_sum:
        wanted = _GROUP_SUM_TILES[2]
    elif padded == _FEWEST_ROWS and is_wide and not has_one_sum:
        wanted = _GROUP_SUM_TILES[-1]
    else:
        wanted = _GROUP_SUM_TILES[1 if not is_wide else 0 if padded == _FEWEST_ROWS and has_one_sum else 3]
    tiles = sorted(_GROUP_SUM_TILES, key=lambda tile: tile != wanted)
    candidates = []
    packed = hint(contraction.summed_count) // (count * size)
    for columns, groups, warps, stages in tiles:
        block = math.gcd(max(groups * _MIN_GROUP_BYTES // size, 1), count)
        stage = block * size * (padded * packed * _ROW_BYTES + columns * len(contraction.sums))
        if stage * (stages - 1) > _block_bytes(spec):
            continue
        candidates.append(_batched_dots(contraction, padded, columns, size, warps, stages, form, block))
    of_row = _row_group_sum_configurations(contraction, form, hint)
    known = [*of_row, *(candidates[:1] if of_row and fragments else candidates)]
    return [*fragments, *known] if _prefers_fragments(contraction, form, hint) else [*known, *fragments]


def _fragment_configurations(contraction: ContractionForm, form: GroupedSums, hint: Hint) -> list[Configuration]:
    """Returns configurations of fragments."""
    is_wide, has_one_sum = _is_wide(contraction, hint), len(contraction.sums) == 1
    if hint(contraction.row_count) > _FEWEST_ROWS // 2:
        tiles, wanted = [*_FULL_FRAGMENT_TILES], _FULL_FRAGMENT_TILES[0 if is_wide else 1]
    else:
        tiles, wanted = [*_FRAGMENT_TILES], _FRAGMENT_TILES[2 if not is_wide else 0 if has_one_sum else 1]
    return fragment_configurations(contraction, form, sorted(tiles, key=lambda tile: tile != wanted))


def _prefers_fragments(contraction: ContractionForm, form: GroupedSums, hint: Hint) -> bool:
    """Whether fragments are first: of one row, and of 5 to 8 for several sums of many columns or few long ones."""
    rows = hint(contraction.row_count)
    if rows <= _FEWEST_ROWS // 2:
        return rows == 1
    return len(contraction.sums) > 1 if _is_wide(contraction, hint) else _is_long(form, hint)


def _is_long(form: GroupedSums, hint: Hint) -> bool:
    """Whether the groups of a row are many."""
    count = product([axis.size for axis in form.groups])
    return hint(count * form.contraction.summed_count) >= _LONG_ROW_GROUPS * _MIN_GROUP_BYTES


def _row_group_sum_configurations(contraction: ContractionForm, form: GroupedSums, hint: Hint) -> list[Configuration]:
    """Returns configurations of one row of bfloat16 without dots, for blocks that divide columns and groups."""
    columns, size = product([axis.size for axis in contraction.columns]), int(form.contraction.summed_count)
    count, is_long = int(product([axis.size for axis in form.groups])), _is_long(form, hint)
    is_bfloat16 = row_precision(contraction, contraction.sums[0]) is torch.bfloat16
    if contraction.rows or contraction.batch or not is_bfloat16 or not isinstance(columns, int):
        return []
    if _is_wide(contraction, hint):
        wanted = _LOADS_FIRST_TILES[0 if len(contraction.sums) == 1 else 1], True
    else:
        wanted = (_LONG_ROW_TILE, False) if is_long else (_LOADS_FIRST_TILES[2], True)
    forms = [*[(tile, True) for tile in _LOADS_FIRST_TILES], (_LONG_ROW_TILE, False)]
    forms.sort(key=lambda form: form != wanted)
    return [
        Configuration(
            y=contraction.columns, y_block=block, r_block=size, looped=True, num_warps=warps, num_stages=stages,
            p=form.groups, p_block=math.gcd(max(groups * _MIN_GROUP_BYTES // size, 1), count), loads_first=loads_first,
        )
        for (block, groups, warps, stages), loads_first in forms if columns % block == 0
    ]  # fmt: skip


def _batched_dots(
    contraction: ContractionForm, rows: int, columns: int, size: int, warps: int, stages: int, form: GroupedSums,
    groups: int,
) -> Configuration:  # fmt: skip
    """Returns a configuration whose dots have a batch: so many groups, or parts of sums, of `size` products."""
    return Configuration(
        contraction.rows, contraction.columns, rows, columns, size, True, warps, stages, True, p=form.groups,
        p_block=groups,
    )  # fmt: skip


def _split_sum_configurations(contraction: ContractionForm, hint: Hint) -> list[Configuration]:
    """Returns configurations of few rows times weights of one byte, whose warps share out the products of a column.

    Where columns are few, a program's warps would otherwise compute the same products.
    """
    rows, loads = hint(contraction.row_count), _column_loads(contraction)
    if rows > _MAX_FEW_ROWS or not all(item.dtype.itemsize == 1 for item in loads):
        return []
    split = split_sums(contraction, _SPLIT_SUM_PRODUCTS)
    if split is None:
        return []
    form, padded = find_grouped_sums(split, contraction), max(next_power_of_2(rows), _FEWEST_ROWS)
    count = form.groups[0].size
    wanted = _SPLIT_SUM_TILES[0 if _is_wide(contraction, hint) else 1]
    return [
        _batched_dots(contraction, padded, columns_block, _SPLIT_SUM_PRODUCTS, warps, stages, form, block)
        for columns_block, block, warps, stages in sorted(_SPLIT_SUM_TILES, key=lambda tile: tile != wanted)
        if isinstance(count, int) and not count % block
    ]  # fmt: skip


def _is_wide(contraction: ContractionForm, hint: Hint) -> bool:
    """Whether columns are so many that programs with a block of many of them occupy a large GPU."""
    return hint(product([axis.size for axis in (*contraction.batch, *contraction.columns)])) >= _WIDE_COLUMNS


def _column_loads(contraction: ContractionForm) -> list[Load]:
    """Returns the loads that the column operands of sums are computed from."""
    kernel = contraction.kernel
    used = {at for item in contraction.sums for at in contraction.prologue(item.column_operand) if kernel.varying[at]}
    return [item for at in sorted(used) if isinstance(item := kernel.operations[at], Load)]


def _has_integer_columns(contraction: ContractionForm) -> bool:
    """Whether column operands are integers of one byte."""
    loads = _column_loads(contraction)
    return bool(loads) and all(item.dtype in (torch.int8, torch.uint8) for item in loads)


def _dot_configurations(contraction: ContractionForm, hint: Hint, spec: DeviceSpec) -> list[Configuration]:
    """Returns configurations of several rows. A program has all of few rows, padded to a block of the dot.

    It has all columns that row reductions reduce.
    """
    rows, reduced = hint(contraction.row_count), hint(contraction.summed_count)
    columns, few = contraction.reduced_columns or contraction.columns, contraction.rows
    narrow = 2 if _has_float8_operands(contraction) else 1
    longest, whole = max(next_power_of_2(reduced), MIN_DOT_BLOCK * narrow), 0
    if contraction.row_reductions:
        whole = max(next_power_of_2(hint(contraction.reduced_column_count)), MIN_DOT_BLOCK)
    if rows > _MAX_FEW_ROWS:
        tiles = [(whole or x, y, min(r * narrow, longest), warps, stages) for y, x, r, warps, stages in _DOT_TILES]
        many = [Configuration(columns, few, x, y, r, True, warps, stages, True) for x, y, r, warps, stages in tiles]
        banded = [replace(item, band=_band(contraction, item, hint)) for item in many]
        return fitting(banded, partial(_shared_bytes, contraction), _smaller, spec)
    padded = max(next_power_of_2(rows), _FEWEST_ROWS)
    is_wide, has_bytes = _is_wide(contraction, hint), _has_integer_columns(contraction) and padded == _FEWEST_ROWS
    wanted = _WIDE_TILES[padded] if is_wide else _FEW_ROWS_TILES[0]
    if is_wide and has_bytes:
        wanted = _WIDE_BYTES_TILE
    few_rows = [wanted, *[tile for tile in _FEW_ROWS_TILES if tile != wanted]]
    blocks = [(whole or y, r, warps, stages) for y, r, warps, stages in few_rows]
    sized = [Configuration(few, columns, padded, y, r, True, warps, stages, True) for y, r, warps, stages in blocks]
    small = [item for item in sized if _shared_bytes(contraction, item) <= _block_bytes(spec)]
    small = small or [Configuration(few, columns, padded, whole or 16, 64, True, 2, 2, True)]
    dots = [replace(item, r_block=min(item.r_block, longest)) for item in small]
    dots = fitting(dots, partial(_shared_bytes, contraction), _smaller, spec)
    grouped = _group_sum_configurations(contraction, hint, spec)
    if grouped:
        return [*grouped, *dots[:1]]
    split = _split_sum_configurations(contraction, hint)
    dots = [*split, *dots] if has_bytes and not is_wide else [*dots, *split]
    if rows > _MAX_SUMMED_ROWS or whole:
        return dots
    summed = [
        Configuration(few, columns, max(next_power_of_2(rows), 2), 4, min(256, longest), True, 4, stages)
        for stages in (3, 1)
    ]
    return [*dots[:1], *summed, *dots[1:]]


def _grouped_configurations(contraction: ContractionForm, hint: Hint, spec: DeviceSpec) -> list[Configuration]:
    """Returns configurations of rows in groups: tiles of about the rows of a group, and rows by themselves if few.

    Tiles are first unless they would be too few to occupy a GPU. Programs of single rows read several columns.
    """
    assert contraction.group is not None
    kernel, rows, columns = contraction.kernel, contraction.rows, contraction.columns
    in_group = hint(contraction.row_count) // max(hint(contraction.group.size), 1)
    block = min(max(next_power_of_2(in_group), MIN_DOT_BLOCK), 128)
    longest = max(next_power_of_2(hint(kernel.reduced_count)), MIN_DOT_BLOCK)
    wide = [
        Configuration(columns, rows, x_block, y_block, min(r_block, longest), True, warps, stages, True)
        for y_block, x_block, r_block, warps, stages in _DOT_TILES if y_block <= block
    ]  # fmt: skip
    narrow = [
        Configuration(rows, columns, min(block, 64), y_block, min(r_block, longest), True, warps, stages, True)
        for y_block, r_block, warps, stages in _GROUPED_TILES if y_block >= 64 or block == MIN_DOT_BLOCK
    ]  # fmt: skip
    banded = [replace(item, band=_band(contraction, item, hint)) for item in (*wide, *narrow)]
    dots = fitting(banded, partial(_shared_bytes, contraction), _smaller, spec)
    if in_group > _MAX_SUMMED_ROWS or is_outer_reduction(kernel, hint):
        return dots
    blocks = hint(product([axis.size for axis in columns])) // _GROUPED_TILES[0][0]
    tiles = -(-hint(contraction.row_count) // MIN_DOT_BLOCK) * blocks * len(contraction.sums)
    y_block, r_block, warps = _GROUPED_ROW_BLOCK
    first = Configuration((), kernel.axes, 1, y_block, min(r_block, longest), True, warps)
    single = [first, *_matvec_configurations(kernel, hint, spec)]
    return [*dots, *single] if tiles >= _MIN_DOT_PROGRAMS else [*single, *dots]


def _band(contraction: ContractionForm, configuration: Configuration, hint: Hint) -> int:
    """Returns the number of blocks of rows whose operands fit a part of the cache of a large GPU."""
    kernel = contraction.kernel
    block = configuration.y_block if configuration.y == contraction.rows else configuration.x_block
    used = {at for item in contraction.sums for at in contraction.prologue(item.row_operand)}
    is_summed = kernel.varying_along(contraction.summed)
    loads = [kernel.operations[at] for at in used if is_summed[at]]
    row_bytes = hint(contraction.summed_count) * sum(item.dtype.itemsize for item in loads if isinstance(item, Load))
    blocks = -(-hint(contraction.row_count) // block)
    return max(min(_BAND_BYTES // max(row_bytes * block, 1), blocks), 1)


def _has_float8_operands(contraction: ContractionForm) -> bool:
    """Whether all operands are loaded in float8, of which a block has twice the elements for the same bytes."""
    kernel = contraction.kernel
    used = [position for item in contraction.sums for position in (item.row_operand, item.column_operand)]
    loads = [kernel.operations[at] for position in used for at in contraction.prologue(position) if kernel.varying[at]]
    return all(item.dtype in FLOAT8 for item in loads if isinstance(item, Load))


def _block_bytes(spec: DeviceSpec) -> int:
    """Returns the shared memory for the blocks of few rows in all stages; the rest is for changes of layout."""
    return spec.shared_memory_bytes * 8 // 9


def _shared_bytes(contraction: ContractionForm, configuration: Configuration) -> int:
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


def _smaller(item: Configuration) -> Configuration | None:
    """Returns a configuration that needs less shared memory, by fewer stages, then smaller blocks; else None."""
    if item.num_stages > 1:
        return replace(item, num_stages=item.num_stages - 1)
    if item.r_block > 2 * MIN_DOT_BLOCK:
        return replace(item, r_block=item.r_block // 2)
    return None
