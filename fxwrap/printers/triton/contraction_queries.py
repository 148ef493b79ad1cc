"""What configurations of contractions depend on: whether they use dots, how few their rows are, what columns load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from fxwrap.devices import DeviceSpec
from fxwrap.loop_ir import MAX_COLUMN_BLOCK, Compute, ContractionForm, GroupedSums, Load, count_points, has_groups
from fxwrap.printers.triton.accesses import Hint

MIN_DOT_BLOCK = 16
"""The smallest size of a block that Triton's dot multiplies."""

MAX_FEW_ROWS = 64
"""The most rows that one program has, all of them."""

MIN_PADDED_ROWS = 8
"""The smallest number of rows that a dot is padded to: that of tensor cores, whose other operand has more."""

_WIDE_COLUMNS = 8192
"""The number of columns from which on few of them a program occupy a large GPU several times."""

T = TypeVar("T")


def can_use_dot(contraction: ContractionForm) -> bool:
    """Whether Triton's dot has the dtype of the sums, and a tile all columns that row reductions reduce.

    Few rows whose groups of weights are summed have no row reductions.
    """
    if contraction.row_reductions:
        is_few = isinstance(contraction.row_count, int) and contraction.row_count <= MAX_FEW_ROWS
        if is_few and has_groups(contraction):
            return False
        count = contraction.reduced_column_count
        if not contraction.rows or not isinstance(count, int) or not 0 < count <= MAX_COLUMN_BLOCK:
            return False
    return contraction.dtype is torch.float32


def is_wide(contraction: ContractionForm, hint: Hint) -> bool:
    """Whether columns are so many that programs with a block of many of them occupy a large GPU."""
    return hint(count_points((*contraction.batch, *contraction.columns))) >= _WIDE_COLUMNS


def column_loads(contraction: ContractionForm) -> list[Load]:
    """Returns the loads that the column operands of sums are computed from."""
    kernel = contraction.kernel
    used = {at for item in contraction.sums for at in contraction.prologue(item.column_operand) if kernel.varying[at]}
    return [item for at in sorted(used) if isinstance(item := kernel.operations[at], Load)]


def has_integer_columns(contraction: ContractionForm) -> bool:
    """Whether column operands are integers of one byte."""
    loads = column_loads(contraction)
    return bool(loads) and all(item.dtype in (torch.int8, torch.uint8) for item in loads)


def few_rows_bytes(spec: DeviceSpec) -> int:
    """Returns the shared memory for the blocks of few rows in all stages; the rest is for changes of layout."""
    return spec.shared_memory_bytes * 8 // 9


def preferred_first(tiles: Sequence[T], preferred: T) -> list[T]:
    """Returns the tiles with one of them, or another one, first."""
    return [preferred, *[tile for tile in tiles if tile != preferred]]


def adds_zeros(form: GroupedSums, from_loads: bool = False) -> bool:
    """Whether a group adds nothing to the totals where its sums and coefficients are zeros, as those beyond the last.

    If `from_loads`, where what coefficients are loaded from is.
    """
    kernel, sums = form.contraction.kernel, {item.reduction for item in form.sums}
    step = kernel.backward_slice(form.totals, known=sums) - {*form.totals}
    computed = [
        item for at in step if isinstance(item := kernel.operations[at], Compute)
        and (from_loads or not kernel.backward_slice([at]).isdisjoint(sums))
    ]  # fmt: skip
    return all(item.name in ("add", "sub", "mul", "cast") for item in computed)
