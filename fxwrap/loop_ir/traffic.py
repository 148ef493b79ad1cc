"""The bytes that the accesses of a kernel transfer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from fxwrap.loop_ir.canonicalize import stride_magnitude
from fxwrap.loop_ir.index import Axis, Index
from fxwrap.loop_ir.kernel import Kernel, Load, Store
from fxwrap.symbolic import Size, product

TRANSFER_BYTES = 32
"""The smallest piece of memory that is transferred: a sector of a GPU's cache, half a cache line of a CPU."""

_Hint: TypeAlias = Callable[[Size], int]


def transferred_bytes(kernel: Kernel, position: int, hint: _Hint) -> int:
    """Returns the bytes that a load or store transfers in all iterations, masked ones included.

    An element counts once for each point of the axes that its address depends on. Short runs of contiguous elements
    transfer whole sectors of `TRANSFER_BYTES`. `hint` returns a typical value of a size.
    """
    access = kernel.operations[position]
    assert isinstance(access, Load | Store), "other operations access no memory"
    itemsize = next(item.dtype.itemsize for item in (*kernel.inputs, *kernel.outputs) if item.name == access.buffer)
    axes = kernel.address_axes[position]
    count = hint(product([axis.size for axis in axes]))
    run, step = _contiguous_run(access.index, sorted(axes, key=lambda axis: axis.name), hint)
    transferred = min(max(run * itemsize, TRANSFER_BYTES), step * itemsize)
    return count * transferred // run


def _contiguous_run(index: Index, axes: list[Axis], hint: _Hint) -> tuple[int, int]:
    """Returns the number of contiguous elements that an index reaches, and the distance to the next ones."""
    strides = {axis: index.stride(axis) for axis in axes}
    steps = {axis: stride_magnitude(stride, hint) for axis, stride in strides.items() if stride is not None}
    run, pending = 1, sorted([(step, hint(axis.size)) for axis, step in steps.items() if step and hint(axis.size) > 1])
    for step, size in pending:
        if step > run:
            return run, step
        run = max(run, step * size)
    return run, run
