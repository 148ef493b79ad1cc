"""The segments of axes for which C++ loops have copies, so that their conditions do not hinder vectorisation."""

from __future__ import annotations

from collections.abc import Sequence

from fxwrap.loop_ir import (
    Axis,
    DeviceAssert,
    Kernel,
    Load,
    Segment,
    as_index,
    eliminate_dead_operations,
    replace_axes,
    specialise,
    split_loop,
)
from fxwrap.printers.cpp.loop_plan import LoopPlan, make_loop_plan

MAX_LOOPS = 12
"""The most copies of a vectorised loop, for segments of several axes."""

MAX_PARTS = 4
"""The most segments of an axis that have loops of their own, for the sake of transposed loads."""


def split_transposed(plan: LoopPlan) -> list[LoopPlan]:
    """Returns the plans of the parts of a pointwise kernel some of which load tiles; none if others would.

    Transposed loads under a condition, as those of an operand of a concatenation, are not tiled.
    """
    kernel = plan.kernel
    if plan.serial or plan.transposed_loads[1] or any(isinstance(item, DeviceAssert) for item in kernel.operations):
        return []
    for axis in kernel.axes:
        segments = split_loop(kernel, axis)
        if not 1 < len(segments) <= MAX_PARTS:
            continue
        parts = [make_loop_plan(_part(kernel, axis, segment)) for segment in segments]
        if any(part.transposed_loads[1] for part in parts):
            return parts
    return []


def _part(kernel: Kernel, axis: Axis, segment: Segment) -> Kernel:
    """Returns the kernel of a segment of an axis."""
    part = Axis(axis.name, segment.end - segment.start)
    axes = [part if item == axis else item for item in kernel.axes]
    special = eliminate_dead_operations(specialise(kernel, axis, segment))
    return replace_axes(special, axes, (), {axis: as_index(part) + segment.start})


def find_cases(kernel: Kernel, axes: Sequence[Axis], lane: Axis) -> dict[Axis, list[Segment]]:
    """Returns the segments of axes around the vectorised loop whose conditions hinder its vectorisation.

    Compilers take one or two conditions on other axes out of a loop, and vectorise masked loads if they are contiguous.
    An axis with too many segments has only its longest one, if that is most of the axis.
    """
    loads = [item for item in kernel.operations if isinstance(item, Load) and item.mask is not None]
    if len(loads) <= 2 and not any(_strided(load, lane) for load in loads):
        return {}
    loops = max(1, len(split_loop(kernel, lane, wraps=True)))
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
