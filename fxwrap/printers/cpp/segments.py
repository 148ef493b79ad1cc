"""The segments of axes for which C++ loops have copies, so that their conditions do not hinder vectorisation."""

from __future__ import annotations

from collections.abc import Sequence

from fxwrap.loop_ir import Axis, Kernel, Load, Segment, split_loop

MAX_LOOPS = 12
"""The most copies of a vectorised loop, for segments of several axes."""


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
