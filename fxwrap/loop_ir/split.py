"""Split reductions: one kernel reduces parts of the rows, and another combines the partial results.

A reduction of few rows or columns occupies a fraction of a GPU. Split into parts it occupies all of it, at the cost of
writing and reading one number per part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import sympy
import torch

from fxwrap.loop_ir.atoms import Axis, IndirectIndex, count_points
from fxwrap.loop_ir.body_operations import (
    Constant,
    DeviceAssert,
    IndexValue,
    Load,
    Reduce,
    ReductionResult,
    Store,
    SymbolicScalar,
    operands,
    operation_dtype,
)
from fxwrap.loop_ir.builder import OperationCopier, with_used_buffers
from fxwrap.loop_ir.canonicalize import reorder_axes
from fxwrap.loop_ir.index import ONE, Atom, Index, IndexLike, as_index
from fxwrap.loop_ir.kernel import Buffer, Kernel
from fxwrap.loop_ir.offsets import delinearize_index, linearize_index
from fxwrap.loop_ir.operations import ORDERED_REDUCTIONS, POSITION_RESULTS, REDUCTIONS
from fxwrap.loop_ir.traffic import FEWEST_CONTIGUOUS, contiguity_scores, has_contiguous_columns
from fxwrap.loop_ir.verify import verify_kernel
from fxwrap.symbolic import Size, ceiling_divide, product

_MIN_ELEMENTS = 1 << 20  # a smaller reduction is faster than a second launch,
_MAX_PROGRAM_ELEMENTS = 1 << 17  # unless one program reduces more than this,
_MAX_POSITION_ELEMENTS = 1 << 14  # or this in rows of which it finds positions: it compares pairs
_MIN_INNER_PART = 2048  # elements of a part of a contiguous row
_MIN_OUTER_PART, _MIN_TILED_PART = 64, 256  # of a column, alone or in tiles of accesses in two layouts
_COLUMNS_PER_PROGRAM = 64  # in a reduction across rows
_PROGRAMS_PER_MULTIPROCESSOR = 4  # that saturate it
_FEW_ACCESSES = 4  # of an element: more, as those of a window, are the work of several elements
_WAITING_ACCESSES = 30
_MIN_SIDE = 32  # elements of each side of a tile of accesses in two layouts
_KINDS_WITH_IDENTITY = frozenset({"sum", "prod", "any", "all", "max", "min", "softmax", "argmax", "argmin"})


@dataclass(frozen=True)
class SplitKernel:
    """The kernels that replace one, in order, and their temporary buffers.

    `matmul` is the number of the kernel that computes the sums of a matmul.
    """

    kernels: tuple[Kernel, ...]
    temporaries: tuple[Buffer, ...]
    matmul: int = 0


def split_reductions(
    kernel: Kernel, hint: Callable[[Size], int], multiprocessors: int, reserved_names: frozenset[str] = frozenset()
) -> SplitKernel | None:
    """Returns a kernel with its reductions split, or None where that is impossible or not faster.

    `hint` returns a typical value of a size, and `multiprocessors` are those of the device. Results that elements
    depend on go through memory to a third kernel. Temporary buffers have none of the `reserved_names`.
    """
    if not kernel.reductions or kernel.scans or kernel.reduces_in_steps:
        return None
    plan = _plan_split(kernel, hint, multiprocessors)
    split = None if plan is None else ReductionSplitter(kernel, plan, reserved_names).run()
    if split is None or len(split.kernels) < 3:
        return split
    names = reserved_names | {buffer.name for buffer in split.temporaries}
    more = split_reductions(split.kernels[-1], hint, multiprocessors, names)
    if more is None and not split.kernels[-1].reduced:  # its elements are no rows
        more = SplitKernel((reorder_axes(split.kernels[-1], hint),), ())
    if more is None:
        return split
    return SplitKernel((*split.kernels[:-1], *more.kernels), (*split.temporaries, *more.temporaries))


# --- number of parts -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SplitPlan:
    """A split of the reduced axes `split` into parts of `size` elements, over the axes `reduced`.

    `mapping` expresses the old axes by the new ones. `inside` is the position in the row, which needs a bounds check
    where the parts are not equal, else None. `results` are the other reduced axes that the results vary along.
    `columns` are those of the split axes that parts have one element of.
    """

    split: tuple[Axis, ...]
    part: Axis
    reduced: tuple[Axis, ...]
    mapping: dict[Atom, IndexLike]
    size: Size
    inside: Index | None
    results: tuple[Axis, ...] = ()
    columns: tuple[Axis, ...] = ()

    @property
    def parts(self) -> tuple[Axis, ...]:
        """The axes of the parts."""
        return (self.part, *self.columns)


def _plan_split(kernel: Kernel, hint: Callable[[Size], int], multiprocessors: int) -> SplitPlan | None:
    columns = _transposed_columns(kernel, hint)
    count, size = hint(kernel.count), hint(kernel.reduced_count)
    saturating = _PROGRAMS_PER_MULTIPROCESSOR * multiprocessors
    across = bool(columns) or has_contiguous_columns(kernel, hint)
    width = hint(count_points(columns))
    busy = max(-(-count * width // _COLUMNS_PER_PROGRAM) if across else count, 1)
    least = _MIN_TILED_PART if columns else _MIN_OUTER_PART if across else _MIN_INNER_PART
    wanted = min(-(-saturating // busy), size // width // least)
    kinds = {item.kind for item in kernel.operations if isinstance(item, Reduce)}
    finds_positions = not across and not kernel.is_multi_pass and not kinds.isdisjoint(ORDERED_REDUCTIONS)
    limit = _MAX_POSITION_ELEMENTS if finds_positions else _MAX_PROGRAM_ELEMENTS
    work = count * size * max(_element_accesses(kernel) // _FEW_ACCESSES, 1)
    if work < _MIN_ELEMENTS and work <= busy * limit:
        return None
    if busy * (4 if kernel.is_multi_pass else 2) > saturating or wanted < 2:
        return None  # elements that depend on results would be loaded again from memory, not from the cache
    split = tuple([axis for axis in kernel.reduced if axis not in columns])
    whole, wave = count_points(split), None if across else max(saturating // busy, 1)
    reach = 2 if kinds <= _KINDS_WITH_IDENTITY else 8  # others have equal parts or none
    for number in range(1, len(split) + 1):  # parts of whole rows need no divisions along these
        first, others = split[:number], split[number:]
        sizes = [axis.size for axis in first]
        parts = _closest_divisor(product(sizes), wanted, reach, wave)
        if parts is not None:
            part, rest = Axis("part", parts), Axis("inner", ceiling_divide(product(sizes), parts))
            rows = delinearize_index(as_index(part) * rest.size + rest, sizes)
            reduced = (rest, *others)
            size = count_points(reduced)
            return SplitPlan(
                kernel.reduced, part, reduced, dict(zip(first, rows, strict=True)), size, None, columns=columns
            )
    equal = _closest_divisor(whole, wanted, reach, wave)
    part = Axis("part", wanted if equal is None else equal)
    each = Axis("inner", ceiling_divide(whole, part.size))
    position = as_index(part) * each.size + each
    mapping: dict[Atom, IndexLike] = dict(
        zip(split, delinearize_index(position, [axis.size for axis in split]), strict=True)
    )
    inside = position if equal is None else None
    return SplitPlan(kernel.reduced, part, (each,), mapping, each.size, inside, columns=columns)


def _transposed_columns(kernel: Kernel, hint: Callable[[Size], int]) -> tuple[Axis, ...]:
    """Returns a reduced axis whose elements are reduced apart first, so that accesses in two layouts are tiles.

    A fifth of the accesses are contiguous along it at least, and a fifth along another reduced axis. Reductions of rows
    have no such axis.
    """
    kinds = {item.kind for item in kernel.operations if isinstance(item, Reduce)}
    if kernel.axes or kernel.is_multi_pass or not kinds.isdisjoint(ORDERED_REDUCTIONS):
        return ()
    scores = contiguity_scores(kernel, hint)
    least = sum(scores.values()) / FEWEST_CONTIGUOUS
    axes = [axis for axis in kernel.reduced if scores.get(axis, 0) >= max(least, 1) and hint(axis.size) >= _MIN_SIDE]
    return (max(reversed(axes), key=lambda axis: scores[axis]),) if len(axes) > 1 else ()


def _element_accesses(kernel: Kernel) -> int:
    """Returns the number of loads and stores that vary along reduced axes.

    One at an index that is loaded counts as many: it waits for that load, and none of a later step comes before it.
    """
    pairs = zip(kernel.operations, kernel.address_axes, strict=True)
    accesses = [item for item, axes in pairs if isinstance(item, Load | Store) and not axes.isdisjoint(kernel.reduced)]
    waiting = [item for item in accesses if any(isinstance(atom, IndirectIndex) for atom in item.index.atoms())]
    return len(accesses) + _WAITING_ACCESSES * len(waiting)


def _closest_divisor(size: Size, wanted: int, reach: int, wave: int | None) -> int | None:
    """Returns the divisor of a size that is closest to the wanted number of parts, or None.

    It is within a factor of 2 if there is one, or else of `reach`. `wave` parts run beside each other: of a few more,
    the last ones run alone, in as much time again.
    """

    def distance(number: int) -> float:
        waves = 1 if wave is None else -(-number // wave)
        return max(number / wanted, waves * wanted / number)

    if not isinstance(size, int):
        return None
    for factor in (2, reach):
        near = [number for number in range(max(wanted // factor, 2), factor * wanted + 1) if size % number == 0]
        if near:
            return min(near, key=distance)
    return None


def reduces_columns(kernel: Kernel) -> bool:
    """Whether most loads of elements are contiguous along a parallel axis."""
    loads = [
        (operation.index, len(axes))
        for operation, axes in zip(kernel.operations, kernel.address_axes, strict=True)
        if isinstance(operation, Load) and not axes.isdisjoint(kernel.reduced)
    ]
    most = max([count for _, count in loads], default=0)
    indices = [index for index, count in loads if count == most]
    along = sum(index.stride(axis) == ONE for index in indices for axis in kernel.reduced)
    beside = sum(index.stride(axis) == ONE for index in indices for axis in kernel.axes)
    return beside > along


# --- the kernels -----------------------------------------------------------------------------------------------------


class _PartCopier(OperationCopier):
    def load(self, buffer: Buffer, index: Index) -> int:
        return self.add(Load(buffer.name, index, buffer.dtype, origin=self.origin))

    def store(self, buffer: Buffer, index: Index, value: int) -> None:
        self.add(Store(buffer.name, index, value, origin=self.origin))


class ReductionSplitter:
    """Splits the reductions over some reduced axes of a kernel; those over other axes belong to their operands."""

    def __init__(self, kernel: Kernel, plan: SplitPlan, reserved_names: frozenset[str] = frozenset()) -> None:
        self.kernel = kernel
        self.plan = plan
        self.reserved_names = reserved_names | {item.name for item in (*kernel.inputs, *kernel.outputs)}
        split = frozenset(plan.split)
        self.varying = kernel.varying_along(split)
        self.reductions = [
            item for item in kernel.reductions if not split.isdisjoint(kernel.reduced_by(self._reduce(item)))
        ]
        self.stages = self._stages()
        self.first = [position for position in self.reductions if self.stages[position] == 0]
        self.temporaries: dict[str, Buffer] = {}
        self.partials: dict[int, list[Buffer]] = {}
        self.results: dict[tuple[int, int], Buffer] = {}
        self.axes = (*kernel.axes, *plan.results)
        sizes = [axis.size for axis in self.axes]
        self.count = product(sizes)
        self.row = linearize_index(self.axes, sizes)
        self.element = linearize_index(plan.parts, [axis.size for axis in plan.parts]) * self.count + self.row

    def _reduce(self, position: int) -> Reduce:
        operation = self.kernel.operations[position]
        assert isinstance(operation, Reduce)
        return operation

    def _stages(self) -> list[int]:
        """Returns for each operation the number of successive split reductions that must complete before it."""
        stages: list[int] = []
        for operation in self.kernel.operations:
            stages.append(max([stages[used] + (used in self.reductions) for used in operands(operation)], default=0))
        return stages

    def run(self) -> SplitKernel | None:
        """Returns the kernels, or None where parts of different sizes do not combine, or a kernel reads another's."""
        kinds = {self._reduce(position).kind for position in self.reductions}
        if self.plan.inside is not None and not kinds <= _KINDS_WITH_IDENTITY:
            return None
        parts = self._partial_kernel()
        rest = self._later_kernel()
        kernels = [parts, self._combine_kernel(), *([rest] if rest is not None else [])]
        if not self._independent(kernels):
            return None
        return SplitKernel(tuple([verify_kernel(item) for item in kernels]), tuple(self.temporaries.values()))

    def _independent(self, kernels: list[Kernel]) -> bool:
        """Whether no kernel reads a buffer that an earlier one has written, except temporaries."""
        written: set[str] = set()
        for kernel in kernels:
            read = {item.buffer for item in kernel.operations if isinstance(item, Load)}
            if not (read - set(self.temporaries)).isdisjoint(written):
                return False
            written |= {store.buffer for store in kernel.stores}
        return True

    def _temporary(self, dtype: torch.dtype, extent: Size, prefix: str) -> Buffer:
        number = 0
        while f"{prefix}{number}" in self.reserved_names or f"{prefix}{number}" in self.temporaries:
            number += 1
        buffer = self.temporaries[f"{prefix}{number}"] = Buffer(f"{prefix}{number}", dtype, extent)
        return buffer

    def _finish(self, body: _PartCopier, axes: tuple[Axis, ...], reduced: tuple[Axis, ...]) -> Kernel:
        """Returns a kernel of these operations and the buffers that they use."""
        known = [*self.kernel.inputs, *self.kernel.outputs, *self.temporaries.values()]
        return with_used_buffers(Kernel(axes, reduced, (), (), tuple(body.operations)), known)

    # --- partial reductions ------------------------------------------------------------------------------------------

    def _partial_kernel(self) -> Kernel:
        """Returns the kernel that reduces each part, and runs stores that need no reduction."""
        kernel, body = self.kernel, _PartCopier(self.kernel, self.plan.mapping)
        inside = self._bounds_mask(body)
        for position, operation in enumerate(kernel.operations):
            if self.stages[position] > 0:
                continue
            if position in self.first:
                body.origin = operation.origin
                self._add_partial_reduction(body, position, self._reduce(position), inside)
            elif isinstance(operation, Store | DeviceAssert):
                if self.varying[position]:
                    self._mask_last_operation(body, body.copy(position), inside)
            else:
                new = body.copy(position)
                if isinstance(operation, Load) and self.varying[position]:
                    self._mask_last_operation(body, new, inside)
                    body.new[position] = len(body.operations) - 1
        others = tuple([axis for axis in kernel.reduced if axis not in self.plan.split])
        return self._finish(body, (*self.plan.parts, *kernel.axes), (*self.plan.reduced, *others))

    def _bounds_mask(self, body: _PartCopier) -> int | None:
        if self.plan.inside is None:
            return None
        whole = count_points(axis for axis in self.plan.split if axis not in self.plan.columns)
        position = body.add(IndexValue(self.plan.inside))
        limit = (
            Constant(whole, torch.int64)
            if isinstance(whole, int)
            else SymbolicScalar(sympy.sympify(whole), torch.int64)
        )
        return body.compute("lt", position, body.add(limit), dtype=torch.bool)

    def _mask_last_operation(self, body: _PartCopier, position: int, inside: int | None) -> None:
        """Masks the last operation with the bounds of the row."""
        if inside is None:
            return
        operation = body.operations.pop()
        assert isinstance(operation, Load | Store | DeviceAssert), "the operation has no mask"
        mask = (
            inside if operation.mask is None else body.compute("logical_and", operation.mask, inside, dtype=torch.bool)
        )
        body.add(dataclasses.replace(operation, mask=mask))

    def _add_partial_reduction(self, body: _PartCopier, position: int, operation: Reduce, inside: int | None) -> None:
        """Adds the reduction of a part and the stores of its results."""
        value = body.new[operation.operands[0]]
        dtype = operation_dtype(body.operations[value])
        if inside is not None:
            neutral = body.add(Constant(_identity(operation.kind, dtype), dtype))
            value = body.compute("where", inside, value, neutral, dtype=dtype)
        axes = () if self.plan.split == self.kernel.reduced else self.plan.reduced
        results = self._results(body, operation.kind, value, dtype, axes, operation.operand_precision)
        if operation.kind in ORDERED_REDUCTIONS:
            start = body.add(IndexValue(as_index(self.plan.part) * self.plan.size))
            results[1] = body.compute("add", results[1], start, dtype=torch.int64)
        extent = product([count_points(self.plan.parts), self.count])
        self.partials[position] = [
            self._temporary(operation_dtype(body.operations[item]), extent, "partial") for item in results
        ]
        for buffer, item in zip(self.partials[position], results, strict=True):
            body.store(buffer, self.element, item)

    def _results(
        self,
        body: _PartCopier,
        kind: str,
        value: int,
        dtype: torch.dtype,
        axes: tuple[Axis, ...] = (),
        operand_precision: torch.dtype | None = None,
    ) -> list[int]:
        """Adds a reduction; returns its results."""
        whole = body.reduce(kind, value, dtype, axes, operand_precision)
        count = REDUCTIONS[kind].results
        if count == 1:
            return [whole]
        types = [torch.int64 if (kind, part) in POSITION_RESULTS else dtype for part in range(count)]
        return [body.add(ReductionResult(whole, part, type_, body.origin)) for part, type_ in enumerate(types)]

    # --- combination -------------------------------------------------------------------------------------------------

    def _combine_kernel(self) -> Kernel:
        """Returns the kernel that combines the partial results, and computes and stores what depends on rows alone."""
        kernel, body = self.kernel, _PartCopier(self.kernel)
        reached: set[int] = set()
        results: dict[tuple[int, int], int] = {}
        for position, operation in enumerate(kernel.operations):
            if position in self.first:
                body.origin = operation.origin
                assert isinstance(operation, Reduce), "self.first holds reductions"
                for part, value in enumerate(self._combine(body, operation, self.partials[position])):
                    results[position, part] = value
                body.new[position] = results[position, 0]
                reached.add(position)
            elif isinstance(operation, ReductionResult) and (operation.operation, operation.position) in results:
                body.new[position] = results[operation.operation, operation.position]
                reached.add(position)
            elif not self.varying[position] and all(used in reached for used in operands(operation)):
                if not isinstance(operation, Reduce):
                    body.copy(position)
                    reached.add(position)
        for key, buffer in self.results.items():
            body.store(buffer, self.row, results[key])
        return self._finish(body, self.axes, self.plan.parts)

    def _combine(self, body: _PartCopier, operation: Reduce, buffers: list[Buffer]) -> list[int]:
        loads = [body.load(buffer, self.element) for buffer in buffers]
        dtype = buffers[0].dtype
        match operation.kind:
            case "welford":
                mean, m2 = self._results(body, "welford", loads[0], dtype)
                between = body.compute("mul", m2, body.size(self.plan.size, dtype), dtype=dtype)
                within = body.reduce("sum", loads[1], dtype)
                return [mean, body.compute("add", within, between, dtype=dtype)]
            case "softmax":
                return self._combine_softmax(body, loads, dtype)
            case "argmax" | "argmin":
                value, part = self._results(body, operation.kind, loads[0], dtype)
                chosen = as_index(IndirectIndex(part, self.plan.part.size)) * self.count + self.row
                return [value, body.load(buffers[1], chosen)]
            case _:
                return [body.reduce(operation.kind, loads[0], dtype)]

    def _combine_softmax(self, body: _PartCopier, loads: list[int], dtype: torch.dtype) -> list[int]:
        largest = body.reduce("max", loads[0], dtype)
        low, zero = body.add(Constant(-float("inf"), dtype)), body.add(Constant(0.0, dtype))
        nothing = body.compute("eq", largest, low, dtype=torch.bool)
        shift = body.compute("where", nothing, zero, largest, dtype=dtype)
        power = body.compute("exp", body.compute("sub", loads[0], shift, dtype=dtype), dtype=dtype)
        return [largest, body.reduce("sum", body.compute("mul", loads[1], power, dtype=dtype), dtype)]

    # --- later stages ------------------------------------------------------------------------------------------------

    def _later_kernel(self) -> Kernel | None:
        """Returns the kernel of later stages, which loads the results of reductions, or None without such stages."""
        kernel, body = self.kernel, _PartCopier(self.kernel)
        later = [
            position
            for position, operation in enumerate(kernel.operations)
            if self.stages[position] > 0 and isinstance(operation, Store | DeviceAssert | Reduce)
            if self.varying[position] or isinstance(operation, Reduce)
        ]
        if not later:
            return None
        after = self._depends_on(later)
        for position, operation in enumerate(kernel.operations):
            source = operation.operation if isinstance(operation, ReductionResult) else position
            if source in self.first:
                if isinstance(operation, Reduce) and REDUCTIONS[operation.kind].results > 1:
                    continue
                part = operation.position if isinstance(operation, ReductionResult) else 0
                body.origin = operation.origin
                body.new[position] = body.load(self._result_buffer(source, part, operation_dtype(operation)), self.row)
            elif isinstance(operation, Store | DeviceAssert):
                if position in later or (not self.varying[position] and position in after):
                    body.copy(position)
            else:
                body.copy(position)
        whole = not any(isinstance(operation, Reduce) for operation in body.operations)
        axes, reduced = ((*kernel.axes, *kernel.reduced), ()) if whole else (kernel.axes, kernel.reduced)
        finished = self._finish(body, axes, reduced)
        used = {item.buffer for item in finished.operations if isinstance(item, Load)}
        for key, buffer in list(self.results.items()):
            if buffer.name not in used:
                del self.results[key], self.temporaries[buffer.name]
        return finished

    def _depends_on(self, later: list[int]) -> set[int]:
        """Returns the operations that depend on a reduction of a later stage, which the combining kernel lacks."""
        reductions = {position for position in later if isinstance(self.kernel.operations[position], Reduce)}
        dependent = set(reductions)
        for position, operation in enumerate(self.kernel.operations):
            if any(used in dependent for used in operands(operation)):
                dependent.add(position)
        return dependent

    def _result_buffer(self, position: int, part: int, dtype: torch.dtype) -> Buffer:
        known = self.results.get((position, part))
        if known is None:
            known = self.results[position, part] = self._temporary(dtype, self.count, "row")
        return known


def _identity(kind: str, dtype: torch.dtype) -> float | int | bool:
    if kind in ("any", "all"):
        return kind == "all"
    if kind in ("sum", "prod"):
        number = 0 if kind == "sum" else 1
        return float(number) if dtype.is_floating_point else number
    if dtype.is_floating_point:
        return float("inf") if kind in ("min", "argmin") else -float("inf")
    return torch.iinfo(dtype).max if kind in ("min", "argmin") else torch.iinfo(dtype).min
