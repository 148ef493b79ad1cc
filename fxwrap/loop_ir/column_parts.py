"""Row reductions of contractions, split along columns: each block of columns is reduced with the products it needs.

The blocks of columns that programs of a matmul compute are parts of the rows of its result, so that a reduction along
rows (statistics of a norm, the maximum for a scale, the sum of exponentials of a cross entropy) needs no pass over the
result: one kernel computes products and partial results, another one combines these.
"""

from __future__ import annotations

from collections.abc import Callable

from fxwrap.loop_ir.atoms import Axis, count_points
from fxwrap.loop_ir.body_operations import DeviceAssert, Store
from fxwrap.loop_ir.contraction import find_contraction
from fxwrap.loop_ir.index import Atom, IndexLike, as_index
from fxwrap.loop_ir.kernel import Kernel
from fxwrap.loop_ir.offsets import delinearize_index
from fxwrap.loop_ir.split import ReductionSplitter, SplitKernel, SplitPlan
from fxwrap.symbolic import Size, ceiling_divide

MAX_COLUMN_BLOCK = 256
"""The largest number of columns that one program reduces: those of a tile of products."""

COLUMN_BLOCK = 128
"""The number of columns in each part of longer rows."""


_MIN_COLUMN_BLOCK = 16
"""The fewest columns of a part: those of a tile of tensor cores."""

_FEW_ROWS = 64
"""The largest number of rows that one program has all of."""

_PROGRAMS_PER_MULTIPROCESSOR = 2
"""The programs of a multiprocessor that occupy it."""


def parallel_column_block(kernel: Kernel, hint: Callable[[Size], int], multiprocessors: int) -> int:
    """Returns the number of columns of a part, on a massively parallel device.

    Few rows are one tile: their columns alone are the programs, so that parts are small enough to occupy the device.
    Lengths of rows are mostly powers of two, and so is the number of programs that suffice.
    """
    form, block = find_contraction(kernel), COLUMN_BLOCK
    if form is None or hint(form.row_count) > _FEW_ROWS:
        return block
    count = hint(form.reduced_column_count) * hint(count_points(form.batch))
    programs = 1 << (_PROGRAMS_PER_MULTIPROCESSOR * multiprocessors).bit_length() - 1
    while block > _MIN_COLUMN_BLOCK and count < block * programs:
        block //= 2
    return block


def split_columns(kernel: Kernel, block: int = COLUMN_BLOCK) -> SplitKernel | None:
    """Returns a contraction as a kernel over blocks of columns and one that combines them.

    None for a kernel without row reductions, with rows of up to `MAX_COLUMN_BLOCK` columns, and where elements depend
    on a row reduction: their products would be computed again.
    """
    form = find_contraction(kernel)
    if form is None or not form.row_reductions:
        return None
    count = form.reduced_column_count
    if isinstance(count, int) and count <= MAX_COLUMN_BLOCK:
        return None
    part, inner = Axis("part", ceiling_divide(count, block)), Axis("inner", block)
    position = as_index(part) * block + inner
    old = delinearize_index(position, [axis.size for axis in form.reduced_columns])
    mapping: dict[Atom, IndexLike] = dict(zip(form.reduced_columns, old, strict=True))
    is_equal = isinstance(count, int) and count % block == 0
    plan = SplitPlan(form.reduced_columns, part, (inner,), mapping, block, None if is_equal else position)
    splitter = ReductionSplitter(kernel, plan)
    return None if _depends_on_rows(kernel, splitter) else splitter.run()


def _depends_on_rows(kernel: Kernel, splitter: ReductionSplitter) -> bool:
    """Whether elements along the columns, or other row reductions, depend on a row reduction."""
    return any(
        splitter.stages[position] > 0
        and (position in splitter.reductions or (splitter.varying[position] and isinstance(item, Store | DeviceAssert)))
        for position, item in enumerate(kernel.operations)
    )
