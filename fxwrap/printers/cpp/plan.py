"""Decisions about a kernel's loops: which axis is vectorised, what runs in parallel, how long reductions are cut."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from fxwrap.loop_ir import (
    OPERATIONS,
    STORAGE_ONLY,
    Axis,
    Compute,
    Gathered,
    Index,
    Kernel,
    Load,
    Reduce,
    Scan,
    Store,
    as_index,
    operands,
)
from fxwrap.symbolic import Size, product

LANES = 64
"""Accumulators of a reduction: enough to hide the latency of one addition, and few enough for the registers' cache."""

PARALLEL_WORK = 32768
"""Elements below which the threads are not woken."""

FEW_ITERATIONS = 16
"""Parallel iterations below which a long reduction is cut into parts that run in parallel."""

PART = 16384
"""Elements of a part of a long reduction; what is longer is summed in parts, which also keeps float32 sums exact."""

STREAMED_LANES, STREAMED_PART = 16, 4096
"""The same where few long rows come from memory, which is slower than additions: some processors fetch ahead better for
fewer loads in flight. Parts are shorter, so that each lane adds as many elements."""

TILES_BYTES = 16384
"""Bytes of the tiles that are loaded transposed: a part of the nearest cache."""

SCATTER_BLOCK = 16
"""Columns of a table that one thread adds rows to."""

SCAN_BLOCK = 256
"""Elements of a row that are scanned together; `kernel.h` has the same."""

COLUMN_BLOCK = 128
"""Columns that are reduced together, when the vectorised axis is kept."""

COLUMN_PART, LONG_COLUMN_PART = 64, 256
"""Rows of a part of a reduction of columns, few so that float32 sums stay exact; more where there are many parts."""

MOST_COLUMN_PARTS = 512
"""Short parts of columns at most: each keeps its results until all are combined."""


BUFFER_COST = 3
"""Instructions from which on a value that is needed again is kept in a row buffer instead."""

BUFFER_ELEMENTS = 8192
"""Elements of the longest row that is kept; a thread's stack holds a few."""


@dataclass(frozen=True)
class Plan:
    """A kernel with the facts its printing rests on. `lane` is the axis of the innermost, vectorised loop."""

    kernel: Kernel
    lane: Axis | None

    @property
    def lane_is_reduced(self) -> bool:
        """Whether the vectorised axis is a reduced one: a row; else columns, or no reduction at all."""
        return self.lane in self.kernel.reduced

    @cached_property
    def depends(self) -> tuple[frozenset[Axis], ...]:
        """For each operation, the axes that its value depends on."""
        found: list[frozenset[Axis]] = []
        reduced = frozenset(self.kernel.reduced)
        for operation in self.kernel.operations:
            axes: frozenset[Axis] = frozenset()
            if isinstance(operation, Load | Store) or hasattr(operation, "index"):
                axes |= operation.index.axes()
            for operand in operands(operation):
                axes |= found[operand]
            if isinstance(operation, Reduce):
                axes -= reduced
            elif isinstance(operation, Scan):
                axes |= reduced
            found.append(axes)
        return tuple(found)

    @cached_property
    def varying(self) -> tuple[bool, ...]:
        """For each operation, whether it happens for each element of the reduced axes."""
        return tuple([not axes.isdisjoint(self.kernel.reduced) for axes in self.depends])

    @property
    def serial(self) -> bool:
        """Whether iterations may write the same element, so that they must run in order."""
        return any(store.mode != "set" for store in self.kernel.stores)

    @cached_property
    def work(self) -> Size:
        """About how many elements of arithmetic the kernel is."""
        costs = sum(OPERATIONS[item.name].cost for item in self.kernel.operations if isinstance(item, Compute))
        return product([self.kernel.count, self.kernel.reduced_count, max(1, costs // 16)])

    @property
    def splits(self) -> bool:
        """Whether the parts of a long reduction run in parallel, because there are few parallel iterations."""
        if self.serial or not self.kernel.reductions or not isinstance(self.kernel.count, int):
            return False
        count = self.kernel.count
        if not count:
            return False  # it runs no iteration
        if not self.lane_is_reduced and self.lane is not None and isinstance(self.lane.size, int):
            count = count // self.lane.size * -(-self.lane.size // COLUMN_BLOCK)
        if count >= FEW_ITERATIONS:
            return False
        return not isinstance(self.kernel.reduced_count, int) or self.kernel.reduced_count >= 2 * PART

    @cached_property
    def tiled(self) -> tuple[Axis | None, tuple[int, ...]]:
        """The axis that some loads run along instead of the vectorised one, and these loads; for pointwise kernels."""
        lane = self.lane
        if lane is None or self.serial or not _long(lane):
            return None, ()
        found: dict[Axis, list[int]] = {}
        for place, operation in enumerate(self.kernel.operations):
            if isinstance(operation, Load) and operation.mask is None:
                for axis in self.kernel.axes:
                    if axis is not lane and _long(axis) and _transposed(operation.index, axis, lane):
                        found.setdefault(axis, []).append(place)
        if not found:
            return None, ()
        axis = max(found, key=lambda item: len(found[item]))
        return axis, tuple(found[axis])

    @property
    def scatters_apart(self) -> bool:
        """Whether stores that combine never meet from different places along the vectorised axis: a row of a table."""
        lane = self.lane
        if lane is None or not isinstance(lane.size, int) or lane.size < SCATTER_BLOCK:
            return False
        return all(_apart(store.index, lane, lane.size) for store in self.kernel.stores)

    @property
    def tile(self) -> int:
        """Rows and columns of the tiles at most: whole cache lines, as many as fit the nearest cache."""
        loads = [self.kernel.operations[place] for place in self.tiled[1]]
        width = sum(load.dtype.itemsize for load in loads if isinstance(load, Load))
        return next((size for size in (64, 32) if size * size * width <= TILES_BYTES), 16)

    @cached_property
    def gathered(self) -> frozenset[int]:
        """The loads of half-precision elements whose places differ from lane to lane and follow no stride."""
        return frozenset(
            place
            for place, item in enumerate(self.kernel.operations)
            if isinstance(item, Load) and item.dtype in STORAGE_ONLY and self._is_gathered(item.index)
        )

    def _is_gathered(self, index: Index) -> bool:
        found = [atom for atom in index.atoms() if isinstance(atom, Gathered)]
        return any(self.lane in self.depends[atom.operation] for atom in found)

    def cost(self, position: int, known: Iterable[int]) -> int:
        """Returns about how many instructions computing a value again takes, from those that are known on."""
        stop, stack, total = set(known), [position], 0
        while stack:
            at = stack.pop()
            if at in stop or not self.varying[at]:
                continue
            stop.add(at)
            operation = self.kernel.operations[at]
            total += OPERATIONS[operation.name].cost if isinstance(operation, Compute) else 1
            stack.extend(operands(operation))
        return total


def make_plan(kernel: Kernel) -> Plan:
    """Returns the plan: the vectorised axis is the one along which most elements lie side by side."""
    candidates = (*kernel.axes, *kernel.reduced)
    if not candidates:
        return Plan(kernel, None)
    varying = Plan(kernel, None).varying
    accesses = [
        (item.index, (8 if varying[place] else 1) * (3 if isinstance(item, Store) else 2))
        for place, item in enumerate(kernel.operations)
        if isinstance(item, Load | Store)
    ]
    scores = [(_score(axis, accesses), position) for position, axis in enumerate(candidates)]
    return Plan(kernel, candidates[max(scores)[1]])


def _score(axis: Axis, accesses: list[tuple[Index, int]]) -> int:
    score = 0
    for index, weight in accesses:
        stride = index.stride(axis)
        number = None if stride is None else stride.constant
        score += weight * (2 if number == 1 else 0 if number == 0 else -1)
    small = isinstance(axis.size, int) and axis.size < 8
    return score - (64 * len(accesses) if small else 0)


def _long(axis: Axis) -> bool:
    return not isinstance(axis.size, int) or axis.size >= 16


def _apart(index: Index, axis: Axis, size: int) -> bool:
    """Whether an index differs along an axis whatever else it depends on: all else moves by whole lengths of it."""
    stride = index.stride(axis)
    number = None if stride is None else stride.constant
    if not number or number < 0:
        return False
    rest = [coefficient for atoms, coefficient in index.terms if atoms and atoms != (axis,)]
    return all(coefficient % (number * size) == 0 for coefficient in rest)


def _transposed(index: Index, axis: Axis, lane: Axis) -> bool:
    """Whether neighbours along `axis` lie side by side, and those along `lane` at a fixed distance."""
    along, across = index.stride(axis), index.stride(lane)
    if along is None or along.constant != 1 or across is None or across.constant in (0, 1) or across.axes():
        return False
    return not any(isinstance(atom, Gathered) for atom in index.atoms())


def split_axis(axes: tuple[Axis, ...]) -> Axis:
    """Returns the axis that a long reduction is cut along: the first symbolic one, else the longest."""
    symbolic = [axis for axis in axes if not isinstance(axis.size, int)]
    return symbolic[0] if symbolic else max(axes, key=lambda axis: as_index(axis.size).constant or 0)
