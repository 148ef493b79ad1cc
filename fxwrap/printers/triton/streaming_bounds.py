"""Bounds of streamed keys, from biases of minus infinity that mask the last ones, as in a cache that is not full."""

from __future__ import annotations

from collections.abc import Collection

from fxwrap.loop_ir import Axis, Compute, DeviceAssert, Kernel, Load, StreamingReduction

MAX_BOUNDED_KEYS = 1024
"""The largest number of keys whose biases a program reads before the others."""


def bounding_load(kernel: Kernel, parts: StreamingReduction, outer: Collection[Axis]) -> int | None:
    """Returns the load of a bias that is added to the scores, which depends on keys, and on rows at most; else None.

    A key whose biases are minus infinity has no weight, whatever its score is. Kernels that assert about keys read all.
    """
    if parts.softmax is None or len(parts.axes) != 1:
        return None
    key, pending = parts.axes[0], [parts.softmax.scores]
    pairs = zip(kernel.operations, kernel.value_axes, strict=True)
    if any(isinstance(item, DeviceAssert) and key in axes for item, axes in pairs):
        return None
    while pending:
        position = pending.pop()
        match kernel.operations[position]:
            case Compute("add" | "cast", used):
                pending += used
            case Load(index=index, dtype=dtype, mask=None) if dtype.is_floating_point:
                if key in index.axes() and index.axes() <= frozenset([*outer, key, parts.row]):
                    return position
            case _:
                pass
    return None
