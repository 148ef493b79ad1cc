"""Configurations of streaming reductions: the blocks of a program, warps and stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fxwrap.loop_ir import HALF_PRECISION, Kernel, KernelError, StreamingReduction, find_streaming_reduction
from fxwrap.printers.triton.configuration import Hint, next_power_of_2
from fxwrap.symbolic import product

MIN_DOT = 16
"""Smallest extent of an operand of `tl.dot`."""


@dataclass(frozen=True)
class StreamingConfiguration:
    """The blocks and launch metadata of a streaming reduction: rows of a program, and positions of an iteration.

    With `half_products`, factors of half precision are multiplied as such; Triton's interpreter cannot do that.
    `max_registers` limits the registers of a thread, so that more programs run beside each other; 0 for no limit. With
    `branches`, one loop visits partial and full blocks, and masks partial ones in a branch; else there are two loops.
    """

    row_block: int
    key_block: int
    num_warps: int = 4
    num_stages: int = 2
    max_registers: int = 0
    branches: bool = False
    half_products: bool = True


def streaming_configurations(
    kernel: Kernel, hint: Hint, interpreted: bool = False
) -> tuple[StreamingConfiguration, ...]:
    """Returns candidate configurations of a streaming reduction, the default one first.

    Raises KernelError for another kernel that reduces some of its reduced axes.
    """
    parts = streaming_parts(kernel)
    rows = max(next_power_of_2(hint(parts.row.size)), MIN_DOT)
    keys = max(next_power_of_2(hint(parts.axes[-1].size)), MIN_DOT)
    width = next_power_of_2(max(hint(product(axis.size for axis in item.axes)) for item in parts.products))
    is_half = all(buffer.dtype in HALF_PRECISION for buffer in kernel.outputs[:1])
    tables = _HALF if is_half else _SINGLE
    matrices = len(parts.products) + len(parts.weighted_sums)
    shapes = tables[min(max(matrices, 2), 4)][min(max(width, 64), 256)]
    candidates = [
        StreamingConfiguration(min(r, rows), min(k, keys), warps, stages, half_products=not interpreted)
        for r, k, warps, stages in shapes
    ]
    return tuple(dict.fromkeys(candidates))


_Shapes: TypeAlias = Mapping[int, Mapping[int, Sequence[tuple[int, int, int, int]]]]
"""Rows, positions, warps and stages, by the number of matrix products of a step and by the width of a head."""

_HALF: _Shapes = {
    2: {64: [(128, 128, 4, 3), (128, 64, 4, 3), (64, 64, 4, 3), (128, 128, 8, 2), (128, 64, 8, 3)],
        128: [(64, 64, 4, 3), (128, 128, 8, 2), (128, 64, 8, 3), (128, 32, 4, 3)],
        256: [(64, 32, 4, 3), (128, 32, 8, 2), (64, 64, 4, 2)]},
    3: {64: [(64, 64, 4, 3), (128, 64, 4, 3), (64, 128, 4, 2), (128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 8, 2)],
        128: [(64, 64, 4, 2), (128, 64, 8, 3), (128, 64, 8, 2), (128, 32, 8, 2), (64, 64, 4, 3)],
        256: [(64, 32, 4, 2), (128, 32, 8, 2), (64, 32, 8, 2)]},
    4: {64: [(64, 64, 4, 3), (64, 32, 4, 3), (128, 64, 8, 3), (128, 64, 8, 2), (128, 32, 8, 3), (64, 64, 8, 2)],
        128: [(64, 64, 4, 2), (128, 64, 8, 3), (128, 64, 8, 2), (64, 32, 4, 2), (128, 32, 8, 2), (64, 64, 8, 2)],
        256: [(64, 32, 8, 2), (32, 32, 4, 2), (64, 32, 8, 1)]},
}  # fmt: skip

_SINGLE: _Shapes = {
    2: {64: [(64, 32, 4, 3), (128, 32, 8, 3), (32, 64, 4, 3)], 128: [(32, 64, 4, 3), (64, 32, 4, 2)],
        256: [(32, 32, 4, 2), (32, 16, 4, 2)]},
    3: {64: [(64, 32, 4, 2), (32, 32, 4, 2)], 128: [(32, 32, 4, 2), (64, 16, 4, 2)],
        256: [(32, 16, 4, 2), (16, 16, 4, 1)]},
    4: {64: [(64, 32, 4, 2), (32, 32, 4, 2)], 128: [(32, 32, 4, 2), (32, 16, 4, 2)],
        256: [(32, 16, 4, 1), (16, 16, 4, 1)]},
}  # fmt: skip


def streaming_parts(kernel: Kernel) -> StreamingReduction:
    """Returns the parts of a streaming reduction. Raises KernelError for other kernels that reduce in steps."""
    parts = find_streaming_reduction(kernel)
    if parts is None:
        raise KernelError("it reduces some of its reduced axes, and is no streaming reduction")
    return parts
