"""Candidate configurations of kernels: those of contractions, and a choice among those of `configuration.py`.

The first configuration of a kernel is the default; autotuning times all.
"""

from __future__ import annotations

import torch

from fxwrap.loop_ir import (
    Compute,
    ContractionForm,
    Kernel,
    Load,
    Reduce,
    find_contraction,
    find_grouped_contraction,
    operands,
)
from fxwrap.printers.triton.configuration import (
    Configuration,
    Hint,
    full_tile_loads,
    inner_reduction_configurations,
    is_outer_reduction,
    next_power_of_2,
    outer_reduction_configurations,
    pointwise_configurations,
)
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
_SHARED_BYTES = 200 << 10
"""Shared memory for the blocks of all stages."""
_MAX_SUMMED_ROWS = 2
"""The largest number of rows whose products are summed element by element, faster than a dot of padded rows."""

_FEW_ROWS_TILES = (
    (16, 512, 2, 3), (32, 128, 2, 3), (32, 256, 2, 5), (128, 128, 8, 3), (64, 64, 4, 4), (16, 256, 2, 5),
    (64, 128, 4, 4), (32, 256, 4, 6),
)  # fmt: skip
"""Columns, elements of a column, warps and stages of products with few rows."""

_SMALLEST_TILE = (16, 64, 2, 2)

_WIDE_TILES = {8: (32, 128, 2, 3), 16: (128, 128, 8, 3), 32: (64, 128, 4, 4), 64: (64, 64, 4, 4)}
"""By the number of rows, the best one of these for matrices of many columns."""

_GROUPED_TILES = (
    (64, 128, 4, 4), (32, 256, 4, 4), (16, 256, 4, 5), (128, 128, 8, 3), (32, 128, 4, 5), (16, 256, 2, 4),
    (64, 256, 4, 3), (16, 128, 2, 5),
)  # fmt: skip
"""The same of rows in groups."""

_DOT_TILES = (
    (128, 128, 64, 8, 3), (128, 256, 64, 8, 3), (64, 128, 64, 4, 4), (128, 64, 64, 4, 4), (64, 64, 64, 4, 4),
    (128, 128, 32, 4, 4),
)  # fmt: skip
"""Rows, columns, elements of a row, warps and stages of products with many rows."""


def _default_hint(size: Size) -> int:
    """Returns a size for symbols of 1024."""
    return size if isinstance(size, int) else int(evaluate(size, {str(symbol): 1024 for symbol in size.free_symbols}))


def configurations(kernel: Kernel, hint: Hint | None = None) -> tuple[Configuration, ...]:
    """Returns candidate configurations of a kernel, the default one first; all are correct."""
    hint = hint or _default_hint
    contraction = find_contraction(kernel)
    if not kernel.reduced:
        candidates = pointwise_configurations(kernel, hint)
    elif contraction is not None and contraction.rows and can_use_dot(contraction):
        candidates = _dot_configurations(contraction, hint)
    elif (grouped := find_grouped_contraction(kernel)) is not None and can_use_dot(grouped):
        candidates = _grouped_configurations(grouped, hint)
    elif _is_row_product(kernel, contraction) and not is_outer_reduction(kernel, hint):
        candidates = _matvec_configurations(kernel, hint)
    elif is_outer_reduction(kernel, hint):
        candidates = outer_reduction_configurations(kernel, hint)
    else:
        candidates = inner_reduction_configurations(kernel, hint)
    return tuple(dict.fromkeys(candidates))


def can_use_dot(contraction: ContractionForm) -> bool:
    """Whether Triton's dot has the dtype of the sums."""
    return contraction.dtype is torch.float32


def _is_row_product(kernel: Kernel, contraction: ContractionForm | None) -> bool:
    """Whether a kernel multiplies one row with matrices; the elements of an iteration may be sums of products."""
    if contraction is not None:
        return not contraction.rows
    pending = [used for at in kernel.reductions for used in operands(kernel.operations[at])]
    while pending:
        match kernel.operations[pending.pop()]:
            case Compute("add", terms):
                pending += terms
            case Compute("mul", (left, right)) if kernel.axes:
                axes = [kernel.value_axes[used].intersection(kernel.axes) for used in (left, right)]
                if min(map(len, axes)) > 0 or not max(axes, key=len):
                    return False
            case _:
                return False
    kinds = {item.kind for item in kernel.operations if isinstance(item, Reduce)}
    return kinds == {"sum"} and not kernel.reduces_in_steps


def _matvec_configurations(kernel: Kernel, hint: Hint) -> list[Configuration]:
    """Returns configurations of one row: those of a reduction, and blocks of columns, first if rows are long.

    Elements of two bytes are read by several columns at once first where rows are long, or have two sums.
    """
    plain = inner_reduction_configurations(kernel, hint)
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


def _dot_configurations(contraction: ContractionForm, hint: Hint) -> list[Configuration]:
    """Returns configurations of several rows. A program has all of few rows, padded to a block of the dot."""
    rows, reduced = hint(contraction.row_count), hint(contraction.kernel.reduced_count)
    columns, few = contraction.columns, contraction.rows
    longest = max(next_power_of_2(reduced), MIN_DOT_BLOCK)
    if rows > _MAX_FEW_ROWS:
        return [
            Configuration(columns, few, x_block, y_block, min(r_block, longest), True, warps, stages, True)
            for y_block, x_block, r_block, warps, stages in _DOT_TILES
        ]
    padded = max(next_power_of_2(rows), _FEWEST_ROWS)
    is_wide = hint(product([axis.size for axis in (*contraction.batch, *columns)])) >= _WIDE_COLUMNS
    wanted = _WIDE_TILES[padded] if is_wide else _FEW_ROWS_TILES[0]
    tiles = sorted(_FEW_ROWS_TILES, key=lambda tile: tile != wanted)
    fitting = [tile for tile in tiles if _fits(contraction, padded, *tile)] or [_SMALLEST_TILE]
    dots = [
        Configuration(few, columns, padded, y_block, min(r_block, longest), True, warps, stages, True)
        for y_block, r_block, warps, stages in fitting
    ]
    if rows > _MAX_SUMMED_ROWS:
        return dots
    summed = [
        Configuration(few, columns, max(next_power_of_2(rows), 2), 4, min(256, longest), True, 4, stages)
        for stages in (3, 1)
    ]
    return [*dots[:1], *summed, *dots[1:]]


def _grouped_configurations(contraction: ContractionForm, hint: Hint) -> list[Configuration]:
    """Returns configurations of rows in groups: tiles of about the rows of a group, and rows by themselves if few."""
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
    single = [] if is_outer_reduction(kernel, hint) else _matvec_configurations(kernel, hint)
    return [*single, *narrow] if in_group <= _MAX_SUMMED_ROWS else [*wide, *narrow]


def _fits(contraction: ContractionForm, rows: int, columns: int, reduced: int, _: int, stages: int) -> bool:
    """Whether the operands of a block fit in shared memory, once for each stage."""
    row_axes, column_axes = frozenset(contraction.rows), frozenset(contraction.columns)
    size = 0
    for operation in contraction.kernel.operations:
        if isinstance(operation, Load) and not operation.index.axes().isdisjoint(contraction.kernel.reduced):
            axes = operation.index.axes()
            extent = (rows if axes & row_axes else 1) * (columns if axes & column_axes else 1)
            size += extent * reduced * operation.dtype.itemsize
    return size * stages <= _SHARED_BYTES
