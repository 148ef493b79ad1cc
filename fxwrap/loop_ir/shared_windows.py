"""Neighbouring windows share loads: an iteration computes several elements of an axis, whose windows overlap.

A window of a convolution or a pool otherwise loads each element again for the windows beside it, and its weights for
each window. Loads from a cache are then most of such a kernel's time. So are those of sums of windows' elements, as in
the gradient of the weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from fxwrap.loop_ir.atoms import Axis, count_points
from fxwrap.loop_ir.body_operations import Compute, Load, Operation, Reduce, map_operation, operands, renumber_index
from fxwrap.loop_ir.builder import eliminate_dead_operations
from fxwrap.loop_ir.canonicalize import replace_axes
from fxwrap.loop_ir.index import ONE, as_index
from fxwrap.loop_ir.kernel import Buffer, Kernel
from fxwrap.loop_ir.segment_fusion import merge_iterations
from fxwrap.loop_ir.segments import axis_comparisons, decide_comparisons
from fxwrap.loop_ir.verify import verify_kernel
from fxwrap.symbolic import Size

MIN_WINDOW_LOADS = 8
"""The fewest loads of one buffer by an iteration that count as a window."""

_MIN_SUMMED_LOADS = 3
"""The fewest that do in sums of windows' elements."""

_MAX_ELEMENTS, _MAX_BYTES = 8, 16
"""The most elements that an iteration computes, and the most bytes of one tensor that these are.

Twice as many elements of four bytes were no faster on an H200, and their kernels took longer to compile.
"""

_MAX_LOADS = 160
"""The most loads of an iteration: registers hold those of several elements."""

_MIN_SAVED = 0.4
"""The least share of the loads that must be saved."""

MIN_WINDOW_ITERATIONS = 1 << 17
"""The fewest iterations that occupy a device."""


def share_windows(kernel: Kernel, hint: Callable[[Size], int]) -> Kernel:
    """Returns a kernel whose iterations have several neighbouring windows, if that saves enough loads.

    The axis is one along which no store is contiguous, so that those of an iteration stay vectors of other iterations;
    in sums, a reduced one along which no load is. `hint` returns a typical value of a size. Other kernels are returned
    unchanged.
    """
    buffer = _window(kernel)
    if buffer is None:
        return kernel
    best, least = kernel, 1 - _MIN_SAVED
    iterations = hint(count_points((*kernel.axes, *kernel.reduced)))
    most = min(iterations // MIN_WINDOW_ITERATIONS, _MAX_ELEMENTS, _MAX_BYTES // buffer.dtype.itemsize)
    for axis in kernel.reduced or kernel.axes:
        accesses = [item for item in kernel.operations if isinstance(item, Load)] if kernel.reduced else kernel.stores
        if not isinstance(axis.size, int) or any(item.index.stride(axis) in (None, ONE) for item in accesses):
            continue
        loads = _loads(kernel, axis)
        for count in [number for number in range(most, 1, -1) if axis.size % number == 0]:
            shared, inner = _with_elements(kernel, axis, count)
            number = _loads(shared, inner)
            if number <= min(least * loads * count, _MAX_LOADS):
                best, least = shared, number / (loads * count)
                break
    return best


def _loads(kernel: Kernel, axis: Axis) -> int:
    """Returns the number of loads of an iteration; in sums, others are outside of the loop along the axis."""
    pairs = zip(kernel.operations, kernel.address_axes, strict=True)
    return sum(isinstance(item, Load) and (not kernel.reduced or axis in axes) for item, axes in pairs)


def _window(kernel: Kernel) -> Buffer | None:
    """Returns the buffer of which a kernel without order loads many elements for each result, or for each summand."""
    reductions = [item for item in kernel.operations if isinstance(item, Reduce)]
    if kernel.combines_values or kernel.scans or kernel.is_multi_pass or kernel.reduces_in_steps:
        return None
    if any(item.kind != "sum" or item.operand_precision is not None for item in reductions):
        return None
    loads = Counter(item.buffer for item in kernel.operations if isinstance(item, Load))
    buffers = [item for item in kernel.inputs if loads[item.name]]
    window = max(buffers, key=lambda item: loads[item.name], default=None)
    least = _MIN_SUMMED_LOADS if reductions else MIN_WINDOW_LOADS
    return window if window is not None and loads[window.name] >= least else None


def _with_elements(kernel: Kernel, axis: Axis, count: int) -> tuple[Kernel, Axis]:
    """Returns a kernel whose iterations compute so many consecutive elements of an axis, and the new axis."""
    assert isinstance(axis.size, int), "the size is known"
    inner = Axis(f"{axis.name}s", axis.size // count)
    axes, reduced = [[inner if item == axis else item for item in items] for items in (kernel.axes, kernel.reduced)]
    elements = [
        _decided(replace_axes(kernel, axes, reduced, {axis: as_index(inner) * count + number}), inner)
        for number in range(count)
    ]
    if kernel.reduced:
        return _merge_sums(elements), inner
    return merge_iterations(elements, inner, inner, lambda _number: as_index(inner)), inner


def _decided(kernel: Kernel, axis: Axis) -> Kernel:
    """Returns the kernel without comparisons whose result is the same along an axis."""
    assert isinstance(axis.size, int), "the size is known"
    results: dict[int, bool] = {}
    for position, comparison in axis_comparisons(kernel, axis).items():
        points = [point.constant for point in comparison.points]
        if all(point is not None and not 0 < point < axis.size for point in points):
            results[position] = comparison.holds(lambda point: (point.constant or 0) > 0)
    return decide_comparisons(kernel, results)


def _merge_sums(kernels: Sequence[Kernel]) -> Kernel:
    """Returns a kernel whose sums have the summands of kernels that differ in these alone.

    Equal operations of several kernels are added once.
    """
    first, waiting = kernels[0], set[int]()
    for position, item in enumerate(first.operations):
        if isinstance(item, Reduce) or not waiting.isdisjoint(operands(item)):
            waiting.add(position)
    operations: list[Operation] = []
    numbers: dict[Operation, int] = {}

    def add(operation: Operation) -> int:
        if operation not in numbers:
            numbers[operation] = len(operations)
            operations.append(operation)
        return numbers[operation]

    moved: list[dict[int, int]] = [{} for _ in kernels]
    for kernel, new in zip(kernels, moved, strict=True):
        index = partial(renumber_index, new.__getitem__, {})
        for position, item in enumerate(kernel.operations):
            if position not in waiting:
                new[position] = add(map_operation(item, new.__getitem__, index))
    new = moved[0]
    for position in sorted(waiting):
        item = map_operation(first.operations[position], new.__getitem__)
        if isinstance(item, Reduce):
            pairs = zip(kernels, moved, strict=True)
            total, *others = [at[operands(kernel.operations[position])[0]] for kernel, at in pairs]
            for other in others:
                total = add(Compute("add", (total, other), item.dtype, item.origin))
            item = replace(item, operands=(total,))
        new[position] = add(item)
    return eliminate_dead_operations(verify_kernel(replace(first, operations=tuple(operations))))
