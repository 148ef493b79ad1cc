"""Contractions of gathered rows without assertions: a kernel before them checks the indices of rows, and stores these.

A GPU executes the matrix instructions of a kernel that calls a function one by one, and each program of a contraction
would check its rows again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from dataclasses import replace

from fxwrap.loop_ir.atoms import Axis
from fxwrap.loop_ir.body_operations import DeviceAssert, Load, Operation, Store, indirect_operands, operation_dtype
from fxwrap.loop_ir.builder import OperationCopier, with_used_buffers
from fxwrap.loop_ir.contraction import find_contraction, find_grouped_contraction
from fxwrap.loop_ir.kernel import Buffer, Kernel
from fxwrap.loop_ir.offsets import linearize_index
from fxwrap.loop_ir.split import SplitKernel
from fxwrap.loop_ir.verify import verify_kernel
from fxwrap.symbolic import Size, product

_MIN_ROWS = 128
"""The fewest rows whose tiles take longer than another launch."""


def split_checked_rows(kernel: Kernel, hint: Callable[[Size], int]) -> SplitKernel | None:
    """Returns a contraction of many rows as a kernel that checks and stores indices of rows, and one that loads these.

    Gathered columns of a contraction are its rows, too. None for a kernel without assertions or few rows, and where
    indices depend on more than the row. `hint` returns a typical value of a size.
    """
    form = find_grouped_contraction(kernel) or find_contraction(kernel)
    checks = [at for at, item in enumerate(kernel.operations) if isinstance(item, DeviceAssert)]
    if form is None or not checks or hint(form.row_count) < _MIN_ROWS:
        return None
    checked = kernel.backward_slice(checks)
    indirect = {at for item in kernel.operations for at in indirect_operands(item)}
    rows = [at for at in sorted(indirect) if _has_common_load(kernel, kernel.backward_slice([at]), checked)]
    used = kernel.backward_slice(rows) | checked
    outputs = {item.name for item in kernel.outputs}
    own = frozenset[Axis]().union(*[kernel.value_axes[at] for at in used])
    is_of_rows = own <= {*form.rows} or own <= {*form.columns}
    if not rows or not is_of_rows or any(_buffer(kernel.operations[at]) in outputs for at in used):
        return None
    axes = tuple([axis for axis in kernel.axes if axis in own])
    sizes = [axis.size for axis in axes]
    if hint(product(sizes)) < _MIN_ROWS:
        return None
    names = outputs | {item.name for item in kernel.inputs}
    unused = (name for number in itertools.count() if (name := f"row{number}") not in names)
    buffers = {at: Buffer(next(unused), operation_dtype(kernel.operations[at]), product(sizes)) for at in rows}
    position = linearize_index(axes, sizes)
    first, second = OperationCopier(kernel), OperationCopier(kernel)
    for at, operation in enumerate(kernel.operations):
        if at in used:
            first.copy(at)
        if at in buffers:
            first.add(Store(buffers[at].name, position, first.new[at], origin=operation.origin))
            load = Load(buffers[at].name, position, buffers[at].dtype, origin=operation.origin)
            second.new[at] = second.add(load)
        elif at not in checks:
            second.copy(at)
    known = [*kernel.inputs, *kernel.outputs, *buffers.values()]
    kernels = [
        verify_kernel(with_used_buffers(part, known))
        for part in (
            replace(kernel, axes=axes, reduced=(), operations=tuple(first.operations)),
            replace(kernel, operations=tuple(second.operations)),
        )
    ]
    return SplitKernel(tuple(kernels), tuple(buffers.values()), matmul=1)


def _has_common_load(kernel: Kernel, some: Collection[int], others: Collection[int]) -> bool:
    return any(isinstance(kernel.operations[at], Load) for at in some if at in others)


def _buffer(operation: Operation) -> str:
    return operation.buffer if isinstance(operation, Load) else ""
