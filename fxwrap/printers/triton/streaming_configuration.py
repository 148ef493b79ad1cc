"""Configurations of streaming reductions: the blocks of a program, warps and stages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from fxwrap.devices import CUDA, WARP_LANES, DeviceSpec
from fxwrap.loop_ir import (
    HALF_PRECISION,
    Axis,
    Compute,
    Constant,
    IndexValue,
    Kernel,
    KernelError,
    Load,
    Operation,
    StreamingReduction,
    count_points,
    find_streaming_reduction,
    operands,
)
from fxwrap.printers.triton.accesses import Hint
from fxwrap.printers.triton.shared_memory import fitting
from fxwrap.printers.triton.streaming_scores import find_linear_bias
from fxwrap.printers.triton.tiling import StreamingConfiguration, next_power_of_2
from fxwrap.symbolic import product

MIN_DOT = 16
"""Smallest extent of an operand of `tl.dot`."""


def streaming_configurations(
    kernel: Kernel, hint: Hint, interpreted: bool = False, spec: DeviceSpec = CUDA
) -> tuple[StreamingConfiguration, ...]:
    """Returns candidate configurations of a streaming reduction for a device, the default one first.

    Raises KernelError for another kernel that reduces some of its reduced axes, and ScheduleError where none fits the
    device's shared memory.
    """
    parts = streaming_parts(kernel)
    rows = max(next_power_of_2(hint(parts.row.size)), MIN_DOT)
    keys = max(next_power_of_2(hint(parts.axes[-1].size)), MIN_DOT)
    width = next_power_of_2(max(hint(count_points(item.axes)) for item in parts.products))
    matrices = min(max(len(parts.products) + len(parts.weighted_sums), 2), 4)
    is_half = _has_half_factors(kernel, parts)
    linear = find_linear_bias(parts.kernel, parts) if is_half else None
    biases = _biases(kernel, parts, frozenset() if linear is None else linear.positions)
    is_uneven = is_half and _rows_are_uneven(kernel, parts)
    table = (_UNEVEN if is_uneven else _HALF if is_half else _SINGLE)[matrices]
    if is_half and matrices == 2 and rows <= _FEW_ROWS:
        table = _DECODING
    elif is_half and matrices == 2 and any(isinstance(item, Load) for item in biases):
        table = _LOADED_BIAS
    branches = is_half and rows > _FEW_ROWS and _has_one_loop(matrices, width, bool(biases), parts)
    positions = max(hint(count_points(parts.axes)), 1)
    candidates = [
        StreamingConfiguration(
            row_block=min(r, rows),
            key_block=min(k, keys),
            num_warps=warps,
            num_stages=min(stages, -(-positions // k)) if table is _DECODING else stages,
            max_registers=registers,
            branches=branches,
            hoists_distances=_hoists_distances(matrices, width, parts),
            splits=rows > _FEW_ROWS,
            half_products=not interpreted,
        )
        for r, k, warps, stages, registers in table[min(max(width, 64), max(table))]
    ]
    is_wide = is_half and matrices == 2 and width > 128
    if is_wide and _programs(kernel, parts, candidates[0], hint) < spec.multiprocessors:
        candidates.sort(key=lambda item: item.row_block)
    if is_uneven:
        candidates = [replace(item, band=_band(kernel, parts, item, hint, spec)) for item in candidates]
    first = candidates[0]
    band = 1 if is_uneven or parts.visit_bound is None else _band(kernel, parts, first, hint, spec)
    other = [replace(first, branches=not branches), replace(first, band=band)] if is_half else []
    every = list(dict.fromkeys([*candidates, *other]))
    if parts.softmax is not None:
        every = [replace(item, waits=_waits(item, width, linear is not None)) for item in every]
    return tuple(fitting(every, partial(_shared_bytes, kernel, parts, hint), _smaller, spec))


def _has_one_loop(matrices: int, width: int, has_bias: bool, parts: StreamingReduction) -> bool:
    """Whether one loop over full and partial blocks, with a branch, is faster than two loops, by matrices of a step.

    Two loops have the code of wide heads' gradients twice, whose values fill the registers.
    """
    if matrices != 2:
        return matrices == 4 and width == 256
    return not has_bias or (parts.visit_bound is not None and (width <= 64 or width == 256))


def _hoists_distances(matrices: int, width: int, parts: StreamingReduction) -> bool:
    """Whether registers of all steps have the distances of a linear bias, by matrices of a step.

    Lists of blocks have more values in registers, whose number is limited, and more of them would leave fewer programs
    beside each other that compute gradients of narrow queries.
    """
    if matrices == 2:
        return parts.visit_bound is None
    return matrices != 3 or width > 64


def _waits(configuration: StreamingConfiguration, width: int, has_linear_bias: bool) -> bool:
    """Whether sums, scores and weights of a thread leave too few registers for all else.

    The steps of a linear bias are numbers of each streamed position that a thread has in a row.
    ptxas then executes the matrix instructions of two steps one by one. Two loops, whose scores have a bias, are not
    faster without that: they compute scores longer than products.
    """
    rows, keys = configuration.row_block, configuration.key_block
    elements = rows * width + rows * keys + rows * keys // 2
    free = configuration.max_registers - elements // (configuration.num_warps * WARP_LANES)
    free -= keys // _LANES_OF_A_ROW if has_linear_bias else 0
    return configuration.branches and configuration.max_registers > 0 and free < _FEWEST_REGISTERS


def _programs(kernel: Kernel, parts: StreamingReduction, configuration: StreamingConfiguration, hint: Hint) -> int:
    """Returns the number of programs of a configuration."""
    others = [axis.size for axis in kernel.axes if axis not in (parts.row, *parts.columns)]
    return -(-hint(parts.row.size) // configuration.row_block) * hint(product(others))


def _shared_bytes(kernel: Kernel, parts: StreamingReduction, hint: Hint, configuration: StreamingConfiguration) -> int:
    """Returns an upper bound of the shared memory of a program.

    It has the factors of products, those that the loop loads once for each stage. Of its other loads there is one less:
    they are in registers when the next one starts.
    """
    blocks = {parts.row: configuration.row_block, parts.axes[-1]: configuration.key_block}
    widths = {*parts.columns, *[axis for item in parts.products for axis in item.axes]}
    matrices = [*[(item.left, item.right) for item in parts.products], *[(item.right,) for item in parts.weighted_sums]]
    factors = {_loaded(kernel, position) for pair in matrices for position in pair}
    total = 0
    for position, operation in enumerate(kernel.operations):
        if isinstance(operation, Load):
            axes = kernel.address_axes[position]
            sizes = [blocks.get(axis) or next_power_of_2(hint(axis.size)) for axis in axes & {*blocks, *widths}]
            copies = configuration.num_stages - (position not in factors) if parts.axes[-1] in axes else 1
            if position in factors or parts.axes[-1] in axes:
                total += math.prod(sizes) * operation.dtype.itemsize * copies
    return total


def _loaded(kernel: Kernel, position: int) -> int:
    """Returns the position of the load of a factor, which may be cast."""
    operation = kernel.operations[position]
    return operation.operands[0] if isinstance(operation, Compute) and operation.name == "cast" else position


def _smaller(item: StreamingConfiguration) -> StreamingConfiguration | None:
    """Returns a configuration that needs less shared memory, by fewer stages, then smaller blocks; else None."""
    if item.num_stages > 1:
        return replace(item, num_stages=item.num_stages - 1)
    if item.key_block > MIN_DOT:
        return replace(item, key_block=item.key_block // 2)
    if item.row_block > MIN_DOT:
        return replace(item, row_block=item.row_block // 2, num_warps=4)
    return None


def _band(
    kernel: Kernel, parts: StreamingReduction, configuration: StreamingConfiguration, hint: Hint, spec: DeviceSpec
) -> int:
    """Returns the number of heads whose programs run beside each other anyway.

    That is 1 where all programs run at the same time, and where they are too short for the search of their head.
    """
    blocks = row_blocks(kernel, parts)
    programs = -(-hint(parts.row.size) // configuration.row_block) * hint(count_points(blocks))
    heads = hint(count_points(axis for axis in kernel.axes if axis not in (parts.row, *parts.columns, *blocks)))
    visits = math.prod([hint(axis.size) for axis in parts.axes]) // configuration.key_block
    if programs <= 1 or programs * heads <= spec.multiprocessors or visits <= _FEW_VISITS:
        return 1
    return max(min(_RUNNING_WARPS * spec.multiprocessors // (programs * configuration.num_warps), heads), 1)


def _rows_are_uneven(kernel: Kernel, parts: StreamingReduction) -> bool:
    """Whether rows visit different numbers of positions: limits that vary over rows are on one side, as a causal one.

    A window limits the positions on the other side, too. The lists of a block mask have no limits: there, all that
    compares rows and positions is one-sided.
    """
    if parts.visit_bound is None:
        return len({item.is_lower for item in parts.row_bounds}) == 1
    streamed, is_compared = frozenset(parts.axes), False
    for position, operation in enumerate(kernel.operations):
        both = parts.row in kernel.value_axes[position] and not streamed.isdisjoint(kernel.value_axes[position])
        if both and isinstance(operation, Compute) and operation.name in ("eq", "ge", "gt", "le", "lt", "ne"):
            sides = [kernel.value_axes[item] & {parts.row, *streamed} for item in operation.operands]
            is_split = any(side == {parts.row} for side in sides) and any(side <= streamed for side in sides)
            if not is_split or operation.name in ("eq", "ne"):
                return False
            is_compared = True
    return is_compared


def row_blocks(kernel: Kernel, parts: StreamingReduction) -> tuple[Axis, ...]:
    """Returns the parallel axes of blocks of rows: positions are those of a block and of a row within it."""
    positions = [item.index.axes() for item in kernel.operations if isinstance(item, IndexValue)]
    return tuple([axis for axis in kernel.axes if axis != parts.row and {axis, parts.row} in positions])


def _has_half_factors(kernel: Kernel, parts: StreamingReduction) -> bool:
    """Whether products have factors that are stored in half precision."""
    source = kernel.operations[_loaded(kernel, parts.products[0].right)]
    return isinstance(source, Load) and source.dtype in HALF_PRECISION


def _biases(kernel: Kernel, parts: StreamingReduction, linear: frozenset[int]) -> list[Operation]:
    """Returns numbers of each row and streamed position that no product is part of, which take registers.

    Those that a condition selects from constants are masks. No element is computed of the `linear` ones.
    """
    computed, masks = {item.position for item in parts.products}, set[int]()
    widths = {axis for item in parts.products for axis in item.axes}
    block, biases = {parts.row, parts.axes[-1]}, list[Operation]()
    for position, operation in enumerate(kernel.operations):
        is_selected = isinstance(operation, Compute) and operation.name in ("where", "cast")
        if not computed.isdisjoint(operands(operation)):
            computed.add(position)
        elif isinstance(operation, Constant) or (is_selected and masks.issuperset(operands(operation)[-2:])):
            masks.add(position)
        elif isinstance(operation, Compute | Load) and operation.dtype.is_floating_point:
            if (
                position not in linear
                and block <= kernel.value_axes[position]
                and widths.isdisjoint(kernel.value_axes[position])
            ):
                biases.append(operation)
    return biases


_Table: TypeAlias = Mapping[int, Sequence[tuple[int, int, int, int, int]]]
"""Rows, positions, warps, stages and registers (0 for any number), by the width of a head."""

_RUNNING_WARPS = 16
"""Warps of such kernels that a multiprocessor runs at the same time, and those that follow them."""

_FEW_VISITS = 16
"""Blocks in a program's lists of partial and full ones, with which the search of its head costs what a band saves."""

_FEWEST_REGISTERS = 32
"""Registers for addresses, statistics and masks, without which the products of two steps do not overlap."""

_LANES_OF_A_ROW = 4
"""Lanes of a warp that share a row of a product of tensor cores."""

_FEW_ROWS = 32
"""Rows that fill no block: queries of a decoding step."""

_DECODING: _Table = {
    64: [(32, 64, 4, 3, 0), (32, 32, 4, 3, 0), (32, 128, 4, 2, 0), (32, 128, 8, 2, 0), (32, 64, 8, 3, 0)],
    128: [(32, 64, 4, 3, 0), (32, 32, 4, 3, 0), (32, 128, 4, 2, 0), (32, 128, 8, 2, 0), (32, 64, 8, 3, 0)],
    256: [(32, 32, 4, 2, 0), (32, 16, 4, 2, 0), (32, 64, 4, 2, 0)],
}
"""There are no more stages than blocks of positions: launches beside a kernel of much shared memory are slower."""

_LOADED_BIAS: _Table = {
    64: [(64, 64, 4, 2, 168), (64, 128, 4, 2, 0), (64, 64, 4, 3, 168), (128, 64, 4, 2, 0), (64, 64, 4, 2, 128)],
    128: [(64, 64, 4, 2, 0), (64, 64, 4, 3, 0), (64, 32, 4, 3, 0), (128, 64, 8, 2, 0), (128, 64, 8, 2, 128)],
    256: [(64, 32, 4, 2, 0), (64, 32, 4, 3, 0), (128, 32, 8, 2, 0)],
    512: [(32, 32, 4, 2, 0), (32, 16, 4, 3, 0), (64, 16, 8, 2, 0)],
}
"""Blocks of a bias are in shared memory, too."""

_HALF: Mapping[int, _Table] = {
    2: {64: [(64, 128, 4, 2, 168), (64, 64, 4, 2, 128), (64, 64, 4, 3, 128), (128, 128, 4, 3, 0), (128, 64, 8, 3, 128)],
        128: [(128, 64, 8, 2, 128), (128, 128, 8, 2, 0), (64, 64, 4, 3, 0), (64, 32, 4, 3, 0)],
        256: [(128, 64, 8, 2, 0), (64, 32, 4, 3, 0), (64, 32, 4, 2, 0), (128, 32, 8, 3, 0)],
        512: [(32, 32, 4, 2, 0), (32, 16, 4, 3, 0), (64, 32, 8, 2, 0)]},
    3: {64: [(64, 64, 4, 3, 0), (128, 64, 4, 3, 0), (64, 128, 4, 2, 0), (128, 128, 8, 2, 0), (128, 64, 8, 3, 0),
             (128, 64, 8, 2, 0)],
        128: [(64, 64, 4, 2, 0), (128, 64, 8, 3, 0), (128, 64, 8, 2, 0), (128, 32, 8, 2, 0)],
        256: [(128, 32, 8, 2, 0), (64, 32, 4, 2, 0), (64, 16, 4, 2, 0)],
        512: [(32, 32, 8, 2, 0), (32, 16, 4, 2, 0)]},
    4: {64: [(64, 64, 4, 3, 0), (64, 32, 4, 3, 0), (128, 64, 8, 3, 0), (128, 64, 8, 2, 0), (128, 32, 8, 3, 0),
             (64, 64, 8, 2, 0)],
        128: [(64, 64, 4, 2, 0), (128, 64, 8, 3, 0), (128, 64, 8, 2, 0), (64, 32, 4, 2, 0), (128, 32, 8, 2, 0)],
        256: [(64, 64, 8, 2, 0), (64, 32, 8, 3, 0), (64, 32, 8, 2, 0), (32, 32, 4, 2, 0)],
        512: [(32, 32, 8, 2, 0), (32, 16, 8, 2, 0)]},
}  # fmt: skip
"""The tables by the number of matrix products of a step.

Registers are limited so that as many programs run beside each other as shared memory has space for. The first one of a
width fits in the shared memory of an H100.
"""

_UNEVEN: Mapping[int, _Table] = {
    **_HALF, 3: {**_HALF[3], 128: [(128, 64, 8, 3, 0), (64, 64, 4, 2, 0), (128, 64, 8, 2, 0), (128, 32, 8, 2, 0)]}
}  # fmt: skip
"""The tables where rows visit different numbers of blocks."""

_SINGLE: Mapping[int, _Table] = {
    2: {64: [(64, 32, 4, 3, 0), (128, 32, 8, 3, 0), (32, 64, 4, 3, 0)], 128: [(32, 64, 4, 3, 0), (64, 32, 4, 2, 0)],
        256: [(32, 32, 4, 2, 0), (32, 16, 4, 2, 0)]},
    3: {64: [(64, 32, 4, 2, 0), (32, 32, 4, 2, 0)], 128: [(32, 32, 4, 2, 0), (64, 16, 4, 2, 0)],
        256: [(32, 16, 4, 2, 0), (16, 16, 4, 1, 0)]},
    4: {64: [(64, 32, 4, 2, 0), (32, 32, 4, 2, 0)], 128: [(32, 32, 4, 2, 0), (32, 16, 4, 2, 0)],
        256: [(32, 16, 4, 1, 0), (16, 16, 4, 1, 0)]},
}  # fmt: skip


def streaming_parts(kernel: Kernel) -> StreamingReduction:
    """Returns the parts of a streaming reduction. Raises KernelError for other kernels that reduce in steps."""
    parts = find_streaming_reduction(kernel)
    if parts is None:
        raise KernelError("it reduces some of its reduced axes, and is no streaming reduction")
    return parts
