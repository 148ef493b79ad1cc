"""The loop plan of a kernel: the vectorised axis, parallelism, and the splitting of long reductions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from fxwrap.loop_ir import (
    HALF_PRECISION,
    MAX_INTERLEAVED,
    OPERATIONS,
    Axis,
    Compute,
    Constant,
    Index,
    IndirectIndex,
    Kernel,
    Load,
    Operation,
    OperationCopier,
    Reduce,
    ReductionResult,
    Store,
    count_points,
    eliminate_dead_operations,
    interleaved_accesses,
    operands,
    operation_dtype,
    unwrapped,
)
from fxwrap.symbolic import Size, product

LANES = 64
"""Number of accumulators of a reduction: enough to hide the latency of additions, few enough for the L1 cache."""

MIN_PARALLEL_WORK = 32768
"""Smallest number of elements that a parallel loop pays off for."""

MIN_PARALLEL_ITERATIONS = 16
"""A long reduction with fewer parallel iterations is split into parts that run in parallel."""

MAX_SPLIT_BLOCKS = 2
"""Blocks of columns up to which the work of one counts as that of its columns together: each is split by itself."""

MAX_LANE_ELEMENTS = 32
"""Elements of a part of a long reduction that one accumulator combines. More would make float32 sums of nearly equal
elements inexact."""

STREAMED_BYTES = 64
"""Bytes of a buffer that an iteration over few long rows loads, a line of the cache: such rows are bound by memory, and
some processors prefetch better with fewer loads in flight."""

TILE_CACHE_BYTES = 16384
"""Largest size in bytes of the tiles of transposed loads, a part of the L1 cache."""

SCATTER_BLOCK = 16
"""Smallest number of columns of rows that a thread updates when threads divide them to scatter."""

MIN_SCATTERED_COLUMNS = 4
"""Smallest number of columns of rows that scatters update as vectors, each in the order of the loops."""

MIN_SCATTER_DISTANCE = 16
"""Smallest distance in elements of what two threads combine with values: a line of the cache of float32."""

SCAN_BLOCK = 256
"""Elements of a row that are scanned together, as in `kernel.h`."""

VECTOR_COST = 10
"""The least cost of an operation that vectors of another axis than the contiguous one are worth."""

COLUMN_BLOCK = 128
"""Columns that are reduced together if the vectorised axis is parallel."""

VECTOR_LANES = 16
"""Elements of the longest vectors, of float32."""

MIN_OVERLAPPING, MAX_OVERLAPPING = 5, 64
"""Lengths of rows that are computed in blocks that overlap: in longer ones, whole vectors are most of the work."""

ROW_BUFFER_MIN_COST = 3
"""Smallest cost in instructions of a value that is stored in a row buffer instead of being recomputed."""

ROW_BUFFER_MAX_ELEMENTS = 8192
"""Largest number of elements of a row buffer. Row buffers are on the stack of a thread."""


@dataclass(frozen=True)
class LoopPlan:
    """A kernel and the axis of its innermost, vectorised loop, with the properties that printing depends on.

    If the axis is parallel, reductions combine `group` adjacent columns: all of these have the result.
    """

    kernel: Kernel
    vector_axis: Axis | None
    group: int = 1

    @property
    def vector_axis_is_reduced(self) -> bool:
        """Whether the vectorised axis is reduced, as in the reduction of rows."""
        return self.vector_axis in self.kernel.reduced

    @property
    def serial(self) -> bool:
        """Whether several iterations may update the same element, so that they must run in order."""
        return self.kernel.combines_values

    @cached_property
    def work(self) -> Size:
        """The estimated work, in elements of simple arithmetic."""
        costs = sum(OPERATIONS[item.name].cost for item in self.kernel.operations if isinstance(item, Compute))
        return product([self.kernel.count, self.kernel.reduced_count, max(1, costs // 16)])

    @property
    def splits_reduction(self) -> bool:
        """Whether a long reduction is split into parallel parts, because there are few parallel iterations."""
        if self.serial or not self.kernel.reductions or not isinstance(self.kernel.count, int):
            return False
        count = self.kernel.count
        if not count:
            return False
        if not self.vector_axis_is_reduced and self.vector_axis is not None and isinstance(self.vector_axis.size, int):
            count = count // self.vector_axis.size * -(-self.vector_axis.size // COLUMN_BLOCK)
        if count >= MIN_PARALLEL_ITERATIONS:
            return False
        columns: Size = 1
        if self.vector_axis is not None and self.group > 1:
            columns = self.vector_axis.size
        elif not self.vector_axis_is_reduced and count <= MAX_SPLIT_BLOCKS and self.vector_axis is not None:
            columns = min(self.vector_axis.size, COLUMN_BLOCK) if isinstance(self.vector_axis.size, int) else 1
        length = product([self.kernel.reduced_count, columns])
        return not isinstance(length, int) or length >= MIN_PARALLEL_WORK

    @cached_property
    def transposed_loads(self) -> tuple[Axis | None, tuple[int, ...]]:
        """The axis along which loads of a pointwise kernel are contiguous, with the loads; (None, ()) if none are."""
        vector_axis = self.vector_axis
        if vector_axis is None or self.serial or not _is_long(vector_axis):
            return None, ()
        others = [axis for axis in self.kernel.axes if axis is not vector_axis and _is_long(axis)]
        loads: dict[Axis, list[int]] = {}
        for position, operation in enumerate(self.kernel.operations):
            if isinstance(operation, Load) and operation.mask is None:
                for axis in others:
                    if is_transposed(operation.index, axis, vector_axis):
                        loads.setdefault(axis, []).append(position)
        if not loads:
            return None, ()
        axis = max(loads, key=lambda item: len(loads[item]))
        return axis, tuple(loads[axis])

    @property
    def scatters_are_disjoint(self) -> bool:
        """Whether iterations at different positions along the vectorised axis never update the same element."""
        vector_axis = self.vector_axis
        if vector_axis is None or not isinstance(vector_axis.size, int) or vector_axis.size < MIN_SCATTERED_COLUMNS:
            return False
        return all(_is_disjoint_along(store.index, vector_axis, vector_axis.size) for store in self.kernel.stores)

    def is_scattered_apart(self, axis: Axis) -> bool:
        """Whether iterations at different positions along an axis never update the same element, nor adjacent ones."""
        return all(_is_apart_along(store.index, axis) for store in self.kernel.stores)

    @property
    def max_tile_size(self) -> int:
        """The largest number of rows and columns of tiles: whole cache lines that fit the L1 cache together."""
        loads = [self.kernel.operations[position] for position in self.transposed_loads[1]]
        width = sum(load.dtype.itemsize for load in loads if isinstance(load, Load))
        return next((size for size in (64, 32) if size * size * width <= TILE_CACHE_BYTES), 16)

    @cached_property
    def overlapping_width(self) -> int:
        """The width of blocks of a short row of uneven length, of which the last one overlaps the one before it; or 0.

        Elements beyond whole vectors would be computed one by one. Those that the kernel overwrites are computed once.
        """
        size = None if self.vector_axis is None else self.vector_axis.size
        if not isinstance(size, int) or not MIN_OVERLAPPING <= size < MAX_OVERLAPPING or self.serial:
            return 0
        read = {item.buffer for item in self.kernel.operations if isinstance(item, Load)}
        if any(store.buffer in read for store in self.kernel.stores) or interleaved_accesses(self.kernel):
            return 0
        dtypes = {buffer.dtype for buffer in (*self.kernel.inputs, *self.kernel.outputs)}
        if dtypes & HALF_PRECISION and size < VECTOR_LANES:  # compilers unroll such blocks, and convert each element
            return 0
        narrowest = min([dtype.itemsize for dtype in dtypes])
        widths = [width for width in (32, 16, 8, 4) if width <= size and width * narrowest <= 4 * VECTOR_LANES]
        width = min(widths, key=lambda item: -(-size // item) * max(item, VECTOR_LANES))
        return width if size % width else 0

    @cached_property
    def gather_loads(self) -> frozenset[int]:
        """The loads of elements of one or two bytes at indirect indices that differ between lanes."""
        return frozenset([at for at, item in self._short_loads() if self._is_gather(item.index)])

    @cached_property
    def far_loads(self) -> frozenset[int]:
        """The loads of half-precision elements, which vectors convert, that are far from each other in memory."""
        return frozenset([
            at for at, item in self._short_loads() if item.dtype in HALF_PRECISION and self._is_far(item.index)
        ])  # fmt: skip

    def _short_loads(self) -> list[tuple[int, Load]]:
        loads = enumerate(self.kernel.operations)
        return [(at, item) for at, item in loads if isinstance(item, Load) and item.dtype.itemsize <= 2]

    def _is_far(self, index: Index) -> bool:
        stride = None if self.vector_axis is None else index.stride(self.vector_axis)
        return stride is not None and stride.constant is not None and abs(stride.constant) > MAX_INTERLEAVED

    def _is_gather(self, index: Index) -> bool:
        indirect = [atom for atom in index.atoms() if isinstance(atom, IndirectIndex)]
        return any(self.vector_axis in self.kernel.value_axes[atom.operation] for atom in indirect)

    def cost(self, position: int, known: Iterable[int]) -> int:
        """Returns the estimated number of instructions that compute a value from the known ones."""
        stop, stack, total = set(known), [position], 0
        while stack:
            at = stack.pop()
            if at in stop or not self.kernel.varying[at]:
                continue
            stop.add(at)
            operation = self.kernel.operations[at]
            total += OPERATIONS[operation.name].cost if isinstance(operation, Compute) else 1
            stack.extend(operands(operation))
        return total


def make_loop_plan(kernel: Kernel) -> LoopPlan:
    """Returns the plan whose vectorised axis is the one along which the fewest accesses have a stride."""
    candidates = (*kernel.axes, *kernel.reduced)
    if not candidates:
        return LoopPlan(kernel, None)
    passes = _passes(kernel)
    interleaved = {position: item.axis for item in interleaved_accesses(kernel) for position in item.positions}
    accesses = [
        _Access(
            item.index,
            (8 * passes[position] if kernel.varying[position] else 1) * (3 if isinstance(item, Store) else 2),
            interleaved.get(position),
        )
        for position, item in enumerate(kernel.operations)
        if isinstance(item, Load | Store)
    ]
    is_cheap = all(OPERATIONS[item.name].cost < VECTOR_COST for item in kernel.operations if isinstance(item, Compute))
    is_short_allowed = is_cheap and not kernel.reduced and not _converts_half_precision(kernel)
    is_pointwise = not kernel.reduced
    scores = [
        (_score(axis, accesses, is_short_allowed, is_pointwise), position) for position, axis in enumerate(candidates)
    ]
    return LoopPlan(kernel, candidates[max(scores)[1]])


def _passes(kernel: Kernel) -> Counter[int]:
    """Returns for each operation the number of passes over the reduced axes that compute it."""
    targets: dict[int, list[int]] = {}
    for position, item in enumerate(kernel.operations):
        if isinstance(item, Reduce | Store):
            targets.setdefault(kernel.stages[position], []).extend(
                [position] if isinstance(item, Store) else item.operands
            )
    reductions = frozenset(kernel.reductions)
    return Counter([item for used in targets.values() for item in kernel.backward_slice(used, reductions)])


@dataclass(frozen=True)
class _Access:
    """A load or a store: its index and weight, and the axis along which it is contiguous together with others."""

    index: Index
    weight: int
    interleaved: Axis | None


def _converts_half_precision(kernel: Kernel) -> bool:
    """Whether elements are converted from or to half precision, which vectors do."""
    casts = [item for item in kernel.operations if isinstance(item, Compute) and item.name == "cast"]
    dtypes = {dtype for item in casts for dtype in (item.dtype, operation_dtype(kernel.operations[item.operands[0]]))}
    return bool(dtypes & HALF_PRECISION)


def _score(axis: Axis, accesses: Sequence[_Access], is_short_allowed: bool, splits_wraps: bool) -> int:
    """Returns the larger number for the better vectorised axis.

    A short axis fills no vector, but if all accesses are contiguous along it, any other one passes over memory again
    for each of its elements. It is worth that only where vectors compute costly operations. Loops that are split where
    an index begins anew (`splits_wraps`) are contiguous along it.
    """
    indices = [unwrapped(item.index, axis) if splits_wraps else item.index for item in accesses]
    strides = [index.stride(axis) for index in indices]
    is_contiguous = [
        axis == item.interleaved or (stride is not None and stride.constant in (0, 1))
        for item, stride in zip(accesses, strides, strict=True)
    ]
    score = sum([item.weight * (2 if is_near else -1) for item, is_near in zip(accesses, is_contiguous, strict=True)])
    short = isinstance(axis.size, int) and axis.size < 8
    return score - (64 * len(accesses) if short and not (is_short_allowed and all(is_contiguous)) else 0)


def _is_long(axis: Axis) -> bool:
    return not isinstance(axis.size, int) or axis.size >= 16


def _is_disjoint_along(index: Index, axis: Axis, size: int) -> bool:
    """Whether values of an axis never share an element: the strides of other axes are multiples of its extent."""
    step = _fixed_step(index, axis)
    return step > 0 and not _terms_within(index, axis, step * size).terms


def _is_apart_along(index: Index, axis: Axis) -> bool:
    """Whether values of an axis never share elements: others step over its extent, or stay within its stride."""
    step = _fixed_step(index, axis)
    if step < MIN_SCATTER_DISTANCE or not isinstance(axis.size, int):
        return False
    limits = _terms_within(index, axis, step * axis.size).bounds()
    if limits is None or limits[0].constant is None or limits[1].constant is None:
        return False
    return limits[1].constant - limits[0].constant < step


def _fixed_step(index: Index, axis: Axis) -> int:
    """Returns the stride of an axis, 0 for one that varies."""
    stride = index.stride(axis)
    return 0 if stride is None else stride.constant or 0


def _terms_within(index: Index, axis: Axis, extent: int) -> Index:
    """Returns the terms, without the constant and that of an axis, that do not step over its extent."""
    rest = [term for term in index.terms if term[0] and term[0] != (axis,)]
    return Index(tuple([term for term in rest if term[1] % extent]))


def is_transposed(index: Index, axis: Axis, lane: Axis) -> bool:
    """Whether an index is contiguous along `axis` and has a fixed larger stride along `lane`."""
    along, across = index.stride(axis), index.stride(lane)
    if along is None or along.constant != 1 or across is None or across.constant in (0, 1) or across.axes():
        return False
    return not any(isinstance(atom, IndirectIndex) for atom in index.atoms())


@dataclass(frozen=True)
class ReductionParts:
    """A part of a long reduction: one index of each axis of `outer`, `length` of `axis`, and all of `inner`."""

    outer: tuple[Axis, ...]
    axis: Axis
    length: int
    inner: tuple[Axis, ...]


def split_reduction(axes: Sequence[Axis], elements: int) -> ReductionParts:
    """Returns parts of at most so many elements; `axes` are in the order of the loops, the innermost one last."""
    count = 1
    for position in reversed(range(len(axes))):
        size = axes[position].size
        if position == 0 or not isinstance(size, int) or count * size > elements:
            break
        count *= size
    return ReductionParts(tuple(axes[:position]), axes[position], elements // count, tuple(axes[position + 1 :]))


def decompose_reductions(kernel: Kernel) -> Kernel:
    """Returns a kernel that computes `welford` as three sums and `softmax` as a maximum and a sum."""
    if not any(isinstance(item, Reduce) and item.kind in ("welford", "softmax", "prod") for item in kernel.operations):
        return kernel
    return _ReductionDecomposer(kernel).run()


class _ReductionDecomposer(OperationCopier):
    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.parts: dict[tuple[int, int], int] = {}
        self.known: dict[Operation, int] = {}

    def run(self) -> Kernel:
        for position, operation in enumerate(self.kernel.operations):
            self.origin = operation.origin
            match operation:
                case Reduce("welford", (value,), dtype):
                    self.welford(position, self.new[value], dtype, operation.axes)
                case Reduce("softmax", (value,), dtype):
                    self.softmax(position, self.new[value], dtype, operation.axes)
                case Reduce("prod", (value,), torch.float32) if not self.is_rounded(position):
                    wide = self.compute("cast", self.new[value], dtype=torch.float64)
                    result = self.reduce("prod", wide, torch.float64, operation.axes)
                    self.new[position] = self.compute("cast", result, dtype=torch.float32)
                case ReductionResult(source, part) if (source, part) in self.parts:
                    self.new[position] = self.parts[source, part]
                case Compute("div", (value, divisor), torch.float32) if self.is_softmax_sum(divisor):
                    inverse = self.compute("reciprocal", self.new[divisor], dtype=torch.float32)
                    self.new[position] = self.compute("mul", self.new[value], inverse, dtype=torch.float32)
                case _:
                    self.copy(position)
        return eliminate_dead_operations(replace(self.kernel, operations=tuple(self.operations)))

    def add(self, operation: Operation) -> int:
        """Adds an operation unless there is an equal one: a softmax's sum shares its summands with the elements."""
        if isinstance(operation, Compute | Constant) and operation in self.known:
            return self.known[operation]
        self.known[operation] = position = super().add(operation)
        return position

    def is_rounded(self, position: int) -> bool:
        """Whether a value is only used in half precision, which hides the rounding errors of float32 products."""
        users = [self.kernel.operations[user] for user in self.kernel.users[position]]
        return all(isinstance(user, Compute) and user.name == "cast" and user.dtype in HALF_PRECISION for user in users)

    def is_softmax_sum(self, position: int) -> bool:
        """Whether a value is the sum of a softmax: 0 or at least 1, so its reciprocal is as accurate as a division."""
        result = self.kernel.operations[position]
        if not isinstance(result, ReductionResult) or result.position != 1:
            return False
        source = self.kernel.operations[result.operation]
        return isinstance(source, Reduce) and source.kind == "softmax"

    def welford(self, position: int, value: int, dtype: torch.dtype, axes: tuple[Axis, ...]) -> None:
        """Adds the corrected two-pass algorithm of Chan, Golub and LeVeque (1983).

        The rounding error of the mean is the mean of the differences from it. Without it, rows of equal elements would
        have differences from their mean, which a division by a small standard deviation amplifies.
        """
        divisor = self.size(count_points(axes or self.kernel.reduced), dtype)
        total = self.reduce("sum", value, dtype, axes)
        mean = self.compute("div", total, divisor, dtype=dtype)
        difference = self.compute("sub", value, mean, dtype=dtype)
        square = self.compute("mul", difference, difference, dtype=dtype)
        residual = self.reduce("sum", difference, dtype, axes)
        squares = self.reduce("sum", square, dtype, axes)
        correction = self.compute("div", residual, divisor, dtype=dtype)
        zero = self.constant(0.0, dtype)
        is_finite = self.compute("eq", self.compute("sub", mean, mean, dtype=dtype), zero, dtype=torch.bool)
        corrected = self.compute("add", mean, correction, dtype=dtype)
        excess = self.compute("mul", residual, correction, dtype=dtype)
        self.parts[position, 0] = self.compute("where", is_finite, corrected, mean, dtype=dtype)
        m2 = self.compute("sub", squares, excess, dtype=dtype)
        self.parts[position, 1] = self.compute("maximum", m2, zero, dtype=dtype)

    def softmax(self, position: int, value: int, dtype: torch.dtype, axes: tuple[Axis, ...]) -> None:
        largest = self.reduce("max", value, dtype, axes)
        power = self.compute("exp", self.compute("sub", value, largest, dtype=dtype), dtype=dtype)
        total = self.reduce("sum", power, dtype, axes)
        lowest = self.constant(-float("inf"), dtype)
        zero = self.constant(0.0, dtype)
        empty = self.compute("eq", largest, lowest, dtype=torch.bool)
        self.parts[position, 0] = largest
        self.parts[position, 1] = self.compute("where", empty, zero, total, dtype=dtype)
