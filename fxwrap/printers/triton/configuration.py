"""How a kernel is cut into programs: tiles, blocks, warps and pipeline stages, with the best guess first.

The guesses come from sweeps on an H200 over kernels of these shapes at 64 MiB an operand; each rule says what it won.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch

from fxwrap.loop_ir import ONE, OPERATIONS, Axis, Compute, Gathered, Kernel, Load, Store
from fxwrap.symbolic import Size, evaluate

Hint: TypeAlias = Callable[[Size], int]
"""Gives a typical value of a size."""

PERSISTENT = 16384
"""Rows of up to so many elements are held in registers; longer ones are read once for each stage."""

_TILES = ((64, 64, 8), (64, 32, 8), (32, 64, 8), (32, 32, 4), (128, 32, 8))
"""Rows, columns and warps of tiles for what is read along two axes."""

_WAVE = 264
"""Programs that keep a large GPU busy: two for each of 132 multiprocessors."""


@dataclass(frozen=True)
class Configuration:
    """A way to cut a kernel.

    Fields: `x` the parallel axes along the tile's contiguous dimension, flattened, `x_block` elements a program; `y`
    likewise for the tile's other dimension; the remaining parallel axes have one element a program. A kernel with
    reduced axes has them, flattened, along the dimension that is left: beside `x`, or beside `y`, `r_block` elements at
    a time. `looped` walks over them in a loop for each stage; otherwise the block holds all of them.
    """

    x: tuple[Axis, ...] = ()
    y: tuple[Axis, ...] = ()
    x_block: int = 1
    y_block: int = 1
    r_block: int = 1
    looped: bool = False
    num_warps: int = 4
    num_stages: int = field(default=1)


def typical(symbol_value: int = 1024) -> Hint:
    """Returns a hint under which every symbol has one value."""

    def hint(size: Size) -> int:
        if isinstance(size, int):
            return size
        values: Mapping[str, int] = {str(symbol): symbol_value for symbol in size.free_symbols}
        return int(evaluate(size, values))

    return hint


def configurations(kernel: Kernel, hint: Hint | None = None) -> tuple[Configuration, ...]:
    """Returns ways to cut a kernel, the best guess first; every one of them is correct."""
    hint = hint or typical()
    if not kernel.reduced:
        found = _pointwise(kernel, hint)
    elif _reduces_across(kernel, hint):
        found = _columns(kernel, hint)
    else:
        found = _rows(kernel, hint)
    return tuple(dict.fromkeys(found))


# --- pointwise ------------------------------------------------------------------------------------------------------


def _pointwise(kernel: Kernel, hint: Hint) -> list[Configuration]:
    if not kernel.axes:
        return [Configuration(num_warps=1)]
    inner, other = _contiguous_axes(kernel, hint)
    if other is not None:
        return [_transposed(inner, other, hint, *shape) for shape in _TILES]
    block, warps = _pointwise_block(kernel, hint)
    rows = _rows_that_share(kernel, inner, hint)
    shared = [_tile(kernel, inner, hint, block // 4, warps, 8)] if rows >= 8 and block >= 1024 else []
    sizes = [(block, warps), (2 * block, warps), (2 * block, 2 * warps), (max(block // 2, 32), warps)]
    sizes.append((4 * block, 2 * warps))
    return [*shared, *[_tile(kernel, inner, hint, *size) for size in sizes]]


def _rows_that_share(kernel: Kernel, inner: Axis, hint: Hint) -> int:
    """Returns how many rows load the same vectors along the inner axis, 1 where these are less than a row itself.

    Eight rows by 256 normalised a batch, with four float32 vectors, in 34.6 us where one row by 1024 took 43.1.
    """
    vectors = rows = 0
    for access in kernel.operations:
        if isinstance(access, Load | Store) and inner in access.index.axes():
            along = isinstance(access, Load) and access.index.axes() == {inner}
            vectors, rows = vectors + along * _itemsize(kernel, access), rows + (not along) * _itemsize(kernel, access)
    return hint(kernel.count) // max(hint(inner.size), 1) if vectors >= rows else 1


def _pointwise_block(kernel: Kernel, hint: Hint) -> tuple[int, int]:
    """Sixteen bytes a thread of the smallest dtype; twice that where arithmetic or other loads of a buffer take time.

    A rotary embedding, which reads the other half of a row too, took 34.5 us with 16 elements a thread and 34.7 with 8.
    """
    moved = [operation for operation in kernel.operations if isinstance(operation, Load | Store)]
    smallest = min([_itemsize(kernel, access) for access in moved], default=4)
    elements = min(16 // smallest, 8)
    cost = sum(OPERATIONS[item.name].cost for item in kernel.operations if isinstance(item, Compute))
    gathers = any(isinstance(atom, Gathered) for access in moved for atom in access.index.atoms())
    if gathers or _neighbours(kernel) or (cost >= 15 and any(_cost(item) >= 12 for item in kernel.operations)):
        elements *= 2
    if gathers:
        elements *= 2
    block = 128 * elements
    total = hint(kernel.count)
    while block > 128 and total < block * _WAVE:
        block //= 2
    return min(block, power_of_two(total)), 8 if gathers and block >= 4096 else 4


def _neighbours(kernel: Kernel) -> bool:
    """Whether a buffer is loaded in several ways, some of them masked, as the halves of a row in a rotary embedding."""
    loads = [item for item in kernel.operations if isinstance(item, Load)]
    return any(sum(one.buffer == other.buffer for other in loads) > 1 for one in loads if one.mask is not None)


def _cost(operation: object) -> int:
    return OPERATIONS[operation.name].cost if isinstance(operation, Compute) else 0


def _transposed(inner: Axis, other: Axis, hint: Hint, y_block: int, x_block: int, warps: int) -> Configuration:
    """Tiles of 64 x 64 read both ways in whole lines: a transposed sum ran at the speed of a copy."""
    x_block = min(x_block, power_of_two(hint(inner.size)))
    y_block = min(y_block, power_of_two(hint(other.size)))
    return Configuration((inner,), (other,), x_block, y_block, num_warps=warps)


def _tile(kernel: Kernel, inner: Axis, hint: Hint, block: int, warps: int, rows: int = 1) -> Configuration:
    """Flat where that is simplest; rows by columns where the inner axis fills blocks, which saves divisions."""
    rest = tuple([axis for axis in kernel.axes if axis != inner])
    size = hint(inner.size)
    x_block = min(block, power_of_two(size))
    filled = -(-size // x_block) * x_block
    if not rest or (filled * 4 > size * 5 and isinstance(inner.size, int)):
        return Configuration(x=kernel.axes, x_block=block, num_warps=warps)
    return Configuration((inner,), rest, x_block, max(block // x_block, 1) * rows, num_warps=warps)


# --- reductions -----------------------------------------------------------------------------------------------------


def _rows(kernel: Kernel, hint: Hint) -> list[Configuration]:
    """One row a program from 2048 elements on, held in registers where it fits: softmax ran at the speed of a copy."""
    size, count = kernel.reduced_count, hint(kernel.count)
    block = power_of_two(hint(size))
    loads = _full_loads(kernel)
    limit = PERSISTENT if loads <= 2 else PERSISTENT // 2
    found = []
    if isinstance(size, int) and block <= limit:
        rows = max(2048 // block, 1) if kernel.axes else 1
        while rows > 1 and count < rows * _WAVE:
            rows //= 2
        tile = rows * block
        warps = _warps(tile, 16 if tile <= 2048 else _elements_a_thread(kernel, count))
        whole = Configuration(y=kernel.axes, y_block=rows, r_block=block, num_warps=warps)
        found += [whole, *[replace(whole, num_warps=other) for other in (warps * 2, max(warps // 2, 1)) if other <= 16]]
        if rows > 1:
            found.append(replace(whole, y_block=rows // 2))
        if count >= 2 * rows * _WAVE and tile <= 4096:
            found.append(replace(whole, y_block=rows * 2, num_warps=min(warps * 2, 16)))
    loop = min(block, 8192)
    warps = 16 if _reads_again(kernel) else 8  # rows read twice want more loads in flight
    longest = (16384, 16) if _held(kernel) <= 2 and not _reads_again(kernel) and block > 8192 else (loop, warps)
    shapes = [longest, (max(loop // 2, 1), 8), (max(loop // 4, 1), 8)]
    if count >= 2 * _WAVE:  # with several rows a multiprocessor, shorter blocks hide more
        shapes[:2] = shapes[1::-1]
    looped = [Configuration(y=kernel.axes, r_block=r, looped=True, num_warps=min(w, _warps(r, 8))) for r, w in shapes]
    if _reads_again(kernel) and count >= 2 * _WAVE and block > PERSISTENT:
        # As few rows at a time as keep all threads busy, so that what is read again is still in the cache: a group
        # norm of 32768 elements a row took 37.4 us with 32 warps a row and 39.2 with 8.
        looped.insert(0, replace(looped[0], r_block=4096, num_warps=32))
    # loads of the next round on their way, as the columns' tiles have them
    looped.append(replace(looped[-1], num_stages=3))
    return [*found, *looped] if not found or block > 2048 else found


def _elements_a_thread(kernel: Kernel, count: int) -> int:
    """Returns how many elements of a row a thread holds: fewer where it holds several vectors of them.

    With 32 instead of 16, a masked softmax took 46.1 us instead of 46.9 and a log-softmax's backward 48.7 instead of
    49.7, but an RMS norm, with weights, 35.0 instead of 34.5. With 64 instead of 32, the log-softmax of a loss took
    20.2 us instead of 21.3; a single row wants many threads.
    """
    vectors = _full_loads(kernel) - _tile_loads(kernel)
    held = _held(kernel)
    if _full_loads(kernel) > 1 and (vectors or held > 4):
        return 16
    return 64 if held <= 2 and not _reads_again(kernel) and count >= _WAVE else 32


def _columns(kernel: Kernel, hint: Hint) -> list[Configuration]:
    """Tiles of 64 rows by 64 columns, three loads in flight: column sums and statistics within 1.2 of a copy.

    Where a tile is loaded from several buffers, these are enough: two took 35.1 us with one stage and 37.3 with three.
    """
    inner, _ = _contiguous_axes(kernel, hint, reduced=False)
    size = kernel.reduced_count
    widest = power_of_two(hint(inner.size))
    found = []
    if isinstance(size, int):
        height = power_of_two(size)
        width = min(64 if height <= 128 else 32 if height <= 512 else 16, widest)
        if height * width <= PERSISTENT:
            warps = _warps(height * width, 16)
            found.append(Configuration(x=(inner,), x_block=width, r_block=height, num_warps=warps))
    whole = list(found)
    shapes = [(64, 64, 3), (128, 32, 3), (64, 32, 3), (64, 64, 1)]
    if _tile_loads(kernel) > 1:
        shapes = [shapes[3], *shapes[:3]]
    for width, height, stages in shapes:
        block = min(width, widest)
        rows = min(height * (width // block), power_of_two(hint(size)))
        warps = min(_warps(block * rows, 16), 4)
        found.append(Configuration((inner,), (), block, 1, rows, looped=True, num_warps=warps, num_stages=stages))
    if whole and not _reads_again(kernel) and hint(size) > 128:
        found = [*found[len(whole) :], *whole]
    return found


def _reduces_across(kernel: Kernel, hint: Hint) -> bool:
    """Whether most of what is read lies contiguous along a parallel axis, as in a sum of columns."""
    scores = _scores(kernel, hint)
    parallel = max([scores.get(axis, 0) for axis in kernel.axes], default=0)
    return parallel > max([scores.get(axis, 0) for axis in kernel.reduced], default=0)


# --- questions ------------------------------------------------------------------------------------------------------


def power_of_two(size: int) -> int:
    """Returns the smallest power of two that is at least the size, and at least 1."""
    return 1 << max(size - 1, 0).bit_length()


def _warps(tile: int, elements: int) -> int:
    return min(max(power_of_two(tile // (32 * elements)), 1), 16)


def _full_loads(kernel: Kernel) -> int:
    pairs = zip(kernel.operations, kernel.varying, strict=True)
    return sum(isinstance(operation, Load) and varies for operation, varies in pairs)


def _tiles(kernel: Kernel) -> list[Load]:
    """Returns the loads that vary along the rows and along every parallel axis."""
    whole = {*kernel.axes, *kernel.reduced}
    pairs = zip(kernel.operations, kernel.addressed, strict=True)
    return [operation for operation, axes in pairs if isinstance(operation, Load) and whole <= axes]


def _held(kernel: Kernel) -> int:
    """Returns the bytes that are loaded for each element of the whole space."""
    return sum(item.dtype.itemsize for item in _tiles(kernel))


def _tile_loads(kernel: Kernel) -> int:
    return len(_tiles(kernel))


def _reads_again(kernel: Kernel) -> bool:
    """Whether something that varies along the row waits for a reduction of it, so that a loop must walk twice."""
    return any(stage > 0 and varies for stage, varies in zip(kernel.stages, kernel.varying, strict=True))


def _itemsize(kernel: Kernel, access: Load | Store) -> int:
    if isinstance(access, Load):
        return access.dtype.itemsize
    stored = next(buffer.dtype for buffer in kernel.outputs if buffer.name == access.buffer)
    assert isinstance(stored, torch.dtype)
    return stored.itemsize


def _scores(kernel: Kernel, hint: Hint, only: type | tuple[type, ...] = (Load, Store)) -> dict[Axis, int]:
    """Returns for each axis the bytes moved by accesses that walk over it element by element."""
    found: dict[Axis, int] = {}
    for access, axes in zip(kernel.operations, kernel.addressed, strict=True):
        if not isinstance(access, Load | Store) or not isinstance(access, only):
            continue
        weight = _itemsize(kernel, access)
        for axis in axes:
            weight *= max(hint(axis.size), 1)
        for axis in access.index.axes():
            if access.index.stride(axis) == ONE:
                found[axis] = found.get(axis, 0) + weight
    return found


def _contiguous_axes(kernel: Kernel, hint: Hint, reduced: bool = True) -> tuple[Axis, Axis | None]:
    """Returns the axis along which most is contiguous, stores first, and another one if much is along that."""
    scores = _scores(kernel, hint)
    stores = _scores(kernel, hint, Store) if reduced else {}
    ranked = sorted(kernel.axes, key=lambda axis: (stores.get(axis, 0), scores.get(axis, 0)), reverse=True)
    inner = ranked[0] if scores.get(ranked[0]) else kernel.axes[-1]
    others = [axis for axis in kernel.axes if axis != inner and scores.get(axis, 0) * 5 >= sum(scores.values())]
    wide = [axis for axis in others if hint(axis.size) >= 16]
    return inner, max(wide, key=lambda axis: scores[axis], default=None)
