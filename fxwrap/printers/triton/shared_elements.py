"""Loads of contractions whose elements several consecutive products share: packed weights, and scales of groups.

A byte with two int4 weights, or the scale of a group of 64, is loaded once and repeated in registers. A load for each
product would be as many instructions as for weights of half precision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product as cartesian

from fxwrap.loop_ir import (
    COMPARISONS,
    Atom,
    Axis,
    Compute,
    Constant,
    Index,
    IndexLike,
    IndexValue,
    IndirectIndex,
    Kernel,
    Load,
    count_points,
    find_contraction,
)
from fxwrap.printers.triton.kernel_text import parenthesize
from fxwrap.printers.triton.tile_printer import TilePrinter, load_literal
from fxwrap.printers.triton.tiling import Dimension

_MAX_JOINED = 8
"""The longest run that joins of registers repeat; longer ones are broadcast."""


def order_reduced_axes(kernel: Kernel) -> Kernel:
    """Returns a contraction whose inner reduced axes are those along which the largest operand's elements are shared.

    Outer axes have the larger strides of that operand, so that words of packed weights are read as they are in memory.
    The order of a sum does not matter to its meaning.
    """
    contraction = find_contraction(kernel)
    if contraction is None or contraction.row_reductions:
        return kernel
    columns = [at for item in contraction.sums for at in contraction.prologue(item.column_operand)]
    loads = [kernel.operations[at] for at in columns if kernel.varying[at]]
    largest = max(
        [item for item in loads if isinstance(item, Load)],
        key=lambda item: math.prod([axis.size for axis in item.index.axes() if isinstance(axis.size, int)]),
        default=None,
    )  # fmt: skip
    if largest is None:
        return kernel
    own = largest.index.axes()
    steps = {axis: step.constant for axis in kernel.reduced if (step := largest.index.stride(axis)) is not None}
    is_known = len(steps) == len(kernel.reduced) and None not in steps.values()

    def place(axis: Axis) -> tuple[bool, int]:
        return axis not in own, -(steps[axis] or 0) if is_known else 0

    return replace(kernel, reduced=tuple(sorted(kernel.reduced, key=place)))


def shared_run(kernel: Kernel, position: int, block: int) -> int:
    """Returns how many consecutive elements of a block of the reduced axes share one element of a load; else 1."""
    load = kernel.operations[position]
    if not isinstance(load, Load) or not kernel.varying[position] or kernel.reduces_in_steps:
        return 1
    own = load.index.axes()
    if any(isinstance(atom, IndirectIndex) and kernel.varying[atom.operation] for atom in load.index.atoms()):
        return 1
    inner: list[Axis] = []
    for axis in reversed(kernel.reduced):
        if axis in own:
            break
        inner.insert(0, axis)
    run = count_points(inner)
    if len(inner) == len(kernel.reduced) or not isinstance(run, int) or run < 2 or run & (run - 1) or block % run:
        return 1
    return run if load.mask is None or _holds_in_each_run(kernel, load.mask, inner) else 1


def _divides(run: int, dimension: Dimension) -> bool:
    return isinstance(dimension.size, int) and dimension.size % run == 0


def _holds_in_each_run(kernel: Kernel, mask: int, inner: Sequence[Axis]) -> bool:
    """Whether a condition on the inner axes alone is true of an element of each run, which all load then."""
    points = cartesian(*[range(int(axis.size)) for axis in inner])
    known: list[dict[Atom, IndexLike]] = [dict(zip(inner, point, strict=True)) for point in points]
    return any(_value(kernel, mask, axes) for axes in known)


def _value(kernel: Kernel, position: int, axes: Mapping[Atom, IndexLike]) -> int | float | None:
    """Returns the value of a comparison of indices at a point of some axes; None where it depends on more."""
    operation = kernel.operations[position]
    match operation:
        case Constant():
            return operation.value
        case IndexValue():
            return operation.index.substitute(axes).constant
        case Compute(name="logical_and"):
            values = [_value(kernel, item, axes) for item in operation.operands]
            return None if None in values else int(all(values))
        case Compute() if operation.name in COMPARISONS:
            left, right = [_value(kernel, item, axes) for item in operation.operands]
            return None if left is None or right is None else int(COMPARISONS[operation.name](left, right))
        case _:
            return None


def repeat_text(value: str, shape: Sequence[str], dimension: int, run: int) -> str:
    """Returns the text of a block in which each element along a dimension is repeated; `shape` is the result's."""
    if dimension == len(shape) - 1 and run <= _MAX_JOINED:
        text, count = value, 1
        while count < run:
            text, count = f"tl.join({text}, {text})", 2 * count
    else:
        subscript = ", ".join([":, None" if n == dimension else ":" for n in range(len(shape))])
        wide = [f"{size} // {run}, {run}" if n == dimension else size for n, size in enumerate(shape)]
        text = f"tl.broadcast_to({value}[{subscript}], ({', '.join(wide)}))"
    return f"tl.reshape({text}, ({', '.join(shape)}{',' if len(shape) == 1 else ''}))"


class ContractionLoadPrinter(TilePrinter):
    """Prints a contraction whose loads may have elements that runs of consecutive products share."""

    run_names: dict[int, dict[Axis, str]]
    """By the length of runs, the names of the outer axes at each run of the block."""
    run_masks: dict[int, str]

    @cached_property
    def runs(self) -> dict[int, int]:
        """Returns the number of elements that share each load's element, along the block."""
        r = self.tile.reduced
        if r is None:
            return {}
        dimension, count = self.tile.dimensions[r], len(self.kernel.operations)
        runs = {position: shared_run(self.kernel, position, dimension.block) for position in range(count)}
        return {at: run for at, run in runs.items() if run > 1 and (not dimension.masked or _divides(run, dimension))}

    def _emit_block_offsets(self, dimension: Dimension, start: str) -> None:
        super()._emit_block_offsets(dimension, start)
        if dimension.name == "r":
            self.run_names, self.run_masks = {}, {}

    def _load(self, position: int, operation: Load, looped: bool, last_use: bool) -> None:
        run = self.runs.get(position, 1)
        if run > 1:
            self._load_shared(position, operation, run, looped, last_use)
        else:
            super()._load(position, operation, looped, last_use)

    def _index_text(self, index: Index) -> str:
        r = self.tile.reduced
        return self._flat_index_text(index, self.tile.dimensions[r] if self.runs and r is not None else None)

    def _load_shared(self, position: int, operation: Load, run: int, looped: bool, last_use: bool) -> None:
        """Prints a load of elements that runs along the reduced axes share, and repeats them."""
        r = self.tile.reduced
        assert r is not None, "only elements along reduced axes are shared"
        own = self._index_dimensions(operation.index)
        printer = self._indices_at(self._run_names(r, run))
        mask = " & ".join([item for item in (self._mask(own - {r}, None), self.run_masks.get(run, "")) if item])
        arguments = [f"{self.pointers[operation.buffer]} + {printer(operation.index)}"]
        if mask:
            arguments += [f"mask={mask}", f"other={load_literal(0, operation.dtype)}"]
        policy = self._eviction_policy(operation, looped and position in self.schedule.reloaded, last_use)
        if policy:
            arguments.append(f'eviction_policy="{policy}"')
        value = self.names.create_name(operation.buffer)
        self.line(f"{value} = tl.load({', '.join(arguments)})", operation.origin)
        shape = [item.block_constant if n in own else "1" for n, item in enumerate(self.tile.dimensions)]
        text = repeat_text(value, shape, r, run)
        if operation.mask is not None:
            text = f"tl.where({self._value(operation.mask)}, {text}, {load_literal(operation.other, operation.dtype)})"
        self._assign(position, operation, operation.buffer, text)

    def _run_names(self, r: int, run: int) -> dict[Axis, str]:
        """Prints the positions of runs of a block along the reduced axes, and returns the names of the outer axes."""
        dimension = self.tile.dimensions[r]
        known = self.run_names.get(run)
        if known is not None:
            return known
        size, axes = 1, list(dimension.axes)
        while size < run:
            inner = axes.pop().size
            assert isinstance(inner, int), "a run has whole axes of constant sizes"
            size *= inner
        lanes = self.row_lanes.replace(dimension.block_constant, f"{dimension.block_constant} // {run}")
        flat = self.names.create_name("run")
        start = f"{parenthesize(self.row_start)} // {run} + " if self.row_start else ""
        self.line(f"{flat} = {start}{lanes}")
        if dimension.masked:
            assert isinstance(dimension.size, int), "runs of masked blocks have a constant size"
            self.run_masks[run] = self.names.create_name("run_mask")
            self.line(f"{self.run_masks[run]} = {flat} < {dimension.size // run}")
        self.run_names[run] = {axis: self.names.create_name(axis.name) for axis in axes}
        self._unflatten(tuple(axes), flat, self.run_names[run])
        return self.run_names[run]
