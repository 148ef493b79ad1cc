"""Splitting of loops where conditions on their variable change, so that masks are constant in each segment.

A segment of cat or pad is a plain copy from one tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fxwrap.loop_ir import (
    COMPARISONS,
    STORAGE_ONLY,
    Axis,
    Compute,
    Constant,
    DeviceAssert,
    IndexValue,
    Kernel,
    Load,
    Operation,
    Store,
    as_index,
    map_operation,
)

MAX_SEGMENTS = 8

MAX_LOOPS = 12
"""The most copies of a vectorised loop, for segments of several axes."""

_ABSORBING_VALUES = {"logical_and": False, "bitwise_and": False, "logical_or": True, "bitwise_or": True}


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of an axis's range, and the kernel specialised to it. Operations have the same positions."""

    start: int
    end: int
    kernel: Kernel


def split_loop(kernel: Kernel, axis: Axis) -> list[Segment]:
    """Returns the segments of an axis between changes of conditions; none if there are no changes or too many."""
    if not isinstance(axis.size, int):
        return []
    split_points: set[int] = set()
    for operation in kernel.operations:
        comparison = _comparison(kernel, operation, axis)
        if comparison is not None:
            split_points |= {point for point in comparison.split_points if 0 < point < axis.size}
    if not split_points or len(split_points) >= MAX_SEGMENTS:
        return []
    bounds = [0, *sorted(split_points), axis.size]
    return [Segment(start, end, specialise(kernel, axis, start)) for start, end in itertools.pairwise(bounds)]


def find_cases(kernel: Kernel, axes: Sequence[Axis], lane: Axis) -> dict[Axis, list[Segment]]:
    """Returns the segments of axes around the vectorised loop whose conditions hinder its vectorisation.

    Compilers take one or two conditions on other axes out of a loop, and vectorise masked loads if they are contiguous.
    An axis with too many segments has only its longest one, if that is most of the axis.
    """
    loads = [item for item in kernel.operations if isinstance(item, Load) and item.mask is not None]
    if len(loads) <= 2 and not any(_strided(load, lane) for load in loads):
        return {}
    loops = max(1, len(split_loop(kernel, lane)))
    cases: dict[Axis, list[Segment]] = {}
    for axis in reversed(axes):
        segments = split_loop(kernel, axis)
        if loops * len(segments) > MAX_LOOPS:
            segments = [max(segments, key=lambda item: item.end - item.start)]
        number = len(segments) + (len(segments) == 1)
        is_most = len(segments) > 1 or any(2 * (item.end - item.start) > axis.size for item in segments)
        if is_most and loops * number <= MAX_LOOPS:
            cases[axis] = segments
            loops *= number
    return cases


def _strided(load: Load, lane: Axis) -> bool:
    stride = load.index.stride(lane)
    return stride is None or stride.constant not in (0, 1)


@dataclass(frozen=True, slots=True)
class _AxisComparison:
    """The comparison of `scale` times an axis with a number, by the operation's name. `scale` is positive."""

    name: str
    scale: int
    number: int

    @property
    def split_points(self) -> tuple[int, ...]:
        """The positions along the axis at which the comparison may change."""
        first_not_less, first_larger = -(-self.number // self.scale), self.number // self.scale + 1
        return {"lt": (first_not_less,), "ge": (first_not_less,), "le": (first_larger,), "gt": (first_larger,)}.get(
            self.name, (first_not_less, first_larger)
        )


def _comparison(kernel: Kernel, operation: Operation, axis: Axis) -> _AxisComparison | None:
    """Returns a comparison of the axis with a number; None for other operations."""
    if not isinstance(operation, Compute) or operation.name not in COMPARISONS:
        return None
    left, right = [kernel.operations[operand] for operand in operation.operands]
    if not isinstance(left, IndexValue) or not isinstance(right, Constant):
        return None
    stride = left.index.stride(axis)
    scale = None if stride is None else stride.constant
    if scale is None or scale <= 0:
        return None
    offset = (left.index - as_index(axis) * scale).constant
    return None if offset is None else _AxisComparison(operation.name, scale, int(right.value) - offset)


def specialise(kernel: Kernel, axis: Axis, start: int) -> Kernel:
    """Returns the kernel specialised to the segment that begins at `start`."""
    new: list[Operation] = []
    same = list(range(len(kernel.operations)))
    truth: dict[int, bool] = {}

    for position, old in enumerate(kernel.operations):
        operation = map_operation(old, same.__getitem__)
        comparison = _comparison(kernel, old, axis)
        if comparison is not None:
            truth[position] = COMPARISONS[comparison.name](comparison.scale * start, comparison.number)
        elif isinstance(operation, Compute):
            _fold(operation, position, same, truth)
            _fold_cast(operation, position, same, new)
        new.append(Constant(truth[position], torch.bool) if position in truth else _fold_mask(operation, truth))
    return replace(kernel, operations=tuple(new))


def _fold(operation: Compute, position: int, same: list[int], truth: dict[int, bool]) -> None:
    """Records a constant bool in `truth`, and an operation that equals another one in `same`."""
    known = [truth.get(operand) for operand in operation.operands]
    if operation.name == "where" and known[0] is not None:
        chosen = operation.operands[1 if known[0] else 2]
        same[position] = same[chosen]
        if chosen in truth:
            truth[position] = truth[chosen]
    elif operation.name == "logical_not" and known[0] is not None:
        truth[position] = not known[0]
    elif operation.dtype is torch.bool and operation.name in _ABSORBING_VALUES:
        decisive = _ABSORBING_VALUES[operation.name]
        if decisive in known:
            truth[position] = decisive
        elif known == [not decisive, not decisive]:
            truth[position] = not decisive
        elif (not decisive) in known:
            other = operation.operands[0 if known[0] is None else 1]
            same[position] = same[other]


def _fold_cast(operation: Compute, position: int, same: list[int], new: list[Operation]) -> None:
    """Records in `same` a half-precision value that is widened and narrowed again, as in a segment of a cat."""
    if operation.name != "cast" or operation.dtype not in STORAGE_ONLY:
        return
    wide = new[operation.operands[0]]
    if isinstance(wide, Compute) and wide.name == "cast":
        source = new[wide.operands[0]]
        if isinstance(source, Load) and source.dtype is operation.dtype:
            same[position] = wide.operands[0]


def _fold_mask(operation: Operation, truth: dict[int, bool]) -> Operation:
    """Returns an operation without a constant mask; one that is always masked becomes a constant."""
    if not isinstance(operation, Load | Store | DeviceAssert) or operation.mask not in truth:
        return operation
    if truth[operation.mask]:
        return replace(operation, mask=None)
    return Constant(operation.other, operation.dtype) if isinstance(operation, Load) else Constant(0, torch.int64)
