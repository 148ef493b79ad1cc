"""Reductions of columns in kernels that also reduce rows, split along rows: each part is a block of whole rows.

The backward of a norm reduces the rows of its operands for the gradient of its input, and their columns for those of
its parameters. One program of a part reads each row once: it reduces the row, stores the elements that depend on that,
and accumulates columns. A second kernel combines the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass

from fxwrap.loop_ir.atoms import Axis, count_points
from fxwrap.loop_ir.body_operations import Load, Reduce, Store, operands
from fxwrap.loop_ir.index import ONE, Atom, IndexLike, as_index
from fxwrap.loop_ir.kernel import Kernel
from fxwrap.loop_ir.offsets import delinearize_index
from fxwrap.loop_ir.operations import REDUCTIONS
from fxwrap.loop_ir.split import ReductionSplitter, SplitKernel, SplitPlan, split_reductions
from fxwrap.symbolic import Size, ceiling_divide

_MOST_PROGRAMS = 4
"""The most programs that run beside each other on a multiprocessor: each has sums of columns in registers."""

_PROGRAM_COLUMNS = 8192
"""The columns of these programs together, in registers."""

_PART_ROW_MULTIPLE = 4
"""Parts have a multiple of so many rows, which programs compute together."""

_PART_ELEMENTS = 1 << 17
"""The most elements of a part, whose columns a program sums one after the other: more would lose precision."""

_MIN_PART_ROWS = 16
"""The fewest rows of a part: fewer would transfer as much for partial results as for rows.

Parts have half or a fourth of them where these would leave more than a fourth of the multiprocessors idle.
"""


@dataclass(frozen=True)
class RowsAndColumns:
    """A kernel that reduces rows and columns: the reduced axes `rows` and `columns`, and the reductions over each."""

    rows: tuple[Axis, ...]
    columns: tuple[Axis, ...]
    row_reductions: tuple[int, ...]
    column_reductions: tuple[int, ...]


def find_rows_and_columns(kernel: Kernel) -> RowsAndColumns | None:
    """Returns the rows and columns of a kernel whose reductions reduce one of both, or None for another kernel.

    Elements of a row may depend on its reductions, and columns may reduce these elements. Nothing but the results of
    columns depends on reductions of columns, each of which has one result. Results vary along the axes that the others
    reduce: those of a matmul's rows do not. Most accesses to elements are contiguous along columns, if both may be.
    """
    over = dict.fromkeys([kernel.reduced_by(item) for item in kernel.operations if isinstance(item, Reduce)])
    if kernel.scans or len(over) != 2 or {axis for axes in over for axis in axes} != {*kernel.reduced}:
        return None
    first, second = sorted(over, key=lambda axes: (_contiguous_elements(kernel, axes), kernel.reduced.index(axes[-1])))
    if not set(first).isdisjoint(second):
        return None
    for rows, columns in ((first, second), (second, first)):
        form = _form(kernel, rows, columns)
        if form is not None:
            return form
    return None


def _contiguous_elements(kernel: Kernel, along: tuple[Axis, ...]) -> int:
    """Returns the number of loads and stores of elements, which vary along all groups of axes, that are contiguous."""
    accesses = [
        operation.index
        for operation, axes in zip(kernel.operations, kernel.address_axes, strict=True)
        if isinstance(operation, Load | Store) and _varies(axes, along) and _varies(axes - {*along}, kernel.reduced)
    ]
    return sum(index.stride(axis) == ONE for index in accesses for axis in along)


def _varies(axes: Set[Axis], along: tuple[Axis, ...]) -> bool:
    return not axes.isdisjoint(along)


def _form(kernel: Kernel, rows: tuple[Axis, ...], columns: tuple[Axis, ...]) -> RowsAndColumns | None:
    across, along, dependent = list[int](), list[int](), set[int]()
    for position, operation in enumerate(kernel.operations):
        depends = not dependent.isdisjoint(operands(operation))
        if isinstance(operation, Reduce):
            others = columns if kernel.reduced_by(operation) == rows else rows
            if depends or kernel.value_axes[position].isdisjoint(others):
                return None
            if kernel.reduced_by(operation) == rows:
                if REDUCTIONS[operation.kind].results != 1:
                    return None
                across.append(position)
                dependent.add(position)
            else:
                along.append(position)
        elif depends:
            if not kernel.value_axes[position].isdisjoint(rows):
                return None
            dependent.add(position)
    return RowsAndColumns(rows, columns, tuple(along), tuple(across))


def split_rows(kernel: Kernel, hint: Callable[[Size], int], multiprocessors: int) -> SplitKernel | None:
    """Returns a kernel that reduces rows and columns as one over blocks of rows and one that combines their columns.

    None for other kernels. `hint` returns a typical value of a size. There are parts for the programs that run beside
    each other on so many multiprocessors, or more.
    """
    form = find_rows_and_columns(kernel)
    if form is None:
        return None
    count = count_points(form.rows)
    columns = max(hint(count_points(form.columns)), 1)
    programs = multiprocessors * min(max(_PROGRAM_COLUMNS // (2 * columns), 1), _MOST_PROGRAMS)
    wanted = -(-hint(count) // programs)
    least = _MIN_PART_ROWS
    while least > _PART_ROW_MULTIPLE and 4 * hint(count) < 3 * least * multiprocessors:
        least //= 2
    size = max(min(wanted, _PART_ELEMENTS // columns), least)
    size = least if size < _MIN_PART_ROWS else -(-size // _PART_ROW_MULTIPLE) * _PART_ROW_MULTIPLE
    part, inner = Axis("part", ceiling_divide(count, size)), Axis("inner", size)
    position = as_index(part) * size + inner
    old = delinearize_index(position, [axis.size for axis in form.rows])
    mapping: dict[Atom, IndexLike] = dict(zip(form.rows, old, strict=True))
    is_equal = isinstance(count, int) and count % size == 0
    plan = SplitPlan(form.rows, part, (inner,), mapping, size, None if is_equal else position, form.columns)
    split = ReductionSplitter(kernel, plan).run()
    if split is None:
        return None
    parts, combining = split.kernels
    names = frozenset([buffer.name for buffer in split.temporaries])
    more = split_reductions(combining, hint, multiprocessors, names)
    if more is None:
        return split
    return SplitKernel((parts, *more.kernels), (*split.temporaries, *more.temporaries))
